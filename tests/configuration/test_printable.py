"""Text of others as it is shown."""

import json

from hypothesis import given
from hypothesis import strategies as st

from broker.printable import json_text, printable, printable_lines

# All of Unicode, half surrogates and what controls terminals more often.
TEXTS = st.text(st.characters() | st.characters(categories=["Cs", "Cc", "Cf"])) | st.sampled_from(["\u2028", "\u00a0"])


@given(TEXTS)
def test_one_line_is_printable_and_usual_text_stays_as_it_is(text: str) -> None:
    assert printable(text).isprintable()
    if text.isprintable():
        assert printable(text) == text


@given(TEXTS)
def test_lines_stay_lines(text: str) -> None:
    lines = printable_lines(text, "  ").split("\n")
    assert all(line.isprintable() and line.startswith("  ") for line in lines)
    assert len(lines) == text.count("\n") + 1


@given(st.recursive(TEXTS | st.integers() | st.none(), lambda inner: st.dictionaries(TEXTS, inner) | st.lists(inner)))
def test_json_is_printable_and_means_the_same(value: object) -> None:
    line = json_text(value)
    assert line.isprintable()
    assert json.loads(line) == json.loads(json.dumps(value))
    assert json.loads(json_text(value, indent=2)) == json.loads(line)


def test_what_can_be_read_is_not_escaped() -> None:
    assert json_text({"name": "größe 😀 日本"}) == '{"name": "größe 😀 日本"}'
    assert json_text("\x7f\x9b\U000e0001") == '"\\u007f\\u009b\\udb40\\udc01"'
