"""Moves of plain entities between partitions: what both sides do when one begins, ends, or is given up.

A gateway leads a move (`broker.gateway.moving`) and the namespace's home decides it (`broker.worker.moves`). Here are
the requests of the gateway, which name the move by its token, and what follows from the home's decision:

1. The other partition makes ready (`arrive`), this one begins to send rows (`depart`, `rows`), the other stores them.
2. The entity becomes quiet (`hold`): it hands out and forwards nothing, so that locks are settled. It takes sends.
3. It is frozen (`freeze`): it refuses all uses, also after a restart, until it hears the decision.
4. The definition names the other partition: it lives there (`relocate`). Or the move is given up: it stays (`keep`).
"""

from collections.abc import Iterable, Sequence
from typing import Any

from broker import requests
from broker.errors import EntityMoving, InvalidArgument, ServerBusy
from broker.partition import disposal
from broker.partition.moving import arrival, residence
from broker.partition.moving.departure import Departure, Row
from broker.partition.state.core import Core
from broker.partition.state.terms import Kind, Terms
from protocol import error_texts
from storage.queue_ids import entity_of
from storage.records import (
    ARRIVING_PREFIX,
    FROZEN_PREFIX,
    CorruptRecord,
    arriving_key,
    decode_document,
    encode_document,
    frozen_key,
)
from storage.store import StoreError, Table

ENDED = "The move has ended."


def load(core: Core, now_ms: int) -> None:
    """At the start, when the terms are known. The home may have decided meanwhile. Raises StoreError."""
    for key, value in core.store.scan(Table.META, ARRIVING_PREFIX, ARRIVING_PREFIX + b"\xff" * 5, 1 << 32):
        entity_id = int.from_bytes(key.removeprefix(ARRIVING_PREFIX), "big")
        try:
            token = decode_document(value)
        except CorruptRecord as error:
            raise StoreError(f"META, entity {entity_id} that is moved here: {error}") from error
        if entity_id in core.entities.terms and not core.entities.lives_here(entity_id):
            core.entities.arriving[entity_id] = token
        else:
            core.store.delete(Table.META, key)
            disposal.tidy_later(core, entity_id, now_ms)
    for key, _ in core.store.scan(Table.META, FROZEN_PREFIX, FROZEN_PREFIX + b"\xff" * 5, 1 << 32):
        entity_id = int.from_bytes(key.removeprefix(FROZEN_PREFIX), "big")
        if entity_id in core.entities.terms and core.entities.lives_here(entity_id):
            core.entities.frozen.add(entity_id)
            continue
        core.store.delete(Table.META, key)
        if entity_id in core.entities.terms:
            disposal.discard(core, entity_id, _topic_of(core, entity_id), now_ms)


def _topic_of(core: Core, entity_id: int) -> int | None:
    terms = core.entities.terms[entity_id]
    return core.entities.topic_ids[terms.topic] if terms.kind == Kind.SUBSCRIPTION else None


def with_subscriptions(core: Core, entity_id: int) -> list[int]:
    """The entity, and the subscriptions of a topic."""
    return [entity_id, *sorted(core.entities.subscription_ids.get(entity_id, ()))]


# -- requests


def arrive(core: Core, asked: requests.Arrive, now_ms: int) -> None:
    """Make ready for the entity's rows. Raises ServerBusy, InvalidArgument."""
    token, entity_id = asked
    _require_known(core, entity_id)
    arrival.begin(core, token, with_subscriptions(core, entity_id))


def store(core: Core, asked: requests.StoreRows, now_ms: int) -> None:
    """Store rows of the other side. Raises InvalidArgument, QuotaExceeded."""
    token, rows = asked
    arrival.store(core, token, rows)


def depart(core: Core, asked: requests.Depart, now_ms: int) -> None:
    """Begin to read the entity's rows. Raises EntityMoving, InvalidArgument."""
    token, entity_id = asked
    _require_known(core, entity_id)
    if not core.entities.lives_here(entity_id):
        raise EntityMoving(error_texts.SERVER_BUSY)
    core.changing()
    core.entities.departing[entity_id] = Departure(core, token, with_subscriptions(core, entity_id))
    _note(core)


def rows(core: Core, asked: requests.Rows, now_ms: int) -> list[Any]:
    """The next rows; True if all were read once; and the number of those that have changed since."""
    token, entity_id, limit_bytes, limit = asked
    departure = _departure(core, token, entity_id)
    core.changing()
    found: list[Row] = departure.rows(min(limit_bytes, core.settings.request_bytes), min(limit, core.step()))
    return [found, departure.is_read, departure.noted]


def hold(core: Core, asked: requests.Hold, now_ms: int) -> list[int]:
    """Hand out and forward nothing more. Returns the numbers of locks, and of batches on their way elsewhere."""
    token, entity_id = asked
    departure = _departure(core, token, entity_id)
    core.changing()
    core.entities.quiet.update(departure.entity_ids)
    locks = sum(queue.locks.count() for queue in core.queues.values() if queue.entity_id in departure.entity_ids)
    return [locks, _count_awaited(core, departure.entity_ids)]


