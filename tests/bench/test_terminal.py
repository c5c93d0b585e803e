"""The terminal of the README is drawn as it was, and its commands exist."""

import re
import shlex
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from bench.terminal import COLUMNS, COMMANDS, FILE, Run, Shown, drawn, runs
from broker.cli.all_commands import app

SVG = "{http://www.w3.org/2000/svg}"

SHOWN = [Shown(0.1, "$ ", False), Shown(0.5, "a", True), Shown(0.6, "<", True), Shown(2, "\r\none & two\r\n$ ", False)]


def rows(picture: str) -> list[str]:
    found: dict[str, str] = {}
    for text in ElementTree.fromstring(picture).iter(f"{SVG}text"):
        found[text.attrib["y"]] = found.get(text.attrib["y"], "") + (text.text or "")
    return list(found.values())


def test_a_picture_is_what_was_shown_each_text_at_its_time():
    picture = drawn(SHOWN)
    assert rows(picture) == ["$ a<", "one & two", "$ "]
    times = [float(time) for time in re.findall(r"\}(\d+\.\d+)%", picture)]
    assert times == [pytest.approx(100 * seconds / 6, abs=0.01) for seconds in (0.1, 0.5, 0.6, 2)]


def test_a_line_that_is_too_long_goes_on_in_the_next_row():
    assert runs([Shown(1, "x" * COLUMNS + "yz\nw", False)]) == [
        Run(0, 0, 1, "x" * COLUMNS, False),
        Run(1, 0, 1, "yz", False),
        Run(2, 0, 1, "w", False),
    ]


def test_the_picture_in_the_repository_is_of_these_commands():
    picture = FILE.read_text()
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|@import", picture), "GitHub shows no such thing"
    typed = [row[2:] for row in rows(picture) if row.startswith(("$ ", "> ")) and row[2:]]
    assert [line.strip() for line in typed] == [command.strip() for command in COMMANDS], "make terminal"


def test_the_broker_that_was_killed_lost_nothing():
    shown = rows(FILE.read_text())
    assert "1000 messages sent to orders" in shown
    assert ("$ peeklock receive orders --count 1000 | wc -l", "1000") in pairwise(shown)


@pytest.mark.parametrize("line", [command for command in COMMANDS if "peeklock" in command])
def test_commands_and_their_options_exist(line: str) -> None:
    command, *words = shlex.split(line.partition("peeklock ")[2].partition(" |")[0].rstrip(")"))
    help_text = CliRunner().invoke(app, [command, "--help"])
    assert help_text.exit_code == 0
    assert {word for word in words if word.startswith("--")} <= set(re.findall(r"--[\w-]+", help_text.stdout))
