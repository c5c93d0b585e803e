"""Publishing: a topic's message is stored once, with an entry in each subscription whose rules select it.

All of a send or none, with the records, references, entries and timers in one commit. A message that no subscription
selects is accepted and dropped. A subscription gets its messages whatever its status: disabled, it collects them.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import NamedTuple

from broker.partition.messages.admission import Incoming
from broker.partition.messages.duplicates import sift
from broker.partition.messages.expiry import end_of_life
from broker.partition.messages.moves import set_aside
from broker.partition.sessions.membership import session_id_in, session_id_of, without_session
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.topic import Topic
from broker.partition.topics.selection import Selection, select, view_of
from broker.wire import Extra
from protocol.message.rendering import with_changes
from storage.queue_ids import Part, entity_of, part_of, queue_id_of
from storage.records import (
    COPY_BYTES,
    NEVER,
    Field,
    Overlay,
    Place,
    due_key,
    encode_entry,
    encode_message,
    encode_references,
    message_enqueued_ms,
    message_expires_ms,
    message_key,
    message_parts,
    queue_key,
    unpack_due_key,
    unpack_message_key,
)
from storage.store import Table

# A copy of a message: message id, encoded entry, overlay, time its time to live ends or NEVER, bytes of its record. A
# plain tuple: one is made per message, and shared by all subscriptions where it is the same.
Copy = tuple[int, bytes, Overlay | None, int, int]


class _Batch(NamedTuple):
    """Copies for one queue, or for several alike."""

    copies: list[Copy]
    entries: list[bytes]
    size_bytes: int
    expiring: list[tuple[int, int, int]]  # index in copies, time, message id


def _batch(copies: list[Copy]) -> _Batch:
    return _Batch(
        copies,
        [copy[1] for copy in copies],
        sum([copy[4] for copy in copies]),
        [(index, copy[3], copy[0]) for index, copy in enumerate(copies) if copy[3] != NEVER],
    )


class _FanOut:
    """Copies of some messages of one topic, gathered and then staged together."""

    def __init__(self, core: Core, topic: Topic, now_ms: int) -> None:
        self._core = core
        self._topic = topic
        self._now_ms = now_ms
        self._for_all: list[Copy] = []  # for each subscription that takes every message
        self._selected: dict[int, list[Copy]] = {}  # by queue id
        self._references: list[tuple[bytes, bytes]] = []
        self._session_ids: dict[int, str] = {}  # by message id
        self.copies = 0

    def add(
        self,
        message_id: int,
        size: int,
        expires_ms: int,
        overlay: Overlay | None,
        selection: Selection,
        session_id: str | None,
    ) -> None:
        if session_id is not None:
            self._session_ids[message_id] = session_id
        copy = (message_id, encode_entry(message_id, 0, overlay), overlay, expires_ms, size)
        for queue_id, changes in selection:
            own = copy
            if changes is not None:
                merged = {**overlay, **changes} if overlay else changes
                own = (
                    message_id,
                    encode_entry(message_id, 0, merged),
                    merged,
                    changes.get(Field.EXPIRES_MS, expires_ms),
                    size,
                )
            terms = self._core.terms[entity_of(queue_id)]
            if terms.time_to_live_ms is not None:
                own = self._limited(own, terms.time_to_live_ms)
            if terms.requires_session and part_of(queue_id) == Part.MAIN:
                queue_id, own = self._in_session(queue_id, own)
            self._selected.setdefault(queue_id, []).append(own)
        count = len(selection)
        if self._topic.for_all:
            self._for_all.append(copy)
            count += len(self._topic.for_all)
        if count > 1:
            self._references.append((message_key(message_id), encode_references(count)))
        self.copies += count

    def _limited(self, copy: Copy, limit_ms: int) -> Copy:
        """The copy with a subscription's own, shorter time to live."""
        message_id, _, overlay, expires_ms, size = copy
        end_ms = end_of_life(self._now_ms, limit_ms)
        if end_ms >= expires_ms:
            return copy
        expires_ms = end_ms
        overlay = {**(overlay or {}), Field.EXPIRES_MS: expires_ms}
        return message_id, encode_entry(message_id, 0, overlay), overlay, expires_ms, size

    def _in_session(self, queue_id: int, copy: Copy) -> tuple[int, Copy]:
        """The copy for a subscription that requires sessions, or for its dead-letter queue if it is of none."""
        message_id, _, overlay, expires_ms, size = copy
        session_id = session_id_of(overlay, self._session_ids.get(message_id))
        if session_id is not None:
            overlay = {**(overlay or {}), Field.SESSION: session_id}
        else:
            queue = self._core.queue(queue_id)
            overlay = without_session(queue, overlay)
            queue.tally.incoming += 1
            queue_id |= Part.DEAD_LETTER
        return queue_id, (message_id, encode_entry(message_id, 0, overlay), overlay, expires_ms, size)

    def stage(self) -> bool:
        """True if some of it will probably be read in this turn."""
        store = self._core.store
        if self._references:
            store.put_many(Table.REFS, self._references)
        entries: list[tuple[bytes, bytes]] = []
        due: list[tuple[bytes, bytes]] = []
        awaited = False
        if self._for_all:
            batches: dict[int | None, _Batch] = {None: _batch(self._for_all)}  # by the subscription's time to live
            for entity_id in self._topic.for_all:
                terms = self._core.terms[entity_id]
                limit_ms = terms.time_to_live_ms
                if terms.requires_session:
                    for copy in self._for_all:
                        limited = copy if limit_ms is None else self._limited(copy, limit_ms)
                        queue_id, own = self._in_session(queue_id_of(entity_id), limited)
                        self._selected.setdefault(queue_id, []).append(own)
                    continue
                batch = batches.get(limit_ms)
                if batch is None:
                    assert limit_ms is not None
                    batch = batches[limit_ms] = _batch([self._limited(copy, limit_ms) for copy in self._for_all])
                awaited = self._append(queue_id_of(entity_id), batch, entries, due) or awaited
        for queue_id, copies in self._selected.items():
            awaited = self._append(queue_id, _batch(copies), entries, due) or awaited
        store.put_many(Table.QUEUE, entries)
        store.put_many(Table.DUE, due)
        return awaited

    def _append(
        self, queue_id: int, batch: _Batch, entries: list[tuple[bytes, bytes]], due: list[tuple[bytes, bytes]]
    ) -> bool:
        core = self._core
        queue = core.queue(queue_id)
        first = queue.next_number
        queue.next_number = end = first + len(batch.copies)
        entries.extend(zip(map(queue_key, repeat(queue_id), repeat(0), range(first, end)), batch.entries, strict=False))
        if queue.window.active or queue.sessions is not None:
            refs = [(number, copy[0], 0, copy[2]) for number, copy in enumerate(batch.copies, first)]
            if queue.sessions is not None:
                queue.sessions.enter(refs)
            else:
                queue.window.extend(refs, first, end, core.settings.window)
        queue.counts[Place.AVAILABLE] += len(batch.copies)
        queue.size_bytes += batch.size_bytes
        core.turn.touch(queue)
        core.turn.wake(queue)
        if queue.is_dead_letter:
            queue.tally.moved_in += len(batch.copies)
            return queue.is_awaited
        queue.tally.incoming += len(batch.copies)
        if batch.expiring:
            earliest_ms = NEVER
            for index, expires_ms, message_id in batch.expiring:
                due.append((due_key(queue_id, Due.EXPIRY, expires_ms, first + index), message_key(message_id)))
                earliest_ms = min(earliest_ms, expires_ms)
            core.arm_expiry(queue, earliest_ms)
        return queue.is_awaited


