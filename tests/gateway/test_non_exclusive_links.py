"""Receivers of sessions that are not exclusive towards workers, to older ones, and where the tier has none."""

import asyncio
from typing import Any
from uuid import UUID, uuid4

import pytest

from broker.namespace.tiers import Sku
from broker.wire import VERSION_WITH_NON_EXCLUSIVE_SESSIONS, Op
from protocol.codec import Described, Symbol, ULong
from tests.end_to_end.raw_peer import ATTACH, DETACH, Frame, error_of
from tests.gateway.in_process import Client, gateway_with_workers, started_gateway

KEYS = [Symbol("com.microsoft:non-exclusive-session-filter"), Symbol("com.microsoft:non-exclusive-session-filter:list")]
TOKEN = uuid4()


def shared(*items: Any, key: Symbol = KEYS[0]) -> dict[Symbol, Described]:
    return {key: Described(ULong(0x000000137000000E), list(items))}


async def refusal(client: Client) -> Frame:
    found = client.frames()
    while DETACH not in [frame.code for frame in found]:
        await asyncio.sleep(0)
        found += client.frames()
    [detached] = [frame for frame in found if frame.code == DETACH]
    return detached


async def test_the_gateway_chooses_the_token_of_a_new_lock(tmp_path):
    gateway, worker = started_gateway(tmp_path, requires_session=True)
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders", filters=shared("s", None))
    client.attach(sender=False, address="orders", filters=shared("s", TOKEN))
    fresh, taking = await worker.commands()
    session_id, _, token, takes_over = fresh[5]
    assert (fresh[0], session_id, len(token), takes_over) == (Op.OPEN_RECEIVER, "s", 16, False)
    assert (taking[5][0], *taking[5][2:]) == ("s", TOKEN.bytes, True)
    worker.say([Op.OPENED, fresh[2], "s", 1])
    [attached] = [frame for frame in client.frames() if frame.code == ATTACH]
    assert attached.fields[5].value[7] == shared("s", UUID(bytes=token))


@pytest.mark.parametrize("session", ["s", None])
@pytest.mark.parametrize("workers", [1, 2])
async def test_an_older_worker_gets_no_such_receiver(tmp_path, workers, session):
    """It knows no tokens. The client is told to try again."""
    gateway, each = gateway_with_workers(tmp_path, workers, requires_session=True)
    for worker in each:
        worker.say([Op.HELLO, VERSION_WITH_NON_EXCLUSIVE_SESSIONS - 1, [each.index(worker)]])
        await worker.commands()
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders", filters=shared(session, None))
    assert error_of(await refusal(client))[0] == "com.microsoft:server-busy"
    for worker in each:
        assert Op.OPEN_RECEIVER not in [command[0] for command in await worker.commands()]


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("requires_session", [False, True])
async def test_in_the_tier_standard_they_are_refused_as_the_cloud_does(tmp_path, requires_session, key):
    gateway, [worker] = gateway_with_workers(tmp_path, 1, sku=Sku.STANDARD, requires_session=requires_session)
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders", filters=shared("it's", None, key=key))
    condition, text = error_of(await refusal(client))
    assert condition == "amqp:not-allowed"
    _, quote, behind = text.rpartition("'")
    assert quote, text
    assert behind.startswith(" contains invalid filter type. System only support Jms or Apache selector filter type.")
    assert await worker.commands() == []
