"""The extension's loops over many messages do what Python's do, also with repeated, unknown and damaged values."""

from typing import Any
from zlib import crc32

import msgpack
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from broker import runs
from broker.namespace.entities import QueueDescription
from broker.partition.messages import leaving
from broker.partition.messages.expiry import end_of_life
from broker.partition.state import bodies, journal, locks
from broker.partition.state.locks import Holder, Locks
from broker.partition.state.queue import Queue
from broker.partition.state.terms import Terms
from protocol.extension import extension
from storage.log import changes
from storage.log.changes import packable
from storage.records import (
    NEVER,
    Counts,
    Place,
    check_message,
    encode_entry,
    encode_message,
    message_expires_ms,
    message_key,
    queue_key,
)
from tests.storage.entered import Ranged

pytestmark = pytest.mark.skipif(extension is None, reason="the extension is not built, or is switched off")

LAYOUT = bytes(range(16))
BODIES = st.lists(st.binary(max_size=300), min_size=1, max_size=20)
LARGE = st.integers(0, (1 << 63) - 100)
TIMES = st.integers(-(1 << 63), (1 << 63) - 1)
KEYS = st.binary(max_size=1) | st.sampled_from([b"\0\0", b"a" * 9, b"\xff\xff"])


def without_extension(monkeypatch: Any, *modules: Any) -> None:
    for module in modules:
        monkeypatch.setattr(module, "extension", None)


def sent(bodies_: list[bytes]) -> list[bytes]:
    return [bytes(24) + LAYOUT + body for body in bodies_]


@given(BODIES, TIMES, st.just(NEVER) | TIMES, st.integers(0, (1 << 32) - 1), LARGE, LARGE)
def test_a_run_is_stored_alike(found, enqueued_ms, expires_ms, queue_id, number, message_id):
    run = runs.run_of(sent(found))
    records, values, refs, ends_ms = extension.store_run(run, enqueued_ms, expires_ms, number, message_id, None)
    assert ends_ms is None
    assert records == [
        (message_key(message_id + ahead), encode_message(enqueued_ms, expires_ms, LAYOUT, body))
        for ahead, body in enumerate(found)
    ]
    assert values == [encode_entry(message_id + ahead) for ahead, _ in enumerate(found)]
    assert extension.Entries(values, [(queue_id, number)]).items() == [
        (queue_key(queue_id, Place.AVAILABLE, number + ahead), value) for ahead, value in enumerate(values)
    ]
    assert refs == [(number + ahead, message_id + ahead, 0, None) for ahead, _ in enumerate(found)]
    for _, record in records:
        check_message(record)


@given(
    st.lists(st.just(0) | st.integers(1, (1 << 32) - 2) | st.integers(1, (1 << 64) - 1), min_size=1, max_size=9),
    TIMES,
    st.just(NEVER) | TIMES,
)
@example([0, 0, 5, 0], 1000, NEVER)
def test_times_to_live_in_a_run_end_alike(ttls_ms, enqueued_ms, expires_ms):
    run = runs.run_of([bytes(16) + ttl_ms.to_bytes(8, "big") + LAYOUT for ttl_ms in ttls_ms])
    records, _, _, ends_ms = extension.store_run(run, enqueued_ms, expires_ms, 1, 1, None)
    expected = [min(expires_ms, end_of_life(enqueued_ms, ttl_ms)) if ttl_ms else expires_ms for ttl_ms in ttls_ms]
    assert [message_expires_ms(record) for _, record in records] == expected
    assert ends_ms == (expected if any(ttls_ms) else None)
    for _, record in records:
        check_message(record)


@given(st.binary(max_size=200), st.integers(0, 200))
def test_what_is_no_run_is_refused(data, at):
    run = runs.run_of(sent([b"body"]))
    for broken in (data, run[:at], run + data):
        try:
            extension.store_run(broken, 1, NEVER, 1, 1, None)
        except ValueError:
            continue
        assert runs.run_of(runs.records_of(broken)) == broken


