"""docs/design/rooms.md says of each folder what the sources say."""

import pytest

from tests import rooms
from tests.sources import ROOT
from tests.test_imports import MAY_IMPORT


def test_the_page_is_what_the_sources_say() -> None:
    assert rooms.PAGE.read_text() == rooms.render(), "run: python -m tests.rooms"


def test_each_folder_and_each_rule_is_on_the_page() -> None:
    page = rooms.render()
    assert all(f"\n| `{path.parent.relative_to(ROOT)}` | " in page for path in rooms.packages().values())
    assert all(f"`{name}`" in page or f"`{name.replace('.', '/')}`" in page for name in MAY_IMPORT)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("broker.errors", "nothing"),
        ("broker.gateway.web", "as `broker.gateway`"),
        ("broker.one_process", "as `broker`, but not `broker.cli`, `broker.partition`, `broker.supervisor`"),
        ("storage", "`protocol.extension`, `storage`"),
    ],
)
def test_what_a_folder_may_import(name: str, text: str) -> None:
    assert rooms.rules_of(name) == text


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Speaks AMQP 1.0 on\nsockets. It is pure.\n\nMore.", "Speaks AMQP 1.0 on sockets."),
        ("One sentence.", "One sentence."),
    ],
)
def test_the_first_sentence_of_a_docstring(docstring: str, sentence: str) -> None:
    assert rooms.first_sentence(docstring) == sentence


def test_a_folder_without_a_sentence_is_refused() -> None:
    with pytest.raises(ValueError, match="not a sentence"):
        rooms.first_sentence("no period")
