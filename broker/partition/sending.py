"""Accepts messages: all of a call or none, with consecutive sequence numbers."""

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import NamedTuple

from broker.partition.forwarding import transfer_queue
from broker.partition.messages.admission import Incoming, check, check_sizes
from broker.partition.messages.duplicates import keep_new, sift
from broker.partition.messages.entering import enter, enter_scheduled
from broker.partition.messages.expiry import end_of_life
from broker.partition.state.bodies import staged_id, with_times
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref
from broker.partition.topics.publishing import publish, publish_run
from broker.runs import messages_of
from broker.wire import Extra, RunBytes
from protocol.extension import extension
from storage.journal.events import Op
from storage.records import (
    MESSAGE_HEADER_BYTES,
    NEVER,
    Field,
    Overlay,
    Place,
    due_key,
    encode_entry,
    encode_message,
    message_key,
    queue_key,
)
from storage.store import Table

# Here, because to look up a member of an enum takes as long as a call.
_MESSAGE_ID = int(Extra.MESSAGE_ID)
_AVAILABLE, _SCHEDULED = Place.AVAILABLE, Place.SCHEDULED
_ACTIVATION, _EXPIRY = Due.SCHEDULED, Due.EXPIRY
_QUEUE = Table.QUEUE
_DUE = Table.DUE
_PING, _SCHEDULED_MS, _SESSION_ID = Extra.PING, Extra.SCHEDULED_MS, Extra.SESSION_ID
_SESSION, _EXPIRES_MS = Field.SESSION, Field.EXPIRES_MS


def send(
    core: Core, queue_id: int, messages: Sequence[Incoming], now_ms: int, reserved: int | None = None
) -> list[int]:
    """Store the messages and return their sequence numbers: 0 for a ping, that of the first message for a duplicate.

    A message with a scheduled time in the future waits under its number until then, and its time to live counts from
    then. `reserved` is the first of as many numbers as there are messages. With it all messages are scheduled, even if
    their time has come meanwhile. Each gets the number at its place; those of pings and duplicates stay unused. Raises
    EntityNotFound, NotAllowed, EntityDisabled, QuotaExceeded.
    """
    queue = core.access(queue_id, now_ms)
    check(core, [(queue, messages)])
    return store(core, queue, messages, now_ms, reserved)


def takes_runs(queue: Queue) -> bool:
    """True if a usual message for the queue is stored as it comes, whatever it says."""
    is_plain = queue.sessions is None and queue.transfers is None and not queue.is_topic
    return is_plain and not queue.terms.duplicate_window_ms


def send_run(core: Core, queue_id: int, run: RunBytes, now_ms: int) -> None:
    """Store the messages of a run, as `send` does."""
    queue = core.access(queue_id, now_ms)
    sessions = queue.sessions
    detects = bool(queue.terms.duplicate_window_ms)
    made = None
    if extension is not None and queue.transfers is None and not queue.is_topic:
        digests = extension.digests_of(run) if detects and sessions is None else None
        if not detects or digests is not None:
            made = _make(core, queue, run, now_ms)
    if made is None:
        if queue.is_topic and publish_run(core, queue, run, now_ms):
            return
        needs_extra = detects or sessions is not None or queue.transfers is not None
        send(core, queue_id, messages_of(run, needs_extra), now_ms)
        return
    check_sizes(core, queue, made.sizes)
    if digests is not None and not keep_new(core, queue, digests, now_ms):
        send(core, queue_id, messages_of(run, with_extra=True), now_ms)
        return
    _store_made(core, queue, made)


def store_run(core: Core, queue: Queue, run: RunBytes, now_ms: int) -> None:
    """Store the messages of a run that were checked, as `send_run` does."""
    made = _make(core, queue, run, now_ms) if extension is not None and takes_runs(queue) else None
    if made is None:
        store(core, queue, messages_of(run, with_extra=True), now_ms)
    else:
        _store_made(core, queue, made)


class _Made(NamedTuple):
    """What is stored of a run."""

    records: list[tuple[bytes, bytes]]  # items of MESSAGES
    values: list[bytes]  # of entries
    refs: list[Ref]
    sizes: list[int]
    expires_ms: int  # when each expires, or the first
    ends_ms: list[int] | None  # when each expires, if some have a time to live of their own


def _make(core: Core, queue: Queue, run: RunBytes, now_ms: int) -> _Made | None:
    """None if a message is unusual."""
    ttl_ms = queue.terms.time_to_live_ms
    expires_ms = NEVER if ttl_ms is None else end_of_life(now_ms, ttl_ms)
    key = None if queue.sessions is None else _SESSION
    made = extension.store_run(run, now_ms, expires_ms, queue.next_number, core.bodies.next_id, key)
    if made is None:
        return None
    records, values, refs, ends_ms = made
    sizes = [len(record) for _, record in records]
    return _Made(records, values, refs, sizes, expires_ms if ends_ms is None else min(ends_ms), ends_ms)


