"""`peeklock restore --from-capture`: what it restores, and what it refuses."""

import shutil
import signal
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from broker.catalog.catalog import Definition, definitions
from broker.cli.all_commands import app
from broker.namespace.entities import QueueDescription
from broker.restoring.definitions import Definitions
from storage.capture.definitions import keep
from storage.capture.errors import AnotherNamespace
from storage.capture.manifest import Kind, TableName
from storage.capture.place import Place as PlaceOfFiles
from storage.capture.writing import CaptureOptions, CaptureWriter
from storage.data_dir import UNFINISHED, read_description
from storage.lmdb_store import LmdbStore
from storage.maintenance import WORK, verify
from storage.queue_ids import queue_id_of
from storage.records import (
    Field,
    Place,
    decode_counts,
    decode_entry,
    decode_state,
    entity_key,
    message_key,
    message_parts,
    unpack_queue_key,
)
from storage.store import Table
from tests.capture.synthetic_rows import BEGIN, EPOCH
from tests.pairing.commands import Command
from tests.restoring.written import NAMESPACE, Written, at, captured_orders, define

ORDERS = queue_id_of(1)
ALL = (b"", b"\xff" * 16, 1 << 20)


def restore(tmp_path: Path, *options: str, code: int = 0) -> str:
    """What it says; on standard error if it is to fail."""
    arguments = ["restore", "--from-capture", str(tmp_path / "captured"), "--data-dir", str(tmp_path / "data")]
    found = CliRunner().invoke(app, [*arguments, *options])
    assert found.exit_code == code, (found.output, found.exception)
    return found.stdout if code == 0 else found.stderr


def restored(tmp_path: Path, partition: int = 0) -> dict[tuple[int, int], tuple[int, str]]:
    """By place and number of the messages of orders: delivery count and the end of the body."""
    path = tmp_path / "data" / "partitions" / str(partition)
    found = {}
    with LmdbStore(path, partition_id=partition, map_size_bytes=1 << 30, create=False) as store:
        for key, value in store.scan(Table.QUEUE, *ALL):
            queue_id, place, number = unpack_queue_key(key)
            entry = decode_entry(value)
            record = store.get(Table.MESSAGES, message_key(entry.message_id))
            assert record is not None
            if queue_id == ORDERS:
                found[place, number] = (entry.delivery_count, message_parts(record)[1][-6:].decode())
    return found


def next_number(tmp_path: Path) -> int:
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        value = store.get(Table.COUNTS, entity_key(ORDERS))
        assert value is not None
        return decode_counts(value).next_sequence_number


def test_what_was_there_at_a_time(tmp_path):
    written = captured_orders(tmp_path / "none")
    written.row("completed", 1)
    written.row("abandoned", 2, deliveryCount=1)
    before = written.second - 1
    written.row("deferred", 2)
    written.row("deadlettered", 3, reason="bad")
    written.write(tmp_path / "captured")
    define(tmp_path / "captured")
    told = restore(tmp_path, "--until", f"{at(before).isoformat()}")
    assert restored(tmp_path) == {(Place.AVAILABLE, 2): (1, "body 2"), (Place.AVAILABLE, 3): (0, "body 3")}
    assert "5 rows, the last of 2026-01-31T" in told
    assert "orders, active: 2" in told
    assert "2 messages of" in told
    assert verify(tmp_path / "data").ok
    description = read_description(tmp_path / "data")
    assert description is not None
    assert description.partitions == 1
    assert not (tmp_path / "data" / UNFINISHED).exists()


@pytest.mark.parametrize("seconds", [0, 0.5])
def test_a_row_counts_at_its_own_time(tmp_path, seconds):
    captured_orders(tmp_path / "captured")
    restore(tmp_path, "--until", (at(1) + timedelta(seconds=seconds)).isoformat())
    assert [number for _, number in restored(tmp_path)] == [1, 2]


