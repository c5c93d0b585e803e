"""Forwarding: a queue, subscription or dead-letter queue whose terms say so moves its messages on, each exactly once.

A transfer queue does the same, but each of its messages names its own destination (`transfer_queue`).

The queue itself is the outbox: messages come in as usual, and the available ones are taken out in the order of their
sequence numbers, which is that of each session, too. Messages for an entity of this partition are moved within the
turn. To another partition, each queue has one command under way at a time, and further messages gather meanwhile. The
messages of a command are deleted when the answer says that they were taken over. `outbox` lists the states when no
answer comes; `destination` is the other side.

A message that is refused for good goes to the transfer dead-letter queue of its entity, or to its dead-letter queue
(`_part_for_failures`). If a retry can help, or no answer comes, the queue tries again later, from the same message on.
"""

from bisect import bisect_right
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from broker.errors import BrokerError, NotAllowed, SessionIdMissing
from broker.namespace.entities import MAX_HOPS
from broker.partition.forwarding import transfer_queue
from broker.partition.forwarding.destination import ENTRY, arrive, enter, judge, key_in, refusal
from broker.partition.messages import stored
from broker.partition.messages.expiry import resume
from broker.partition.messages.hand_out import take
from broker.partition.messages.leaving import discard, unlocked
from broker.partition.messages.moves import DESCRIPTION, REASON, dead_letter, overlay_expires_ms, put_back
from broker.partition.messages.schedule import overtake
from broker.partition.sessions.membership import SESSION_ID_IS_NULL
from broker.partition.state.core import Core
from broker.partition.state.idleness import refuses, use
from broker.partition.state.lanes import destination_of
from broker.partition.state.locks import Held, ref_of
from broker.partition.state.outbox import Outbox
from broker.partition.state.queue import Queue
from broker.partition.state.timers import Due
from broker.partition.state.window import message_id_of, number_of, overlay_of
from broker.wire import Forward, forward
from protocol import error_texts
from storage.journal.events import ELSEWHERE, Op
from storage.queue_ids import Part, queue_id_of, with_part
from storage.records import (
    NEVER,
    STORE_ID_KEY,
    CorruptRecord,
    Field,
    Overlay,
    Place,
    decode_document,
    encode_document,
    forwarded_key,
    message_expires_ms,
    message_key,
    queue_key,
    unpack_queue_key,
)
from storage.store import StoreError, Table

HOPS_EXCEEDED = "MaxTransferHopCountExceeded"
HOPS_TEXT = f"The maximum number of allowed hops when forwarding between queues or topics is {MAX_HOPS}."


class Travelling(NamedTuple):
    """A message taken out of its queue and not sent yet. `overlay` goes with its record."""

    held: Held
    record: bytes
    overlay: Overlay


def forwards(queue: Queue) -> NotAllowed:
    return NotAllowed(error_texts.receiver_on_forwarding(queue.terms.name, queue.forward_to))


def begin(core: Core, queue: Queue) -> None:
    """The queue forwards from now on. Its receivers are closed and its locks have ended before."""
    if queue.outbox is None:
        queue.outbox = Outbox(queue.window)
    if queue.sessions is not None:  # it has not used its window: messages were in those of sessions
        queue.window.reset(queue.locks.numbers())
    queue.window.active = True
    overtake(core, queue)
    core.turn.wake(queue)


def end(queue: Queue) -> None:
    """The queue does not forward any more. What is on its way may still come back."""
    if queue.sessions is not None:
        queue.window.active = False
        queue.window.reset(set())


def begin_again(core: Core, queue_id: int, recorded: int | list[int]) -> None:
    """At the start: other partitions may have taken over messages of the queue; `recorded` is what META says."""
    queue = core.find(queue_id)
    if queue is None:
        return
    if isinstance(recorded, int):
        queue.outbox = Outbox(queue.window, recorded)
    elif queue.transfers is not None:
        for partition in recorded:
            queue.transfers.add(partition, 0).synced = partition == core.partition_id
    core.turn.wake(queue)