@given(BODIES, st.none() | st.tuples(st.integers(0, 19), st.integers(0, 400), st.integers(0, 255)))
def test_damage_is_found_alike(found, damage):
    records: list[Any] = [encode_message(1, NEVER, LAYOUT, body) for body in found]
    if damage is not None:
        index, at, byte = damage
        record = records[index % len(records)]
        records[index % len(records)] = (
            record[: at % (len(record) + 1)] + bytes((byte,)) + record[at % len(record) + 1 :]
        )
    expected = all(bodies._checked(record) is not None for record in records)
    assert extension.are_whole([*records, None]) is expected


@pytest.mark.parametrize("body_bytes", [0, 200, 215, 216, 217, 500, 1000, 1024, 4097, 70_001])
def test_records_of_all_sizes_have_the_same_checksum(body_bytes):
    """The extension hashes long ones with the processor's widest registers, and in stripes and blocks."""
    record = encode_message(1, NEVER, LAYOUT, bytes(at * 7 % 251 for at in range(body_bytes)))
    assert extension.are_whole([record])
    for at in {8, len(record) // 2, len(record) - 1}:
        assert not extension.are_whole([record[:at] + bytes((record[at] ^ 1,)) + record[at + 1 :]])


@given(
    st.lists(st.tuples(LARGE, LARGE, st.integers(0, (1 << 32) - 1)), max_size=9),
    st.none() | st.tuples(st.integers(0, 8), st.binary(max_size=20)),
)
def test_entries_are_read_alike(entries, damage):
    items: list[Any] = [(queue_key(7, 0, number), encode_entry(*entry)) for number, *entry in entries]
    is_usual = damage is None or damage[0] >= len(items)
    if damage is not None and not is_usual:
        items[damage[0]] = items[damage[0]][0], damage[1]
    refs = extension.refs_of(items)
    assert refs == ([(*each, None) for each in entries] if is_usual else None)
    with_overlay = [(queue_key(7, 0, 1), encode_entry(1, 0, {1: 2}))]
    assert extension.refs_of([*items, *with_overlay]) is None


HELD = st.lists(
    st.tuples(
        st.integers(0, 12),  # the counter of its token
        st.sampled_from((NEVER, 5_000)),  # when it expires
        st.sampled_from((Place.AVAILABLE, Place.AVAILABLE, Place.DEFERRED)),
        st.sampled_from((900, 1_000, 1_001, NEVER)),  # when the lock ends
        st.integers(0, 2),  # its holder
    ),
    max_size=12,
    unique_by=lambda each: each[0],
)


def token(counter: int) -> bytes:
    return bytes(8) + counter.to_bytes(8, "big")


def made(held: list[Any], ends_ms: list[int]) -> tuple[Locks, list[Holder]]:
    found, holders = Locks(), [Holder() for _ in ends_ms]
    for holder, until_ms in zip(holders, ends_ms, strict=True):
        holder.until_ms = until_ms
    for counter, due_ms, place, until_ms, number in held:
        found.add(token(counter), ((counter, counter + 100, 0, None), 40, due_ms, place, until_ms, holders[number]))
        holders[number].tokens[token(counter)] = None
    return found, holders


@given(HELD, st.lists(st.sampled_from((NEVER, 1_000, -1)), min_size=3, max_size=3), st.lists(st.integers(0, 14)))
def test_locks_are_removed_alike(held, ends_ms, counters):
    found, holders = made(held, ends_ms)
    expected, other_holders = made(held, ends_ms)
    tokens = [*map(token, counters), b"", b"no token"]
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, locks)
        refs = [each and each[:5] for each in expected.remove_all(tokens, 1_000)]
    assert [each and each[:5] for each in found.remove_all(tokens, 1_000)] == refs
    assert [*found.held] == [*expected.held]
    assert (found.deferred, found.expiring) == (expected.deferred, expected.expiring)
    assert [[*each.tokens] for each in holders] == [[*each.tokens] for each in other_holders]