def publish(
    core: Core, queue: Queue, messages: Sequence[Incoming], now_ms: int, reserved: int | None = None
) -> list[int]:
    """As `sending.store`, to the topic of `queue`. What is scheduled waits at the topic, under its number there."""
    topic = core.topic(queue)
    fan_out = _FanOut(core, topic, now_ms)
    records: list[bytes] = []
    waiting: list[tuple[bytes, bytes]] = []
    due: list[tuple[bytes, bytes]] = []
    numbers: list[int] = []
    first = number = queue.next_number if reserved is None else reserved
    message_id = core.bodies.next_id
    repeats: dict[int, int] = {}
    if queue.terms.duplicate_window_ms:
        repeats = sift(core, queue, [extra for _, _, _, extra in messages], now_ms, reserved)
    size_bytes, earliest_ms = 0, NEVER
    default_ttl_ms, for_all, has_rules = queue.terms.time_to_live_ms, bool(topic.for_all), topic.has_rules
    for layout, body, ttl_ms, extra in messages:
        if default_ttl_ms is not None and (ttl_ms is None or ttl_ms > default_ttl_ms):
            ttl_ms = default_ttl_ms
        scheduled_ms, session_id = 0, None
        if extra:
            if extra.get(Extra.PING):
                queue.tally.pings += 1
                numbers.append(0)
                number += reserved is not None
                continue
            scheduled_ms = extra.get(Extra.SCHEDULED_MS) or 0
            if repeats and (known := repeats.get(len(numbers))) is not None:
                numbers.append(known)
                number += reserved is not None
                continue
            session_id = extra.get(Extra.SESSION_ID)
        enqueued_ms = max(now_ms, scheduled_ms)
        expires_ms = end_of_life(enqueued_ms, ttl_ms)
        numbers.append(number)
        number += 1
        selection: Selection = []
        waits = scheduled_ms > now_ms or reserved is not None
        if waits:
            key = message_key(message_id)
            waiting.append((queue_key(queue.id, Place.SCHEDULED, numbers[-1]), encode_entry(message_id)))
            due.append((due_key(queue.id, Due.SCHEDULED, enqueued_ms, numbers[-1]), key))
            earliest_ms = min(earliest_ms, enqueued_ms)
        else:
            if has_rules:
                view = view_of(layout, body, numbers[-1], now_ms, expires_ms)
                selection = select(core, topic, view, now_ms, default_ttl_ms)
            if not selection and not for_all:
                queue.tally.unmatched += 1
                continue
        record = encode_message(enqueued_ms, expires_ms, layout, body)
        records.append(record)
        size_bytes += len(record)
        if not waits:
            fan_out.add(message_id, len(record), expires_ms, None, selection, session_id)
        message_id += 1

    queue.tally.incoming += len(messages)
    if number == first:
        return numbers
    queue.next_number = max(queue.next_number, number)
    core.turn.touch(queue)
    if not records:
        return numbers
    awaited = fan_out.stage()
    core.bodies.append(records, keep=awaited)
    queue.size_bytes += size_bytes + COPY_BYTES * fan_out.copies
    if waiting:
        core.store.put_many(Table.QUEUE, waiting)
        core.store.put_many(Table.DUE, due)
        queue.counts[Place.SCHEDULED] += len(waiting)
        core.timers.arm(earliest_ms, (queue.id, Due.SCHEDULED))
    return numbers


