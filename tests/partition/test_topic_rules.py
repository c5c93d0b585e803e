"""Rules of subscriptions: what they select and change, what happens when they fail, and how they are administered."""

import pytest

from broker.errors import EntityAlreadyExists, EntityNotFound, InvalidArgument, NotAllowed, QuotaExceeded
from broker.partition.topics import rule_requests
from broker.wire import Outcome
from protocol.codec import Described, Int, Long, Symbol, Timestamp, decode_exactly
from storage.queue_ids import Part
from storage.records import NEVER, Field, Place
from storage.store import Table
from tests.partition.driver import MAIN, START_MS
from tests.partition.topic_driver import (
    TOPIC,
    TOPIC_ENTITY,
    A,
    B,
    TopicDriver,
    assert_shared_rightly,
    event,
    rule,
    text,
)

DURATION = Described(Symbol("com.microsoft:timespan"), Long(2_000 * 10_000))
TAKES_RED = rule("red", sql="color = 'red'")


def assert_sound(topic):
    assert_shared_rightly(topic.store, {TOPIC_ENTITY: {A >> 3, B >> 3}})


def with_rules(*rules, **properties):
    topic = TopicDriver()
    topic.subscribe(A, *rules, no_rules=True, **properties)
    return topic


def changes(delivery):
    """Properties and system fields set since, decoded."""

    def read(value):
        return decode_exactly(value) if isinstance(value, bytes) else value

    return (
        {name: read(value) for name, value in delivery.properties.items()},
        {field: read(value) for field, value in delivery.overlay.get(Field.SYSTEM, {}).items()},
    )


def names(topic, queue_id=A):
    return [found["name"] for found in topic.request("enumerate-rules", 0, 100, queue=queue_id)]


# ---- filters


def test_a_subscription_gets_what_one_of_its_rules_selects_and_once_only():
    topic = with_rules(TAKES_RED, rule("large", sql="size > 10"), rule("label", correlation={"label": "x"}))
    topic.subscribe(B, rule("blue", correlation={"properties": {"color": "blue"}}))
    topic.publish(
        event("red", color="red"),
        event("both", color="red", size=11),
        event("blue", color="blue", size=10),
        event("label", system={3: "x"}),
        "none",
    )
    assert (topic.texts(A), topic.texts(B)) == (["red", "both", "label"], ["blue"])
    assert [d.number for d in topic.peek(A)] == [1, 2, 3]
    assert topic.references() == {}
    assert topic.message_count() == 4
    assert_sound(topic)


def test_subscriptions_with_and_without_selecting_rules_work_side_by_side():
    topic = TopicDriver(B)
    topic.subscribe(A, TAKES_RED)
    topic.publish("plain", event("red", color="red"))
    assert (topic.texts(A), topic.texts(B)) == (["red"], ["plain", "red"])
    assert topic.references() == {2: 2}


def test_filters_see_what_the_broker_knows_of_the_message():
    topic = with_rules(
        rule("size", sql="sys.Size > 500"),
        rule("ttl", sql="sys.TimeToLive < @limit", limit=DURATION),
        rule("time", sql="sys.EnqueuedTimeUtc = @now AND user.timed = 1", now=Timestamp(START_MS)),
    )
    topic.publish(event(bytes(600)), event("brief", ttl_ms=1_000), event("timed", timed=1), "none")
    assert len(topic.peek(A)) == 3


def test_a_rule_given_as_an_expression_that_is_always_true_costs_no_look_at_messages():
    topic = with_rules(rule("always", sql="1=1"))
    topic.publish("m")
    assert topic.texts(A) == ["m"]
    assert not topic.partition._core.topics[TOPIC_ENTITY].has_rules


# ---- actions


