"""Hands available messages to receivers with credit, in order and fairly; bounded per turn."""

from collections.abc import Callable, Hashable, Sequence
from collections.abc import Set as AbstractSet
from functools import partial
from itertools import islice
from operator import itemgetter
from typing import Any

from broker.partition.messages import selecting, stored
from broker.partition.messages.deliveries import (
    READ_MAX,
    RECEIVED_AND_DELETED,
    WEIGHT_BYTES,
    Deliveries,
    Drained,
    new_token,
    token_of,
)
from broker.partition.messages.leaving import discard, set_aside, unlocked
from broker.partition.messages.moves import expire, overlay_expires_ms
from broker.partition.messages.selecting import Taken
from broker.partition.messages.session_hand_out import hand_out_sessions
from broker.partition.state.core import Core
from broker.partition.state.line import Line
from broker.partition.state.locks import NOBODY, Held, LockRun
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import Receiver, Session
from broker.partition.state.timers import Due
from broker.partition.state.window import Ref, Window, message_id_of, number_of
from protocol.extension import extension
from storage.journal.events import Op
from storage.records import (
    NEVER,
    Place,
    message_expires_ms,
    queue_key,
    unpack_queue_key,
)
from storage.store import Table

FETCH_MAX = 1024  # entries read ahead at once
FRESH_TIMES = 4  # so many times what came in a turn may be handed out in it, besides `pump_stored_bytes`

# Here, because to look up a member of an enum takes as long as a call.
_AVAILABLE, _LOCKS = Place.AVAILABLE, Due.LOCKS
_DEFERRED, _QUEUE = Place.DEFERRED, Table.QUEUE

_ref_of: Callable[[tuple[Ref, bytes, int]], Ref] = itemgetter(0)


def pump(core: Core, now_ms: int) -> tuple[Deliveries, Drained, list[Hashable]]:
    """Serve the queues that are awake. Those that it does not get to the end of stay awake.

    Returns what `Pumped` has as `deliveries`, `drained` and `available`.
    """
    awake = core.turn.take_awake()
    deliveries: Deliveries = []
    drained: Drained = []
    available: list[Hashable] = []
    # Receivers that keep up get what has just come, before it must be read from the tables.
    ready_bytes = core.settings.pump_stored_bytes + FRESH_TIMES * core.bodies.fresh_bytes
    budget_bytes = min(core.settings.pump_bytes, ready_bytes)
    later = []  # queues that were cut short; they come after those that got nothing
    core.begin_part()
    for queue in awake.values():
        if budget_bytes <= 0 or core.work_left() <= 0:
            core.turn.awake[queue.id] = queue
            continue
        if queue.sessions is not None:
            if queue.is_held_back:
                continue  # the answer of the other partition wakes it
            used_bytes, cut = hand_out_sessions(core, queue, queue.sessions, now_ms, budget_bytes, deliveries, drained)
        elif queue.selections:
            used_bytes, cut = _hand_out_to_all(core, queue, now_ms, budget_bytes, deliveries, drained, available)
        else:
            used_bytes, cut = _hand_out(core, queue, queue.line, take, now_ms, budget_bytes, deliveries)
        budget_bytes -= used_bytes
        if cut:
            later.append(queue)
        elif not queue.selections:
            _tell(queue.line, queue.ready(), drained, available)
    for queue in later:
        core.turn.awake[queue.id] = queue
    return deliveries, drained, available


def _hand_out_to_all(
    core: Core,
    queue: Queue,
    now_ms: int,
    budget_bytes: int,
    deliveries: Deliveries,
    drained: Drained,
    available: list[Hashable],
) -> tuple[int, bool]:
    """Serve the receivers with selectors, too. What the first get is gone for the others, so the first are others each
    time; those that the turn did not get to come first in the next.

    Returns the bytes used, and True if it was cut short for some of them.
    """
    used_bytes, served, cut = 0, 0, False
    for selection in list(queue.turns):
        if served and (used_bytes >= budget_bytes or core.work_left() <= 0):
            cut = True
            break
        served += 1
        if selection is None:
            line, take_next = queue.line, take
        else:
            line, take_next = selection.line, partial(selecting.take, selection)
        used, cut_here = _hand_out(core, queue, line, take_next, now_ms, budget_bytes - used_bytes, deliveries)
        used_bytes += used
        if selection is None:
            ready = queue.ready()
        else:
            ready = 0
            if not cut_here and line.watching and not (line.waiting or line.told):
                found, cut_here = selecting.is_ready(core, queue, selection, now_ms)
                ready = int(found)
        if cut_here:
            cut = True
            if line.draining:
                drained += [(receiver.key, receiver.delivered) for receiver in line.take_used_up()]
        else:
            _tell(line, ready, drained, available)
    queue.turns.rotate(-served if cut and served < len(queue.turns) else -1)
    if len(queue.window.skip) > queue.locks.count() + core.settings.window:
        queue.window.reset(queue.locks.numbers())  # see `withdraw`
    return used_bytes, cut