def publish_forwarded(core: Core, queue: Queue, messages: Sequence[tuple[bytes, Overlay]], now_ms: int) -> None:
    """Publish records that another entity forwards to the topic, each with its overlay, which changes.

    What was set of them since becomes a part of the message, so that rules see it. The time to live goes on.
    """
    topic = core.topic(queue)
    fan_out = _FanOut(core, topic, now_ms)
    terms, number = queue.terms, queue.next_number
    limit_ms = end_of_life(now_ms, terms.time_to_live_ms)
    records: list[bytes] = []
    size_bytes = 0
    for record, overlay in messages:
        expires_ms = overlay.get(Field.EXPIRES_MS) or message_expires_ms(record)
        if expires_ms > limit_ms:
            overlay[Field.EXPIRES_MS] = expires_ms = limit_ms
        overlay[Field.ENQUEUED_MS] = now_ms
        layout, body = message_parts(record)
        properties, system = overlay.pop(Field.PROPERTIES, None), overlay.pop(Field.SYSTEM, None)
        if properties or system:
            layout, body = with_changes(layout, body, properties or {}, system or {})
            record = encode_message(message_enqueued_ms(record), message_expires_ms(record), layout, body)
        selection: Selection = []
        if topic.has_rules:
            view = view_of(layout, body, number, now_ms, expires_ms)
            selection = select(core, topic, view, now_ms, terms.time_to_live_ms)
        number += 1
        if not selection and not topic.for_all:
            queue.tally.unmatched += 1
            continue
        message_id = core.bodies.next_id + len(records)
        fan_out.add(message_id, len(record), expires_ms, overlay, selection, session_id_in(record))
        records.append(record)
        size_bytes += len(record)
    queue.next_number = number
    queue.tally.incoming += len(messages)
    core.turn.touch(queue)
    if records:
        core.bodies.append(records, keep=fan_out.stage())
        queue.size_bytes += size_bytes + COPY_BYTES * fan_out.copies


