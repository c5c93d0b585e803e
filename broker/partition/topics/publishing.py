"""Publishing: a topic's message is stored once, with an entry in each subscription whose rules select it.

All of a send is accepted or none, in one commit. A message that no subscription selects is accepted and dropped. A
disabled subscription still collects its messages.

One turn makes a limited number of copies, and only if the store has room for them. The remaining messages wait at the
topic, as available messages of the topic's own queue, and later turns publish them. Messages that are sent meanwhile,
and scheduled ones that become due, wait behind them, so that the order holds. A message is published to all its
subscriptions in one commit.
"""

from collections.abc import Mapping, Sequence
from itertools import repeat
from typing import NamedTuple

from broker.partition.messages import stored
from broker.partition.messages.admission import Incoming, check_sizes
from broker.partition.messages.duplicates import sift
from broker.partition.messages.entering import enter, enter_scheduled, reserve
from broker.partition.messages.expiry import end_of_life
from broker.partition.messages.leaving import leave, unlocked
from broker.partition.sessions.membership import session_id_in, session_id_of, without_session
from broker.partition.state.bodies import staged_id, with_times
from broker.partition.state.core import Core
from broker.partition.state.locks import Held, ref_of
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.topic import Topic
from broker.partition.state.window import Ref, number_of
from broker.partition.topics.selection import Failure, Selected, select, view_of
from broker.wire import Extra, RunBytes
from protocol.extension import extension
from protocol.message.rendering import with_changes
from storage.journal.events import Op
from storage.queue_ids import Part, entity_of, part_of, queue_id_of, with_part
from storage.records import (
    COPY_BYTES,
    MESSAGE_HEADER_BYTES,
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
    unpack_queue_key,
)
from storage.store import Table

# A copy of a message: message id, encoded entry, overlay, time at which its time to live ends or NEVER, bytes of its
# record, and the time from which a time to live counts. A plain tuple, because one is made per message. Subscriptions
# whose copies are equal share it.
Copy = tuple[int, bytes, Overlay | None, int, int, int]

PUBLISHED, FORWARDED = "published", "forwarded"  # in the journal
_DELAY_FIELDS = (Field.ENQUEUED_MS, Field.SCHEDULED_MS)
RETRY_MS = 1000  # the time between two tries to publish messages that found no room


