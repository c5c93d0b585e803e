"""Rows of the journal, from what frames say of a partition."""

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.journal.properties import DECODING, properties_of, text
from protocol.codec import Symbol, encode
from storage.journal.events import ENTERING, LEAVING, Hint, Op, name_of
from storage.journal.queues import Mode, Modes, Queues
from storage.journal.rows import Rows
from storage.journal.schema import SCHEMA
from storage.log.changes import Operation
from storage.queue_ids import Part, queue_id_of
from storage.records import NEVER, Field, Overlay, Place, encode_state, session_key, staged_key
from storage.store import Table
from tests.examples import examples
from tests.journal.turns_of_messages import (
    ACTIVE,
    DEAD,
    NAMED,
    ORDERS,
    deleted,
    done,
    entry,
    inserted,
    put,
    record,
    sent,
    stored,
)

COPY = queue_id_of(9)


def rows_of(*frames, mode=Mode.BODIES, modes=None, names=None):
    queues = Queues(Modes(mode, modes or {}), names or {ORDERS: "orders", 9: "events/subscriptions/all"})
    rows = Rows(3, queues, DECODING)
    for time_ms, operations, hints in frames:
        rows.add(time_ms, operations, hints)
    batch = rows.batch(100)
    batch.validate(full=True)
    assert batch.schema == SCHEMA
    return batch.to_pylist()


def shown(rows, *columns):
    return [tuple(row[column] for column in columns) for row in rows]


PLACE = ("op", "entity", "subQueue", "sequenceNumber", "reason")


def test_a_message_with_all_its_properties():
    fields = ["m-1", b"user", "to", "subject", "reply", "c-1", Symbol("text/plain"), None, None, None, "session"]
    made = record(b"body", *fields, annotations={"x-opt-partition-key": "session"}, enqueued_ms=5, expires_ms=9_000)
    overlay: Overlay = {Field.HOPS: 1}
    [row] = rows_of(
        (2_000, [stored((1, made)), inserted(entry(ACTIVE, 1 << 48, 1, count=2, overlay=overlay))], [NAMED])
    )
    assert (row["partition"], row["journalOffset"], row["eventTime"].timestamp()) == (3, 100, 2.0)
    assert shown([row], *PLACE) == [("enqueued", "orders", "active", 1 << 48, None)]
    assert shown([row], "messageId", "sessionId", "partitionKey", "correlationId", "subject", "contentType") == [
        ("m-1", "session", "session", "c-1", "subject", "text/plain")
    ]
    assert (row["enqueuedTime"].timestamp(), row["scheduledTime"], row["expiresAt"].timestamp()) == (0.005, None, 9.0)
    assert (row["deliveryCount"], row["bodySize"], row["record"]) == (2, len(made), made)
    assert row["overlay"] == b"\x81\x07\x01"


def test_no_bodies_in_the_mode_events_and_nothing_of_entities_that_are_off():
    frame = (1, [*sent(1, b"a"), *sent(5, b"b", queue_id=COPY)], [done(Op.DELIVERED, ACTIVE, 1)])
    [of_orders, of_topic] = [row for row in rows_of(frame, mode=Mode.EVENTS) if row["op"] == "enqueued"]
    assert of_orders["record"] is of_topic["record"] is None
    assert of_orders["bodySize"] > 40
    rows = rows_of(frame, mode=Mode.EVENTS, modes={"ORDERS": Mode.OFF, "events/*": Mode.BODIES, "*": Mode.OFF})
    assert [(row["entity"], row["record"] is None) for row in rows] == [("events/subscriptions/all", False)]


def test_a_message_that_comes_and_goes_in_one_frame():
    frame = (
        1,
        [*sent(1, b"a", b"b"), deleted(ACTIVE, 1)],
        [done(Op.DELIVERED, ACTIVE, 1), done(Op.COMPLETED, ACTIVE, 1, reason="receiveAndDelete")],
    )
    assert shown(rows_of(frame), *PLACE) == [
        ("enqueued", "orders", "active", 1, None),
        ("enqueued", "orders", "active", 2, None),
        ("delivered", "orders", "active", 1, None),
        ("completed", "orders", "active", 1, "receiveAndDelete"),
    ]


@pytest.mark.parametrize("change", [put, inserted])
@pytest.mark.parametrize("is_deleted_first", [True, False])
def test_a_message_that_changes_its_place_neither_enters_nor_leaves(change, is_deleted_first):
    operations = [deleted(ACTIVE, 4), change(entry(ACTIVE, 4, 1, Place.DEFERRED))]
    frame = (1, operations if is_deleted_first else operations[::-1], [done(Op.DEFERRED, ACTIVE, 4)])
    assert shown(rows_of(frame), *PLACE) == [("deferred", "orders", "active", 4, None)]