@given(HELD)
def test_keys_are_made_alike(held):
    found, _ = made(held, [NEVER] * 3)
    messages = [*found.held.values()]

    def keys() -> Any:
        queue = Queue(7, Terms.of(QueueDescription(name="q")), Counts())
        queue.counts = [100, 100, 100]
        return *leaving._keys_of(queue, messages), queue.counts

    native = keys()
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, leaving)
        assert native == keys()


@given(
    st.dictionaries(KEYS, st.binary(max_size=1)),
    st.dictionaries(KEYS, st.binary(max_size=1)),
    st.lists(KEYS),
    st.lists(KEYS),
    st.lists(KEYS, min_size=1, unique=True),
)
def test_young_keys_are_deleted_alike(fresh, changed, gone, keys, wanted):
    tables = changes.YoungTable(), changes.YoungTable()
    for table in tables:
        table.insert([*fresh.items()], [*fresh])
        table.put([item for item in changed.items() if item[0] not in fresh])
        with pytest.MonkeyPatch.context() as patch:
            without_extension(patch, changes)
            table.delete(gone)
    tables[0].delete(keys)
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, changes)
        tables[1].delete(keys)
    assert (tables[0].fresh, tables[0].changed) == (tables[1].fresh, tables[1].changed)
    assert tables[0].highest == tables[1].highest == max(tables[0].changed, default=b"")
    assert tables[0].has_none_of(wanted) is not any(map(tables[0].hides, wanted))
    for order in (sorted(wanted), sorted(wanted, reverse=True)):
        items = [(key, b"value") for key in order]
        assert tables[0].not_hidden(items) == [item for item in items if not tables[0].hides(item[0])]


@given(st.lists(st.tuples(LARGE, LARGE, st.integers(0, (1 << 32) - 1), st.none() | st.just({1: 2}))))
def test_numbers_and_counts_are_split_alike(refs):
    native = journal._split(refs)
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, journal)
        assert native == journal._split(refs) == (tuple(ref[0] for ref in refs), tuple(ref[2] for ref in refs))


REFS_IN_RUNS = st.tuples(LARGE, st.integers(1, 4), st.sampled_from([0, 7])).map(
    lambda run: [(run[0] + index, 5, run[2], None) for index in range(run[1])]
)


@given(st.lists(REFS_IN_RUNS, min_size=1, max_size=2).map(lambda runs: [ref for run in runs for ref in run]))
def test_runs_of_refs_are_found_alike(refs):
    native = journal._run_of(refs)
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, journal)
        assert native == journal._run_of(refs)
    if native is not None:
        assert refs == [(native[0] + index, 5, native[1], None) for index in range(len(refs))]
    elif len({count for _, _, count, _ in refs}) == 1:
        assert [number for number, *_ in refs] != [*range(refs[0][0], refs[0][0] + len(refs))]


@pytest.mark.parametrize("refs", [[()], [(1, 2)], [(1, 2, 3), None]])
@pytest.mark.parametrize("function", [extension and extension.split, extension and extension.run_of_refs])
def test_what_is_no_ref_is_an_error_and_no_crash(refs, function):
    with pytest.raises((IndexError, SystemError)):
        function(refs)


RANGES = st.lists(st.tuples(LARGE, st.integers(1, 300)) | LARGE, max_size=9)


@given(RANGES)
def test_tokens_of_ranges_are_alike(ranges):
    given_ = [token(each) if isinstance(each, int) else token(each[0]) + each[1].to_bytes(4, "big") for each in ranges]
    native = runs.tokens_of(given_)
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, runs)
        assert native == runs.tokens_of(given_)


@given(BODIES)
def test_runs_are_alike(found):
    records = sent(found)
    native = runs.run_of(records)
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, runs)
        assert native == runs.run_of(records)
    assert runs.records_of(native) == records
    assert runs.messages_of(native) == [[LAYOUT, body, None, None] for body in found]
    middle = len(found) // 2
    at = runs.offset_of(native, middle)
    assert native[:at] + native[at:] == runs.run_of(records[:middle]) + runs.run_of(records[middle:])