def publish_due(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: scheduled messages of a topic that are due are published, a step of them, in the order of their times.

    The time to live counts from now. What comes of it is as if they were sent now, but that nothing refuses them.
    """
    store, limit = core.store, core.settings.step
    topic = core.topic(queue)
    fan_out = _FanOut(core, topic, now_ms)
    start, end = due_key(queue.id, Due.SCHEDULED, 0, 0), due_key(queue.id, Due.SCHEDULED, now_ms + 1, 0)
    done: list[bytes] = []
    old_entries: list[bytes] = []
    unmatched: list[bytes] = []
    read_bytes = gone_bytes = 0
    for key, value in store.scan(Table.DUE, start, end, limit):
        _, _, scheduled_ms, number = unpack_due_key(key)
        (message_id,) = unpack_message_key(value)
        record = core.bodies.read_one(message_id)
        done.append(key)
        old_key = queue_key(queue.id, Place.SCHEDULED, number)
        if store.get(Table.QUEUE, old_key) is None:
            continue
        if record is None:
            set_aside(core, queue, Place.SCHEDULED, number, message_id)
            continue
        old_entries.append(old_key)
        expires_ms = message_expires_ms(record)
        overlay: Overlay = {Field.ENQUEUED_MS: now_ms, Field.ENQUEUE_SEQUENCE_NUMBER: number}
        if expires_ms != NEVER:
            expires_ms = overlay[Field.EXPIRES_MS] = end_of_life(now_ms, expires_ms - scheduled_ms)
        selection: Selection = []
        if topic.has_rules:
            layout, body = message_parts(record)
            view = view_of(layout, body, number, now_ms, expires_ms)
            selection = select(core, topic, view, now_ms, queue.terms.time_to_live_ms)
        if selection or topic.for_all:
            fan_out.add(message_id, len(record), expires_ms, overlay, selection, session_id_in(record))
        else:
            unmatched.append(message_key(message_id))
            gone_bytes += len(record)
            queue.tally.unmatched += 1
        read_bytes += len(record)
        if read_bytes >= core.settings.step_bytes:
            break
    store.delete_many(Table.DUE, done)
    store.delete_many(Table.QUEUE, old_entries)
    store.delete_many(Table.MESSAGES, unmatched)
    fan_out.stage()
    queue.counts[Place.SCHEDULED] -= len(old_entries)
    queue.size_bytes += COPY_BYTES * fan_out.copies - gone_bytes
    queue.tally.activated += len(old_entries)
    core.turn.touch(queue)
    if rest := store.scan(Table.DUE, start, due_key(queue.id, Due.SCHEDULED + 1, 0, 0), 1):
        core.timers.arm(max(unpack_due_key(rest[0][0])[2], now_ms), (queue.id, Due.SCHEDULED))
