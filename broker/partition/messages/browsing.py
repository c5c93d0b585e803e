"""Shows messages of a queue without taking them, in any place, by sequence number; and tells when there are more."""

from collections.abc import Hashable, Sequence
from heapq import merge
from itertools import islice
from typing import TYPE_CHECKING, Any

from broker.errors import BrokerError, InvalidArgument
from broker.partition.messages import stored
from broker.partition.messages.selecting import LOOK_BYTES, LOOK_STEP, selects
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.receivers import encoded
from broker.wire import ENTRY
from storage.records import Field, Place, queue_key, unpack_queue_key
from storage.store import Table

if TYPE_CHECKING:
    from broker.rules.selectors import Selector

BROWSE_STEP = LOOK_STEP  # entries that one `browse` looks at


def peek(
    core: Core, queue: Queue, from_number: int, count: int, max_bytes: int, session_id: str | None = None
) -> list[Any]:
    """Entry items (see broker.wire) of up to `count` messages from this number on, with the place in place of a token.

    Locked and expired messages are shown, too; with `session_id`, those of that session. There are fewer if their
    records exceed `max_bytes`, but at least one.
    """
    _check(from_number, count)
    count = min(count, core.settings.peek_max)
    items, _ = _shown(core, queue, from_number, count, count, max_bytes, session_id)
    return items


def browse(
    core: Core,
    queue: Queue,
    from_number: int,
    count: int,
    max_bytes: int,
    session_id: str | None = None,
    selector: "Selector | None" = None,
) -> list[Any]:
    """A step of all messages from this number on: [items as those of `peek`, the number to go on from, True if that is
    behind all messages]. With a selector they are those that it selects.
    """
    _check(from_number, count)
    step = min(count if selector is None else BROWSE_STEP, core.step(), BROWSE_STEP)
    items, next_number = _shown(core, queue, from_number, step, count, max_bytes, session_id, selector)
    core.turn.work += 1
    return [items, queue.next_number, True] if next_number is None else [items, next_number, False]


def _check(from_number: int, count: int) -> None:
    """Check where a page begins and how long it may be. Raises InvalidArgument."""
    if count < 1:
        raise InvalidArgument(f"message-count must be positive, not {count}.")
    if not 0 <= from_number < 1 << 63:
        raise InvalidArgument(f"from-sequence-number must be a positive 64-bit number, not {from_number}.")


def _shown(
    core: Core,
    queue: Queue,
    from_number: int,
    looked: int,
    count: int,
    max_bytes: int,
    session_id: str | None,
    selector: "Selector | None" = None,
) -> tuple[list[Any], int | None]:
    """Items as those of `peek`, of up to `looked` entries. Then the next number to look at; None if there is none."""
    lists = [entries(core, queue, place, from_number, looked, session_id) for place in Place]
    found = list(islice(merge(*lists), looked))
    core.turn.work += len(found)
    more = sum(map(len, lists)) > len(found) or any(len(each) == looked for each in lists)
    items: list[Any] = []
    used_bytes = passed_bytes = shown = 0
    for number, place, value in found:
        if shown == count:
            return items, number
        message = stored.read_message(core, queue, Place(place), number, value)
        if message is None:
            continue
        (_, _, delivery_count, overlay), record = message
        if selector is not None and not selects(core, selector, record, delivery_count, overlay):
            passed_bytes += len(record)
            if passed_bytes >= LOOK_BYTES:
                return items, number + 1
            continue
        used_bytes += len(record)
        if shown and used_bytes > max_bytes:
            return items, number
        items += (place, number, delivery_count, record, overlay)
        shown += 1
    return items, found[-1][0] + 1 if more else None


def entries(
    core: Core, queue: Queue, place: Place, from_number: int, count: int, session_id: str | None = None
) -> list[tuple[int, int, bytes]]:
    """(number, place, queue entry) of up to `count` messages in this place, from this number on; of one session, or of
    all.
    """
    if session_id is not None:
        assert queue.sessions is not None
        return [
            (number, int(place), value)
            for number, value in queue.sessions.entries(place, encoded(session_id), from_number, count)
        ]
    start, end = queue_key(queue.id, place, from_number), queue_key(queue.id, place + 1, 0)
    items = core.store.scan(Table.QUEUE, start, end, count)
    found = []
    for key, value in items:
        _, _, number = unpack_queue_key(key)
        found.append((number, int(place), value))
    return found


def lock_ends(core: Core, queue: Queue, items: Sequence[Any], now_ms: int) -> dict[int, int]:
    """By sequence number, the end of the lock of each of the shown messages that is locked, by the wall clock.

    The lock of a session is that of its messages, received or not, but for those that are lent or not active yet.
    """
    locks, sessions = queue.locks, queue.sessions
    if not locks.count() and (sessions is None or not sessions.locked):
        return {}
    if sessions is None:
        ends = locks.ends_of(items[1::ENTRY], now_ms)
    else:
        ends = {}
        for place, number, overlay in zip(items[0::ENTRY], items[1::ENTRY], items[4::ENTRY], strict=True):
            session_id = (overlay or {}).get(Field.SESSION)
            until_ms = sessions.lock_end_of(number, session_id, locks, now_ms) if place != Place.SCHEDULED else None
            if until_ms is not None:
                ends[number] = until_ms
    return {number: core.wall_ms(until_ms) for number, until_ms in ends.items()}


# -- browsers that wait for more


def wait(core: Core, queue: Queue, browser: Hashable, number: int) -> None:
    """The browser is told once when the queue has had a message with this number, or a later one."""
    wait_no_more(core, browser, 0)
    queue.browsers[browser] = number
    core.browsers[browser] = queue.id
    core.turn.browsed[queue.id] = queue


def wait_no_more(core: Core, browser: Hashable, now_ms: int) -> None:
    queue = core.queues.get(core.browsers.pop(browser, 0))
    if queue is not None:
        del queue.browsers[browser]
        queue.accessed_ms = max(queue.accessed_ms, now_ms)


def told_of_more(core: Core) -> list[Hashable]:
    """The browsers to tell now."""
    told: list[Hashable] = []
    for queue in core.turn.take_browsed().values():
        told += [browser for browser, number in queue.browsers.items() if number < queue.next_number]
    for browser in told:
        wait_no_more(core, browser, 0)
    return told


def end_waits(core: Core, queue: Queue, error: BrokerError) -> None:
    """The browsers that wait are told `error`."""
    for browser in list(queue.browsers):
        core.turn.closed.append((browser, error))
        wait_no_more(core, browser, 0)