def pump(core: Core, now_ms: int) -> list[Forward]:
    """Forward messages as this turn's work allows; returns the commands to other partitions.

    Queues that the turn did not get to stay in `core.turn.outgoing`.
    """
    commands: list[Forward] = []
    budget_bytes = core.settings.pump_bytes
    core.begin_part()
    while core.turn.outgoing and budget_bytes > 0 and core.work_left() > 0:
        left_over: dict[int, Queue] = {}  # these come first in the next turn
        for queue in core.turn.take_outgoing().values():
            if budget_bytes <= 0 or core.work_left() <= 0:
                left_over[queue.id] = queue
            elif queue.transfers is None:
                budget_bytes -= _step(core, queue, now_ms, commands)
            else:
                for lane in queue.transfers.in_turn():
                    if budget_bytes <= 0 or core.work_left() <= 0:
                        queue.transfers.next_partition = lane.partition
                        core.turn.wake(queue)
                        break
                    budget_bytes -= _step_of_lane(core, queue, lane, now_ms, commands)
        core.turn.outgoing = left_over | core.turn.outgoing
    return commands


def _step(core: Core, queue: Queue, now_ms: int, commands: list[Forward]) -> int:
    """Do the next step for the queue. Returns the bytes it took."""
    outbox = queue.outbox
    assert outbox is not None
    if outbox.awaited or outbox.retry_ms > now_ms:
        return 0  # the answer or the timer wakes the queue
    if not outbox.synced:
        _command(core, queue, outbox, 0, [], 0, commands)
        return 0
    name = queue.forward_to
    if not name:
        _bind(core, queue, None)
        queue.window.active = bool(queue.receivers) and queue.sessions is None
        return 0
    if not queue.terms.can_receive or not queue.ready():
        return 0
    destination = core.entities.destination_ids.get(name)
    partition, *others = (core.partition_id,) if destination is None else core.entities.partitions_of(name)
    if others:
        assert destination is not None
        _bind(core, queue, None)
        return _step_to_fragments(core, queue, outbox, name, destination, now_ms)
    if partition == core.partition_id:
        _bind(core, queue, None)
        travelling, used_bytes, more = _take(core, queue, now_ms)
        _move(core, queue, outbox, travelling, [destination or 0] * len(travelling), now_ms)
        if more:
            core.turn.wake(queue)
        return used_bytes
    if core.forwarding.bytes >= core.settings.forward_bytes:
        core.forwarding.waiting[queue.id] = queue
        return 0
    _bind(core, queue, partition)
    assert destination is not None
    travelling, used_bytes, more = _take(core, queue, now_ms)
    if travelling:
        _send(core, queue, outbox, destination, travelling, used_bytes, commands)
    elif more:
        core.turn.wake(queue)
    return used_bytes


def _step_to_fragments(core: Core, queue: Queue, outbox: Outbox, name: str, destination: int, now_ms: int) -> int:
    """Do what `_step` does, to a partitioned entity: each message goes to the fragment of its key (PE9 of Service Bus).

    Messages for this partition are moved within the turn. Those for others go to the entity's transfer queue, which has
    a lane for each partition, so that a partition that is away delays no others.
    """
    travelling, used_bytes, more = _take(core, queue, now_ms)
    detects = bool(core.entities.terms[destination].duplicate_window_ms)
    transfers = core.queue(with_part(queue.id, Part.TRANSFER))
    here: list[Travelling] = []
    for each in travelling:
        number = number_of(ref_of(each.held))
        partition = core.entities.partition_for(name, key_in(each.record, each.overlay, detects), number)
        if partition == core.partition_id:
            here.append(each)
        else:
            transfer_queue.transfer(core, queue, transfers, each.held, each.overlay, name, partition)
    _move(core, queue, outbox, here, [destination] * len(here), now_ms)
    if more:
        core.turn.wake(queue)
    return used_bytes


def _step_of_lane(core: Core, queue: Queue, lane: Outbox, now_ms: int, commands: list[Forward]) -> int:
    """Do what `_step` does, for the messages of a transfer queue that are for one partition."""
    if lane.awaited:
        return 0
    if lane.retry_ms > now_ms:
        _arm(core, queue, lane)  # the timer that was armed may have been another lane's
        return 0
    if not lane.synced:
        _command(core, queue, lane, 0, [], 0, commands)
        return 0
    here = lane.partition == core.partition_id
    if not here and core.forwarding.bytes >= core.settings.forward_bytes:
        core.forwarding.waiting[queue.id] = queue
        return 0
    travelling, destinations, used_bytes, more = _take_of_lane(core, queue, lane)
    if here:
        _move(core, queue, lane, travelling, destinations, now_ms)
    elif travelling:
        for each, destination in zip(travelling, destinations, strict=True):
            each.overlay[Field.DESTINATION] = destination
        _send(core, queue, lane, 0, travelling, used_bytes, commands)
    if more or (here and travelling):  # some messages may have been put back
        core.turn.wake(queue)
    return used_bytes