def test_each_rule_with_an_action_makes_its_own_copy_and_those_without_make_one():
    topic = with_rules(
        rule("one"),
        TAKES_RED,
        rule("first", action="SET mark = 1"),
        rule("second", sql="color = 'red'", action="SET mark = 2"),
        rule("blank", action=" "),
    )
    topic.publish(event("m", color="red"))
    copies = topic.peek(A)
    assert sorted((changes(copy)[0] for copy in copies), key=len) == [
        {},
        {"mark": 1, "RuleName": "first"},
        {"mark": 2, "RuleName": "second"},
    ]
    assert topic.references() == {1: 3}
    assert_sound(topic)
    received = topic.receive(3, "a", A)
    topic.settle(Outcome.ACCEPTED, *received[:2], queue=A)
    assert_sound(topic)
    topic.settle(Outcome.ACCEPTED, received[2], queue=A)
    assert (topic.message_count(), topic.references()) == (0, {})


def test_an_action_sets_and_removes_properties_and_system_properties():
    action = """
        SET added = 'x'; SET Amount = amount + 1; REMOVE gone; REMOVE never;
        SET sys.Label = 'new'; SET sys.ContentType = 'text/plain'; SET sys.MessageId = 'id'; SET sys.SessionId = 's';
        REMOVE sys.To
    """
    topic = with_rules(rule("r", action=action))
    topic.publish(event("m", system={2: "to", 3: "old"}, amount=Int(4), gone="here"))
    [copy] = topic.peek(A)
    properties, system = changes(copy)
    assert properties == {"added": "x", "amount": 5, "gone": None, "RuleName": "r"}
    assert type(properties["amount"]) is Int
    assert system == {3: "new", 6: "text/plain", 0: "id", 10: "s", 2: None}
    assert type(system[6]) is Symbol


def test_an_action_changes_the_time_to_live_of_its_copy():
    topic = TopicDriver(B, default_message_time_to_live_ms=60_000)
    topic.subscribe(A, rule("r", action="SET sys.TimeToLive = @ttl", ttl=DURATION))
    topic.publish(event("m", ttl_ms=10_000), event("short", ttl_ms=1_000))
    assert [d.overlay[Field.EXPIRES_MS] - START_MS for d in topic.peek(A)] == [2_000, 2_000]
    topic.wait(2_000)
    assert (topic.texts(A), topic.texts(B)) == ([], ["m"])
    assert_sound(topic)


@pytest.mark.parametrize(("default_ms", "expected"), [(None, NEVER), (60_000, START_MS + 60_000)])
def test_an_action_that_removes_the_time_to_live_leaves_the_topics(default_ms, expected):
    topic = with_rules(rule("r", action="REMOVE sys.TimeToLive"))
    topic.put_topic(default_message_time_to_live_ms=default_ms)
    topic.publish(event("m", ttl_ms=1_000))
    assert topic.peek(A)[0].overlay[Field.EXPIRES_MS] == expected
    topic.wait(5_000)
    assert topic.texts(A) == ["m"]


def test_a_changed_copy_of_a_scheduled_message_keeps_its_number_and_time():
    topic = with_rules(rule("r", action="SET a = 1"))
    topic.publish(event("m", ttl_ms=1_000, scheduled_ms=START_MS + 100))
    topic.wait(100)
    [copy] = topic.peek(A)
    assert copy.overlay[Field.ENQUEUED_MS] == START_MS + 100
    assert copy.overlay[Field.EXPIRES_MS] == START_MS + 1_100
    assert copy.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] == 1
    assert changes(copy)[0] == {"a": 1, "RuleName": "r"}


def test_properties_set_by_receivers_are_added_to_those_of_the_action():
    topic = with_rules(rule("r", action="SET a = 1; REMOVE b"))
    topic.publish(event("m", b=2))
    topic.settle(Outcome.ABANDONED, topic.receive_one("r", A), properties={"c": "3"}, queue=A)
    assert changes(topic.peek(A)[0])[0] == {"a": 1, "b": None, "c": "3", "RuleName": "r"}


# ---- failures (DL7)


