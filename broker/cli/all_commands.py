"""The whole command line: the commands of this machine, and those that are clients of a broker."""

import os
import sys

from broker.cli.capturing.capture import app as capture_app
from broker.cli.client import app as client_app
from broker.cli.commands import app as app
from broker.cli.dead_letter import app as dead_letter_app
from broker.cli.ending import FAILED
from broker.cli.jobs import jobs_app
from broker.cli.managing.entities import entity_app
from broker.cli.managing.rules import rule_app
from broker.cli.pairing.pair import pair_app
from broker.cli.pairing.syphon import app as syphon_app
from broker.cli.receive import app as receive_app
from broker.cli.resend import app as resend_app
from broker.cli.transfer import app as transfer_app
from broker.cli.watching.top import app as top_app

for each in (client_app, receive_app, dead_letter_app, resend_app, transfer_app, top_app, syphon_app, capture_app):
    app.add_typer(each)
for kind in ("queue", "topic", "subscription"):
    app.add_typer(entity_app(kind), name=kind)
app.add_typer(rule_app, name="rule")
app.add_typer(pair_app, name="pair")
app.add_typer(jobs_app, name="jobs")


def main() -> None:
    """Run the command of the command line, and end."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who has started us
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))
    try:
        app()
    except OSError as error:
        # What the commands expect is said there: this is an output that cannot be written, such as a full disk.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # else Python tries again at the end
        print(f"peeklock: {error.filename or 'standard output'}: {error.strerror or error}", file=sys.stderr)
        sys.exit(FAILED)