def _bind(core: Core, queue: Queue, partition: int | None) -> None:
    """Record that this other partition may take over messages of the queue from now on."""
    outbox = queue.outbox
    assert outbox is not None
    if outbox.partition == partition:
        return
    outbox.partition = partition
    if partition is None:
        core.store.delete(Table.META, forwarded_key(queue.id))
    else:
        core.store.put(Table.META, forwarded_key(queue.id), encode_document(partition))


def _take(core: Core, queue: Queue, now_ms: int) -> tuple[list[Travelling], int, bool]:
    """Take the next messages out of the queue. Those with too many hops are given up.

    Also returns the bytes of all messages that were looked at, and True if there may be more.
    """
    settings = core.settings
    count = min(queue.ready(), settings.forward_count, core.step())
    taken, used_bytes, is_cut = take(core, queue, count, settings.forward_batch_bytes, now_ms)
    travelling: list[Travelling] = []
    without_expiry = queue.is_dead_letter  # in a dead-letter queue a time to live has no effect
    for ref, record, due_ms in taken:
        number, _, _, overlay = ref
        held = unlocked(ref, len(record), due_ms, Place.AVAILABLE)
        if overlay is None:
            overlay = {Field.ENQUEUE_SEQUENCE_NUMBER: number, Field.HOPS: 1}
        else:
            hops = overlay.get(Field.HOPS, 0) + 1
            if hops > MAX_HOPS:
                _give_up(core, queue, held, HOPS_EXCEEDED, HOPS_TEXT)
                continue
            overlay = {Field.ENQUEUE_SEQUENCE_NUMBER: number, **overlay, Field.HOPS: hops}
            overlay.pop(Field.SESSION, None)  # the destination may have no sessions, and finds it out if it has
        if without_expiry and (overlay_expires_ms(overlay) or message_expires_ms(record)) != NEVER:
            overlay[Field.EXPIRES_MS] = NEVER
        travelling.append(Travelling(held, record, overlay))
    outbox = queue.outbox
    if travelling and outbox is not None:
        outbox.highest = max(outbox.highest, number_of(ref_of(travelling[-1].held)))
    return travelling, used_bytes, is_cut or used_bytes > 0


def _take_of_lane(core: Core, queue: Queue, lane: Outbox) -> tuple[list[Travelling], list[int], int, bool]:
    """Take messages as `_take` does.

    Returns also the entity id of each message's destination, and True if there may be more in the lane.

    A message whose destination is known here to be impossible is given up.
    """
    settings = core.settings
    count = min(settings.forward_count, core.step())
    taken, used_bytes, more = transfer_queue.take(core, queue, lane, count, settings.forward_batch_bytes)
    travelling: list[Travelling] = []
    destinations: list[int] = []
    gone: list[Held] = []
    errors: dict[str, BrokerError | None] = {}  # by name
    for ref, record in taken:
        number, _, _, own = ref
        name = destination_of(ref)
        overlay = {Field.ENQUEUE_SEQUENCE_NUMBER: number, Field.HOPS: 1, **(own or {})}
        del overlay[Field.DESTINATION]
        overlay.pop(Field.LANE, None)
        held = unlocked(ref, len(record), NEVER, Place.AVAILABLE)
        if number <= lane.taken:
            gone.append(held)
            continue
        if lane.partition not in core.entities.partitions_of(name):  # the destination was moved
            partition = core.entities.partition_for(name, None, number)
            transfer_queue.transfer(core, queue, queue, held, own or {}, name, partition)
            continue
        destination = core.entities.destination_ids.get(name, 0)
        if name not in errors:
            errors[name] = refusal(core, destination, name)
        if (error := errors[name]) is not None:
            _give_up(core, queue, held, type(error).__name__, str(error))
            continue
        travelling.append(Travelling(held, record, overlay))
        destinations.append(destination)
    _gone(core, queue, gone)
    return travelling, destinations, used_bytes, more


def _give_up(core: Core, queue: Queue, held: Held, error: str, text: str) -> None:
    """`error` is the class name of the error, or a reason."""
    reason = SESSION_ID_IS_NULL if error == SessionIdMissing.__name__ else error
    part = _part_for_failures(core, queue, held, reason)
    dead_letter(core, queue, held, {REASON: reason, DESCRIPTION: text}, reason, part)