def test_a_message_on_which_a_filter_fails_is_dead_lettered_in_that_subscription():
    topic = TopicDriver(B)
    topic.subscribe(A, rule("div", sql="1 / amount > 0"))
    topic.publish(event("m", amount=0), event("good", amount=1))
    assert (topic.texts(A), topic.texts(A | 1), topic.texts(B)) == (["good"], ["m"], ["m", "good"])
    [dead] = topic.peek(A | 1)
    assert dead.properties["DeadLetterReason"] == "FilterException"
    assert "'div'" in dead.properties["DeadLetterErrorDescription"]
    assert "by zero" in dead.properties["DeadLetterErrorDescription"]
    assert dead.overlay[Field.DEAD_LETTER_SOURCE] == "news/Subscriptions/a"
    tally = topic.partition.tallies()[A]
    assert (tally["incoming"], tally["rules_failed"], tally["dead_lettered"]) == (2, 1, {"FilterException": 1})
    assert topic.partition.gauges()["rules_failed"] == 1
    assert_sound(topic)
    topic.settle(Outcome.ACCEPTED, topic.receive_one("dead", A | 1), queue=A | 1)
    assert_sound(topic)


def test_a_message_on_which_a_filter_fails_is_dropped_where_the_subscription_does_not_want_it():
    topic = with_rules(rule("div", sql="1 / amount > 0"), dead_lettering_on_filter_evaluation_exceptions=False)
    topic.publish(event("m", amount=0))
    assert (topic.texts(A), topic.texts(A | 1), topic.message_count()) == ([], [], 0)
    assert topic.partition.gauges()["rules_failed"] == 1


def test_an_action_that_fails_dead_letters_the_message_unchanged_and_other_rules_have_their_copies():
    topic = with_rules(
        rule("bad", action="SET amount = 1 / amount"),
        rule("worse", sql="1 / amount > 0"),
        rule("good", action="SET a = 1"),
        rule("plain"),
    )
    topic.publish(event("m", amount=0))
    assert len(topic.peek(A)) == 2
    [dead] = topic.peek(A | 1)
    assert dead.properties.keys() == {"DeadLetterReason", "DeadLetterErrorDescription"}
    assert topic.partition.gauges()["rules_failed"] == 2
    assert topic.references() == {1: 3}
    assert_sound(topic)


def test_messages_on_which_rules_fail_are_dead_lettered_without_a_time_to_live():
    topic = with_rules(rule("div", sql="1 / amount > 0"), default_message_time_to_live_ms=1_000)
    topic.publish(event("m", amount=0, ttl_ms=500))
    topic.wait(10_000)
    assert topic.texts(A | 1) == ["m"]


def test_receivers_of_the_dead_letter_queue_are_served_at_once():
    topic = with_rules(rule("div", sql="1 / amount > 0"))
    topic.open("dead", A | 1)
    topic.grant(1, "dead")
    topic.publish(event("m", amount=0))
    assert len(topic.pump()["dead"]) == 1


# ---- administration


def test_a_new_subscription_has_the_default_rule_unless_others_are_given():
    topic = TopicDriver(A)
    topic.subscribe(B, TAKES_RED)
    assert topic.request("enumerate-rules", 0, 9, queue=A) == [
        {"name": "$Default", "created_ms": START_MS, "filter": {"kind": "true"}, "action": None}
    ]
    assert names(topic, B) == ["red"]
    topic.subscribe(B, status="Active")  # a change of properties leaves the rules alone
    assert names(topic, B) == ["red"]


def test_rules_are_added_listed_and_removed_and_hold_from_then_on():
    topic = TopicDriver(A, B)
    topic.publish("first")
    topic.now_ms += 1
    topic.request("add-rule", TAKES_RED, queue=A)
    topic.publish("second")  # the default rule is still there
    topic.request("remove-rule", "$default", queue=A)
    topic.publish("third", event("red", color="red"))
    topic.request("remove-rule", "RED", queue=A)
    topic.publish(event("red", color="red"))
    assert topic.texts(A) == ["first", "second", "red"]
    assert topic.texts(B) == ["first", "second", "third", "red", "red"]
    topic.request("add-rule", rule("all"), queue=A)
    topic.publish("last")
    assert topic.texts(A)[-1] == "last"
    assert_sound(topic)


