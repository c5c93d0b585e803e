"""One is told in the singular."""

import pytest

from storage.wording import counted, plural


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 messages"), (1, "1 message"), (2, "2 messages"), (12345, "12345 messages")]
)
def test_a_count_has_its_noun(count, text):
    assert counted(count, "message") == text


def test_a_noun_may_have_another_form():
    assert [counted(each, "entry", "entries") for each in (1, 2)] == ["1 entry", "2 entries"]
    assert [plural(each, "is", "are") for each in (1, 2)] == ["is", "are"]