def test_a_put_alone_is_no_row_unless_it_is_named():
    operations = [put(entry(ACTIVE, 4, 1, count=1), entry(ACTIVE, 5, 2))]
    assert rows_of((1, operations, [done(Op.ABANDONED, ACTIVE, 4, counts=[1])]))[0]["deliveryCount"] == 1
    named = [Hint.ENTERED, ACTIVE, (5,), "moved", None, None]
    assert shown(rows_of((1, operations, [named])), *PLACE) == [("enqueued", "orders", "active", 5, "moved")]


def test_dead_lettering_is_a_row_on_each_side():
    overlay: Overlay = {
        Field.PROPERTIES: {"DeadLetterReason": "bad", "DeadLetterErrorDescription": encode("very bad")},
        Field.ENQUEUED_MS: 7_000,
    }
    operations = [deleted(ACTIVE, 4, 6), inserted(entry(DEAD, 1, 40, overlay=overlay), entry(DEAD, 2, 60))]
    frame = (1, operations, [[Hint.MOVED, Op.DEAD_LETTERED, ACTIVE, (4, 6), (3, 1), DEAD, 1, "bad"]])
    rows = rows_of(frame)
    assert shown(rows, *PLACE, "description", "deliveryCount") == [
        ("enqueued", "orders", "deadletter", 1, "deadlettered", None, 0),
        ("enqueued", "orders", "deadletter", 2, "deadlettered", None, 0),
        ("deadlettered", "orders", "active", 4, "bad", "very bad", 3),
        ("deadlettered", "orders", "active", 6, "bad", None, 1),
    ]
    assert shown(rows[:2], "originEntity", "originSubQueue", "originSequenceNumber") == [
        ("orders", "active", 4), ("orders", "active", 6)
    ]  # fmt: skip
    assert [row["enqueuedTime"] and row["enqueuedTime"].timestamp() for row in rows[:2]] == [7.0, None]


def test_scheduled_and_activated():
    scheduled = [stored((1, record(b"a", "m", enqueued_ms=90_000))), inserted(entry(ACTIVE, 1, 1, Place.SCHEDULED))]
    activated = [deleted(ACTIVE, 1, place=Place.SCHEDULED), inserted(entry(ACTIVE, 2, 1))]
    rows = rows_of(
        (1, scheduled, []), (90_000, activated, [[Hint.MOVED, Op.ACTIVATED, ACTIVE, (1,), None, ACTIVE, 2, None]])
    )
    assert shown(rows, *PLACE) == [
        ("scheduled", "orders", "active", 1, None),
        ("enqueued", "orders", "active", 2, "activated"),
        ("activated", "orders", "active", 1, None),
    ]
    assert rows[0]["scheduledTime"].timestamp() == 90.0
    assert rows[1]["originSequenceNumber"] == 1


def test_a_waiting_message_that_is_published_to_two_subscriptions_leaves_its_topic_once():
    topic, other = queue_id_of(8), queue_id_of(10)
    operations = [deleted(topic, 1, 2), inserted(entry(COPY, 5, 1), entry(COPY, 6, 2), entry(other, 1, 1))]
    hints = [
        [Hint.MOVED, Op.PUBLISHED, topic, (1, 2), None, COPY, 5, None],
        [Hint.MOVED, Op.PUBLISHED, topic, (1,), None, other, 1, None],
    ]
    rows = rows_of((1, operations, hints))
    assert shown([row for row in rows if row["op"] == "published"], "sequenceNumber") == [(1,), (2,)]
    assert shown(rows[:3], "entity", "reason", "originSequenceNumber") == [
        ("events/subscriptions/all", "published", 1), ("events/subscriptions/all", "published", 2),
        ("#10", "published", 1),
    ]  # fmt: skip


def test_what_leaves_without_a_hint_is_told_and_what_did_not_leave_is_not():
    rows = rows_of((1, [deleted(ACTIVE, 1, 2, 3)], [done(Op.COMPLETED, ACTIVE, 2, 9, 2, counts=[7, 8, 9])]))
    assert shown(rows, *PLACE, "deliveryCount") == [
        ("completed", "orders", "active", 2, None, 7),
        ("purged", "orders", "active", 1, "unexplained", None),
        ("purged", "orders", "active", 3, "unexplained", None),
    ]