def test_rules_survive_a_restart_with_their_values():
    topic = TopicDriver(A)
    added = [
        rule("z", sql="a = @v", action="SET b = @v", v=Int(5)),
        rule("y", correlation={"label": "x", "properties": {"n": Timestamp(5)}}),
        rule("x", kind="false"),
    ]
    for each in added:
        topic.now_ms += 1
        topic.request("add-rule", each, queue=A)
    before = topic.request("enumerate-rules", 0, 9, queue=A)
    topic.restart()
    assert topic.request("enumerate-rules", 0, 9, queue=A) == before
    assert names(topic) == ["$Default", "x", "y", "z"]
    topic.publish(event("m", a=5))
    assert [changes(copy)[0] for copy in topic.peek(A)] == [{}, {"b": 5, "RuleName": "z"}]


def test_rules_are_listed_by_name_in_any_case_however_they_were_added():
    topic = TopicDriver(A, B)
    for name in ("sqlRule", "b", "correlationRule", "C"):
        topic.now_ms += 1
        topic.request("add-rule", rule(name), queue=A)
    assert names(topic) == ["$Default", "b", "C", "correlationRule", "sqlRule"]
    assert names(topic, B) == ["$Default"]
    topic.request("remove-rule", "c", queue=A)
    topic.request("replace-rule", rule("B"), queue=A)
    assert names(topic) == ["$Default", "B", "correlationRule", "sqlRule"]
    topic.request("add-rule", rule("a"), queue=A)
    assert [found["name"] for found in topic.request("enumerate-rules", 1, 2, queue=A)] == ["a", "B"]


def test_a_property_of_a_correlation_filter_that_is_null_takes_messages_without_it():
    topic = with_rules(
        rule("r", correlation={"properties": {"kind": "value", "gone": None}}),
        rule("only", correlation={"properties": {"Gone": None}, "label": "x"}),
    )
    topic.subscribe(B, rule("null", correlation={"properties": {"gone": None}}))
    topic.publish(
        event("without", kind="value"),
        event("null", kind="value", gone=None),
        event("with", kind="value", Gone=""),
        event("label", system={3: "x"}),
        event("label with", system={3: "x"}, gone=False),
        "other",
    )
    assert topic.texts(A) == ["without", "null", "label"]
    assert topic.texts(B) == ["without", "null", "label", "other"]
    topic.restart()
    [_, found] = topic.request("enumerate-rules", 0, 9, queue=A)
    assert decode_exactly(found["filter"]["properties"]["gone"]) is None
    topic.publish(event("later", kind="value"), event("later with", kind="value", gone=1))
    assert topic.texts(A) == ["without", "null", "label", "later"]
    topic.request("remove-rule", "r", queue=A)
    topic.request("remove-rule", "only", queue=A)
    topic.publish(event("last", kind="value"))
    assert topic.texts(A) == ["without", "null", "label", "later"]


def test_rules_are_listed_in_pages():
    topic = with_rules(*[rule(f"r{n}") for n in range(5)])
    assert [found["name"] for found in topic.request("enumerate-rules", 1, 2, queue=A)] == ["r1", "r2"]
    assert topic.request("enumerate-rules", 5, 2, queue=A) == []
    for skip, top in ((-1, 1), (0, 0)):
        with pytest.raises(InvalidArgument):
            topic.request("enumerate-rules", skip, top, queue=A)


