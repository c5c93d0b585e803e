"""The command `peeklock`: starts the interpreters that `serve` needs before it loads the command line."""

import os
import sys

from broker.settings.placement import guess_one_process
from broker.supervisor import interpreters


def main() -> None:
    if sys.argv[1:2] == ["serve"] and "--help" not in sys.argv:
        one_process = guess_one_process(sys.argv, os.environ)  # a wrong guess only costs time
        interpreters.start_ahead(interpreters.ONE_PROCESS if one_process else interpreters.SEPARATE)
    try:
        from broker.cli.commands import main as run_command

        run_command()
    finally:
        interpreters.discard_ahead()
