"""The command `peeklock`: starts the processes that `serve` needs before it loads the command line."""

import gc
import os
import sys

from broker.settings.placement import guess
from broker.supervisor import interpreters

# These know nothing of the commands that are clients, and so start sooner.
_SERVING = ("serve", "worker", "gateway")


def main() -> None:
    gc.disable()  # while modules load: it would look at them again and again, and they all stay
    serves = sys.argv[1:2] and sys.argv[1] in _SERVING
    if serves and "--help" not in sys.argv:
        guessed = guess(sys.argv, os.environ)  # a wrong guess only costs time
        interpreters.start_ahead(interpreters.modules(sys.argv[1], guessed))
    try:
        if serves:
            from broker.cli.commands import main as run_command
        else:
            from broker.cli.all_commands import main as run_command
        gc.enable()
        run_command()
    finally:
        interpreters.discard_ahead()