def _part_for_failures(core: Core, queue: Queue, held: Held, reason: str) -> Part:
    """The part of the entity for a message that cannot be moved on (DL9, setting forwarding.failures).

    One that has no session and needs one is a dead letter whatever the setting says (DL4).

    What a dead-letter queue could not forward would only be forwarded again from there, and what a client sent through
    the entity was never one of its messages. In a transfer queue, those that the entity forwards have hops.
    """
    if core.settings.dead_letter_unforwarded or reason == SESSION_ID_IS_NULL:
        (_, _, _, overlay), *_ = held
        if queue.part == Part.MAIN or (queue.part == Part.TRANSFER and Field.HOPS in (overlay or {})):
            return Part.DEAD_LETTER
    return Part.TRANSFER_DEAD_LETTER


def _return(core: Core, queue: Queue, outbox: Outbox, held: Held, now_ms: int) -> None:
    """The message could not be moved now: make it available again."""
    if queue.transfers is not None:
        outbox.window.put_back(ref_of(held))
    else:
        put_back(core, queue, held, now_ms)


# -- within the partition


def _move(
    core: Core, queue: Queue, outbox: Outbox, travelling: list[Travelling], destinations: Sequence[int], now_ms: int
) -> None:
    """Move messages within the turn, each to its destination: an entity id, or 0 if the entity does not exist."""
    if any(refuses(core, queue_id_of(destination)) for destination in set(destinations)):
        for held, _, _ in travelling:
            _return(core, queue, outbox, held, now_ms)
        _try_later(core, queue, outbox, now_ms)
        return
    verdict = judge(core, destinations, [(record, overlay) for _, record, overlay in travelling])
    accepted: dict[int, list[Travelling]] = {}
    for each, destination in zip(travelling[: verdict.accepted], destinations, strict=False):
        accepted.setdefault(destination, []).append(each)
    for destination, messages in accepted.items():
        target = core.access(queue_id_of(destination), now_ms)
        use(core, target.id, now_ms)
        as_they_are = queue.topic_id is None and not target.is_topic and not target.terms.duplicate_window_ms
        discard(core, queue, [held for held, _, _ in messages], Op.FORWARDED, keep_bodies=as_they_are)
        if as_they_are:
            entries = [
                (number_of(ref_of(held)), message_id_of(ref_of(held)), len(record), message_expires_ms(record), overlay)
                for held, record, overlay in messages
            ]
            if core.journal.is_on:  # it makes rows of what one frame has
                core.store.put_many(
                    Table.MESSAGES,
                    [(message_key(message_id_of(ref_of(held))), record) for held, record, _ in messages],
                )
            enter(core, target, entries, queue.id, now_ms)
        else:
            arrivals = [(number_of(ref_of(held)), record, overlay) for held, record, overlay in messages]
            arrive(core, target, arrivals, queue.id, now_ms)
        queue.tally.forwarded += len(messages)
    if accepted:
        use(core, queue.id, now_ms)
    decided = verdict.accepted + len(verdict.refused)
    for (held, _, _), error in zip(travelling[verdict.accepted :], verdict.refused, strict=False):
        _give_up(core, queue, held, type(error).__name__, str(error))
    for held, _, _ in travelling[decided:]:
        _return(core, queue, outbox, held, now_ms)


# -- to another partition


def _send(
    core: Core,
    queue: Queue,
    outbox: Outbox,
    destination: int,
    travelling: list[Travelling],
    size_bytes: int,
    commands: list[Forward],
) -> None:
    entries: list[Any] = []
    forward = queue.locks.forward
    for held, record, overlay in travelling:
        forward(held)
        entries += (number_of(ref_of(held)), record, overlay)
    _command(core, queue, outbox, destination, entries, size_bytes, commands)


def _command(
    core: Core,
    queue: Queue,
    outbox: Outbox,
    destination: int,
    entries: list[Any],
    size_bytes: int,
    commands: list[Forward],
) -> None:
    """Send a command. Without entries it only asks for the mark, and earlier messages stay in doubt."""
    partition = outbox.partition
    assert partition is not None
    outbox.awaited = True
    outbox.sent_bytes = size_bytes
    outbox.numbers += entries[0::ENTRY]
    core.forwarding.bytes += size_bytes
    core.forwarding.awaited[queue.id, partition] = (queue, outbox)
    commands.append(forward(partition, _store_id(core), core.partition_id, queue.id, destination, entries))


