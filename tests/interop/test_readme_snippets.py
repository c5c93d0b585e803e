"""Snippets of the project's README are parts of the programs of docs/first-message, which `test_interop.py` runs."""

import re
from textwrap import indent

import pytest

from tests.interop.sdks import DOCS

README = DOCS.parent.parent / "README.md"
PROGRAMS = {
    "python": "python/first_message.py",
    "javascript": "javascript/first-message.js",
    "go": "go/main.go",
    "java": "java/src/main/java/FirstMessage.java",
    "csharp": "dotnet/Program.cs",
}
INDENTED = ("", "\t", " " * 8)  # in which the program has the snippet, in its main function


@pytest.mark.parametrize("language", PROGRAMS)
def test_a_snippet_of_the_readme_is_the_core_of_the_program(language: str) -> None:
    [snippet] = re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)
    imports = re.findall(r"^(?:from|import|using) .*\n", snippet, re.MULTILINE)
    core = snippet.removeprefix("".join(imports)).lstrip("\n")
    program = (DOCS / PROGRAMS[language]).read_text()
    assert all(line in program for line in imports)
    assert any(indent(core, prefix) in program for prefix in INDENTED), core