def test_a_rule_of_a_name_that_is_taken_is_refused():
    topic = TopicDriver(A, B)
    topic.request("add-rule", TAKES_RED, queue=A)
    for name in ("red", "RED", "$Default"):
        with pytest.raises(EntityAlreadyExists):
            topic.request("add-rule", rule(name), queue=A)
    topic.request("add-rule", TAKES_RED, queue=B)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (rule("r", sql="a = "), "line=1, column=5"),
        (rule("r", sql="a = @missing"), "parameter has no value"),
        (rule("r", action="SET sys.SequenceNumber = 1"), "read-only"),
        (rule("r", correlation={}), "condition"),
        (rule("r", kind="spatial"), "spatial"),
    ],
)
def test_a_wrong_rule_is_refused_and_says_why(wrong, said):
    topic = TopicDriver(A)
    with pytest.raises(InvalidArgument, match=said):
        topic.request("add-rule", wrong, queue=A)
    assert names(topic) == ["$Default"]
    with pytest.raises(InvalidArgument, match=said):
        topic.subscribe(B, wrong)
    with pytest.raises(EntityNotFound):
        topic.peek(B)


FUTILE = rule("ttl", action="SET sys.TimeToLive = 'soon'")


@pytest.mark.parametrize(
    ("futile", "said"),
    [
        (FUTILE, "Token line=1, column=22, .*sys.TimeToLive is a duration .* not 'soon'"),
        (rule("r", sql="1 / 0 = 1"), "column=1, .*division of an integer by zero"),
    ],
)
def test_a_rule_that_fails_on_every_message_is_refused_when_it_is_made(futile, said):
    topic = TopicDriver(A)
    topic.request("add-rule", rule(futile["name"].upper(), sql="a = 1"), queue=A)
    with pytest.raises(InvalidArgument, match=said):
        topic.request("replace-rule", {**futile, "name": futile["name"].upper()}, queue=A)
    with pytest.raises(InvalidArgument, match=said):
        topic.request("add-rule", {**futile, "name": "new"}, queue=A)
    with pytest.raises(InvalidArgument, match=said):
        topic.partition.index.check_rules("news", [futile])
    assert names(topic) == ["$Default", futile["name"].upper()]
    assert topic.partition.take_flawed_rules() == []


def test_a_stored_rule_that_fails_on_every_message_goes_on_and_is_told_once():
    topic = with_rules(FUTILE, TAKES_RED)
    before = topic.store.scan(Table.RULES, b"", b"\xff" * 64, 10)
    topic.restart()
    assert topic.partition.take_flawed_rules() == []  # rules are read with the first use of their topic
    topic.publish(event("red", color="red"))
    [(subscription, name, flaw)] = topic.partition.take_flawed_rules()
    assert (subscription, name) == ("news/Subscriptions/a", "ttl")
    assert "not 'soon'" in flaw
    assert topic.partition.take_flawed_rules() == []
    assert topic.texts(A) == ["red"]
    assert topic.counts(A + Part.DEAD_LETTER)[0] == 1
    assert topic.store.scan(Table.RULES, b"", b"\xff" * 64, 10) == before
    topic.request("remove-rule", "ttl", queue=A)
    topic.publish(event("red", color="red"))
    assert topic.counts(A + Part.DEAD_LETTER)[0] == 1


def test_other_partitions_take_a_rule_that_one_has_taken():
    topic = TopicDriver(A)
    topic.partition.set_rules(A >> 3, [FUTILE])
    topic.partition.set_rule(A >> 3, {**FUTILE, "name": "other"})
    assert names(topic) == ["other", "ttl"]


def test_strings_of_an_action_are_converted_to_the_time_to_live():
    topic = with_rules(rule("ttl", action="SET sys.TimeToLive = '00:00:02'; SET sys.Label = 'n' + number"))
    topic.publish(event("m", number=7))
    [delivery] = topic.peek(A)
    assert delivery.overlay[Field.EXPIRES_MS] == START_MS + 2_000
    assert changes(delivery)[1] == {3: "n7"}


def test_a_rule_that_is_not_there_cannot_be_removed():
    topic = TopicDriver(A)
    with pytest.raises(EntityNotFound, match="could not be found"):
        topic.request("remove-rule", "other", queue=A)


