"""The figures of the README are those of docs/performance.md."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Rows of the README's table, and of docs/performance.md.
FIGURES = {
    "Send, messages/s": "1 KiB, 1 link: send",
    "Send and receive at once, messages/s": "1 KiB, 1 link: send and receive at once",
    "Start to ready, s": "start to ready, empty",
    "Memory when idle, MB": "idle, all processes: memory",
}


def cells(page: Path, row: str) -> list[list[str]]:
    """The cells of each row of that name."""
    lines = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", page.read_text(), re.MULTILINE)
    return [[cell.strip().strip("*") for cell in line.split("|")] for line in lines]


@pytest.mark.parametrize(("row", "measured"), FIGURES.items())
def test_figures_of_the_readme_are_those_that_were_measured(row: str, measured: str) -> None:
    [ours] = cells(ROOT / "README.md", row)
    figures = {cell for cell in ours if cell != "-"}
    assert len(figures) == 3
    # Performance has a row of this name for the rates, and one for what they cost.
    tables = [[cell.partition(" [")[0] for cell in found] for found in cells(ROOT / "docs/performance.md", measured)]
    assert any(figures <= set(medians) for medians in tables), tables


def test_the_first_figure_of_the_readme_is_that_of_its_table():
    readme = ROOT / "README.md"
    [claim] = re.findall(r"^\*\*One queue takes (\d+),000 messages a second", readme.read_text(), re.MULTILINE)
    [[sent, *_]] = cells(readme, "Send, messages/s")
    assert int(claim) == int(sent.replace(",", "")) // 1000
