"""The command `peeklock`: starts the interpreters that `serve` needs before it loads the command line."""

import sys

from broker.supervisor import interpreters


def main() -> None:
    if sys.argv[1:2] == ["serve"] and "--help" not in sys.argv:
        interpreters.start_ahead()
    try:
        from broker.cli.commands import main as run_command

        run_command()
    finally:
        interpreters.discard_ahead()