def test_rules_belong_to_subscriptions():
    topic = TopicDriver(A)
    for queue_id in (TOPIC, MAIN, A | 1):
        for name, args in (("add-rule", (rule("r"),)), ("remove-rule", ("r",)), ("enumerate-rules", (0, 1))):
            with pytest.raises(NotAllowed):
                topic.request(name, *args, queue=queue_id)
    with pytest.raises(EntityNotFound):
        topic.request("add-rule", rule("r"), queue=B)


@pytest.mark.parametrize("kind", ["sql", "correlation"])
def test_a_topic_has_so_many_filters_of_a_kind_over_all_its_subscriptions(kind, monkeypatch):
    def numbered(n):
        return rule(f"r{n}", sql=f"a = {n}") if kind == "sql" else rule(f"r{n}", correlation={"label": str(n)})

    assert rule_requests.LIMITS == {"sql": 2000, "correlation": 100_000}
    monkeypatch.setitem(rule_requests.LIMITS, kind, 3)
    topic = TopicDriver(A, B)
    for n in (1, 2):
        topic.request("add-rule", numbered(n), queue=A)
    topic.request("add-rule", numbered(3), queue=B)
    with pytest.raises(QuotaExceeded):
        topic.request("add-rule", numbered(4), queue=B)
    topic.request("add-rule", rule("true"), queue=B)
    topic.request("remove-rule", "r1", queue=A)
    topic.request("add-rule", numbered(4), queue=B)
    topic.unsubscribe(B)
    topic.request("add-rule", numbered(5), queue=A)
    assert names(topic) == ["$Default", "r2", "r5"]


# ---- delays

DELAY = "SET sys.ScheduledEnqueueTimeUtc = @at"
AT_MS = START_MS + 5_000
LATER = rule("later", action=DELAY, at=Timestamp(AT_MS))


def test_an_action_that_sets_the_enqueue_time_delays_its_copy_and_no_other():
    topic = TopicDriver(B)
    topic.subscribe(A, LATER, rule("now"))
    topic.publish(event("m"), event("n"))
    assert (topic.counts(A)[:3], topic.texts(B)) == ([2, 0, 2], ["m", "n"])
    waiting = [each for each in topic.peek(A) if each.place == Place.SCHEDULED]
    assert [(each.overlay[Field.ENQUEUED_MS], changes(each)[0]["RuleName"]) for each in waiting] == [
        (AT_MS, "later")
    ] * 2
    topic.open("r", A)
    topic.grant(10)
    assert len(topic.pump()["r"]) == 2
    topic.wait(4_999)
    assert topic.pump() == {}
    topic.restart()
    topic.wait(1)
    assert topic.counts(A)[:3] == [4, 0, 0]
    [*_, one, other] = topic.peek(A)
    assert [each.overlay[Field.ENQUEUE_SEQUENCE_NUMBER] for each in (one, other)] == [each.number for each in waiting]
    assert (one.overlay[Field.ENQUEUED_MS], one.overlay[Field.SCHEDULED_MS]) == (AT_MS, AT_MS)
    assert [text(each.body) for each in (one, other)] == ["m", "n"]
    assert_sound(topic)


@pytest.mark.parametrize(
    ("action", "delayed"),
    [
        ("SET sys.ScheduledEnqueueTimeUtc = '1970-01-01T00:00:00Z'", 0),
        ("SET sys.ScheduledEnqueueTimeUtc = '9999-12-31T23:59:59.9999999Z'", 1),
        ("SET sys.ScheduledEnqueueTimeUtc = '0001-01-01'", 0),
        ("SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc", 0),
        ("SET sys.ScheduledEnqueueTimeUtc = @huge", 1),
        ("SET sys.ScheduledEnqueueTimeUtc = @tiny", 0),
        ("SET sys.ScheduledEnqueueTimeUtc = @at; REMOVE sys.ScheduledEnqueueTimeUtc", 0),
        ("SET sys.ScheduledEnqueueTimeUtc = @at; SET sys.ScheduledEnqueueTimeUtc = NULL", 0),
        ("SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + @delay", 1),
    ],
)
def test_only_a_time_to_come_delays(action, delayed):
    topic = TopicDriver()
    topic.subscribe(
        A,
        rule(
            "r", action=action, at=Timestamp(AT_MS), delay=DURATION, huge=Timestamp(2**63 - 1), tiny=Timestamp(-(2**63))
        ),
    )
    topic.publish("m")
    assert topic.counts(A)[:3] == [1 - delayed, 0, delayed]
    assert_sound(topic)


