"""Looks, before a syphon begins, whether it can work: makes queues that are missing, and says clearly what is wrong.

Each backlog queue and the queue of the leases is tried as it will be used. What only the management API tells is told
if that can be asked: it needs Manage.
"""

import asyncio
from collections.abc import Iterator
from typing import Final, NamedTuple
from xml.etree.ElementTree import Element

from broker.administration.client import HttpClient, HttpError
from broker.atom.client_documents import text_of
from broker.atom.values import UNLIMITED_MS, read_boolean, read_duration_ms, read_number
from broker.logging import get_logger
from broker.pairing.backlog import backlog_queues, lease_queue
from broker.pairing.namespaces import PRIMARY_SECONDS, Namespace, name_of
from broker.pairing.options import InvalidPairing
from broker.pairing.provisioning import check_they_differ, create_lease_queue, create_missing
from broker.pairing.reaching import SecondaryAway, connect_secondary, is_away, reason_primary_is_away
from broker.pairing.syphon.options import SyphonOptions
from protocol import conditions
from protocol.client.connection import Connection
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkDetached

log = get_logger("syphon")

USUAL_LOCK_SECONDS: Final = 60.0  # of queues that a pairing has made
FEW_DELIVERIES: Final = 100
SHOWN_NAMES: Final = 20
_CHECKED_SESSION: Final = "check"  # no backlog queue has this lease


class Found(NamedTuple):
    """What a syphon works with. `lock_s` and `lease_s`: how long locks last in the backlog queues, and of leases."""

    queues: list[str]
    lease_queue: str
    lock_s: dict[str, float]
    lease_s: float


async def check(primary: Namespace, secondary: Namespace, primary_name: str | None, options: SyphonOptions) -> Found:
    """Raises InvalidPairing, and SecondaryAway if that is all that is wrong. The primary may be away."""
    name = name_of(primary, secondary, primary_name)
    queues, leases = backlog_queues(name, options.backlog_queue_count), lease_queue(name)
    described: dict[str, Element] = {}
    not_made: Exception | None = None
    async with await connect_secondary(secondary) as connection:
        async with primary.management(PRIMARY_SECONDS) as one, secondary.management() as other:
            try:
                await create_missing(other, name, options.backlog_queue_count)
                await create_lease_queue(other, name)
                described = {queue: (await other.get(queue)).description for queue in (*queues, leases)}
            except (HttpError, InvalidPairing) as error:
                not_made = error.with_traceback(None)  # which refers to this call
            await check_they_differ(one, other)
            reason = await reason_primary_is_away(primary)
            if reason is None:
                await _tell_who_may_get_twice(one)
        for queue in queues:
            for text in _doubts(described.get(queue)):
                log.warning(text, queue=queue)
        await asyncio.gather(*(_try(connection, queue, None, not_made) for queue in queues))
        await _try(connection, leases, _CHECKED_SESSION, not_made)
    if reason is not None:
        log.info("the primary is away now", reason=reason)
    lock_s = {queue: _lock_s(described.get(queue)) for queue in queues}
    return Found(queues, leases, lock_s, _lock_s(described.get(leases)))


def _doubts(queue: Element | None) -> Iterator[str]:
    """What may harm messages that lie in the queue, although it can be drained."""
    if queue is None:
        return
    try:
        if read_number(text_of(queue, "MaxDeliveryCount") or "10") < FEW_DELIVERIES:
            yield "the queue dead-letters messages after a few deliveries that fail: set MaxDeliveryCount higher"
        if read_boolean(text_of(queue, "EnablePartitioning") or "false"):
            yield "the queue is partitioned, so messages of a session do not keep their order in it"
        if read_duration_ms(text_of(queue, "DefaultMessageTimeToLive") or "P10675199D") < UNLIMITED_MS:
            yield "messages expire in the queue: remove its DefaultMessageTimeToLive"
    except ValueError as error:
        log.debug("a description makes no sense", reason=str(error))


def _lock_s(queue: Element | None) -> float:
    try:
        return read_duration_ms(text_of(queue, "LockDuration")) / 1000 if queue is not None else USUAL_LOCK_SECONDS
    except ValueError:
        return USUAL_LOCK_SECONDS


async def _try(connection: Connection, queue: str, session: str | None, not_made: Exception | None) -> None:
    try:
        attached = (
            connection.receiver(queue, credit=0) if session is None else connection.accept_session(queue, session)
        )
        await (await attached).close()
    except AuthenticationFailed as error:
        raise InvalidPairing(f"the secondary refuses the key for {queue}: {error}") from error
    except LinkDetached as error:
        match error.condition:
            case conditions.NOT_FOUND:
                text = f"{queue} is missing in the secondary, and was not made: {not_made}"
                raise SecondaryAway(text) if is_away(not_made) else InvalidPairing(text) from error
            case conditions.UNAUTHORIZED_ACCESS:
                raise InvalidPairing(f"the key has no right to listen at {queue} in the secondary: {error}") from error
            case conditions.SESSION_CANNOT_BE_LOCKED:
                return
        raise InvalidPairing(f"{queue} in the secondary cannot be used: {error}") from error
    except (ConnectionLost, TimeoutError) as error:
        raise SecondaryAway(f"the secondary does not answer for {queue}: {error}") from error
    except ClientError as error:
        raise InvalidPairing(f"{queue} in the secondary cannot be used: {error}") from error


async def _tell_who_may_get_twice(primary: HttpClient) -> None:
    """Log which queues and topics detect no duplicates, if that can be asked: they may get a message twice."""
    try:
        described = [*await _all_of(primary, "queues"), *await _all_of(primary, "topics")]
    except HttpError as error:
        log.debug("not known who detects duplicates", reason=str(error))
        return
    names = [name for name, each in described if text_of(each, "RequiresDuplicateDetection").lower() != "true"]
    if names:
        shown = [*names[:SHOWN_NAMES], *(["..."] if len(names) > SHOWN_NAMES else [])]
        log.info("no duplicate detection: these may get a message twice", count=len(names), entities=shown)


async def _all_of(client: HttpClient, kind: str) -> list[tuple[str, Element]]:
    return [(each.title, each.description) for each in await client.all_of(f"$Resources/{kind}")]
