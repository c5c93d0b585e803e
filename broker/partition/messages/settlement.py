"""Ends the locks of messages: by the receiver's outcome, when the lock's time ends, or when the receiver is lost.

| outcome       | the message                             | deliveries        |
|---------------|-----------------------------------------|-------------------|
| accepted      | is gone                                 |                   |
| abandoned     | is back where it was, or dead-lettered  | + 1               |
|               | (with a delay: is back later)           |                   |
| released      | is back where it was                    |                   |
| deferred      | is set aside, or dead-lettered          | + 1               |
| dead-lettered | is in the dead-letter queue             |                   |

The end of a lock and a broken connection count as abandoned. The delivery that reaches the maximum dead-letters the
message (DL5), also one that ends with a deferral, as in Service Bus. Dead-letter queues count no deliveries.
"""

from collections.abc import Callable, Sequence
from itertools import islice
from typing import cast

from broker.errors import BrokerError, LockLost, MessageTooLarge, NotAllowed
from broker.partition.messages import delays, header_sizes
from broker.partition.messages.leaving import discard
from broker.partition.messages.moves import Properties, dead_letter, defer, put_back, put_back_failed
from broker.partition.state.core import Core
from broker.partition.state.locks import Ending, Held, Holder
from broker.partition.state.queue import Queue
from broker.partition.state.tally import BY_APPLICATION, HEADER_SIZE_EXCEEDED
from broker.partition.state.timers import Due
from broker.runs import tokens_of
from broker.wire import Outcome
from protocol import error_texts
from storage.journal.events import Op
from storage.records import Field

_ACCEPTED = Outcome.ACCEPTED  # here, because to look up a member of an enum takes as long as a call


def settle(
    core: Core, queue: Queue, ranges: Sequence[bytes], outcome: Outcome, properties: Properties | None, now_ms: int
) -> list[BrokerError | None]:
    """Apply the outcome to each token's message; one result per token. A token whose result is an error stays locked.

    `ranges` are tokens, or some at once: see `tokens_of`.

    LockLost: there is no such lock, or it ended at or before `now_ms`. NotAllowed: the message is dead-lettered
    already, or settled in an open transaction, or takes no delay. MessageTooLarge: the properties set on this message
    by its receivers become too large. InvalidArgument, OutOfRange: the delay is none.
    """
    if outcome == _ACCEPTED and queue.locks.has_none_staged(ranges):
        core.changing()
        removed = queue.locks.remove_all(ranges, now_ms)
        if None not in removed:
            return _complete(core, queue, cast(list[Held], removed))
        _complete(core, queue, [held for held in removed if held is not None])
        queue.tally.settlements_too_late += removed.count(None)
        lost = LockLost(error_texts.LOCK_LOST)
        return [lost if held is None else None for held in removed]
    apply = _APPLY[outcome]
    results: list[BrokerError | None] = []
    for token in tokens_of(ranges):
        error = refusal(core, queue, token, outcome, properties, now_ms)
        results.append(error)
        if error is None:
            core.changing()
            apply(core, queue, queue.locks.remove(token), properties, now_ms)
        elif isinstance(error, LockLost):
            queue.tally.settlements_too_late += 1
    return results


def refusal(
    core: Core, queue: Queue, token: bytes, outcome: Outcome, properties: Properties | None, now_ms: int
) -> BrokerError | None:
    """The reason why the outcome cannot be applied, or None."""
    held = queue.locks.find(token, now_ms)
    if held is None:
        return LockLost(error_texts.LOCK_LOST)
    if token in queue.locks.staged:
        return NotAllowed("The message is settled in a transaction that has not ended.")
    if outcome == Outcome.DEAD_LETTERED and queue.is_dead_letter:
        return NotAllowed("A message of a dead-letter queue cannot be dead-lettered.")
    if properties:
        (_, _, _, overlay), _, _, place, _, _ = held
        if (refused := delays.refusal(core, outcome, properties, place)) is not None:
            return refused
        _, properties = delays.taken_out(core, properties)
        if outcome == Outcome.DEAD_LETTERED:
            return None  # with too many properties it is dead-lettered without these: see `_dead_letter`
        before = (overlay or {}).get(Field.PROPERTIES) or {}
        if header_sizes.sizes_of({**before, **(properties or {})}) > core.settings.properties_bytes:
            limit = core.settings.properties_bytes
            return MessageTooLarge(f"The properties set by receivers exceed {limit} bytes.")
    return None


def written_bytes(queue: Queue, tokens: Sequence[bytes], properties: Properties | None) -> int:
    """Bytes of properties that a settlement writes which leaves these messages in the store."""
    held = [queue.locks.held[token] for token in tokens if token in queue.locks.held]
    before = [(overlay or {}).get(Field.PROPERTIES) or {} for (_, _, _, overlay), *_ in held]
    added_bytes = header_sizes.sizes_of(properties or {})
    return sum(header_sizes.sizes_of(each) + added_bytes for each in before)


def _complete(core: Core, queue: Queue, removed: list[Held]) -> list[BrokerError | None]:
    if removed:
        discard(core, queue, removed, Op.COMPLETED)
        queue.tally.completed += len(removed)
    return [None] * len(removed)


def _accept(core: Core, queue: Queue, held: Held, properties: Properties | None, now_ms: int) -> None:
    _complete(core, queue, [held])


