"""Arrow columns as AMQP messages, and their ids, against the client's own codec and a reference without Arrow."""

import datetime
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

pa = pytest.importorskip("pyarrow")
pytest.importorskip("numpy")

from protocol.client.messages import Message
from protocol.message.batches import unpack_batch
from pyspark_peeklock.encoding import (
    MAX_BATCH_MESSAGES,
    SECTION_BYTES,
    TEXTS,
    payloads,
    sections,
)
from pyspark_peeklock.errors import UnfitRow
from pyspark_peeklock.identity import Identities

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=128)
ASCII = st.text(st.characters(max_codepoint=127), max_size=300)
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
TIMES = st.datetimes(datetime.datetime(1970, 1, 1), datetime.datetime(9999, 12, 30), timezones=st.just(datetime.UTC))
KINDS = {
    **dict.fromkeys(TEXTS, TEXT),
    "contentType": ASCII,
    "contentEncoding": ASCII,
    "scheduledTime": TIMES,
    "timeToLiveMs": st.integers(1, 2**32 - 1),
    "applicationProperties": st.dictionaries(TEXT, st.none() | TEXT, max_size=4),
}
TYPES = {
    **dict.fromkeys(TEXTS, pa.string()),
    "body": pa.binary(),
    "scheduledTime": pa.timestamp("us", "UTC"),
    "timeToLiveMs": pa.int64(),
    "applicationProperties": pa.map_(pa.string(), pa.string()),
}
FIELDS = {
    "messageId": "message_id",
    "to": "to",
    "subject": "subject",
    "replyTo": "reply_to",
    "correlationId": "correlation_id",
    "contentType": "content_type",
    "contentEncoding": "content_encoding",
    "sessionId": "group_id",
    "replyToSessionId": "reply_to_group_id",
    "timeToLiveMs": "ttl_ms",
}


@st.composite
def tables(draw):
    """Rows with some of the columns, as lists by name; all rows may be a slice of a larger array."""
    rows = draw(st.integers(1, 6))
    names = draw(st.sets(st.sampled_from(sorted(KINDS)))) | {"messageId"}
    columns = {"body": draw(st.lists(st.binary(max_size=300), min_size=rows, max_size=rows))}
    for name in names:
        values = KINDS[name] if name == "messageId" else st.none() | KINDS[name]
        columns[name] = draw(st.lists(values, min_size=rows, max_size=rows))
    if "sessionId" in columns and "partitionKey" in columns:
        columns["partitionKey"] = columns["sessionId"]
    return columns, draw(st.integers(0, rows - 1))


def arrays(columns, skipped=0):
    found = {}
    for name, values in columns.items():
        if name == "applicationProperties":
            values = [None if value is None else list(value.items()) for value in values]
        found[name] = pa.array(values, TYPES[name]).slice(skipped)
    return found


@given(tables())
def test_messages_are_what_the_client_reads(table):
    columns, skipped = table
    encoded = sections(arrays(columns, skipped)).to_pylist()
    rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)][skipped:]
    assert len(encoded) == len(rows)
    for section, row in zip(encoded, rows, strict=True):
        assert section[:4] == b"\x00\x53\x75\xb0"
        message = Message.decode(section[SECTION_BYTES:])
        assert message.content() == row["body"]
        assert message.durable
        for name, field in FIELDS.items():
            assert getattr(message, field) == row.get(name)
        assert message.application_properties == (row.get("applicationProperties") or {})
        annotations = {}
        if row.get("partitionKey") is not None:
            annotations["x-opt-partition-key"] = row["partitionKey"]
        if row.get("scheduledTime") is not None:
            millis = (row["scheduledTime"] - EPOCH) // datetime.timedelta(milliseconds=1)
            annotations["x-opt-scheduled-enqueue-time"] = millis
        assert message.annotations == annotations


