"""The first change that CONTRIBUTING.md leads to can be made as it says, and has not been made already."""

import re
from types import ModuleType

import pytest

from broker.cli import messages
from tests.sources import ROOT

SOURCE = ROOT / "broker" / "cli" / "messages.py"
ANCHOR = '"session_id": message.group_id,'


def blocks() -> list[str]:
    """The test and the line of the guide, without the indentation of its list."""
    page = (ROOT / "CONTRIBUTING.md").read_text()
    return [
        re.sub(r"^   ", "", text, flags=re.MULTILINE) for text in re.findall(r"```python\n(.*?) *```", page, re.DOTALL)
    ]


def run(monkeypatch, capsys, source: str) -> None:
    """The test of the guide, on the module with this source."""
    changed = ModuleType("changed")
    exec(compile(source, str(SOURCE), "exec"), changed.__dict__)
    monkeypatch.setattr(messages, "print_message", changed.__dict__["print_message"])
    test = ModuleType("test")
    exec(compile(blocks()[0], "CONTRIBUTING.md", "exec"), test.__dict__)
    test.__dict__["test_the_address_for_answers_is_printed"](capsys)


def test_the_test_of_the_guide_fails_without_its_line(monkeypatch, capsys):
    with pytest.raises(KeyError, match="reply_to"):
        run(monkeypatch, capsys, SOURCE.read_text())


def test_the_test_of_the_guide_passes_with_its_line(monkeypatch, capsys):
    line = blocks()[1]
    source = SOURCE.read_text()
    assert source.count(f"{ANCHOR}\n") == 1
    run(monkeypatch, capsys, source.replace(f"{ANCHOR}\n", f"{ANCHOR}\n{line}"))