def test_messages_that_were_never_in_the_queue():
    hints = [
        [Hint.BARE, Op.DUPLICATE, ACTIVE, ("a", encode("b"), None), None, None, None],
        [Hint.BARE, Op.PUBLISHED, queue_id_of(8), (None,), 0, None, None],
        [Hint.BARE, Op.PUBLISHED, queue_id_of(8), ("x", "y"), (1, 2), None, None],
    ]
    rows = rows_of((1, [], hints), names={8: "events"})
    assert shown(rows, "op", "messageId", "copies", "sequenceNumber") == [
        ("duplicate", "a", None, None), ("duplicate", "b", None, None), ("duplicate", None, None, None),
        ("published", None, 0, None), ("published", "x", 1, None), ("published", "y", 2, None),
    ]  # fmt: skip


def test_forwarded_messages_say_where_they_were_also_those_that_are_not_stored():
    topic, relay = queue_id_of(8), queue_id_of(10)
    hints = [
        [Hint.ENTERED, ACTIVE, (5, 6), "forwarded", relay, (71, 73)],
        [Hint.BARE, Op.DUPLICATE, ACTIVE, ("a",), None, relay, (72,)],
        [Hint.BARE, Op.PUBLISHED, topic, (None, None), (2, 0), relay, (74, 75)],
        [Hint.ENTERED, COPY, (1,), "published", topic, None],
    ]
    operations = [*sent(5, b"a", b"b"), *sent(1, b"c", queue_id=COPY)]
    rows = rows_of((1, operations, hints), names={ORDERS: "orders", 8: "events", 9: "events/all", 10: "relay"})
    origin = ("originEntity", "originEntityId", "originSubQueue", "originSequenceNumber")
    assert sorted(shown(rows, "op", "entity", "entityId", *origin, "copies"), key=str) == sorted(
        [
            ("enqueued", "orders", ORDERS, "relay", 10, "active", 71, None),
            ("enqueued", "orders", ORDERS, "relay", 10, "active", 73, None),
            ("enqueued", "events/all", 9, "events", 8, "active", None, None),
            ("duplicate", "orders", ORDERS, "relay", 10, "active", 72, None),
            ("published", "events", 8, "relay", 10, "active", 74, 2),
            ("published", "events", 8, "relay", 10, "active", 75, 0),
        ],
        key=str,
    )


def test_an_entity_that_was_created_again_has_the_name_of_the_old_one_and_another_id():
    rows = rows_of((1, [*sent(1, b"a", queue_id=COPY), deleted(ACTIVE, 1)], [NAMED, [Hint.NAMED, 9, "orders"]]))
    assert shown(rows, "op", "entity", "entityId") == [("enqueued", "orders", 9), ("purged", "orders", ORDERS)]


def test_an_older_event_has_its_own_time_and_a_later_name_counts():
    hints = [done(Op.DELIVERED, ACTIVE, 1, at_ms=500), [Hint.NAMED, ORDERS, "renamed"], done(Op.RELEASED, ACTIVE, 1)]
    rows = rows_of((1_000, [], hints))
    assert [(row["entity"], row["eventTime"].timestamp()) for row in rows] == [("renamed", 0.5), ("renamed", 1.0)]


def test_a_gap_is_a_row():
    rows = Rows(0, Queues(Modes(Mode.EVENTS, {}), {}), DECODING)
    rows.truncate(1_000, "why")
    [row] = rows.batch(5).to_pylist()
    assert {name for name, value in row.items() if value is not None} == {
        "partition",
        "journalOffset",
        "eventTime",
        "op",
        "description",
    }
    assert (row["op"], row["description"]) == ("truncated", "why")


@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1))
def test_extreme_times_are_shown_as_none(enqueued_ms, expires_ms):
    made = record(b"", "m", enqueued_ms=enqueued_ms, expires_ms=expires_ms)
    [row] = rows_of((1, [stored((1, made)), inserted(entry(ACTIVE, 2**63 - 1, 1, Place.SCHEDULED))], []))
    shown_ms = row["expiresAt"] and int(row["expiresAt"].timestamp() * 1000 + 0.5)
    assert shown_ms in (expires_ms, None) or abs(shown_ms - expires_ms) <= 1
    assert row["sequenceNumber"] == 2**63 - 1


@given(st.binary(max_size=200))
def test_any_record_has_properties_or_none(content):
    for each in (content, record(b"x", "m")[:40] + content, content[:24].ljust(24, b"\0") + b"\x00" * 16 + content):
        found = properties_of(each)
        assert len(found) == 6
        [value.encode() for value in found if value is not None]
    text(content).encode()


