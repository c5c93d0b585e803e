"""Receivers with selectors and browsers towards workers: what is said to them, and to older ones."""

import asyncio
from typing import Any

import pytest

from broker.wire import VERSION_WITH_LOCK_ENDS, VERSION_WITH_SELECTORS, Op
from protocol.codec import Described, Symbol, Timestamp, UInt
from protocol.symbols import LOCKED_UNTIL
from storage.records import LAYOUT_BYTES, NEVER, Place, encode_message
from tests.end_to_end.raw_peer import ATTACH, DETACH, FLOW, TRANSFER, error_of
from tests.gateway.in_process import QUEUE_ID, Client, gateway_with_workers, started_gateway
from tests.gateway.test_delivery_overlays import sections_of
from tests.gateway.test_waiting_for_workers import PEEK
from tests.sessions.raw_sessions import annotations_of

RED = {Symbol("selector"): Described(Symbol("apache.org:selector-filter:string"), "color = 'red'")}
COPY = Symbol("copy")
RECORD = encode_message(1, NEVER, bytes(LAYOUT_BYTES), b"\x00\x53\x75\xa0\x01m")


async def test_a_selector_goes_to_the_worker_and_usual_receivers_are_opened_as_ever(tmp_path):
    gateway, worker = started_gateway(tmp_path)
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders")
    client.attach(sender=False, address="orders", filters=RED)
    plain, selective = await worker.commands()
    assert plain == [Op.OPEN_RECEIVER, 0, plain[2], QUEUE_ID, False, None]
    assert selective == [Op.OPEN_SELECTIVE, 0, selective[2], QUEUE_ID, False, None, "color = 'red'"]


@pytest.mark.parametrize("workers", [1, 2])
async def test_an_older_worker_gets_no_receiver_with_a_selector(tmp_path, workers):
    """It would take it for one without. The client is told to try again."""
    gateway, each = gateway_with_workers(tmp_path, workers)
    for worker in each:
        worker.say([Op.HELLO, VERSION_WITH_SELECTORS - 1, [each.index(worker)]])
        await worker.commands()
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders")
    client.attach(sender=False, address="orders", filters=RED)
    for worker in each:
        said = [command[0] for command in await worker.commands()]
        assert said.count(Op.OPEN_RECEIVER) == 1
        assert Op.OPEN_SELECTIVE not in said
    found = client.frames()
    while DETACH not in [frame.code for frame in found]:
        await asyncio.sleep(0)
        found += client.frames()
    [detached] = [frame for frame in found if frame.code == DETACH]
    assert error_of(detached)[0] == "com.microsoft:server-busy"


async def test_a_browser_asks_step_by_step_and_then_waits(tmp_path):
    gateway, worker = started_gateway(tmp_path)
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders", mode=COPY, filters=RED, credit=3)
    [request] = await worker.commands()
    assert request[:2] + request[3:5] == [Op.REQUEST, 0, "browse", QUEUE_ID]
    assert request[5] == [0, 3, request[5][2], None, "color = 'red'", True]
    items: list[Any] = [Place.AVAILABLE, 7, 0, RECORD, None]
    worker.say([Op.REPLY, request[2], [items, 9, False, {7: 1234}]])
    [request] = await worker.commands()
    assert request[5][:2] == [9, 2]
    worker.say([Op.REPLY, request[2], [[], 20, True, {}]])
    [waits] = await worker.commands()
    assert waits == [Op.AWAIT, 0, waits[2], QUEUE_ID, 20]
    attached, shown = [frame for frame in client.frames() if frame.code in (ATTACH, TRANSFER)]
    assert (attached.code, shown.code) == (ATTACH, TRANSFER)
    assert annotations_of(shown.payload)[LOCKED_UNTIL] == 1234
    worker.say([Op.AVAILABLE, waits[2]])
    [request] = await worker.commands()
    assert request[5][:2] == [20, 2]
    worker.say([Op.REPLY, request[2], [[], 21, True, {}]])
    await worker.commands()
    client.say(FLOW, *map(UInt, (1, 1000, 0, 1000, 0, 1, 0)))  # its credit is taken back
    commands = await worker.commands()
    assert [command[0] for command in commands] == [Op.CLOSE_RECEIVER]


@pytest.mark.parametrize("version", [VERSION_WITH_LOCK_ENDS - 1, VERSION_WITH_LOCK_ENDS])
async def test_an_older_worker_is_not_asked_for_the_ends_of_locks(tmp_path, version):
    gateway, [worker] = gateway_with_workers(tmp_path, 1)
    worker.say([Op.HELLO, version, [0]])
    await worker.commands()
    tells = version == VERSION_WITH_LOCK_ENDS
    more = [True] if tells else []
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders", mode=COPY, credit=1)
    requester = client.attach(sender=True, address="orders/$management")
    client.attach(sender=False, address="orders/$management", credit=1)
    client.transfer(requester, PEEK)
    browse, peek = await worker.commands()
    assert browse[5] == [0, 1, browse[5][2], None, None, *more]
    assert peek[5] == [0, 1, peek[5][2], *more]
    items: list[Any] = [Place.AVAILABLE, 7, 0, RECORD, None]
    worker.say([Op.REPLY, browse[2], [items, 8, True, {7: 1234}] if tells else [items, 8, True]])
    worker.say([Op.REPLY, peek[2], [items, {7: 1234}] if tells else items])
    browsed, answer = [frame.payload for frame in client.frames() if frame.code == TRANSFER]
    [peeked] = sections_of(answer)[0x77]["messages"]
    for shown in (browsed, peeked["message"]):
        assert annotations_of(shown).get(LOCKED_UNTIL) == (Timestamp(1234) if tells else None)


async def test_an_older_worker_cannot_browse(tmp_path):
    gateway, worker = started_gateway(tmp_path)
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="orders", mode=COPY, credit=3)
    [request] = await worker.commands()
    worker.say([Op.FAILED, request[2], "NotImplementedByBroker", "There is no operation 'browse'."])
    [detached] = [frame for frame in client.frames() if frame.code == DETACH]
    assert error_of(detached)[0] == "amqp:not-implemented"