def _store_made(core: Core, queue: Queue, made: _Made) -> None:
    records, values, refs, sizes, expires_ms, ends_ms = made
    first = queue.next_number
    queue.tally.incoming += len(refs)
    core.changing()
    core.bodies.append_items(records, keep=queue.is_awaited)
    core.store.insert_entries(extension.Entries(values, [(queue.id, first)]))
    core.turn.work += len(refs)
    if expires_ms != NEVER:
        core.store.insert_many(_DUE, _due_of(queue.id, ends_ms or repeat(expires_ms), first, records))
    enter(core, queue, refs, range(first, first + len(refs)), sum(sizes), expires_ms)


def _due_of(
    queue_id: int, ends_ms: Iterable[int], first: int, records: Sequence[tuple[bytes, bytes]]
) -> list[tuple[bytes, bytes]]:
    """Items of DUE; `records` are items of MESSAGES, with sequence numbers from `first` on."""
    return [
        (due_key(queue_id, _EXPIRY, end_ms, number), key)
        for number, ((key, _), end_ms) in enumerate(zip(records, ends_ms, strict=False), first)
        if end_ms != NEVER
    ]


def store(
    core: Core, queue: Queue, messages: Sequence[Incoming], now_ms: int, reserved: int | None = None
) -> list[int]:
    """Store messages that were checked, as `send` does."""
    if queue.transfers is not None:
        return transfer_queue.store(core, queue, queue.transfers, messages, now_ms)
    if queue.is_topic:
        return publish(core, queue, messages, now_ms, reserved)
    queue_id = queue.id
    first = number = queue.next_number if reserved is None else reserved
    next_id = core.bodies.next_id
    records: list[bytes] = []
    adopted: list[int] = []
    entries: list[tuple[bytes, bytes]] = []
    refs: list[Ref] = []
    due: list[tuple[bytes, bytes]] = []
    numbers: list[int] = []
    scheduled: list[Ref] = []
    size_bytes = 0
    earliest_expiry_ms = earliest_scheduled_ms = NEVER
    default_ttl_ms, sessions = queue.terms.time_to_live_ms, queue.sessions
    repeats: dict[int, int] = {}
    if queue.terms.duplicate_window_ms:
        repeats = sift(core, queue, [extra for _, _, _, extra in messages], now_ms, reserved)

    for layout, body, ttl_ms, extra in messages:
        if default_ttl_ms is not None and (ttl_ms is None or ttl_ms > default_ttl_ms):
            ttl_ms = default_ttl_ms
        scheduled_ms = staged = 0
        overlay: Overlay | None = None
        if repeats and (known := repeats.get(len(numbers))) is not None:
            numbers.append(known)
            number += reserved is not None
            continue
        if extra and not (len(extra) == 1 and _MESSAGE_ID in extra):
            if extra.get(_PING):
                queue.tally.pings += 1
                core.journal.bare(Op.PING, queue.id, [extra.get(_MESSAGE_ID)])
                numbers.append(0)
                number += reserved is not None
                continue
            scheduled_ms = extra.get(_SCHEDULED_MS) or 0
            staged = staged_id(extra)
            if sessions is not None:
                overlay = {_SESSION: extra[_SESSION_ID]}
        message_id = staged or next_id
        if reserved is None and (not scheduled_ms or scheduled_ms <= core.wall_ms(now_ms)):
            place, enqueued_ms = _AVAILABLE, now_ms
            expires_ms = NEVER if ttl_ms is None else end_of_life(now_ms, ttl_ms)
            if expires_ms != NEVER:
                due.append((due_key(queue_id, _EXPIRY, expires_ms, number), message_key(message_id)))
                if expires_ms < earliest_expiry_ms:
                    earliest_expiry_ms = expires_ms
            if staged:
                overlay = with_times(overlay, now_ms, expires_ms)
            refs.append((number, message_id, 0, overlay))
        else:
            place, enqueued_ms = _SCHEDULED, scheduled_ms
            if scheduled_ms != NEVER:
                due.append((due_key(queue_id, _ACTIVATION, scheduled_ms, number), message_key(message_id)))
                if scheduled_ms < earliest_scheduled_ms:
                    earliest_scheduled_ms = scheduled_ms
            expires_ms = end_of_life(scheduled_ms, ttl_ms)
            if expires_ms != NEVER:
                overlay = {**(overlay or {}), _EXPIRES_MS: expires_ms}
            scheduled.append((number, message_id, 0, overlay))
        if staged:
            adopted.append(staged)
            size_bytes += MESSAGE_HEADER_BYTES + len(body)
        else:
            record = encode_message(enqueued_ms, expires_ms, layout, body)
            records.append(record)
            size_bytes += len(record)
            next_id += 1
        entries.append((queue_key(queue_id, place, number), encode_entry(message_id, 0, overlay)))
        numbers.append(number)
        number += 1

    queue.tally.incoming += len(messages)
    if not entries:
        return numbers
    core.changing()
    core.bodies.append(records, keep=queue.is_awaited)
    if adopted:
        core.bodies.adopt(adopted)
    core.store.insert_many(_QUEUE, entries)
    core.turn.work += len(entries)
    if due:
        core.store.insert_many(_DUE, due)
    enter(core, queue, refs, range(first, number), size_bytes, earliest_expiry_ms)
    if scheduled:
        enter_scheduled(core, queue, scheduled, 0, earliest_scheduled_ms, now_ms)
    return numbers