def test_the_checksum_of_an_entry_is_that_of_zlib():
    [entry] = extension.store_run(runs.run_of(sent([b""])), 1, NEVER, 1, 0x0123_4567_89AB_CDEF, None)[1]
    assert int.from_bytes(entry[:4], "big") == crc32(entry[4:])


ENTRIES = st.lists(
    st.tuples(
        st.sampled_from([1, 1, 1, 1, 2, (1 << 64) - 1]),  # how far the token is ahead of the one before
        st.sampled_from([1, 1, 1, 16, 0, (1 << 63)]),  # and the number
        st.sampled_from([0, 0, 0, 0, 3, (1 << 32) - 1]),  # delivery count
        st.sampled_from([None, None, None, None, {}, {1: 2}]),
        st.binary(max_size=40),
    ),
    min_size=1,
    max_size=30,
)


@given(ENTRIES)
def test_deliveries_become_runs_alike(found):
    entries: list[Any] = []
    counter = number = 0
    for ahead, numbers_ahead, delivery_count, overlay, body in found:
        counter, number = (counter + ahead) % (1 << 64), (number + numbers_ahead) % (1 << 64)
        entries += (b"\0\7prefix" + counter.to_bytes(8, "big"), number, delivery_count, bytes(40) + body, overlay)
    native = runs.parts_of(entries)
    with pytest.MonkeyPatch.context() as patch:
        without_extension(patch, runs)
        assert native == runs.parts_of(entries)
    if native is None:
        return
    again: list[Any] = []
    for part in native:
        if isinstance(part, tuple):
            token, numbers, delivery_count, count, run = part
            assert len(runs.records_of(run)) == count
            again += runs.entries_of(run, token, numbers, delivery_count)
        else:
            again += part
    assert again == entries


def around(number: int) -> list[int]:
    return [sign * number + off for off in (-1, 0, 1) for sign in (1, -1)]


NUMBERS = st.sampled_from([number for bits in range(66) for number in around(1 << bits)])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.sampled_from(Place) | st.binary(max_size=300) | st.text(max_size=40)
    | st.sampled_from(["\ud800", "x" * 300, b"y" * 70_000, 1.5, bytearray(b"z"), object()]),
    lambda inner: st.lists(inner, max_size=20) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.binary(max_size=3) | st.integers(0, 9) | st.text(max_size=3), inner, max_size=20),
    max_leaves=40,
)  # fmt: skip


@pytest.mark.parametrize("number", [number for bits in (7, 8, 16, 31, 32, 63, 64, 70) for number in around(1 << bits)])
def test_numbers_at_the_limits_of_their_forms_are_packed_alike_or_not(number):
    buffer = bytearray(16)
    end = extension.pack_into(number, buffer, 0)
    try:
        packed = msgpack.packb(number)
    except OverflowError:
        assert end is None
    else:
        assert buffer[:end] == packed


@given(VALUES, st.integers(0, 80_000), st.integers(0, 60))
def test_values_are_packed_alike_or_not(value, size, at):
    buffer = bytearray(at + size)
    end = extension.pack_into(value, memoryview(buffer), at)
    if end is None:
        try:
            packed = msgpack.packb(value)
        except (TypeError, ValueError, OverflowError):
            return
        assert len(packed) > size or any(kind in repr(value) for kind in ("1.5", "bytearray"))
    else:
        assert buffer[at:end] == msgpack.packb(value)
        assert buffer == bytes(at) + buffer[at:end] + bytes(at + size - end)


QUEUES = st.lists(st.tuples(st.integers(0, (1 << 32) - 1), LARGE), max_size=4)


