"""Finds the messages of a queue that a selector selects, a step at a time.

One step looks at LOOK_STEP messages at most, so that a search through a long queue takes many turns, in each of which
the others get theirs.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from broker.errors import InvalidFilter, NotImplementedByBroker
from broker.partition.messages import stored
from broker.partition.messages.deliveries import READ_MAX, WEIGHT_BYTES
from broker.partition.messages.leaving import set_aside, unlocked
from broker.partition.messages.moves import expire
from broker.partition.state.core import Core
from broker.partition.state.queue import Queue
from broker.partition.state.selection import Selection
from broker.partition.state.window import Ref, message_id_of, number_of
from broker.rules.errors import InvalidRule, SelectorNotSupported
from broker.rules.selecting import compile_selector
from storage.records import (
    LAYOUT_AT,
    Field,
    Overlay,
    Place,
    queue_key,
    unpack_queue_key,
)
from storage.store import Table

if TYPE_CHECKING:
    from broker.rules.selectors import Selector

LOOK_STEP = 256  # messages that one selector looks at in one step
LOOK_BYTES = 1 << 20  # of their records, unless a single one has more

_AVAILABLE, _DEFERRED = Place.AVAILABLE, Place.DEFERRED

Taken = list[tuple[Ref, bytes, int]]  # ref, record, time of its DUE entry or NEVER


def selector_of(text: str) -> "Selector":
    """Compile the text of a selector. Raises InvalidFilter, NotImplementedByBroker."""
    try:
        return compile_selector(text)
    except SelectorNotSupported as error:
        raise NotImplementedByBroker(str(error)) from None
    except InvalidRule as error:
        raise InvalidFilter(str(error)) from None


def selects(core: Core, selector: "Selector", record: bytes, delivery_count: int, overlay: Overlay | None) -> bool:
    """True if the selector selects this message as it is now."""
    core.turn.work += selector.work
    overlay = overlay or {}
    set_since, fields_since = overlay.get(Field.PROPERTIES), overlay.get(Field.SYSTEM)
    return selector.matches(record, LAYOUT_AT, delivery_count, set_since, fields_since)


def take(
    selection: Selection, core: Core, queue: Queue, count: int, limit_bytes: int, now_ms: int
) -> tuple[Taken, int, bool]:
    """Take the next messages that are selected out of the window, without a lock.

    Returns them, the bytes of their records, and True if it was cut short: there may be more.
    """
    taken, used_bytes, cut = _look(core, queue, selection, count, limit_bytes, now_ms)
    if taken:
        queue.window.withdraw({number_of(ref) for ref, _, _ in taken})
    return taken, used_bytes, cut


def is_ready(core: Core, queue: Queue, selection: Selection, now_ms: int) -> tuple[bool, bool]:
    """True if there is a message to select, which stays. Then as the third result of `take`."""
    taken, _, cut = _look(core, queue, selection, 1, LOOK_BYTES, now_ms)
    for ref, _, _ in taken:
        selection.look_again([number_of(ref)])
    return bool(taken), cut and not taken


def of_session(core: Core, queue: Queue, selector: "Selector", refs: Sequence[Ref], now_ms: int) -> list[Ref]:
    """Choose those of these messages of a locked session that are selected, expired or unreadable."""
    found: list[Ref] = []
    for ref, record in zip(refs, core.bodies.read([*map(message_id_of, refs)]), strict=True):
        _, _, delivery_count, overlay = ref
        if (
            record is None
            or stored.expires_ms(queue, overlay, record) <= now_ms
            or selects(core, selector, record, delivery_count, overlay)
        ):
            found.append(ref)
    return found


def _look(
    core: Core, queue: Queue, selection: Selection, count: int, limit_bytes: int, now_ms: int
) -> tuple[Taken, int, bool]:
    """The next messages that are selected, which stay in the window. Expired ones are expired, and unreadable ones
    quarantined.
    """
    taken: Taken = []
    if not selection.is_behind(queue.next_number):
        return taken, 0, False
    used_bytes = looked_bytes = 0
    left = min(core.step(), LOOK_STEP)
    while len(taken) < count and left > 0 and looked_bytes < LOOK_BYTES and used_bytes < limit_bytes:
        average_bytes = queue.size_bytes // (sum(queue.counts) or 1) + WEIGHT_BYTES
        refs = _next(core, queue, selection, min(left, READ_MAX, LOOK_BYTES // average_bytes + 1))
        left -= max(1, len(refs))
        if not refs:
            if not selection.is_behind(queue.next_number):
                return taken, used_bytes, False
            continue
        free = queue.window.free(map(number_of, refs))
        free -= {number_of(ref) for ref, _, _ in taken}  # what has come back twice is looked at twice
        wanted = [ref for ref in refs if number_of(ref) in free]
        if not wanted:
            continue
        for at, (ref, record) in enumerate(zip(wanted, core.bodies.read([*map(message_id_of, wanted)]), strict=True)):
            number, message_id, delivery_count, overlay = ref
            if len(taken) == count or used_bytes >= limit_bytes:
                selection.look_again([number_of(each) for each in wanted[at:]])
                break
            if record is None:
                set_aside(core, queue, _AVAILABLE, number, message_id)
                continue
            looked_bytes += len(record)
            due_ms = stored.expires_ms(queue, overlay, record)
            if due_ms <= now_ms:
                queue.forget([(number, overlay)])
                expire(core, queue, unlocked(ref, len(record), due_ms, _AVAILABLE))
            elif selects(core, selection.selector, record, delivery_count, overlay):
                used_bytes += len(record) + WEIGHT_BYTES
                taken.append((ref, record, due_ms))
        if core.work_left() <= 0:
            break
    return taken, used_bytes, len(taken) < count and selection.is_behind(queue.next_number)


def _next(core: Core, queue: Queue, selection: Selection, count: int) -> list[Ref]:
    """The next messages to look at; some may be locked. First those that are back."""
    store = core.store
    if numbers := selection.take_returned(count):
        core.turn.work += len(numbers)
        keys = [queue_key(queue.id, _AVAILABLE, number) for number in numbers]
        found = [(key, entry) for key in keys if (entry := store.get(Table.QUEUE, key)) is not None]
        return stored.read_entries(core, queue, found)
    start = queue_key(queue.id, _AVAILABLE, selection.cursor)
    items = store.scan(Table.QUEUE, start, queue_key(queue.id, _DEFERRED, 0), count)
    core.turn.work += len(items)
    selection.cursor = queue.next_number
    if len(items) == count:
        last_key, _ = items[-1]
        _, _, last_number = unpack_queue_key(last_key)
        selection.cursor = last_number + 1
    return stored.read_entries(core, queue, items)