@pytest.mark.parametrize(
    "bad",
    [
        [done(Op.DELIVERED, ACTIVE, 2**64)],
        [done(Op.DELIVERED, ACTIVE, 1, reason="\ud800")],
        [[1, 99, 1, (1,), None, None, None]],
        [[1]],
        [done(Op.DELIVERED, ACTIVE, 1, at_ms=2**62)],
    ],
)
def test_malformed_events_are_an_exception(bad):
    with pytest.raises((ValueError, TypeError, OverflowError, KeyError)):
        rows_of((1, [], bad))


# --- a reference: queues as sets, and what happens to messages in them, one frame after the other

OPS = st.tuples(
    st.sampled_from(["send", "complete", "dead-letter", "defer", "restore", "forget", "put"]), st.integers(0, 5)
)


@settings(max_examples=examples(150))
@given(st.lists(st.lists(OPS, min_size=1, max_size=8), min_size=1, max_size=12))
def test_each_message_enters_once_and_leaves_once(frames):
    present = {ACTIVE: {}, DEAD: {}}  # number: place
    following = {ACTIVE: 1, DEAD: 1}
    wanted, made = [], []
    for steps in frames:
        operations, hints = [], []
        for what, which in steps:
            numbers = sorted(present[ACTIVE])
            if what == "send":
                number = following[ACTIVE]
                operations += sent(number, b"x")
                present[ACTIVE][number], following[ACTIVE] = Place.AVAILABLE, number + 1
                wanted.append(("in", "active", number, "enqueued"))
                continue
            if not numbers:
                continue
            number = numbers[which % len(numbers)]
            place = present[ACTIVE][number]
            if what == "put":
                operations.append(put(entry(ACTIVE, number, number, place, count=which)))
            elif what in ("defer", "restore"):
                to = Place.DEFERRED if what == "defer" else Place.AVAILABLE
                if to != place:
                    operations += [deleted(ACTIVE, number, place=place), inserted(entry(ACTIVE, number, number, to))]
                    present[ACTIVE][number] = to
            else:
                operations.append(deleted(ACTIVE, number, place=place))
                del present[ACTIVE][number]
                if what == "complete":
                    hints.append(done(Op.COMPLETED, ACTIVE, number))
                elif what == "dead-letter":
                    there = following[DEAD]
                    operations.append(inserted(entry(DEAD, there, number)))
                    hints.append([Hint.MOVED, Op.DEAD_LETTERED, ACTIVE, (number,), None, DEAD, there, "bad"])
                    following[DEAD] = there + 1
                    wanted.append(("in", "deadletter", there, "enqueued"))
                op = {"complete": "completed", "dead-letter": "deadlettered", "forget": "purged"}[what]
                wanted.append(("out", "active", number, op))
        made.append((1, operations, hints))
    entering, leaving = {name_of(op) for op in ENTERING}, {name_of(op) for op in LEAVING}
    found = [
        (
            "in" if row["op"] in entering else "out" if row["op"] in leaving else "",
            row["subQueue"],
            row["sequenceNumber"],
            row["op"],
        )
        for row in rows_of(*made)
    ]
    assert sorted(found) == sorted(wanted)
    assert all(found.index(("in", *row[1:3], "enqueued")) < place for place, row in enumerate(found) if row[0] == "out")


def test_operations_of_other_tables_are_no_business_of_the_journal():
    assert (
        rows_of((1, [(Operation.PUT, Table.COUNTS, ((b"1234", b"x" * 44),))], [done(Op.DELIVERED, ACTIVE, 1)]))[0]["op"]
        == "delivered"
    )
    assert NEVER == 2**63 - 1
    assert queue_id_of(ORDERS, Part.DEAD_LETTER) == DEAD


def test_a_change_of_a_message_that_stays_tells_its_overlay():
    overlay: Overlay = {Field.PROPERTIES: {"why": "later"}}
    changed = [put(entry(ACTIVE, 1, 1, count=1, overlay=overlay), entry(ACTIVE, 2, 2, count=1))]
    hints = [done(Op.ABANDONED, ACTIVE, 1, 2, counts=[1, 1]), done(Op.DELIVERED, ACTIVE, 3)]
    rows = rows_of((1, sent(1, b"a", b"b", b"c"), [NAMED]), (2, changed, hints))[3:]
    assert shown(rows, "op", "sequenceNumber", "deliveryCount", "record") == [
        ("abandoned", 1, 1, None),
        ("abandoned", 2, 1, None),
        ("delivered", 3, None, None),
    ]
    assert [row["overlay"] for row in rows] == [b"\x81\x04\x81\xa3why\xa5later", None, None]
    frames = (1, sent(1, b"a", b"b", b"c"), [NAMED]), (2, changed, hints)
    assert [row["overlay"] for row in rows_of(*frames, mode=Mode.EVENTS)] == [None] * 6
    assert rows_of(*frames, mode=Mode.OFF) == []


