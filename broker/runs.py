"""Runs of usual messages, which go between gateways and workers as one value each.

A run is message records one behind the other, each with its size before it (4 bytes, big-endian). A record is as
`storage.records` has it. In a run that a client sends, checksum and times are 0: the partition makes them. But a
message that has a time to live has it there (in milliseconds) in place of the time when it expires. A large run may be
a view of the frame in which it came.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

from broker import wire
from broker.wire import ENTRY, ITEMS_AT_ONCE, Command, ForWorker, RunOfRecords, SendRun, Settle
from protocol.extension import extension
from protocol.lock_tokens import TOKEN_BYTES
from protocol.message.intake import extra_of
from storage.records import LAYOUT_BYTES, MESSAGE_HEADER_BYTES, message_expires_ms

_size = struct.Struct(">I")
_count = struct.Struct(">I").unpack_from
_token = struct.Struct(">8sQ")
SIZE_BYTES = _size.size
RANGE_BYTES = TOKEN_BYTES + 4  # of a token with a number of consecutive ones behind it
COUNT_MAX = (1 << 32) - 1  # of a range
_LAYOUT_AT = MESSAGE_HEADER_BYTES - LAYOUT_BYTES


def records_of(run: wire.Run) -> list[bytes]:
    if isinstance(run, RunOfRecords):
        return run.records
    records: list[Any] = []
    at, end, unpack = 0, len(run), _size.unpack_from
    while at < end:
        begin = at + SIZE_BYTES
        at = begin + unpack(run, at)[0]
        records.append(run[begin:at])
    return records if isinstance(run, bytes) else [bytes(record) for record in records]


def sizes_of(run: wire.RunBytes) -> list[int]:
    """Bytes of each record."""
    sizes = []
    at, end, unpack = 0, len(run), _size.unpack_from
    while at < end:
        [size] = unpack(run, at)
        sizes.append(size)
        at += SIZE_BYTES + size
    return sizes


def run_of(records: list[bytes]) -> bytes:
    if extension is not None:
        return bytes(extension.run_of(records))
    pack = _size.pack
    return b"".join(chain.from_iterable((pack(len(record)), record) for record in records))


def messages_of(run: wire.RunBytes, with_extra: bool = False) -> list[Any]:
    """The incoming messages of a run: see `broker.wire`; `with_extra`: with the extra maps that gateways make."""
    messages = []
    for record in records_of(run):
        layout, body = record[_LAYOUT_AT:MESSAGE_HEADER_BYTES], record[MESSAGE_HEADER_BYTES:]
        ttl_ms = message_expires_ms(record) or None
        messages.append([layout, body, ttl_ms, extra_of(layout, body) if with_extra else None])
    return messages


def has_times_to_live(run: wire.RunBytes) -> bool:
    """Tell whether a message of a run that a client sends has a time to live."""
    return any(map(message_expires_ms, records_of(run)))


def entries_of(run: wire.Run, token: bytes, numbers: int | bytes, delivery_count: int) -> list[Any]:
    """The entry items of a run: see `broker.wire`."""
    prefix, counter = _token.unpack(token)
    records = records_of(run)
    if isinstance(numbers, bytes):
        each: Sequence[int] = struct.unpack(f">{len(records)}Q", numbers)
    else:
        each = range(numbers, numbers + len(records))
    entries: list[Any] = []
    for ahead, (number, record) in enumerate(zip(each, records, strict=True)):
        entries += (_token.pack(prefix, counter + ahead), number, delivery_count, record, None)
    return entries


class RunMessages:
    """A run and the number of its messages; a slice is a run as well."""

    def __init__(self, run: bytes, count: int) -> None:
        self.run = run
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, part: slice) -> "RunMessages":
        begin, end, _ = part.indices(self._count)
        return RunMessages(self.run[offset_of(self.run, begin) : offset_of(self.run, end)], end - begin)


def token_ahead(token: bytes, ahead: int) -> bytes:
    """The token of the delivery so far behind that of this token."""
    prefix, counter = _token.unpack(token)
    return _token.pack(prefix, counter + ahead)


# First token, sequence numbers (see `wire.DeliverRun`), delivery count, number of messages, run.
Part = tuple[bytes, int | bytes, int, int, wire.Run]


def parts_of(entries: list[Any]) -> Sequence[Part | list[Any]] | None:
    """Entry items as runs, and as entry items where they have an overlay; None if most runs would have one message.

    A run goes on as long as tokens are consecutive and the delivery count is the same. One that is larger than
    `wire.LARGE_RUN_BYTES` is a `wire.RunOfRecords`.
    """
    if extension is not None:
        found: Sequence[Part | list[Any]] | bool | None = extension.parts_of(entries)
        if not isinstance(found, bool):
            return found
    ends = [at for at in range(ENTRY, len(entries), ENTRY) if not _is_continued(entries, at)] + [len(entries)]
    if 2 * len(ends) > len(entries) // ENTRY + 1:
        return None
    parts: list[Part | list[Any]] = []
    begin = 0
    for end in ends:
        token, number, delivery_count, _, overlay = entries[begin : begin + ENTRY]
        if overlay is None:
            numbers = entries[begin + 1 : end : ENTRY]
            is_consecutive = numbers == [*range(number, number + len(numbers))]
            records = entries[begin + 3 : end : ENTRY]
            is_large = sum(map(len, records)) + SIZE_BYTES * len(records) > wire.LARGE_RUN_BYTES
            run = RunOfRecords(records) if is_large else run_of(records)
            packed = number if is_consecutive else struct.pack(f">{len(numbers)}Q", *numbers)
            parts.append((token, packed, delivery_count, len(numbers), run))
        else:
            parts.append(entries[begin:end])
        begin = end
    return parts


def together(deliveries: list[tuple[Any, int, list[Any]]], largest_bytes: int) -> list[tuple[int, int, Part]] | None:
    """The deliveries of one worker's turn to one gateway, as `wire.DeliverRuns` has them.

    They are ((gateway, channel), locked_until_ms or 0 if not locked, entry items). None unless each is one run (see
    `parts_of`) of at most `largest_bytes`.
    """
    if extension is None:
        return None
    found: list[tuple[int, int, Part]] | None = extension.together(deliveries, largest_bytes)
    return found


def _is_continued(entries: list[Any], at: int) -> bool:
    """True if the entry at this offset is of the same run as the one before."""
    before = at - ENTRY
    return (
        entries[at + 4] is entries[before + 4] is None
        and entries[at + 2] == entries[before + 2]
        and entries[at][:8] == entries[before][:8]
        and int.from_bytes(entries[at][8:], "big") == int.from_bytes(entries[before][8:], "big") + 1
    )


def tokens_of(ranges: Sequence[bytes]) -> list[bytes]:
    """Each token, of tokens some of which may have four bytes more: a number of consecutive tokens from that one on."""
    if extension is not None:
        return list(extension.tokens_of(ranges))
    tokens: list[bytes] = []
    for each in ranges:
        if len(each) != RANGE_BYTES:
            tokens.append(each)
        else:
            prefix, counter = _token.unpack_from(each)
            [count] = _count(each, TOKEN_BYTES)
            tokens += [_token.pack(prefix, number) for number in range(counter, counter + count)]
    return tokens


def ranges_of(ranges: list[bytes]) -> list[bytes]:
    """The same tokens (see `tokens_of`), in fewer ranges if some are consecutive."""
    if extension is not None:
        found: list[bytes] = extension.ranges_of(ranges)
        return found
    joined: list[bytes] = []
    for each in ranges:
        if joined and _follows(each, joined[-1]) and (count := count_of((joined[-1], each))) <= COUNT_MAX:
            joined[-1] = range_of(joined[-1][:TOKEN_BYTES], count)
        else:
            joined.append(each)
    return joined


def _follows(each: bytes, before: bytes) -> bool:
    """True if the first token of `each` is the one behind those of the range `before`."""
    if not {len(each), len(before)} <= {TOKEN_BYTES, RANGE_BYTES}:
        return False
    prefix, counter = _token.unpack_from(before)
    return _token.unpack_from(each) == (prefix, counter + count_of((before,)))


def count_of(ranges: Sequence[bytes]) -> int:
    """The number of these tokens: see `tokens_of`."""
    return sum(_count(each, TOKEN_BYTES)[0] if len(each) == RANGE_BYTES else 1 for each in ranges)


def cut(command: Command | ForWorker) -> tuple[Command | ForWorker, Command | None]:
    """Cut a command, as `wire.cut` does, also if it has runs."""
    if isinstance(command, SendRun):
        if command.messages <= ITEMS_AT_ONCE:
            return command, None
        at = offset_of(command.run, ITEMS_AT_ONCE)
        first = command._replace(messages=ITEMS_AT_ONCE, run=command.run[:at])
        return first, command._replace(messages=command.messages - ITEMS_AT_ONCE, run=command.run[at:])
    if isinstance(command, Settle) and len(command.tokens) < sum(command.channels[1::2]) > ITEMS_AT_ONCE:
        ranges, other_ranges = _cut_ranges(command.tokens, ITEMS_AT_ONCE)
        channels, other_channels = wire.cut_channels(command.channels)
        rest = command._replace(tokens=other_ranges, channels=other_channels)
        return command._replace(tokens=ranges, channels=channels), rest
    return wire.cut(command)


def _cut_ranges(ranges: Sequence[bytes], count: int) -> tuple[Sequence[bytes], Sequence[bytes]]:
    """Ranges of the first `count` tokens, and of the rest, which is not empty."""
    for at, each in enumerate(ranges):
        here = count_of((each,))
        if here >= count:
            first, rest = [*ranges[:at], range_of(each[:TOKEN_BYTES], count)], ranges[at + 1 :]
            if here > count:
                rest = [range_of(token_ahead(each[:TOKEN_BYTES], count), here - count), *rest]
            return first, rest
        count -= here
    return ranges, ()


def range_of(token: bytes, count: int) -> bytes:
    """Return a range of so many consecutive tokens from this one on."""
    return token + count.to_bytes(RANGE_BYTES - TOKEN_BYTES, "big")


def offset_of(run: wire.RunBytes, count: int) -> int:
    """The offset behind the first `count` records."""
    at, unpack = 0, _size.unpack_from
    for _ in range(count):
        at += SIZE_BYTES + unpack(run, at)[0]
    return at