class _Batch(NamedTuple):
    """Copies for one queue, or for several queues that get equal copies."""

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
    """Copies of some messages of one topic. They are gathered, and then staged together or not at all."""

    def __init__(self, core: Core, queue_id: int, topic: Topic) -> None:
        """`queue_id`: the main queue of the topic."""
        self._core = core
        self._queue_id = queue_id
        self._topic = topic
        self._for_all: list[Copy] = []  # for each subscription that takes every message
        self._scheduled: list[tuple[int, Copy, int]] = []  # delayed by an action: queue id, copy, until when
        self._selected: dict[int, list[Copy]] = {}  # by queue id
        self._references: list[tuple[bytes, bytes]] = []
        self._session_ids: dict[int, str] = {}  # by message id
        self.waited: dict[int, int] = {}  # message id: the number of a message that waited at the topic
        self._failures: list[Failure] = []
        self._entry_bytes = 0  # of all copies
        self.copies = 0
        self.counts: list[int] = []  # the copies of each message that has some
        self.work = 0  # see `Turn.work`

    def is_full(self) -> bool:
        """True if no more may be added in this turn."""
        return self.work >= self._core.work_left()

    def add(
        self,
        message_id: int,
        size: int,
        since_ms: int,
        expires_ms: int,
        overlay: Overlay | None,
        selected: Selected,
        session_id: str | None,
    ) -> bool:
        """Add the copies of a message that was accepted at `since_ms`. False if no subscription takes it."""
        selection, failures, tried = selected
        self._failures += failures
        self.work += 1 + tried
        count = len(selection) + len(self._topic.for_all)
        if not count:
            return False
        if session_id is not None:
            self._session_ids[message_id] = session_id
        copy = (message_id, encode_entry(message_id, 0, overlay), overlay, expires_ms, size, since_ms)
        for queue_id, changes in selection:
            own = copy
            scheduled_ms = None
            if changes is not None:
                scheduled_ms, changes = self._delay(queue_id, changes, session_id)
                merged = {**overlay, **changes} if overlay else changes
                own = (
                    message_id,
                    encode_entry(message_id, 0, merged),
                    merged,
                    changes.get(Field.EXPIRES_MS, expires_ms),
                    size,
                    since_ms,
                )
            terms = self._core.entities.terms[entity_of(queue_id)]
            if terms.time_to_live_ms is not None:
                own = _limited(own, terms.time_to_live_ms)
            if scheduled_ms is None:
                self._selected.setdefault(queue_id, []).append(own)
            else:
                own = _delayed(own, scheduled_ms)
                self._scheduled.append((queue_id, own, scheduled_ms))
            self._entry_bytes += len(own[1])
        if self._topic.for_all:
            self._for_all.append(copy)
            self._entry_bytes += len(self._topic.for_all) * len(copy[1])
        if count > 1:
            self._references.append((message_key(message_id), encode_references(count)))
        self.copies += count
        self.counts.append(count)
        self.work += count if expires_ms == NEVER else 2 * count
        return True

    def _delay(self, queue_id: int, changes: Overlay, session_id: str | None) -> tuple[int | None, Overlay]:
        """The time until which an action delays a copy, and its changes. One that is dead-lettered is not delayed."""
        scheduled_ms = changes.get(Field.ENQUEUED_MS)
        if scheduled_ms is None or session_id_of(changes, session_id) is not None:
            return scheduled_ms, changes
        if not self._core.entities.terms[entity_of(queue_id)].requires_session:
            return scheduled_ms, changes
        return None, {field: value for field, value in changes.items() if field not in _DELAY_FIELDS}

    def fits(self) -> bool:
        """True if the store has room for all copies."""
        selected = {*self._selected, *(queue_id for queue_id, _, _ in self._scheduled)}
        queues = len(selected) + (len(self._topic.for_all) if self._for_all else 0)
        return self._core.has_room((), self.copies, queues, 2 * self._entry_bytes)

    def _in_session(self, queue_id: int, copies: list[Copy]) -> dict[int, list[Copy]]:
        """The copies for a subscription that requires sessions; those without one are for its dead-letter queue."""
        queue = self._core.queue(queue_id)
        found: dict[int, list[Copy]] = {}
        for message_id, _, overlay, expires_ms, size, since_ms in copies:
            session_id = session_id_of(overlay, self._session_ids.get(message_id))
            if session_id is not None:
                overlay = {**(overlay or {}), Field.SESSION: session_id}
            else:
                overlay = without_session(queue, overlay)
                queue.tally.incoming += 1
            entry = encode_entry(message_id, 0, overlay)
            target = queue_id if session_id is not None else with_part(queue_id, Part.DEAD_LETTER)
            found.setdefault(target, []).append((message_id, entry, overlay, expires_ms, size, since_ms))
        return found

    def stage(self) -> bool:
        """Stage the copies. True if some of them will probably be read in this turn."""
        core, store = self._core, self._core.store
        core.turn.work += self.work
        self._count_failures()
        if not self.copies:
            return False
        if self._references:
            store.insert_many(Table.REFS, self._references)
        entries: list[tuple[bytes, bytes]] = []
        due: list[tuple[bytes, bytes]] = []
        awaited = False
        selected: dict[int, list[Copy]] = {}
        for queue_id, copies in self._selected.items():
            if core.entities.terms[entity_of(queue_id)].requires_session and part_of(queue_id) == Part.MAIN:
                for target, own in self._in_session(queue_id, copies).items():
                    selected.setdefault(target, []).extend(own)
            else:
                selected.setdefault(queue_id, []).extend(copies)
        if self._for_all:
            batches: dict[int | None, _Batch] = {None: _batch(self._for_all)}  # by the subscription's time to live
            for entity_id in self._topic.for_all:
                terms = core.entities.terms[entity_id]
                limit_ms = terms.time_to_live_ms
                batch = batches.get(limit_ms)
                if batch is None:
                    assert limit_ms is not None
                    batch = batches[limit_ms] = _batch([_limited(copy, limit_ms) for copy in self._for_all])
                if terms.requires_session:
                    for target, own in self._in_session(queue_id_of(entity_id), batch.copies).items():
                        selected.setdefault(target, []).extend(own)
                    continue
                awaited = self._append(queue_id_of(entity_id), batch, entries, due) or awaited
        for queue_id, delayed, scheduled_ms in self._scheduled:
            self._schedule(queue_id, delayed, scheduled_ms, entries, due)
        for queue_id, copies in selected.items():
            awaited = self._append(queue_id, _batch(copies), entries, due) or awaited
        store.insert_many(Table.QUEUE, entries)
        store.insert_many(Table.DUE, due)
        return awaited

    def _schedule(
        self,
        queue_id: int,
        copy: Copy,
        scheduled_ms: int,
        entries: list[tuple[bytes, bytes]],
        due: list[tuple[bytes, bytes]],
    ) -> None:
        """The copy waits in its subscription until this time of the wall clock, as `schedule` has it."""
        core, queue = self._core, self._core.queue(queue_id)
        message_id, entry, overlay, _, size, since_ms = copy
        number = reserve(queue, 1)
        if queue.sessions is not None:
            [(message_id, entry, overlay, *_)] = self._in_session(queue_id, [copy])[queue_id]
        entries.append((queue_key(queue_id, Place.SCHEDULED, number), entry))
        due.append((due_key(queue_id, Due.SCHEDULED, scheduled_ms, number), message_key(message_id)))
        there = [self.waited.get(message_id)] if self.waited else None
        core.journal.entered(queue_id, [number], PUBLISHED, self._queue_id, there)
        enter_scheduled(core, queue, [(number, message_id, 0, overlay)], size, scheduled_ms, since_ms)
        queue.tally.incoming += 1

    def _count_failures(self) -> None:
        for entity_id, rules, reason in self._failures:
            tally = self._core.queue(queue_id_of(entity_id)).tally
            tally.rules_failed += rules
            if reason is not None:
                tally.incoming += 1
                tally.dead_lettered[reason] = tally.dead_lettered.get(reason, 0) + 1

    def _append(
        self, queue_id: int, batch: _Batch, entries: list[tuple[bytes, bytes]], due: list[tuple[bytes, bytes]]
    ) -> bool:
        core = self._core
        queue = core.queue(queue_id)
        first = queue.next_number
        numbers = range(first, first + len(batch.copies))
        there = [self.waited.get(copy[0]) for copy in batch.copies] if self.waited else None
        entries.extend(zip(map(queue_key, repeat(queue_id), repeat(0), numbers), batch.entries, strict=False))
        refs: list[Ref] = []
        if queue.window.active or queue.sessions is not None:
            refs = [(number, copy[0], 0, copy[2]) for number, copy in enumerate(batch.copies, first)]
        _enter(core, queue, numbers, refs, batch.size_bytes, self._queue_id, there)
        if queue.is_dead_letter:
            queue.tally.moved_in += len(batch.copies)
            return queue.is_awaited
        queue.tally.incoming += len(batch.copies)
        if batch.expiring:
            for index, expires_ms, message_id in batch.expiring:
                due.append((due_key(queue_id, Due.EXPIRY, expires_ms, first + index), message_key(message_id)))
            core.arm_expiry(queue, min(expires_ms for _, expires_ms, _ in batch.expiring))
        return queue.is_awaited


