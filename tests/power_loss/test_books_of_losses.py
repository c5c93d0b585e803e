"""What the books say of a directory that was found after a loss of power."""

from collections import Counter

import pytest

from tests.power_loss.books import RELAY, SOON, SOURCE, TARGET, Books, Found, body_of, key_of


def books(*marks):
    kept = Books()
    for mark in marks:
        kept.tell({"adds": [], "removes": [], "values": {}, **mark} if "begin" in mark else mark)
    return kept


def found(*units, **values):
    return Found(Counter(units), values)


A, B = ("q", "a"), ("q", "b")
SENT = [{"begin": 1, "adds": [A]}, {"done": 1}]
REMOVING = {"begin": 2, "removes": [A]}


@pytest.mark.parametrize(
    ("marks", "units", "breach"),
    [
        (SENT, [A], None),
        (SENT, [], "missing"),
        (SENT, [A, A], "twice"),
        (SENT, [A, B], "there"),
        (SENT[:1], [], None),
        (SENT[:1], [A], None),
        ([*SENT, REMOVING], [A], None),
        ([*SENT, REMOVING], [], None),
        ([*SENT, REMOVING, {"done": 2}], [], None),
        ([*SENT, REMOVING, {"done": 2}], [A], "there"),
        ([{"begin": 1, "adds": [A, B]}], [A], "in part"),
        ([{"begin": 1, "adds": [A, B]}], [A, B], None),
        ([*SENT, {"begin": 2, "adds": [B], "removes": [A]}], [A, B], "in part"),
        ([*SENT, {"begin": 2, "adds": [B], "removes": [A]}], [B], None),
        ([SENT[0], {"doubtful": 1}], [], None),
        ([SENT[0], {"doubtful": 1}], [A], None),
        ([SENT[0], {"doubtful": 1}, REMOVING, {"done": 2}], [A], "there"),
        ([{"begin": 1, "adds": [[RELAY, "k"]]}, {"done": 1}], [(SOURCE, "k")], None),
        ([{"begin": 1, "adds": [[RELAY, "k"]]}, {"done": 1}], [(SOURCE, "k"), (TARGET, "k")], "twice"),
        ([{"begin": 1, "adds": [[RELAY, "k"]]}, {"done": 1}], [(TARGET, "k"), (TARGET, "k")], "twice"),
        ([{"begin": 1, "adds": [["q", SOON]]}, {"done": 1}], [("q:scheduled", SOON)], None),
        ([{"begin": 1, "adds": [["q:scheduled", "far"]]}, {"done": 1}], [("q", "far")], "missing"),
    ],
)
def test_messages(marks, units, breach):
    breaches = books(*marks).breaches(found(*units))
    assert [text.partition(":")[0] for text in breaches][:1] == ([breach] if breach else [])


def test_a_copy_may_have_a_message_in_the_queue_that_it_was_forwarded_from():
    kept = books({"begin": 1, "adds": [[RELAY, "k"]]}, {"done": 1})
    kept.tell({"begin": 2, "adds": [], "removes": [[RELAY, "k"]], "values": {}})
    kept.tell({"done": 2})
    left = found((SOURCE, "k"))
    assert len(kept.breaches(left)) == 1
    left.is_copy = True
    assert kept.breaches(left) == []


def test_values():
    kept = books({"begin": 1, "values": {"state": "x"}})
    assert kept.breaches(found(state="x")) == kept.breaches(found(state="as made")) == []
    kept = books({"begin": 1, "values": {"state": "x"}}, {"done": 1}, {"begin": 2, "values": {"state": "y"}})
    assert kept.breaches(found(state="x")) == kept.breaches(found(state="y")) == []
    assert len(kept.breaches(found(state="z"))) == len(kept.breaches(found())) == 1
    kept.tell({"done": 2})
    assert len(kept.breaches(found(state="x"))) == 1


def test_a_body_says_its_key_and_a_changed_one_does_not():
    body = body_of("m-1", 1000)
    assert len(body) == 1000
    assert key_of(body) == "m-1"
    assert key_of(body[:-1] + b"?") is key_of(body[:500] + bytes(500)) is key_of(b"") is key_of(body + b"x") is None