def test_numbers_go_on_above_those_of_messages_that_have_left_and_those_behind_the_cut(tmp_path):
    captured_orders(tmp_path / "captured", 9)
    restore(tmp_path, "--until", at(1).isoformat())
    assert next_number(tmp_path) == 10


def test_a_time_without_a_zone_is_wrong_use(tmp_path):
    for text in ("2026-01-31T07:00:00", "yesterday", ""):
        assert "no time with a time zone" in restore(tmp_path, "--until", text, code=2)


def test_nothing_before_the_time(tmp_path):
    captured_orders(tmp_path / "captured")
    long_ago = (BEGIN - timedelta(days=365)).isoformat()
    assert "nothing was captured up to" in restore(tmp_path, "--until", long_ago, code=1)
    (tmp_path / "captured").rename(tmp_path / "elsewhere")
    assert "nothing was captured there" in restore(tmp_path, code=1)
    assert not (tmp_path / "data").exists()


def test_a_directory_that_is_not_empty(tmp_path):
    captured_orders(tmp_path / "captured")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine").touch()
    assert "is not an empty directory" in restore(tmp_path, code=1)
    (tmp_path / "data" / "mine").unlink()
    restore(tmp_path)
    assert "is not an empty directory" in restore(tmp_path, code=1)
    assert len(restored(tmp_path)) == 3


def gap_at_the_begin(written: Written, url: Path) -> None:
    written.write(url, first=2)


def gap_of_the_journal(written: Written, url: Path) -> None:
    written.row("truncated", description="the log was overwritten")
    written.write(url)


def no_bodies(written: Written, url: Path) -> None:
    written.rows[0][2]["record"] = None
    written.write(url)


def rows_about_others(written: Written, url: Path) -> None:
    written.row("completed", 17)
    written.write(url)


def numbers_before(written: Written, url: Path) -> None:
    for each in written.rows[0]:
        each["sequenceNumber"] += 5
    written.write(url)


def another_entity(written: Written, url: Path) -> None:
    written.sent(1, entity="unheard")
    written.write(url)


def another_epoch(written: Written, url: Path) -> None:
    written.write(url)
    later = Written()
    later.second = 100
    later.sent(1)
    later.write(url, epoch="0" * 16)


@pytest.mark.parametrize(
    ("spoil", "text", "count"),
    [
        (gap_at_the_begin, f"partition 0, epoch {EPOCH}: the offsets 0 to 1 are not captured", 2),
        (gap_of_the_journal, "the journal has a gap before offset 4: the log was overwritten", 4),
        (no_bodies, "partition 0: 1 message of orders is captured without its body", 3),
        (rows_about_others, "partition 0: 1 row is about messages that the rows before do not have", 4),
        (numbers_before, "orders (active): the 5 messages with numbers below 6 were there before", 4),
        (another_entity, "partition 0: 1 message of unheard, of which there is no definition", 4),
        (another_epoch, "partition 0: its journal began anew at", 1),
    ],
)
def test_what_is_not_known_is_refused_or_told(tmp_path, spoil, text, count):
    written = Written()
    for number in range(1, 5):
        written.sent(number)
    define(tmp_path / "captured")
    spoil(written, tmp_path / "captured")
    error = restore(tmp_path, code=1)
    assert text in error
    assert "--allow-gaps restores what is known" in error
    assert not (tmp_path / "data" / "partitions").exists()
    told = restore(tmp_path, "--allow-gaps")
    assert text in told
    assert "not known: " in told
    assert len(restored(tmp_path)) == count
    assert verify(tmp_path / "data").ok