def _enter(
    core: Core,
    queue: Queue,
    numbers: range,
    refs: list[Ref],
    size_bytes: int,
    topic_queue_id: int,
    there: Sequence[int | None] | None = None,
) -> None:
    """Copies with these numbers are in the queue now. `refs` are theirs if its window or its sessions want them."""
    core.journal.entered(queue.id, numbers, PUBLISHED, topic_queue_id, there)
    enter(core, queue, refs, numbers, size_bytes, count=len(numbers))


def _limited(copy: Copy, limit_ms: int) -> Copy:
    """The copy with the subscription's time to live, if that is shorter."""
    message_id, _, overlay, expires_ms, size, since_ms = copy
    end_ms = end_of_life(since_ms, limit_ms)
    if end_ms >= expires_ms:
        return copy
    expires_ms = end_ms
    overlay = {**(overlay or {}), Field.EXPIRES_MS: expires_ms}
    return message_id, encode_entry(message_id, 0, overlay), overlay, expires_ms, size, since_ms


def _delayed(copy: Copy, scheduled_ms: int) -> Copy:
    """The copy, whose time to live counts from the time until which it is delayed."""
    message_id, _, overlay, expires_ms, size, since_ms = copy
    expires_ms = NEVER if expires_ms == NEVER else end_of_life(scheduled_ms, expires_ms - since_ms)
    overlay = {**(overlay or {}), Field.EXPIRES_MS: expires_ms}
    return message_id, encode_entry(message_id, 0, overlay), overlay, expires_ms, size, since_ms


