"""The whole command line: the commands of this machine, and those that are clients of a broker."""

import sys

from broker.cli.client import app as client_app
from broker.cli.commands import app as app
from broker.cli.dead_letter import app as dead_letter_app
from broker.cli.entities import entity_app
from broker.cli.receive import app as receive_app
from broker.cli.resend import app as resend_app
from broker.cli.rules import rule_app
from broker.cli.top import app as top_app
from broker.cli.transfer import app as transfer_app

for each in (client_app, receive_app, dead_letter_app, resend_app, transfer_app, top_app):
    app.add_typer(each)
for kind in ("queue", "topic", "subscription"):
    app.add_typer(entity_app(kind), name=kind)
app.add_typer(rule_app, name="rule")


def main() -> None:
    sys.exit(app())