def _tell(line: Line, ready: int, drained: Drained, available: list[Hashable]) -> None:
    """The receivers in line have got what there is: end their drains, and tell those that watch."""
    if line.draining:
        drained += [(receiver.key, receiver.delivered) for receiver in line.take_drained()]
    if line.watching and not line.waiting and ready > 0:
        available += [receiver.key for receiver in line.tell(ready)]


def _hand_out(
    core: Core,
    queue: Queue,
    line: Line,
    take_next: Callable[[Core, Queue, int, int, int], tuple[Taken, int, bool]],
    now_ms: int,
    budget_bytes: int,
    deliveries: Deliveries,
) -> tuple[int, bool]:
    """`take_next` takes messages as `take` does.

    Returns the bytes used, and True if it was cut short by the budget or because the turn has no work left.
    """
    until_ms = now_ms + queue.terms.lock_duration_ms
    items: dict[Hashable, list[Any]] = {}
    used_bytes, cut = 0, False
    while line.waiting and not cut and (ready := queue.ready()) > 0:
        group, wanted = line.next_round(ready)
        limit_bytes = core.settings.pump_bytes_per_receiver * len(group)
        if wanted > 1:
            wanted = min(wanted, max(len(group), core.work_left()))
        if limit_bytes > budget_bytes - used_bytes:
            limit_bytes = budget_bytes - used_bytes
        taken, bytes_taken, cut = take_next(core, queue, wanted, limit_bytes, now_ms)
        used_bytes += bytes_taken
        each, more = divmod(len(taken), len(group))
        begin = 0
        for place, receiver in enumerate(group[: len(taken)]):
            end = begin + each + (place < more)
            dealt = taken[begin:end] if len(group) > 1 else taken  # neighbours: they are one run
            begin = end
            receiver.delivered += len(dealt)
            flat = items.get(receiver.key)
            if flat is None:
                flat = items[receiver.key] = []
                deliveries.append((receiver.key, 0 if receiver.receive_and_delete else until_ms, flat))
            if receiver.receive_and_delete:
                flat += _remove(core, queue, dealt, now_ms)
            else:
                flat += _lock(core, queue, receiver, dealt, until_ms, now_ms)
        line.served(group, len(taken))
        if len(taken) < wanted:
            break
        cut = cut or core.work_left() <= 0
    return used_bytes, cut