def _count_awaited(core: Core, entity_ids: Sequence[int]) -> int:
    """Only the answers to these tell which messages the other partitions have taken over."""
    queues = {queue_id for queue_id, _ in core.forwarding.awaited if entity_of(queue_id) in entity_ids}
    for queue in core.queues.values():
        if queue.entity_id in entity_ids:
            outboxes = [queue.outbox, *(queue.transfers.lanes.values() if queue.transfers is not None else ())]
            if any(outbox is not None and not outbox.synced for outbox in outboxes):
                queues.add(queue.id)
    return len(queues)


def freeze(core: Core, asked: requests.Freeze, now_ms: int) -> None:
    """From the next commit on the entity refuses all uses, and its rows do not change. Its locks end.

    Raises ServerBusy while messages are on their way to other partitions.
    """
    token, entity_id = asked
    departure = _departure(core, token, entity_id)
    if _count_awaited(core, departure.entity_ids):
        raise ServerBusy("A partition that the entity forwards messages to does not answer. Please try again.")
    core.changing()
    for each in departure.entity_ids:
        residence.leave(core, each, EntityMoving(error_texts.SERVER_BUSY))
        core.store.put(Table.META, frozen_key(each), encode_document(token))
        core.entities.frozen.add(each)


def _require_known(core: Core, entity_id: int) -> None:
    if entity_id not in core.entities.terms:
        raise InvalidArgument("The entity is not known to this partition.")


def _departure(core: Core, token: bytes, entity_id: int) -> Departure:
    departure: Departure | None = core.entities.departing.get(entity_id)
    if departure is None or departure.token != token:
        raise InvalidArgument(ENDED)
    if departure.is_overrun:
        raise ServerBusy("The entity changes faster than it can be moved. Please try again when it is used less.")
    return departure


def _note(core: Core) -> None:
    """Let all departures hear what changes."""
    departures: list[Departure] = [*core.entities.departing.values()]
    if not departures:
        core.store.noting = None
    elif len(departures) == 1:
        core.store.noting = departures[0].note
    else:

        def note(table: Table, keys: Iterable[bytes]) -> None:
            keys = list(keys)
            for departure in departures:
                departure.note(table, keys)

        core.store.noting = note


# -- the decision


def relocate(core: Core, entity_id: int, before: Terms, now_ms: int) -> None:
    """The definition of an entity names other partitions than before: those that are in its terms now."""
    lived_here = not before.partitions or core.partition_id in before.partitions
    _end_departure(core, entity_id)
    if core.entities.arriving.pop(entity_id, None) is not None:
        core.store.delete(Table.META, arriving_key(entity_id))
        disposal.tidy_later(core, entity_id, now_ms)
    was_frozen = _unfreeze(core, entity_id)
    lives_here = core.entities.lives_here(entity_id)
    if lives_here and (was_frozen or not lived_here):
        residence.enter(core, entity_id, now_ms)
    elif lived_here and not lives_here:
        if not was_frozen:
            residence.leave(core, entity_id, EntityMoving(error_texts.SERVER_BUSY))
        disposal.discard(core, entity_id, _topic_of(core, entity_id), now_ms)


def keep(core: Core, entity_id: int, now_ms: int) -> None:
    """The move of this entity, if there is one, is given up."""
    _end_departure(core, entity_id)
    for each in with_subscriptions(core, entity_id):
        if each in core.entities.arriving:
            del core.entities.arriving[each]
            core.store.delete(Table.META, arriving_key(each))
            disposal.discard(core, each, _topic_of(core, each), now_ms)
        if _unfreeze(core, each):
            residence.enter(core, each, now_ms)


def keep_all(core: Core, now_ms: int) -> None:
    """The home knows of no move of an entity here."""
    for entity_id in [*core.entities.departing, *core.entities.arriving, *core.entities.frozen]:
        if entity_id in core.entities.terms:
            keep(core, entity_id, now_ms)


def forget(core: Core, entity_id: int) -> None:
    """The entity is deleted."""
    _end_departure(core, entity_id)
    core.entities.quiet.discard(entity_id)
    if core.entities.arriving.pop(entity_id, None) is not None:
        core.store.delete(Table.META, arriving_key(entity_id))
    _unfreeze(core, entity_id)


def _unfreeze(core: Core, entity_id: int) -> bool:
    """False if it was not frozen."""
    if entity_id not in core.entities.frozen:
        return False
    core.entities.frozen.discard(entity_id)
    core.store.delete(Table.META, frozen_key(entity_id))
    return True


def _end_departure(core: Core, entity_id: int) -> None:
    departure: Departure | None = core.entities.departing.pop(entity_id, None)
    if departure is None:
        return
    _note(core)
    core.entities.quiet.difference_update(departure.entity_ids)
    for queue in core.queues.values():
        if queue.entity_id in departure.entity_ids:
            core.turn.wake(queue)


# -- turns


def hold_back(core: Core) -> None:
    """Quiet entities hand out and forward nothing in this turn; when they are not quiet any more, they are woken."""
    turn = core.turn
    for queues in (turn.awake, turn.outgoing, turn.offering):
        for queue_id in [each for each in queues if entity_of(each) in core.entities.quiet]:
            del queues[queue_id]


def delete_step(core: Core, entity_id: int, now_ms: int) -> None:
    """The timer: delete a step of what is not needed any more."""
    if entity_id in core.entities.deleted:
        disposal.free(core, entity_id, now_ms)
    elif entity_id not in core.entities.arriving:
        disposal.tidy(core, entity_id, now_ms)