_NOTHING = Selected([], [], 0)


def publish(
    core: Core, queue: Queue, messages: Sequence[Incoming], now_ms: int, reserved: int | None = None
) -> list[int]:
    """Publish messages that were checked, as `sending.store` stores them, for the topic of `queue`.

    Scheduled messages wait at the topic, under their numbers there.
    """
    topic = core.topic(queue.entity_id)
    fan_out = _FanOut(core, queue.id, topic)
    records: list[bytes] = []
    scheduled: list[tuple[bytes, bytes]] = []
    later: list[Ref] = []
    due: list[tuple[bytes, bytes]] = []
    numbers: list[int] = []
    first = number = queue.next_number if reserved is None else reserved
    next_id = core.bodies.next_id
    adopted: list[int] = []
    waiting: list[Waiting] = []
    published: list[Waiting] = []
    said_ids: list[bytes | None] = []  # the message ids of these
    waits = has_backlog(queue)
    repeats: dict[int, int] = {}
    if queue.terms.duplicate_window_ms:
        repeats = sift(core, queue, [extra for _, _, _, extra in messages], now_ms, reserved)
    size_bytes, earliest_ms, wall_ms = 0, NEVER, core.wall_ms(now_ms)
    default_ttl_ms, has_rules = queue.terms.time_to_live_ms, topic.has_rules
    for layout, body, ttl_ms, extra in messages:
        if default_ttl_ms is not None and (ttl_ms is None or ttl_ms > default_ttl_ms):
            ttl_ms = default_ttl_ms
        scheduled_ms, session_id, staged = 0, None, staged_id(extra)
        if extra:
            if extra.get(Extra.PING):
                queue.tally.pings += 1
                core.journal.bare(Op.PING, queue.id, [extra.get(Extra.MESSAGE_ID)])
                numbers.append(0)
                number += reserved is not None
                continue
            scheduled_ms = extra.get(Extra.SCHEDULED_MS) or 0
            if repeats and (known := repeats.get(len(numbers))) is not None:
                numbers.append(known)
                number += reserved is not None
                continue
            session_id = extra.get(Extra.SESSION_ID)
        is_scheduled = scheduled_ms > wall_ms or reserved is not None
        enqueued_ms = scheduled_ms if is_scheduled else now_ms
        expires_ms = end_of_life(enqueued_ms, ttl_ms)
        size = MESSAGE_HEADER_BYTES + len(body)
        message_id = staged or next_id
        overlay: Overlay | None = with_times(None, now_ms, expires_ms) if staged and not is_scheduled else None
        if is_scheduled:
            overlay = None if expires_ms == NEVER else {Field.EXPIRES_MS: expires_ms}
            scheduled.append((queue_key(queue.id, Place.SCHEDULED, number), encode_entry(message_id, 0, overlay)))
            due.append((due_key(queue.id, Due.SCHEDULED, enqueued_ms, number), message_key(message_id)))
            earliest_ms = min(earliest_ms, enqueued_ms)
            later.append((number, message_id, 0, overlay))
        elif waits or fan_out.is_full():
            waits = True
            waiting.append((number, message_id, overlay))
        else:
            selected = _NOTHING
            if has_rules:
                view = view_of(layout, body, number, now_ms, expires_ms)
                selected = select(core, topic, view, now_ms, default_ttl_ms)
            said_id = extra.get(Extra.MESSAGE_ID) if extra else None
            if not fan_out.add(message_id, size, now_ms, expires_ms, overlay, selected, session_id):
                queue.tally.unmatched += 1
                core.journal.bare(Op.PUBLISHED, queue.id, [said_id], [0])
                numbers.append(number)
                number += 1
                continue
            published.append((number, message_id, overlay))
            said_ids.append(said_id)
        numbers.append(number)
        number += 1
        if staged:
            adopted.append(staged)
        else:
            records.append(encode_message(enqueued_ms, expires_ms, layout, body))
            next_id += 1
        size_bytes += size

    queue.tally.incoming += len(messages)
    if number == first:
        return numbers
    core.changing()
    waits_for = _stage(core, queue, fan_out, records, published, said_ids, waiting, now_ms)
    core.bodies.adopt(adopted)
    enter(core, queue, [], range(first, number), size_bytes, count=waits_for)
    if scheduled:
        core.store.insert_many(Table.QUEUE, scheduled)
        core.store.insert_many(Table.DUE, due)
        core.turn.work += 2 * len(scheduled)
        enter_scheduled(core, queue, later, 0, earliest_ms, now_ms)
    return numbers