def test_what_a_partition_has_taken_over():
    names = {ORDERS: "orders", 9: "invoices"}
    entered = [Hint.ENTERED, ACTIVE, (1,), "forwarded", COPY, None]
    frame = (1, sent(1, b"a"), [entered, [Hint.TAKEN_OVER, COPY, 7]])
    came, taken = rows_of(frame, names=names)
    assert shown([came], "op", "originEntity", "originSequenceNumber") == [("enqueued", "invoices", None)]
    assert shown([taken], *PLACE) == [("takenOver", "invoices", "active", None, None)]
    assert shown([taken], "originEntity", "originSubQueue", "originSequenceNumber") == [("invoices", "active", 7)]
    assert len(rows_of(frame, names=names, modes={"invoices": Mode.OFF})) == 1


@pytest.mark.parametrize(("numbers_there", "told"), [([4, None], [4, None]), (None, [None, None])])
def test_the_numbers_of_messages_that_waited_at_their_topic(numbers_there, told):
    entered = [Hint.ENTERED, COPY, (1, 2), "published", ACTIVE, numbers_there]
    rows = rows_of((1, [inserted(entry(COPY, 1, 1), entry(COPY, 2, 2))], [NAMED, entered]))
    assert [row["originSequenceNumber"] for row in rows] == told


def test_a_body_that_was_stored_before_its_transaction_was_committed():
    body = record(b"large", "m-1")
    stages = (1, [stored((7, body))], [NAMED, [Hint.STAGED, ACTIVE, 7]])
    adopted = Operation.DELETE, Table.META, (staged_key(7),)
    commits = (2, [inserted(entry(ACTIVE, 1, 7, overlay={Field.ENQUEUED_MS: 5})), adopted], [])
    staged_row, entered = rows_of(stages, commits)
    columns = ("op", "entity", "sequenceNumber", "originEntity", "originSequenceNumber", "record")
    assert shown([staged_row, entered], *columns) == [
        ("staged", "orders", None, None, -7, body),
        ("enqueued", "orders", 1, None, -7, None),
    ]
    assert [row["op"] for row in rows_of(stages, commits, mode=Mode.EVENTS)] == ["enqueued"]


def state_of(session_id, *state, queue=ACTIVE):
    key = session_key(queue, session_id.encode())
    if not state:
        return Operation.DELETE, Table.SESSION_STATES, (key,)
    return Operation.PUT, Table.SESSION_STATES, ((key, encode_state(*state)),)


def test_states_of_sessions():
    frames = (
        (1, [state_of("ü", b"half"), state_of("a", b"\0" * 9)], [NAMED]),
        (2, [state_of("ü"), state_of("a", b"done")], [[Hint.STATES, ACTIVE, "moved"], [Hint.STATES, DEAD, "else"]]),
    )
    columns = ("op", "entity", "subQueue", "sequenceNumber", "sessionId", "bodySize", "record", "reason")
    assert shown(rows_of(*frames), *columns) == [
        ("stateSet", "orders", "active", None, "ü", 4, b"half", None),
        ("stateSet", "orders", "active", None, "a", 9, b"\0" * 9, None),
        ("stateCleared", "orders", "active", None, "ü", None, None, "moved"),
        ("stateSet", "orders", "active", None, "a", 4, b"done", "moved"),
    ]
    events = rows_of(*frames, mode=Mode.EVENTS)
    assert shown(events, "bodySize", "record") == [(4, None), (9, None), (None, None), (4, None)]
    assert rows_of(*frames, mode=Mode.OFF) == []


@pytest.mark.parametrize("key", [b"", b"\0" * 5, session_key(ACTIVE, b"a") + b"b", session_key(ACTIVE, b"\xff")])
def test_a_malformed_key_of_a_session_is_a_malformed_event(key):
    with pytest.raises(ValueError, match=r"session key|utf-8"):
        rows_of((1, [(Operation.PUT, Table.SESSION_STATES, ((key, encode_state(b"x")),))], [NAMED]))


def test_the_page_of_rows_has_all_ops_and_columns():
    page = (Path(__file__).parents[2] / "docs" / "journal.md").read_text()
    ops, columns = page.split("## Columns")

    def first_cells(text):
        return [
            name
            for line in text.splitlines()
            if line.startswith("| `")
            for name in re.findall(r"`(.+?)`", line.split("|")[1])
        ]

    assert sorted(first_cells(ops)[1:]) == sorted(name_of(op) for op in Op)
    assert sorted(first_cells(columns)) == sorted(SCHEMA.names)
