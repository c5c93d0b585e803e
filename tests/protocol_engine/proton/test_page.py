"""The page of proton's peculiarities has each test of this folder, and each of its tests is here."""

import ast
import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parents[2] / "docs" / "design" / "proton.md"


def test_the_page_and_the_tests_have_the_same_peculiarities() -> None:
    """Each section of tests names their file."""
    page = PAGE.read_text()
    written: dict[str, list[str]] = {}
    for section in page.split("\n## ")[1:]:
        named = re.findall(r"^`(test_\w+\.py)`", section, re.MULTILINE)
        tests = re.findall(r"`(test_\w+)`", section)
        if named or tests:
            [file] = named
            written[file] = tests
    found = {
        path.name: [
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        for path in HERE.glob("test_*.py")
        if path != Path(__file__)
    }
    assert {file: sorted(tests) for file, tests in written.items()} == {
        file: sorted(tests) for file, tests in found.items()
    }
