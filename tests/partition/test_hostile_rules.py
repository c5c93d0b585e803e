"""No message and no rule takes a partition down: what rules fail on is dead-lettered in that subscription."""

import math
import re
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from broker.errors import InvalidArgument
from broker.rules import Action, Changes
from protocol.codec import Char, Decimal128, Described, Long, Symbol, Timestamp, ULong
from protocol.message.rendering import render
from storage.records import Field, message_parts
from tests.examples import examples
from tests.partition.driver import START_MS
from tests.partition.topic_driver import TOPIC, TOPIC_ENTITY, A, B, TopicDriver, assert_shared_rightly, event, rule

POISON: dict[str, Any] = {"a": math.nan, "b": Decimal128(b"\x30\x40" + bytes(13) + b"\x07")}
TIMESPAN = Symbol("com.microsoft:timespan")


def with_surrogate(message):
    """What an older release stored of a sender's char that is half a pair of UTF-16."""
    layout, body, ttl_ms, extra = message
    return [layout, body.replace(b"\x73\x00\x00\x00c", b"\x73\x00\x00\xd8\x00"), ttl_ms, extra]


def failing(name="r", sql=None, action=None, **properties):
    topic = TopicDriver(B)
    topic.subscribe(A, rule(name, sql=sql, action=action), **properties)
    return topic


def test_a_decimal_beside_nan_costs_no_subscription_its_message():
    topic = failing(sql="a < b")
    topic.publish(event("m", **POISON))
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B)) == ([], [], ["m"])


def test_a_scheduled_message_that_rules_cannot_compare_is_published_by_the_next_start():
    topic = failing(sql="a < b")
    topic.publish(event("m", scheduled_ms=START_MS + 100, **POISON))
    topic.now_ms += 200
    topic.restart()
    topic.wait(0)
    assert (topic.texts(A), topic.texts(B)) == ([], ["m"])
    assert_shared_rightly(topic.store, {TOPIC_ENTITY: {A >> 3, B >> 3}})


@pytest.mark.parametrize("scheduled", [False, True])
def test_a_stored_surrogate_is_dead_lettered_where_a_rule_wants_it_and_delivered_elsewhere(scheduled):
    topic = failing(action="SET sys.Label = c")
    topic.publish(with_surrogate(event("m", scheduled_ms=START_MS + 100 * scheduled, c=Char("c"))))
    if scheduled:
        topic.restart()
        topic.wait(100)
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B)) == ([], ["m"], ["m"])
    [dead] = topic.peek(A | 1)
    assert dead.properties["DeadLetterReason"] == "RuleActionException"
    [whole] = topic.peek(B)
    layout, body = message_parts(whole.record)
    prefix, rest = render(layout, body, 0, 1, 0, START_MS)
    assert b"\x73\x00\x00\xd8\x00" in prefix + body[rest:]


@pytest.mark.parametrize("value", ["\ud800", object(), Long(2**64)])
def test_changes_that_have_no_encoding_are_a_failure_of_the_action(value, monkeypatch):
    monkeypatch.setattr(Action, "apply", lambda self, message: Changes(user={"a": value}))
    topic = failing(action="SET a = 1")
    topic.publish("m")
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B)) == ([], ["m"], ["m"])
    assert topic.peek(A | 1)[0].properties["DeadLetterReason"] == "RuleActionException"


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("SET x = a + a", "property 'x' .* 32768"),
    ],
)
def test_an_action_makes_no_copy_that_nobody_could_have_sent(action, text):
    topic = failing(action=action)
    topic.publish(event("m", a="é" * 15_000))
    assert (topic.texts(A), topic.texts(A | 1)) == ([], ["m"])
    assert re.search(text, topic.peek(A | 1)[0].properties["DeadLetterErrorDescription"])