def publish_run(core: Core, queue: Queue, run: RunBytes, now_ms: int) -> bool:
    """Publish, as `publish` does, the messages of a run and subscriptions that take every message as it is.

    False if that is not so, or not all of it can be done in this turn; then nothing is done. Raises NotAllowed,
    EntityDisabled, QuotaExceeded.
    """
    topic = core.topic(queue.entity_id)
    subscriptions = topic.for_all
    if extension is None or topic.has_rules or not subscriptions or has_backlog(queue):
        return False
    terms = [queue.terms, *(core.entities.terms[each] for each in subscriptions)]
    if any(each.duplicate_window_ms or each.requires_session or each.time_to_live_ms is not None for each in terms):
        return False
    queues = [core.queue(queue_id_of(each)) for each in subscriptions]
    first_id = core.bodies.next_id
    made = extension.store_run(run, now_ms, NEVER, queues[0].next_number, first_id, None)
    records: list[tuple[bytes, bytes]] = made[0]
    values: list[bytes] = made[1]
    if made[3] is not None:  # some have a time to live of their own
        return False
    count, copies = len(records), len(records) * len(queues)
    if (count - 1) * (1 + len(queues)) >= core.work_left():
        return False
    sizes = [len(record) for _, record in records]
    check_sizes(core, queue, sizes, len(queues))
    if not core.has_room((), copies, len(queues), 2 * copies * len(values[0])):
        return False
    core.changing()
    entries = extension.Entries(values, [(each.id, each.next_number) for each in queues])
    size_bytes, awaited = sum(sizes), False
    for each in queues:
        numbers = range(each.next_number, each.next_number + count)
        refs: list[Ref] = []
        if each.window.active:
            refs = [(number, first_id + ahead, 0, None) for ahead, number in enumerate(numbers)]
        _enter(core, each, numbers, refs, size_bytes, queue.id)
        each.tally.incoming += count
        awaited = awaited or each.is_awaited
    if len(queues) > 1:
        references = encode_references(len(queues))
        core.store.insert_many(Table.REFS, [(key, references) for key, _ in records])
    core.store.insert_entries(entries)
    core.journal.bare(Op.PUBLISHED, queue.id, [None] * count, [len(queues)] * count)
    core.bodies.append_items(records, keep=awaited)
    core.turn.work += copies + 2 * count
    queue.tally.incoming += count
    first = queue.next_number
    enter(core, queue, [], range(first, first + count), size_bytes + COPY_BYTES * copies, count=0)
    return True