@pytest.mark.parametrize(
    ("action", "topics_ms", "own_ms", "expected"),
    [
        (DELAY, None, None, NEVER),
        (DELAY, 1_000, None, 1_000),
        (DELAY, 7_000, 2_000, 2_000),
        (DELAY + "; SET sys.TimeToLive = '00:00:03'", 7_000, None, 3_000),
        (DELAY + "; SET sys.TimeToLive = '00:00:03'", 2_000, None, 2_000),
        (DELAY + "; REMOVE sys.TimeToLive", None, 4_000, 4_000),
    ],
)
def test_the_time_to_live_of_a_delayed_copy_begins_with_its_time(action, topics_ms, own_ms, expected):
    topic = TopicDriver(default_message_time_to_live_ms=topics_ms)
    topic.subscribe(A, rule("r", action=action, at=Timestamp(AT_MS)), default_message_time_to_live_ms=own_ms)
    topic.publish("m", event("brief", ttl_ms=10_000))
    topic.wait(5_000)
    [copy, _] = topic.peek(A)
    expires_ms = copy.overlay[Field.EXPIRES_MS]
    assert (expires_ms if expected == NEVER else expires_ms - AT_MS) == expected
    if expected != NEVER:
        topic.wait(expected - 1)
        assert topic.texts(A)[:1] == ["m"]
        topic.wait(1)
        assert "m" not in topic.texts(A)
    assert_sound(topic)


def test_a_delayed_copy_of_a_message_that_expires_earlier_lives_on():
    topic = with_rules(LATER)
    topic.publish(event("m", ttl_ms=1_000))
    topic.wait(5_500)
    assert topic.texts(A) == ["m"]
    topic.wait(500)
    assert topic.texts(A) == []


def test_a_delayed_copy_of_a_scheduled_message_waits_for_the_later_time():
    topic = with_rules(LATER)
    topic.publish(event("m", scheduled_ms=START_MS + 100), event("late", scheduled_ms=AT_MS + 100))
    topic.wait(100)
    assert topic.counts(A)[:3] == [0, 0, 1]
    topic.wait(4_900)
    assert topic.texts(A) == ["m"]
    topic.wait(100)
    assert topic.texts(A) == ["m", "late"]


def test_a_delayed_copy_waits_in_its_session():
    topic = with_rules(rule("r", action=DELAY + "; SET sys.SessionId = id", at=Timestamp(AT_MS)), requires_session=True)
    topic.publish(event("m", id="s"), event("none"))
    assert topic.counts(A)[:3] == [0, 0, 1]
    dead = topic.peek(A + Part.DEAD_LETTER)
    assert [text(each.body) for each in dead] == ["none"]
    assert Field.ENQUEUED_MS not in dead[0].overlay
    assert [each.place for each in topic.peek(A)] == [Place.SCHEDULED]
    topic.restart()
    topic.wait(5_000)
    assert topic.counts(A)[:3] == [1, 0, 0]
    [copy] = topic.peek(A)
    assert copy.overlay[Field.SESSION] == "s"


def test_a_delayed_copy_can_be_cancelled_and_purged():
    topic = with_rules(LATER)
    topic.publish("m", "n")
    [first, _] = topic.peek(A)
    topic.request("cancel-scheduled", [first.number], queue=A)
    assert topic.counts(A)[:3] == [0, 0, 1]
    assert_sound(topic)
    assert topic.request("purge", queue=A) == 1
    topic.wait(5_000)
    assert topic.counts(A)[:3] == [0, 0, 0]
    assert not topic.store.scan(Table.DUE, b"", b"\xff" * 64, 10)
    assert_sound(topic)
