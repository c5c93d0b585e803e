"""The examples of documents as tests run them: their very text, but for the addresses of the test's broker."""

import re
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.sources import ROOT

SECRET: Final = "/run/secrets/peeklock"
_BLOCK: Final = re.compile(r"^```(python|sql)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_JOURNAL: Final = re.compile(r"""("?)mode("?)(=|: | )(["'])journal\4""")


class Example(NamedTuple):
    language: str
    text: str


def section(page: str, heading: str) -> str:
    """The text of a page below the heading, up to the next one. Raises KeyError."""
    parts = re.split(r"^#+ (.*)\n", (ROOT / "docs" / page).read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))[heading]


def examples(page: str, heading: str) -> list[Example]:
    """What is in Python and SQL below the heading, in its order."""
    return [Example(*found) for found in _BLOCK.findall(section(page, heading))]


def option_values(page: str, heading: str, option: str) -> list[str]:
    """What commands below the heading give to an option such as --packages, each time."""
    return re.findall(rf"{option} ([^\s`]+)", section(page, heading))


def placed(text: str, secret: Path, http_endpoint: str) -> str:
    """An example for this broker: the file with its connection string, and its address for HTTP, which is unusual."""
    text = text.replace(SECRET, str(secret))
    return _JOURNAL.sub(rf"\g<0>, \1httpEndpoint\2\3\4{http_endpoint}\4", text)


def run(spark: Any, found: list[Example], secret: Path, http_endpoint: str, names: dict[str, Any]) -> None:
    """Run each with these global names, which may become more."""
    for language, text in found:
        text = placed(text, secret, http_endpoint)
        if language == "python":
            exec(compile(text, "<document>", "exec"), names)
            continue
        for statement in filter(str.strip, text.split(";")):
            spark.sql(statement).show()