def publish_forwarded(
    core: Core, queue: Queue, messages: Sequence[tuple[int, bytes, Overlay]], source: int, now_ms: int
) -> None:
    """Publish records that the queue `source` forwards to the topic: with their numbers there, and overlays, which this
    function changes.

    Properties in the overlay become a part of the message, so that rules see them. The time to live continues.
    """
    topic = core.topic(queue.entity_id)
    fan_out = _FanOut(core, queue.id, topic)
    terms, first = queue.terms, queue.next_number
    number = first
    limit_ms = end_of_life(now_ms, terms.time_to_live_ms)
    records: list[bytes] = []
    waiting: list[Waiting] = []
    published: list[Waiting] = []
    waits = has_backlog(queue)
    there: dict[int, int] = {}
    size_bytes = 0
    for number_there, record, overlay in messages:
        expires_ms = overlay.get(Field.EXPIRES_MS) or message_expires_ms(record)
        if expires_ms > limit_ms:
            overlay[Field.EXPIRES_MS] = expires_ms = limit_ms
        overlay[Field.ENQUEUED_MS] = now_ms
        layout, body = message_parts(record)
        properties, system = overlay.pop(Field.PROPERTIES, None), overlay.pop(Field.SYSTEM, None)
        if properties or system:
            layout, body = with_changes(layout, body, properties or {}, system or {})
            record = encode_message(message_enqueued_ms(record), message_expires_ms(record), layout, body)
        message_id = core.bodies.next_id + len(records)
        if waits or fan_out.is_full():
            waits = True
            waiting.append((number, message_id, overlay))
        else:
            selected = _NOTHING
            if topic.has_rules:
                view = view_of(layout, body, number, now_ms, expires_ms)
                selected = select(core, topic, view, now_ms, terms.time_to_live_ms)
            if not fan_out.add(message_id, len(record), now_ms, expires_ms, overlay, selected, session_id_in(record)):
                queue.tally.unmatched += 1
                core.journal.bare(Op.PUBLISHED, queue.id, [None], [0], source, [number_there])
                number += 1
                continue
            published.append((number, message_id, overlay))
        there[number] = number_there
        number += 1
        records.append(record)
        size_bytes += len(record)
    core.changing()
    queue.tally.incoming += len(messages)
    origin = source, there
    waits_for = _stage(core, queue, fan_out, records, published, [None] * len(published), waiting, now_ms, origin)
    enter(core, queue, [], range(first, number), size_bytes, count=waits_for)


# -- messages that wait at the topic to be published

# A message that the topic has accepted and not published yet: its number at the topic, message id, overlay.
Waiting = tuple[int, int, Overlay | None]


def has_backlog(queue: Queue) -> bool:
    """True if the topic has accepted messages that are not published yet. They go first, in their order."""
    return queue.counts[Place.AVAILABLE] > 0