def _store_id(core: Core) -> bytes:
    """The id of this partition's store. Raises StoreError."""
    if core.forwarding.store_id is None:
        value = core.store.get(Table.META, STORE_ID_KEY)
        try:
            core.forwarding.store_id = decode_document(value or b"")
        except CorruptRecord as error:
            raise StoreError(f"META {STORE_ID_KEY.decode()}: {error}") from error
    return core.forwarding.store_id


def taken_over(core: Core, queue_id: int, by: int, up_to: int, refused: Sequence[Any], busy: str, now_ms: int) -> None:
    """A partition answers a command: messages up to this sequence number are taken over, the next ones are refused.

    `refused` and `busy` are those of `destination.take_over`.
    """
    answered = _answered(core, queue_id, by)
    if answered is None:
        return  # the queue was deleted meanwhile
    queue, outbox = answered
    numbers, outbox.numbers = outbox.numbers, []
    end = queue.locks.end_forward
    not_taken = bisect_right(numbers, up_to)
    if not_taken:
        use(core, queue.id, now_ms)
    _gone(core, queue, [held for number in numbers[:not_taken] if (held := end(number))])
    if not outbox.synced:
        outbox.synced = True
        if queue.transfers is not None:
            outbox.taken = up_to
        else:
            _delete_taken(core, queue, up_to)
            resume(core, queue)
    for name, text, each in refused:
        for number in each:
            if (held := end(number)) is not None:
                _give_up(core, queue, held, name, text)
    for number in numbers[not_taken:]:
        if (held := end(number)) is not None:
            _return(core, queue, outbox, held, now_ms)
    if busy:
        _try_later(core, queue, outbox, now_ms)
    else:
        outbox.succeed()
        core.turn.wake(queue)


def _answered(core: Core, queue_id: int, partition: int) -> tuple[Queue, Outbox] | None:
    """The queue and outbox whose command this partition answers; None if no answer is awaited."""
    forwarding = core.forwarding
    found = forwarding.awaited.pop((queue_id, partition), None)
    if found is None:
        return None
    _, outbox = found
    outbox.awaited = False
    forwarding.bytes -= outbox.sent_bytes
    if forwarding.waiting:
        core.turn.outgoing |= forwarding.waiting
        forwarding.waiting.clear()
    return found


def _gone(core: Core, queue: Queue, messages: list[Held]) -> None:
    if messages:
        discard(core, queue, messages, Op.FORWARDED, ELSEWHERE)
        queue.tally.forwarded += len(messages)


def _delete_taken(core: Core, queue: Queue, up_to: int) -> None:
    """After a start: delete the available messages up to this number, which were taken over: one command at most."""
    start, end = queue_key(queue.id, Place.AVAILABLE, 0), queue_key(queue.id, Place.AVAILABLE, up_to + 1)
    found: list[Held] = []
    for key, value in core.store.scan(Table.QUEUE, start, end, 1 << 32):
        _, _, number = unpack_queue_key(key)
        if (message := stored.read_message(core, queue, Place.AVAILABLE, number, value)) is not None:
            ref, record = message
            due_ms = stored.expires_ms(queue, overlay_of(ref), record)
            found.append(unlocked(ref, len(record), due_ms, Place.AVAILABLE))
    _gone(core, queue, found)
    queue.forget([(number, overlay) for (number, _, _, overlay), *_ in found])


def unanswered(core: Core, partitions: Collection[int], now_ms: int) -> None:
    """Commands to these partitions, or their answers, are lost: ask for the marks."""
    for queue_id, partition in list(core.forwarding.awaited):
        if partition in partitions and (found := _answered(core, queue_id, partition)) is not None:
            queue, outbox = found
            outbox.synced = False
            _try_later(core, queue, outbox, now_ms)


def _try_later(core: Core, queue: Queue, outbox: Outbox, now_ms: int) -> None:
    outbox.fail(now_ms)
    _arm(core, queue, outbox)


def _arm(core: Core, queue: Queue, outbox: Outbox) -> None:
    core.timers.arm(outbox.retry_ms, (queue.id, Due.FORWARDING))


def forget(core: Core, queue_id: int) -> None:
    """The queue is deleted."""
    for awaiting_id, partition in list(core.forwarding.awaited):
        if awaiting_id == queue_id:
            _answered(core, queue_id, partition)
    core.forwarding.waiting.pop(queue_id, None)