@pytest.mark.parametrize("dead_letters_failures", [True, False])
@pytest.mark.parametrize(
    "action",
    [
        "SET x = a; SET y = a",  # with the message's own property
        ";".join(f"SET {name} = a" for name in "xyz"),
        "SET sys.Label = a + a; SET sys.To = a + a; SET sys.ReplyTo = a + a",
    ],
)
def test_a_message_whose_properties_an_action_makes_too_many_is_dead_lettered(action, dead_letters_failures):
    topic = failing(action=action, dead_lettering_on_filter_evaluation_exceptions=dead_letters_failures)
    topic.publish(event("m", a="é" * 15_000))
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B)) == ([], ["m"], ["m"])
    [dead] = topic.peek(A | 1)
    assert dead.properties == {
        "DeadLetterReason": "HeaderSizeExceeded",
        "DeadLetterErrorDescription": "The size quota for this stream exceeded the limit.",
    }
    assert dead.overlay[Field.DEAD_LETTER_SOURCE] == topic.partition._core.entities.terms[A >> 3].name
    tally = topic.partition.tallies()[A]
    assert (tally["dead_lettered"], tally["rules_failed"]) == ({"HeaderSizeExceeded": 1}, 0)


def test_an_action_may_replace_what_it_makes_large():
    topic = failing(action="SET a = a; SET b = a")
    topic.publish(event("m", a="é" * 15_000))
    assert (topic.texts(A), topic.texts(A | 1)) == (["m"], [])


def test_a_constant_filter_that_python_cannot_evaluate_is_a_rule_like_others():
    topic = TopicDriver(A)
    topic.request("add-rule", rule("r", sql="@a < @b", **POISON), queue=A)
    topic.publish("m")
    topic.restart()
    assert topic.texts(A) == ["m"]


VALUES = st.one_of(
    st.none() | st.booleans() | st.floats() | st.text(max_size=3) | st.binary(max_size=3),
    st.sampled_from([0, 1, 2**63 - 1, -(2**63)]).map(Long),
    st.sampled_from([2**63, 2**64 - 1]).map(ULong),
    st.sampled_from([0, 2**63 - 1, -(2**63), -62_135_596_800_000]).map(Timestamp),
    st.binary(min_size=16, max_size=16).map(Decimal128),
    st.characters(exclude_categories=["Cs"]).map(Char),  # nobody can encode a surrogate
    st.builds(Described, st.just(TIMESPAN), st.sampled_from([ULong(2**64 - 1), Long(0), Long(-1), Long(2**63 - 1)])),
)
OPERANDS = st.sampled_from(["a", "b", "c", "sys.TimeToLive", "sys.Label", "'%'", "-1", "9223372036854775807", "@v"])
SUMS = OPERANDS | st.builds("{} {} {}".format, OPERANDS, st.sampled_from("+-*/%"), OPERANDS)
FILTERS = st.builds("{} {} {}".format, SUMS, st.sampled_from(["<", "=", "<>", "LIKE"]), SUMS)
TARGETS = st.sampled_from(["a", "sys.Label", "sys.TimeToLive", "sys.SessionId", "sys.MessageId"])
ACTIONS = st.none() | st.builds("SET {} = {}".format, TARGETS, SUMS)


@settings(max_examples=examples(400))
@given(FILTERS, ACTIONS, st.dictionaries(st.sampled_from("abc"), VALUES), VALUES, st.booleans(), st.booleans())
@example("a < b", None, POISON, None, True, False)
@example("@v < b", None, POISON, math.nan, True, False)
def test_every_message_is_accounted_for_with_any_rules(sql, action, properties, value, later, sessions):
    topic = TopicDriver(B)
    try:
        topic.subscribe(A, rule("r", sql=sql, action=action, v=value), requires_session=sessions)
    except InvalidArgument:
        return
    topic.publish(event("m", scheduled_ms=START_MS + later, **properties))
    topic.now_ms += later
    topic.restart()
    topic.wait(0)
    assert topic.texts(B) == ["m"]
    assert len(topic.peek(A)) + len(topic.peek(A | 1)) <= 1
    assert_shared_rightly(topic.store, {TOPIC_ENTITY: {A >> 3, B >> 3}})
    assert topic.request("counts", queue=TOPIC)