@given(st.lists(st.integers(0, 3000), min_size=1, max_size=40), st.integers(64, 4000), st.integers(0, 39))
def test_transfers_hold_all_messages_in_order_within_the_limit(sizes, limit, skipped):
    skipped %= len(sizes)
    array = pa.array([bytes([n]) * size for n, size in enumerate(sizes)], pa.binary())
    encoded = sections({"body": array, "messageId": pa.array(["x"] * len(array))}).slice(skipped)
    found = []
    for payload in payloads(encoded, limit):
        messages = unpack_batch(payload.content) if payload.is_batch else [payload.content]
        assert (payload.first, payload.end) == (len(found), len(found) + len(messages))
        assert len(payload.content) <= limit or not payload.is_batch
        found += messages
    assert [Message.decode(each).content() for each in found] == array.to_pylist()[skipped:]


def test_a_transfer_has_a_limited_number_of_messages():
    rows = 2 * MAX_BATCH_MESSAGES + 1
    encoded = sections({"body": pa.array([b""] * rows), "messageId": pa.array(["x"] * rows)})
    assert [each.end - each.first for each in payloads(encoded, 1 << 20)] == [MAX_BATCH_MESSAGES] * 2 + [1]


def test_encoding_costs_microseconds_for_a_row():
    """Some ten times what it takes on an idle machine: so that a loop over rows, which takes far more, is noticed.

    On a busy one a process also takes more of its processor, but hardly each time.
    """
    rows = 10_000
    columns = {"body": pa.array([b"x" * 1024] * rows), "messageId": pa.array([str(row) for row in range(rows)])}

    def cost():
        begun = time.process_time()
        list(payloads(sections(columns), 1 << 17))
        return time.process_time() - begun

    assert min(cost() for _ in range(5)) / rows < 15e-6


POSITIONS = st.lists(
    st.tuples(st.sampled_from(["ns", "n" * 100]), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=30
)


@given(POSITIONS, st.lists(st.integers(1, 29), max_size=4))
def test_ids_of_positions_do_not_depend_on_batches_and_differ_by_row(positions, cuts):
    positions.sort(key=lambda each: each[2])
    ids = Identities(None)
    found = []
    for first, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(positions)], strict=True):
        rows = positions[first:end]
        if rows:
            found += ids.of(columns_of(rows), len(rows), first).to_pylist()
    assert found == Identities(None).of(columns_of(positions), len(positions), 0).to_pylist()
    assert len(set(found)) == len(found) == len(positions)
    assert all(len(each) <= 128 for each in found)
    copies = {}
    for position, identity in zip(positions, found, strict=True):
        copies[position] = copies.get(position, -1) + 1
        assert identity.endswith(f"/{position[2]}#{copies[position]}")


def columns_of(positions):
    namespaces, partitions, offsets = zip(*positions, strict=True)
    rows = len(positions)
    return {
        "namespace": pa.array(namespaces),
        "entity": pa.array(["orders"] * rows),
        "partition": pa.array(partitions, pa.int32()),
        "journalOffset": pa.array(offsets, pa.int64()),
    }


def test_rows_whose_offsets_fall_are_refused_unless_their_copies_are_numbered():
    columns = columns_of([("ns", 0, 5), ("ns", 1, 1), ("ns", 0, 4)])
    with pytest.raises(UnfitRow, match="row 102 of this task: column 'journalOffset' falls"):
        Identities(None).of(columns, 3, 100)
    columns["fanOut"] = pa.array([0, 0, 7])
    assert Identities(None).of(columns, 3, 100).to_pylist() == ["ns/orders/0/5#0", "ns/orders/1/1#0", "ns/orders/0/4#7"]


def test_ids_of_a_column_are_kept_and_the_rest_gets_positions():
    columns = columns_of([("ns", 0, 2**63 - 1), ("ns", 0, 2**63 - 1), ("ns", 0, 2**63 - 1)])
    columns["messageId"] = pa.array(["a", None, None])
    ids = Identities(None).of(columns, 3, 0).to_pylist()
    assert ids == ["a", "ns/orders/0/9223372036854775807#0", "ns/orders/0/9223372036854775807#1"]
    columns["partition"] = pa.array([0, None, 0], pa.int32())
    with pytest.raises(UnfitRow, match="row 1 of this task: column 'partition' is null, and messageId too"):
        Identities(None).of(columns, 3, 0)