def _stage(
    core: Core,
    queue: Queue,
    fan_out: _FanOut,
    records: list[bytes],
    published: list[Waiting],
    said_ids: list[bytes | None],
    waiting: list[Waiting],
    now_ms: int,
    origin: tuple[int, Mapping[int, int]] | None = None,
) -> int:
    """Publish the gathered copies, if there is room for them, and let the other messages wait. Returns their number.

    `origin`, for the journal: the queue that forwards them, and the number there by that here.
    """
    awaited = False
    source, there = origin or (None, {})
    if fan_out.copies and not fan_out.fits():
        waiting = published + waiting
    else:
        awaited = fan_out.stage()
        numbers = None if source is None else [there[number] for number, _, _ in published]
        core.journal.bare(Op.PUBLISHED, queue.id, said_ids, fan_out.counts, source, numbers)
        queue.size_bytes += COPY_BYTES * fan_out.copies
    if records:
        core.bodies.append(records, keep=awaited)
        core.turn.work += len(records)
    if waiting:
        if source is not None:
            here = [number for number, _, _ in waiting]
            core.journal.entered(queue.id, here, FORWARDED, source, [there[number] for number in here])
        core.store.insert_many(
            Table.QUEUE,
            [
                (queue_key(queue.id, Place.AVAILABLE, number), encode_entry(each, 0, own))
                for number, each, own in waiting
            ],
        )
        core.turn.work += len(waiting)
        core.timers.arm(now_ms, (queue.id, Due.PUBLISHING))
    return len(waiting)


def publish_waiting(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: publish a step of the messages that wait at the topic. Without room it tries again later.

    Each is published as if at the time when the topic accepted it, or when it was due.
    """
    if not has_backlog(queue):
        return
    if core.turn.work and core.work_left() <= 0:
        core.timers.arm(now_ms, (queue.id, Due.PUBLISHING))
        return
    if not (_publish_some(core, queue, core.settings.step) or _publish_some(core, queue, 1)):
        core.timers.arm(now_ms + RETRY_MS, (queue.id, Due.PUBLISHING))
    elif has_backlog(queue):
        core.timers.arm(now_ms, (queue.id, Due.PUBLISHING))


def _publish_some(core: Core, queue: Queue, count: int) -> bool:
    """Publish up to `count` messages, as this turn's work allows. False if there is no room for their copies."""
    store, topic = core.store, core.topic(queue.entity_id)
    fan_out = _FanOut(core, queue.id, topic)
    start, end = queue_key(queue.id, Place.AVAILABLE, 0), queue_key(queue.id, Place.AVAILABLE + 1, 0)
    least_work = 1 + topic.rule_set.tried + len(topic.for_all)
    done: list[Held] = []
    unmatched: list[bytes] = []
    read_bytes = 0
    for key, value in store.scan(Table.QUEUE, start, end, min(count, core.work_left() // least_work + 1)):
        if done and (fan_out.is_full() or read_bytes >= core.settings.step_bytes):
            break
        _, _, number = unpack_queue_key(key)
        message = stored.read_message(core, queue, Place.AVAILABLE, number, value)
        if message is None:
            continue
        ref, record = message
        _, message_id, _, overlay = ref
        read_bytes += len(record)
        overlay = overlay or {}
        since_ms = overlay.get(Field.ENQUEUED_MS) or message_enqueued_ms(record)
        expires_ms = overlay.get(Field.EXPIRES_MS) or message_expires_ms(record)
        selected = _NOTHING
        if topic.has_rules:
            layout, body = message_parts(record)
            view = view_of(layout, body, number, since_ms, expires_ms)
            selected = select(core, topic, view, since_ms, queue.terms.time_to_live_ms)
        fan_out.waited[message_id] = number
        is_taken = fan_out.add(
            message_id, len(record), since_ms, expires_ms, overlay or None, selected, session_id_in(record)
        )
        if not is_taken:
            unmatched.append(message_key(message_id))
        # The body of one that is published goes on counting, for all copies.
        done.append(unlocked(ref, 0 if is_taken else len(record), NEVER, Place.AVAILABLE))
    if fan_out.copies and not fan_out.fits():
        return False
    fan_out.stage()
    core.journal.gone(Op.PUBLISHED, queue.id, [number_of(ref_of(held)) for held in done])
    leave(core, queue, done)
    store.delete_many(Table.MESSAGES, unmatched)
    queue.tally.unmatched += len(unmatched)
    queue.size_bytes += COPY_BYTES * fan_out.copies
    core.turn.work += len(done)
    return True
