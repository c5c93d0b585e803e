"""Writes docs/design/rooms.md, the page of folders and imports: `python -m tests.rooms`.

What a folder does is the first sentence of its package's docstring. What it may import is in `tests.test_imports`.
"""

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.sources import ROOT, SHIPPED, is_within, modules
from tests.test_imports import MAY_IMPORT, MAY_NOT_IMPORT, NOT_PURE, ONLY_IN, PURE

PAGE = ROOT / "docs" / "design" / "rooms.md"

INTRODUCTION = """\
# What does each folder do, and what may it import?

Made by `python -m tests.rooms`: do not edit it. A description is the first sentence of the docstring in the folder's
`__init__.py`; the rules are in `tests/test_imports.py`, which checks every import.
[The architecture](../architecture.md) says how the folders work together.

## Folders

A folder without rules of its own has those of the folder that it names. *Of ours* leaves out libraries: these are
[below](#libraries-that-few-may-import). `protocol/native` has the extension in C
([why, and for what](native-code.md)).
"""
MODULES = """
## Modules with rules of their own

They may import less than their folder, or something else.
"""
LIBRARIES = """
## Libraries that few may import
"""
PURITY = """
## Pure modules

They do no I/O and read no clock, so tests and models call them directly. A folder stands for all that is in it.
"""


def packages() -> dict[str, Path]:
    """All folders with Python modules, by the name that is imported."""
    return {name: path for name, path in modules(*SHIPPED) if path.name == "__init__.py"}


def first_sentence(docstring: str) -> str:
    """The first sentence of a docstring, in one line. Raises ValueError if there is none."""
    text = " ".join(docstring.split("\n\n")[0].split())
    found = re.match(r".*?[.](?=\s|$)", text)
    if found is None:
        raise ValueError(f"not a sentence: {text!r}")
    return found[0]


def purpose(path: Path) -> str:
    """What the package with this `__init__.py` does. Raises ValueError."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    if not docstring:
        raise ValueError(f"{path.relative_to(ROOT)} has no docstring, which would say what the folder does")
    return first_sentence(docstring)


def rules_of(name: str) -> str:
    """What a package or module may import, in words."""
    own = MAY_IMPORT.get(name)
    if own is None:
        fitting = [each for each in MAY_IMPORT if is_within(name, each)]
        text = f"as {_code([max(fitting, key=len)])}"
    else:
        text = _code(own) or "nothing"
    refused = MAY_NOT_IMPORT.get(name)
    return f"{text}, but not {_code(refused)}" if refused else text


def _code(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in sorted(names))


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    for cells in (head, ["---"] * len(head), *rows):
        yield f"| {' | '.join(cells)} |"


def render() -> str:
    folders = packages()
    of_folders = (
        (f"`{path.parent.relative_to(ROOT)}`", purpose(path), rules_of(name)) for name, path in folders.items()
    )
    singles = sorted(name for name in MAY_IMPORT if name not in folders)
    lines = [INTRODUCTION, *_table(("folder", "what it does", "may import, of ours"), of_folders), MODULES]
    lines += [*_table(("module", "may import, of ours"), ((f"`{name}`", rules_of(name)) for name in singles))]
    lines += [LIBRARIES, *_table(("library", "imported in"), _pairs(ONLY_IN)), PURITY]
    lines += [f"- `{name}`{_excuses(name)}" for name in sorted(PURE)]
    return "\n".join(lines) + "\n"


def _pairs(rules: Mapping[str, Iterable[str]]) -> Iterator[tuple[str, str]]:
    for name in sorted(rules):
        yield f"`{name}`", _code(rules[name])


def _excuses(name: str) -> str:
    excused = sorted(module for module in NOT_PURE if is_within(module, name))
    return f", except for {_code(excused)}" if excused else ""


if __name__ == "__main__":
    PAGE.write_text(render())