def test_states_of_sessions_at_a_time_and_those_without_their_bytes(tmp_path):
    written = Written()

    def row(op, session, record=None, entity="talks"):
        written.row(op, entity=entity, subQueue="active", sessionId=session, record=record)

    row("stateSet", "a", b"first")
    row("stateSet", "b", b"of b")
    row("stateSet", "a", b"second")  # second 2
    row("stateCleared", "b")
    row("stateSet", "c")
    row("stateSet", "d")
    row("stateCleared", "d")
    row("stateSet", "e", b"?", entity="orders")  # which has no sessions any more
    url = tmp_path / "captured"
    written.write(url)
    define(url, QueueDescription(name="orders"), QueueDescription(name="talks", requires_session=True))
    restore(tmp_path, "--until", at(2).isoformat())
    assert states(tmp_path) == {"a": b"second", "b": b"of b"}
    shutil.rmtree(tmp_path / "data")
    told = restore(tmp_path, code=1)
    assert "partition 0: 1 state of a session of talks is not captured (journal.mode must be bodies)" in told
    told = restore(tmp_path, "--allow-gaps")
    assert "1 state of a session and 0 ids for" in told
    assert states(tmp_path) == {"a": b"second"}


def states(tmp_path: Path) -> dict[str, bytes]:
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        items = store.scan(Table.SESSION_STATES, *ALL)
        assert [key for key, _ in items] == [key for key, _ in store.scan(Table.SESSIONS, *ALL)]
        return {key[6:].decode(): decode_state(value) for key, value in items}


def test_a_gap_behind_the_cut_does_not_matter(tmp_path):
    written = captured_orders(tmp_path / "captured")
    written.row("truncated", description="later")
    written.write(tmp_path / "other")
    define(tmp_path / "other")
    (tmp_path / "captured").rename(tmp_path / "first")
    (tmp_path / "other").rename(tmp_path / "captured")
    restore(tmp_path, "--until", at(2).isoformat())
    assert len(restored(tmp_path)) == 3


