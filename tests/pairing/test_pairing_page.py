"""docs/pairing.md says what the programs do: its example, its texts of errors and logs, its reasons of dead letters."""

import re
import shlex

from typer.testing import CliRunner

from broker.cli.all_commands import app
from broker.pairing.syphon import blame
from tests.brokers import REPOSITORY

PAGE = (REPOSITORY / "docs" / "pairing.md").read_text()


def test_the_example_of_costs_is_what_the_command_prints():
    [(command, output)] = re.findall(r"^\$ peeklock (.*)\n((?:.+\n)+)```", PAGE, re.MULTILINE)
    result = CliRunner().invoke(app, shlex.split(command))
    assert result.stdout == output


def test_every_reason_of_a_dead_letter_is_explained_and_no_other():
    reasons = {value for value in vars(blame).values() if isinstance(value, str) and value.startswith("Syphon")}
    assert len(reasons) > 3
    assert {each for each in re.findall(r"^\| `(\w+)`", PAGE, re.MULTILINE) if each.startswith("Syphon")} == reasons


def test_what_users_see_is_what_the_sources_say():
    """Texts of errors and logs, in the first column of the table of symptoms; an ellipsis is a name."""
    table = PAGE[PAGE.index("| What you see ") :].split("\n\n")[0]
    seen = [text for row in table.splitlines() for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]
    texts = [part.strip() for text in seen if not text.startswith("peeklock_") for part in text.split("…")]
    assert len(texts) > 8
    sources = "".join(path.read_text() for name in ("broker", "protocol") for path in (REPOSITORY / name).rglob("*.py"))
    assert [text for text in texts if text not in sources] == []