def take(core: Core, queue: Queue, count: int, limit_bytes: int, now_ms: int) -> tuple[Taken, int, bool]:
    """Take the next messages out of the window, without a lock; the bytes read; True if it was cut short.

    Expired messages are expired and unreadable ones quarantined, a step of them at most. The result is cut short by
    `limit_bytes`, by such a step, and when the turn has no work left.
    """
    taken: Taken = []
    used_bytes = 0
    gone_left = 0  # 0 before the first expired or unreadable message
    observe_ttl = not queue.is_dead_letter
    while len(taken) < count:
        missing = count - len(taken)
        at_once = 1
        if missing > 1:
            average_bytes = queue.size_bytes // (sum(queue.counts) or 1) + WEIGHT_BYTES
            at_once = min(missing, READ_MAX, (limit_bytes - used_bytes) // average_bytes + 1)
        refs = next_refs(core, queue, at_once, missing)
        if not refs:
            return taken, used_bytes, queue.window.cursor < queue.next_number
        records = core.bodies.read([*map(message_id_of, refs)])
        usual = extension and extension.take_usual(
            refs, records, NEVER, WEIGHT_BYTES, limit_bytes - used_bytes, now_ms, observe_ttl
        )
        if usual is not None:
            found, bytes_found = usual
            taken += found
            used_bytes += bytes_found
            for unused in islice(refs, len(found), None):
                queue.window.put_back(unused)
            if used_bytes >= limit_bytes:
                return taken, used_bytes, True
            continue
        for index, ref in enumerate(refs):
            record, due_ms = records[index], NEVER
            if record is not None:
                used_bytes += len(record) + WEIGHT_BYTES
                if observe_ttl:
                    due_ms = (ref[3] and overlay_expires_ms(ref[3])) or message_expires_ms(record)
            if record is not None and due_ms > now_ms:
                taken.append((ref, record, due_ms))
                is_enough = used_bytes >= limit_bytes
            else:
                gone_left = (gone_left or core.step()) - 1
                if record is None:
                    number, message_id, _, _ = ref
                    set_aside(core, queue, _AVAILABLE, number, message_id)
                else:
                    expire(core, queue, unlocked(ref, len(record), due_ms, _AVAILABLE))
                is_enough = gone_left <= 0 or used_bytes >= limit_bytes
            if is_enough:
                for unused in islice(refs, index + 1, None):
                    queue.window.put_back(unused)
                return taken, used_bytes, True
    return taken, used_bytes, False


def next_refs(core: Core, queue: Queue, count: int, ahead: int) -> list[Ref]:
    """Take up to `count` available messages out of the window; the caller will ask for `ahead` in all.

    Returns fewer than there are if the turn has no work left.
    """
    window = queue.window
    refs = window.next(count)
    while len(refs) < count and window.cursor < queue.next_number and core.work_left() > 0:
        _fetch(core, queue, min(max(ahead, 32), FETCH_MAX))
        refs += window.next(count - len(refs))
    return refs


def _fetch(core: Core, queue: Queue, limit: int) -> None:
    """Read the next entries behind the window's end into it."""
    window = queue.window
    start = queue_key(queue.id, _AVAILABLE, window.cursor)
    items = core.store.scan(_QUEUE, start, queue_key(queue.id, _DEFERRED, 0), limit)
    core.turn.work += len(items)
    refs = stored.read_entries(core, queue, _unskipped(window, items) if window.skip else items)
    cursor = queue.next_number
    if len(items) == limit:
        last_key, _ = items[-1]
        _, _, last_number = unpack_queue_key(last_key)
        cursor = last_number + 1
    window.fill(refs, cursor)


def _unskipped(window: Window, items: Sequence[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Return those that the window does not skip, which are locked; it has passed the others."""
    found: list[tuple[bytes, bytes]] = []
    for item in items:
        _, _, number = unpack_queue_key(item[0])
        if number in window.skip:
            window.skip.discard(number)
        else:
            found.append(item)
    return found


def withdraw(core: Core, queue: Queue, session: Session | None, numbers: AbstractSet[int]) -> None:
    """These available messages, of the session if there is one, have been locked before it was their turn."""
    window = queue.window if session is None else session.window
    window.withdraw(numbers)
    if len(window.skip) <= queue.locks.count() + core.settings.window:
        return
    if queue.sessions is not None and session is not None:
        queue.sessions.reset(session, queue.locks)
    else:
        window.reset(queue.locks.numbers())  # else what is settled before its turn would stay in memory until then


def _lock(core: Core, queue: Queue, receiver: Receiver, taken: Taken, until_ms: int, now_ms: int) -> list[Any]:
    """Lock the messages for the receiver; returns the entry items."""
    first = core.take_tokens(len(taken))
    run = _run_of(core, taken, first)
    if run is not None:
        items, refs, sizes = run
        queue.locks.add_run(LockRun(token_of(core, first), refs, sizes, until_ms, receiver))
    elif extension is None:
        items = _locked(core, queue, receiver, taken, until_ms, first)
    else:
        held, tokens = queue.locks.held, receiver.tokens
        items = extension.lock(taken, core.token_prefix, first, until_ms, _AVAILABLE, receiver, held, tokens)
        queue.locks.expiring.update([number_of(ref) for ref, _, due_ms in taken if due_ms != NEVER])
    core.timers.arm(until_ms, (queue.id, _LOCKS))
    queue.tally.outgoing += len(taken)
    core.journal.delivered(queue.id, map(_ref_of, taken), now_ms)
    return items


def _run_of(core: Core, taken: Taken, first: int) -> tuple[list[Any], list[Ref], list[int]] | None:
    """Entry items, with the tokens from `first` on, refs, and sizes; None if one of the messages expires."""
    if extension is not None:
        found: tuple[list[Any], list[Ref], list[int]] | None
        found = extension.run_of_taken(taken, core.token_prefix, first, NEVER)
        return found
    items: list[Any] = []
    for number, (ref, record, due_ms) in enumerate(taken, first):
        if due_ms != NEVER:
            return None
        items += (token_of(core, number), ref[0], ref[2], record, ref[3])
    return items, [*map(_ref_of, taken)], [len(record) for _, record, _ in taken]


def _locked(core: Core, queue: Queue, receiver: Receiver, taken: Taken, until_ms: int, first: int) -> list[Any]:
    """Lock the messages, with the tokens from `first` on; returns the entry items."""
    items: list[Any] = []
    tokens, place = receiver.tokens, _AVAILABLE
    held, expiring = queue.locks.held, queue.locks.expiring
    for (ref, record, due_ms), token_number in zip(taken, range(first, first + len(taken)), strict=True):
        token = token_of(core, token_number)
        number, _, delivery_count, overlay = ref
        items += (token, number, delivery_count, record, overlay)
        held[token] = (ref, len(record), due_ms, place, until_ms, receiver)
        tokens[token] = None
        if due_ms != NEVER:
            expiring.add(number)
    return items


def _remove(core: Core, queue: Queue, taken: Taken, now_ms: int) -> list[Any]:
    """Delete the messages (receive and delete); returns the entry items."""
    items: list[Any] = []
    gone: list[Held] = []
    for ref, record, due_ms in taken:
        number, _, delivery_count, overlay = ref
        items += (new_token(core), number, delivery_count, record, overlay)
        gone.append((ref, len(record), due_ms, _AVAILABLE, 0, NOBODY))
    core.journal.delivered(queue.id, map(_ref_of, taken), now_ms)
    discard(core, queue, gone, Op.COMPLETED, RECEIVED_AND_DELETED)
    queue.tally.outgoing += len(taken)
    queue.tally.received_and_deleted += len(taken)
    return items
