"""docs/pairing-library.md says what the library does: its program runs, and its names and defaults are right."""

import asyncio
import builtins
import dataclasses
import os
import re
import subprocess
import sys

from broker.pairing import aliases
from broker.pairing.health import State
from broker.pairing.options import PairingOptions
from broker.pairing.pairing import Pairing
from broker.pairing.sending import PairedSender, Sent
from protocol import errors
from protocol.client import errors as client_errors
from tests.brokers import REPOSITORY, Broker
from tests.pairing.conftest import QUEUES, contents
from tests.patience import PATIENCE_S

PAGE = (REPOSITORY / "docs" / "pairing-library.md").read_text()
PROGRAM, _ = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)


def table(first: str) -> list[list[str]]:
    rows = PAGE[PAGE.index(f"| {first}") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows[2:]]


def test_every_option_is_there_with_its_default():
    shown = {cells[0].strip("`"): cells[1].strip("`").replace(",", "") for cells in table("`PairingOptions`")}
    assert shown == {each.name: str(each.default) for each in dataclasses.fields(PairingOptions)}


def test_what_it_names_is_there():
    for field in ("queue", "is_in_backlog", "is_repeated"):
        assert f"`{field}`" in PAGE
        assert field in Sent._fields
    for name in re.findall(r"`(?:await )?pairing\.(\w+)\(", PAGE):
        assert hasattr(Pairing, name), name
    assert hasattr(PairedSender, "send")
    assert [str(each) for each in State] == ["healthy", "suspect", "failed_over"]
    raised = [name for cells in table("Raised") for name in re.findall(r"`(\w+)`", cells[0])]
    assert len(raised) == 6
    for name in raised:
        assert any(hasattr(each, name) for each in (client_errors, errors, aliases, builtins)), name


def test_its_program_sends_to_the_backlog_while_the_primary_is_away_and_else_to_the_primary(tmp_path, secondary):
    primary = Broker(tmp_path, QUEUES)
    assert run(primary, secondary, "failover_interval_ms=0, attempt_timeout_ms=400, ") == "in the backlog\n"
    with primary:
        assert run(primary, secondary) == "in the primary\n"
        assert asyncio.run(contents(primary, "orders")) == [b"hello"]


def run(primary: Broker, secondary: Broker, more: str = "") -> str:
    """The output of the page's program, with the ports that these brokers have for HTTP."""
    text = PROGRAM.replace("PairingOptions(r", f"PairingOptions({more}r")
    for name, broker in (("PRIMARY", primary), ("SECONDARY", secondary)):
        place = f'os.environ["PEEKLOCK_{name}"]'
        assert place in text
        text = text.replace(place, f'{place}, http=Address("http", "localhost", {broker.http_port})')
    done = subprocess.run(
        [sys.executable, "-c", f"from broker.administration.address import Address\n{text}"],
        cwd=REPOSITORY,
        env=os.environ
        | {"PEEKLOCK_PRIMARY": primary.connection_string, "PEEKLOCK_SECONDARY": secondary.connection_string},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines(keepends=True)[-1]