def _abandon(core: Core, queue: Queue, held: Held, properties: Properties | None, now_ms: int) -> None:
    queue.tally.abandoned += 1
    delay_ms, properties = delays.taken_out(core, properties)
    put_back_failed(core, queue, held, properties, Op.ABANDONED, now_ms, delay_ms)


def _release(core: Core, queue: Queue, held: Held, properties: Properties | None, now_ms: int) -> None:
    queue.tally.released += 1
    core.journal.done(Op.RELEASED, queue.id, [held])
    put_back(core, queue, held, now_ms)


def _defer(core: Core, queue: Queue, held: Held, properties: Properties | None, now_ms: int) -> None:
    queue.tally.deferred += 1
    defer(core, queue, held, properties)


def _dead_letter(core: Core, queue: Queue, held: Held, properties: Properties | None, now_ms: int) -> None:
    if properties and header_sizes.exceed_with(core, held, properties):
        dead_letter(core, queue, held, header_sizes.SAID, HEADER_SIZE_EXCEEDED)
    else:
        dead_letter(core, queue, held, properties, BY_APPLICATION)


_APPLY: dict[Outcome, Callable[[Core, Queue, Held, Properties | None, int], None]] = {
    Outcome.ACCEPTED: _accept,
    Outcome.ABANDONED: _abandon,
    Outcome.RELEASED: _release,
    Outcome.DEFERRED: _defer,
    Outcome.DEAD_LETTERED: _dead_letter,
}


def end_locks(core: Core, queue: Queue, now_ms: int) -> None:
    """The timer: end a step of the locks whose time is over; first those that were lost before."""
    if queue.locks.ending:
        _put_back_ending(core, queue, now_ms)
        core.timers.arm(now_ms, (queue.id, Due.LOCKS))
        return
    for token in queue.locks.ended(now_ms, core.step()):
        queue.tally.locks_ended += 1
        put_back_failed(core, queue, queue.locks.remove(token), None, Op.LOCK_EXPIRED, now_ms)
        if core.work_left() <= 0:
            break
    next_ms = queue.locks.first_end_ms()
    if next_ms is not None:
        core.timers.arm(next_ms, (queue.id, Due.LOCKS))


def take_back(core: Core, queue: Queue, holder: Holder, unsent_from: bytes, now_ms: int) -> None:
    """One receiver never got its deliveries from this token on: put them back. Its other locks go on."""
    tokens = queue.locks.tokens_from(holder, unsent_from)
    queue.tally.released += len(tokens)
    _end(core, queue, Ending(queue.locks.set_apart(tokens), None), now_ms)


def lose_locks(core: Core, queue: Queue, holder: Holder, unsent_from: bytes | None, now_ms: int) -> None:
    """The receiver's connection broke. That is a failed delivery: these messages may have crashed it (ST12).

    Those from the token `unsent_from` on never reached it, and are only put back.
    """
    unsent = len(queue.locks.tokens_from(holder, unsent_from))
    queue.tally.released += unsent
    queue.tally.locks_lost += len(queue.locks.tokens(holder)) - unsent
    _end(core, queue, Ending(holder, Op.LOCK_LOST, unsent_from), now_ms)


def fail_locks(core: Core, queue: Queue, tokens: Sequence[bytes], now_ms: int) -> None:
    """End some of the locks as `lose_locks` does, whoever holds them."""
    lose_locks(core, queue, queue.locks.set_apart(sorted(tokens)), None, now_ms)


def _end(core: Core, queue: Queue, ending: Ending, now_ms: int) -> None:
    """The locks are lost at once; their messages are back at once, or those that are too many in the next turns."""
    queue.locks.ending.append(ending)
    _put_back_ending(core, queue, now_ms)


def _put_back_ending(core: Core, queue: Queue, now_ms: int) -> None:
    ending = queue.locks.ending
    while ending:
        if not put_back_some(core, queue, ending[0], now_ms):
            core.timers.arm(now_ms, (queue.id, Due.LOCKS))
            return
        ending.popleft()


def put_back_some(core: Core, queue: Queue, ending: Ending, now_ms: int, all_of_it: bool = False) -> bool:
    """A step of it, the oldest first, as far as the turn may. True if there is nothing left.

    What was not sent comes back without a write. In a queue without sessions that costs the turn nothing, so that it is
    all back before what is behind it is handed out; the receiver's window limits it.
    """
    tokens, work = queue.locks.tokens(ending.holder), int(queue.sessions is not None)
    while tokens:
        for token in list(islice(tokens, core.step())):
            if not all_of_it and core.turn.work and core.work_left() <= 0:
                return False
            core.turn.work += work
            held = queue.locks.remove(token)
            if (op := ending.failed(token)) is not None:
                put_back_failed(core, queue, held, None, op, now_ms)
            else:
                core.journal.done(Op.RELEASED, queue.id, [held])
                put_back(core, queue, held, now_ms)
    return True


def drop_locks(core: Core, queue: Queue, now_ms: int) -> None:
    """End all locks because the entity was changed (ST13). This is no failed delivery."""
    tokens = list(queue.locks.held)
    queue.tally.locks_lost += len(tokens)
    for token in tokens:
        held = queue.locks.remove(token)
        core.journal.done(Op.LOCK_LOST, queue.id, [held])
        put_back(core, queue, held, now_ms)