@given(st.lists(st.binary(max_size=300), max_size=20), QUEUES, st.integers(0, 70_000))
def test_entries_are_packed_as_their_items(values, queues, size):
    entries = extension.Entries(values, queues)
    items = entries.items()
    assert len(entries) == len(items) == len(values) * len(queues)
    assert items == [
        (queue_key(queue_id, Place.AVAILABLE, first + ahead), value)
        for queue_id, first in queues
        for ahead, value in enumerate(values)
    ]
    packed = msgpack.packb([items, 7])
    assert msgpack.packb([entries, 7], default=packable) == packed
    buffer = bytearray(size)
    end = extension.pack_into([entries, 7], buffer, 0)
    if end is None:
        assert len(packed) > size
    else:
        assert buffer[:end] == packed


def test_entries_have_values_of_bytes_in_queues_with_numbers():
    for values, queues in (([1], []), (["text"], [(1, 1)]), ([b"value"], [(1,)]), ([b"value"], [(1, "x")]), ((), [])):
        with pytest.raises((TypeError, SystemError)):
            extension.Entries(values, queues)
    with pytest.raises(TypeError, match="object cannot be packed"):
        packable(object())


NUMBER_RANGES = st.lists(st.tuples(LARGE, st.integers(0, 20)), max_size=6)


@given(st.sampled_from([b"", b"queue"]), NUMBER_RANGES, st.integers(0, 3000))
def test_keys_are_packed_as_their_list(prefix, ranges, size):
    keys, reference = extension.Keys(prefix, ranges), Ranged(prefix, ranges)
    made = keys.keys()
    assert made == reference.keys()
    assert (len(keys), keys.prefix, keys.highest) == (len(reference), prefix, reference.highest)
    assert [key for first, count in keys.ranges for key in Ranged(prefix, [(first, count)])] == made
    assert len(keys.ranges) <= len([count for _, count in ranges if count])
    assert keys.of([(7, 2)]).keys() == Ranged(prefix, [(7, 2)])
    packed = msgpack.packb([made, 7])
    assert msgpack.packb([keys, 7], default=packable) == packed
    buffer = bytearray(size)
    end = extension.pack_into([keys, 7], buffer, 0)
    if end is None:
        assert len(packed) > size
    else:
        assert buffer[:end] == packed


def test_keys_of_other_prefixes_and_ranges_are_refused():
    for prefix, ranges in ((b"four", []), (b"sixsix", []), (b"", [(1,)]), (b"", [("x", 1)]), (b"", [(1, 1 << 63)] * 2)):
        with pytest.raises((ValueError, TypeError)):
            extension.Keys(prefix, ranges)
    for bounds in ((-1, 1), (1, 0), (0, 3)):
        with pytest.raises(ValueError, match="no such part"):
            extension.Entries([b"a", b"b"], [(1, 1)]).part(*bounds)
    several = extension.Entries([b"a"], [(1, 1), (2, 1)])
    assert several.begin is None
    with pytest.raises(ValueError, match="no such part"):
        several.part(0, 1)


@given(st.lists(st.binary(max_size=9), max_size=20), st.integers(0, (1 << 32) - 1), LARGE, st.data())
def test_a_part_of_entries_is_a_part_of_their_items(values, queue_id, first, data):
    begin = data.draw(st.integers(0, len(values)))
    end = data.draw(st.integers(begin, len(values)))
    entries = extension.Entries(values, [(queue_id, first)])
    assert entries.begin == (queue_key(queue_id, Place.AVAILABLE, first)[:-8], first)
    part = entries.part(begin, end)
    assert part.items() == entries.items()[begin:end]
    assert part.begin == (queue_key(queue_id, Place.AVAILABLE, first)[:-8], first + begin)


def test_values_with_too_many_levels_and_other_buffers_are_not_packed():
    value: Any = []
    for _ in range(10_000):
        value = [value]
    assert extension.pack_into(value, bytearray(100_000), 0) is None
    for buffer, at in ((bytearray(3), 4), (bytearray(3), -1), (b"unchanged", 0)):
        with pytest.raises((ValueError, TypeError)):
            extension.pack_into(1, buffer, at)