@pytest.mark.parametrize("table", ["ledger", "messages"])
@pytest.mark.parametrize("harm", ["cut", "flip", "remove"])
def test_a_damaged_file_is_named(tmp_path, table, harm):
    captured_orders(tmp_path / "captured", 200)
    file = min((tmp_path / "captured").glob(f"table={table}/**/*.parquet"))
    data = bytearray(file.read_bytes())
    if harm == "remove":
        file.unlink()
    elif harm == "cut":
        file.write_bytes(data[:-20])
    else:
        data[len(data) // 4] ^= 1
        file.write_bytes(data)
    assert str(file) in restore(tmp_path, code=1)
    assert not (tmp_path / "data" / "partitions").exists()


@pytest.mark.parametrize("folder", ["manifest", "definitions"])
def test_a_damaged_manifest_or_definition_is_named(tmp_path, folder):
    captured_orders(tmp_path / "captured")
    files = [*(tmp_path / "captured" / folder).rglob("*.json")]
    for file in files:
        file.write_bytes(file.read_bytes().replace(b"peeklock", b"peekluck"))
    error = restore(tmp_path, code=1)
    assert "the checksum does not match" in error
    assert any(file.name in error for file in files)


@pytest.mark.parametrize("table", TableName)
def test_a_manifest_whose_files_lack_rows_is_refused(tmp_path, table):
    captured_orders(tmp_path / "captured")
    with CaptureWriter(PlaceOfFiles.of(str(tmp_path / "captured")), NAMESPACE, CaptureOptions()) as writer:
        file = next(each for each in writer.state.files.values() if each.table is table)
        entry = writer.state.following(Kind.COMPACTED, 0).model_copy(
            update={"removed": (file.path,), "next": tuple(writer.state.next.values())}
        )
        writer.append(entry)
    text = {
        TableName.LEDGER: "partition 0, epoch 00000000000000a1: the offsets 0 to 2 are in no file",
        TableName.MESSAGES: "3 messages of orders are captured without their bodies",
    }[table]
    assert text in restore(tmp_path, code=1)
    assert not (tmp_path / "data" / "peeklock.json").exists()


CONFIG = """
[[queues]]
name = "orders"
max_delivery_count = 3
"""


def test_without_definitions_those_of_the_configuration_are_taken(tmp_path):
    written = Written()
    written.sent(1)
    written.write(tmp_path / "captured")
    assert "no definitions of entities" in restore(tmp_path, code=1)
    (tmp_path / "config.toml").write_text(CONFIG)
    told = restore(tmp_path, "--config", str(tmp_path / "config.toml"))
    assert "definitions of 1 entity from the configuration" in told
    assert len(restored(tmp_path)) == 1


def test_without_definitions_names_are_as_the_configuration_has_them(tmp_path):
    """They were kept so when such captures were written."""
    (tmp_path / "config.toml").write_text(CONFIG.replace("orders", "Orders"))
    written = Written()
    written.sent(1)
    written.write(tmp_path / "captured")
    restore(tmp_path, "--config", str(tmp_path / "config.toml"))
    assert len(restored(tmp_path)) == 1
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        assert [each.description.name for each in definitions(store)] == ["Orders"]


def test_rows_of_more_partitions_than_there_were(tmp_path):
    written = Written()
    written.sent(1)
    written.sent(2, partition=3)
    written.write(tmp_path / "captured")
    define(tmp_path / "captured", partitions=3)
    assert "the capture has rows of partition 3, and" in restore(tmp_path, code=1)


def test_definitions_as_of_a_time(tmp_path):
    """Those that were kept last before it, and what was made between this look at them and the time."""
    place = PlaceOfFiles.of(str(tmp_path))
    orders = Definition(1, QueueDescription(name="orders"), 0, 0, (0,))
    changed = orders._replace(description=QueueDescription(name="orders", max_delivery_count=3))
    new = Definition(2, QueueDescription(name="new"), 5000, 5000, (0,))
    for kept_ms, entities in ((1000, [orders]), (9000, [changed, new])):
        documents = [each.document() for each in entities]
        keep(place, {"namespace": NAMESPACE, "partitions": 1, "entities": documents, "rules": {}}, kept_ms)
    assert not keep(place, {"namespace": NAMESPACE, "partitions": 1, "entities": documents, "rules": {}}, 9500)

    def entities_at(ms: int | None) -> list[Definition]:
        until = None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
        found = Definitions.captured(place, NAMESPACE, until)
        assert found is not None
        return [*found.entities]

    assert entities_at(10) == entities_at(1000) == entities_at(4999) == [orders]
    assert entities_at(5000) == entities_at(8999) == [orders, new]
    assert entities_at(9000) == entities_at(None) == [changed, new]
    with pytest.raises(AnotherNamespace, match="of the namespace 'peeklock', not 'other'"):
        Definitions.captured(place, "other", None)


def test_a_restore_that_was_killed_is_no_data_directory_and_can_be_repeated(tmp_path):
    written = Written()
    for number in range(1, 30_000):
        written.sent(number)
    written.write(tmp_path / "captured")
    define(tmp_path / "captured")
    arguments = ("restore", "--from-capture", tmp_path / "captured", "--data-dir", tmp_path / "data")
    with Command(tmp_path / "command", *arguments) as command:
        while not (tmp_path / "data" / WORK / "partitions" / "0" / "data.mdb").exists():
            assert command.process.poll() is None, command.err
        command.end(signal.SIGKILL)
    assert (tmp_path / "data" / UNFINISHED).exists()
    assert read_description(tmp_path / "data") is None
    with Command(tmp_path / "serve", "serve", "--data-dir", tmp_path / "data") as broker:
        assert broker.end() != 0
        assert "is what a restore has made so far: run the same `peeklock restore` again" in broker.err
    restore(tmp_path)
    assert len(restored(tmp_path)) == 29_999
    assert verify(tmp_path / "data").ok


def test_a_dead_letter_keeps_its_reason_and_a_delayed_message_its_time(tmp_path):
    import msgpack

    written = captured_orders(tmp_path / "none")
    dead = {Field.PROPERTIES: {"DeadLetterReason": "bad"}, Field.DEAD_LETTER_SOURCE: "orders"}
    origin: dict[str, Any] = {"originEntity": "orders", "originSubQueue": "active", "originSequenceNumber": 1}
    values: dict[str, Any] = {"subQueue": "deadletter", "reason": "deadlettered", "overlay": msgpack.packb(dead)}
    written.row("enqueued", 1, deliveryCount=4, **values, **origin)
    written.row("deadlettered", 1, reason="bad")
    returns_ms = int(at(3600).timestamp() * 1000)
    written.row("abandoned", 2, deliveryCount=2, overlay=msgpack.packb({Field.RETURNS_MS: returns_ms}))
    written.write(tmp_path / "captured")
    define(tmp_path / "captured")
    told = restore(tmp_path)
    assert "orders, deadletter: 1" in told
    assert restored(tmp_path) == {(Place.AVAILABLE, 3): (0, "body 3"), (Place.SCHEDULED, 2): (2, "body 2")}
    with LmdbStore(tmp_path / "data/partitions/0", partition_id=0, map_size_bytes=1 << 30, create=False) as store:
        [value] = [value for key, value in store.scan(Table.QUEUE, *ALL) if unpack_queue_key(key)[0] == ORDERS | 1]
        assert decode_entry(value)[1:] == (4, dead)
        [(key, _)] = store.scan(Table.DUE, *ALL)
        assert returns_ms.to_bytes(8, "big") in key
    assert verify(tmp_path / "data").ok


def test_either_a_backup_or_a_capture(tmp_path):
    for arguments in (
        ["restore"],
        ["restore", "backup", "--from-capture", "captured"],
        ["restore", "backup", "--until", "2026-01-31T07:00:00Z"],
        ["restore", "backup", "--allow-gaps"],
    ):
        assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("ops", "there"),
    [
        (["enqueued 0", "completed 1", "enqueued 1", "completed 0"], False),
        (["enqueued 0", "completed 1", "enqueued 0"], True),
        (["enqueued 1", "completed 0", "enqueued 1", "completed 1", "enqueued 0"], True),
        (["enqueued 0", "abandoned 1", "completed 0"], False),
    ],
)
def test_rows_are_in_the_files_of_two_hours_in_turn_because_the_clock_was_set_back(tmp_path, ops, there):
    written = Written()
    for each in ops:
        op, hour = each.split()
        time: dict[str, Any] = {"eventTime": BEGIN + timedelta(hours=int(hour))}
        if op == "enqueued":
            written.sent(1, **time)
        else:
            written.row(op, 1, **time)
    written.write(tmp_path / "captured")
    define(tmp_path / "captured")
    restore(tmp_path)
    assert bool(restored(tmp_path)) == there


