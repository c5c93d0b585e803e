"""Docstrings are sentences: each says what is done or what a thing is."""

import ast
import re

import pytest

from tests.sources import ROOT, SHIPPED, modules

# "Of", "Those" or "As" at the beginning, or nothing but sentences with "Raises".
NO_SENTENCE = re.compile(r"(?:Of|Those|As)\b|(?:Raises\b(?:[^.]|\.\b)*\.\s*)+\Z")
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(source: str) -> list[tuple[int, str]]:
    """Return the docstrings in the source with their lines."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, DOCUMENTED)]
    return [(node.body[0].lineno, text) for node in nodes if (text := ast.get_docstring(node))]


def test_docstrings_say_what_is_done_or_what_it_is():
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for _, path in modules(*SHIPPED)
        for line, text in docstrings(path.read_text())
        if NO_SENTENCE.match(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("text", "is_sentence"),
    [
        ("Of one partition.", False),
        ("Those of each message.", False),
        ("As `post`, for a run.", False),
        ("Raises OSError.", False),
        ("Raises what `storage.durable` raises.", False),
        ("Raises Refused if\nthere is none. Raises OSError.", False),
        ("Read a file. Raises OSError.", True),
        ("Raise Refused if there is none.", True),
        ("Assign the next number.", True),
    ],
)
def test_what_counts_as_a_sentence(text, is_sentence):
    assert (NO_SENTENCE.match(text) is None) == is_sentence
