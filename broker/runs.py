"""Runs of usual messages, which go between gateways and workers as one value each.

A run is message records one behind the other, each with its size before it (4 bytes, big-endian). A record is as
`storage.records` has it. In a run that a client sends, checksum and times are 0: the partition makes them.
"""

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any

from broker import wire
from broker.wire import ENTRY, ITEMS_AT_ONCE, Command, ForWorker, SendRun, Settle
from protocol.extension import extension
from protocol.lock_tokens import TOKEN_BYTES
from storage.records import LAYOUT_BYTES, MESSAGE_HEADER_BYTES

_size = struct.Struct(">I")
_count = struct.Struct(">I").unpack_from
_token = struct.Struct(">8sQ")
SIZE_BYTES = _size.size
_LAYOUT_AT = MESSAGE_HEADER_BYTES - LAYOUT_BYTES


def records_of(run: bytes) -> list[bytes]:
    records = []
    at, end, unpack = 0, len(run), _size.unpack_from
    while at < end:
        begin = at + SIZE_BYTES
        at = begin + unpack(run, at)[0]
        records.append(run[begin:at])
    return records


def run_of(records: list[bytes]) -> bytes:
    if extension is not None:
        return bytes(extension.run_of(records))
    pack = _size.pack
    return b"".join(chain.from_iterable((pack(len(record)), record) for record in records))


def messages_of(run: bytes) -> list[Any]:
    """The incoming messages of a run: see `broker.wire`."""
    return [
        [record[_LAYOUT_AT:MESSAGE_HEADER_BYTES], record[MESSAGE_HEADER_BYTES:], None, None]
        for record in records_of(run)
    ]


def entries_of(run: bytes, token: bytes, number: int, delivery_count: int) -> list[Any]:
    """The entry items of a run: see `broker.wire`."""
    prefix, counter = _token.unpack(token)
    entries: list[Any] = []
    for ahead, record in enumerate(records_of(run)):
        entries += (_token.pack(prefix, counter + ahead), number + ahead, delivery_count, record, None)
    return entries


def token_ahead(token: bytes, ahead: int) -> bytes:
    """The token of the delivery so far behind that of this token."""
    prefix, counter = _token.unpack(token)
    return _token.pack(prefix, counter + ahead)


def run_of_entries(entries: Sequence[Any]) -> tuple[bytes, int, int, int, bytes] | None:
    """First token, first sequence number, delivery count, number of messages, and run of these entry items.

    None if they are no run: tokens or numbers are not consecutive, or one has an overlay or another count.
    """
    token, number, delivery_count = entries[:3]
    count = len(entries) // ENTRY
    if (
        entries[4::ENTRY].count(None) != count
        or entries[2::ENTRY].count(delivery_count) != count
        or entries[1::ENTRY] != [*range(number, number + count)]
    ):
        return None
    prefix, counter = _token.unpack(token)
    if entries[(count - 1) * ENTRY] != _token.pack(prefix, counter + count - 1):
        return None
    return token, number, delivery_count, count, run_of([*entries[3::ENTRY]])


def tokens_of(ranges: Sequence[bytes]) -> list[bytes]:
    """Each token, of tokens some of which may have four bytes more: a number of consecutive tokens from that one on."""
    if extension is not None:
        return list(extension.tokens_of(ranges))
    tokens: list[bytes] = []
    for each in ranges:
        if len(each) == TOKEN_BYTES:
            tokens.append(each)
        else:
            prefix, counter = _token.unpack_from(each)
            [count] = _count(each, TOKEN_BYTES)
            tokens += [_token.pack(prefix, number) for number in range(counter, counter + count)]
    return tokens


def cut(command: Command | ForWorker) -> tuple[Command | ForWorker, Command | None]:
    """As `wire.cut`, of commands that may have runs."""
    if isinstance(command, SendRun):
        if command.messages <= ITEMS_AT_ONCE:
            return command, None
        at = offset_of(command.run, ITEMS_AT_ONCE)
        first = command._replace(messages=ITEMS_AT_ONCE, run=command.run[:at])
        return first, command._replace(messages=command.messages - ITEMS_AT_ONCE, run=command.run[at:])
    if isinstance(command, Settle) and len(command.tokens) <= ITEMS_AT_ONCE < sum(command.channels[1::2]):
        command = without_runs(command)
    return wire.cut(command)


def offset_of(run: bytes, count: int) -> int:
    """The offset behind the first `count` records."""
    at, unpack = 0, _size.unpack_from
    for _ in range(count):
        at += SIZE_BYTES + unpack(run, at)[0]
    return at


def without_runs(command: Command | ForWorker) -> Command | ForWorker:
    """The same command with each message and token of its own."""
    if isinstance(command, SendRun):
        return wire.send(command.partition, command.channel, command.queue, messages_of(command.run))
    if isinstance(command, Settle) and sum(command.channels[1::2]) != len(command.tokens):
        return command._replace(tokens=tokens_of(command.tokens))
    return command