def test_a_record_that_goes_on_through_several_queues_and_files(tmp_path):
    """Each file has a row group of each entity, so that none has both ends of the chain."""
    written = Written()
    origin: dict[str, Any] = {"reason": "forwarded", "originSubQueue": "active", "originSequenceNumber": 1}
    written.sent(1, entity="a")
    for before, after in (("a", "b"), ("b", "c")):
        written.row("enqueued", 1, entity=after, originEntity=before, **origin)
        written.row("forwarded", 1, entity=before)
        written.second += 3600
    written.row(
        "enqueued", 1, entity="c", subQueue="deadletter", originEntity="c", **origin | {"reason": "deadlettered"}
    )
    written.row("deadlettered", 1, entity="c")
    written.sent(2, entity="a")
    written.row("enqueued", 2, entity="b", originEntity="a", **origin | {"originSequenceNumber": 2})
    written.row("forwarded", 2, entity="a")
    written.second += 3600
    written.row("completed", 2, entity="b")
    written.write(tmp_path / "captured")
    define(tmp_path / "captured", *(QueueDescription(name=name) for name in "abc"))
    told = restore(tmp_path)
    assert [line.strip() for line in told.splitlines() if line.startswith("  ")] == ["c, deadletter: 1"]
    assert verify(tmp_path / "data").ok
