"""Of a connection that has ended nothing lives on, whatever was under way: without Python's search for cycles.

The workers may owe answers; what waits for them lives until they come, or until the worker is lost.
"""

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from broker.gateway import life
from broker.gateway.gateway import Gateway
from broker.wire import VERSION, Op
from protocol.codec import Described, Int, Long, Symbol, UByte, UInt, ULong, encode
from protocol.engine.sasl import SASL_HEADER
from storage.records import NEVER, encode_message
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    CLOSE,
    DISPOSITION,
    END,
    TRANSFER,
    coordinator,
    frame_bytes,
    message,
    outcome,
    source,
    target,
)
from tests.gateway.in_process import QUEUE_ID, Client, Worker, gateway_with_workers
from tests.hostile_input import HOSTILE, PEEK, transfer
from tests.leftovers import Leftovers

RECORD = encode_message(1, NEVER, bytes(16), message(b"body"))
BEGUN = b"\x00\x53\x75\xb0\x00\x01\x00\x00" + b"x" * 1000  # of a message of 64 KiB
KEYED = message(b"m", annotations={Symbol("x-opt-partition-key"): "k"})
SESSION_FILTER = {Symbol("com.microsoft:session-filter"): "s"}
NEXT_SESSION = {Symbol("com.microsoft:session-filter"): None}

State = Callable[["Scene"], Coroutine[Any, Any, None]]


class Scene:
    """A client of a gateway with some workers."""

    def __init__(self, gateway: Gateway, workers: list[Worker]) -> None:
        self.gateway, self.workers = gateway, workers
        self.client = Client(gateway)

    def connect(self) -> None:
        self.client.connect()
        self.client.frames()

    def sender(self, address: str = "orders") -> int:
        return self.client.attach(sender=True, address=address)

    def receiver(self, credit: int = 10, *, filters: Any = None, settled: bool = False) -> int:
        client, handle = self.client, self.client.next_handle
        client.next_handle += 1
        modes = UByte(1 if settled else 0), UByte(0)
        ends = source("orders", filters=filters), target("here")
        client.say(ATTACH, f"link-{handle}", UInt(handle), True, *modes, *ends)
        if credit:
            client.say(0x13, UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(handle), UInt(0), UInt(credit))
        return handle

    async def answer(self) -> None:
        """The workers answer what they were told, as one does that has nothing."""
        for _ in range(3):
            for worker in self.workers:
                for command in await worker.commands():
                    self.answer_to(worker, command)

    def answer_to(self, worker: Worker, command: list[Any]) -> None:
        match command[0]:
            case Op.SEND | Op.SEND_BATCH:
                batch = command[0] == Op.SEND_BATCH
                if command[2]:
                    worker.say([Op.SENT, command[2], 1 if batch else len(command[4])])
            case Op.CLOSE_RECEIVER:
                worker.say([Op.CLOSED, command[2], "", ""])
            case Op.REQUEST:
                worker.say([Op.FAILED, command[2], "ServerBusy", "busy"])
            case Op.SETTLE:
                for channel, count in zip(command[4][0::2], command[4][1::2], strict=True):
                    if channel:
                        worker.say([Op.SETTLED, [channel, count]])

    async def opened(self) -> tuple[Worker, int]:
        """The worker and the channel of the first receiver that was opened."""
        for worker in self.workers:
            for command in await worker.commands():
                if command[0] == Op.OPEN_RECEIVER:
                    worker.say([Op.OPENED, command[2], "s", 2_000_000_000_000])
                    return worker, command[2]
        raise AssertionError("no receiver was opened")


# -- what is under way


async def nothing(scene: Scene) -> None:
    scene.client.transport.connect()


async def half_of_sasl(scene: Scene) -> None:
    scene.client.transport.connect()
    scene.client.transport.feed(SASL_HEADER + frame_bytes(0, bytes(100), kind=1)[:50])


async def open_connection(scene: Scene) -> None:
    scene.connect()


async def begun_messages(scene: Scene) -> None:
    """One in the extension, if that is there, and one in Python."""
    scene.connect()
    first, second = scene.sender(), scene.sender()
    scene.client.transport.feed(transfer(first, 0, BEGUN, more=True))
    scene.client.transport.feed(transfer(second, 1, BEGUN, more=True, batch=True))


async def a_frame_that_is_not_whole(scene: Scene) -> None:
    scene.connect()
    handle = scene.sender()
    scene.client.transport.feed(transfer(handle, 0, BEGUN, more=True))
    scene.client.transport.feed(transfer(handle, None, bytes(5000), more=True)[:3000])


async def messages_that_wait_for_answers(scene: Scene) -> None:
    scene.connect()
    handle = scene.sender()
    for payload in (message(b"x"), KEYED, message(b"y"), b"nonsense"):
        scene.client.transfer(handle, payload)
    scene.client.transport.feed(transfer(handle, 4, b"\x00\x53\x75\xa0\x06\x00\x53\x75\xa0\x01z", batch=True))


async def messages_that_are_answered(scene: Scene) -> None:
    await messages_that_wait_for_answers(scene)
    await scene.answer()


async def deliveries(scene: Scene) -> None:
    scene.connect()
    scene.receiver()
    worker, channel = await scene.opened()
    worker.say(
        [Op.DELIVER, channel, 1, [b"\0\0" + b"t" * 14, 1, 0, RECORD, None, b"\0\0" + b"u" * 14, 2, 0, RECORD, {}]]
    )
    run = len(RECORD).to_bytes(4, "big") + RECORD
    worker.say([Op.DELIVER_RUN, channel, 1, b"\0\0" + b"v" * 14, 3, 0, 1, run])
    scene.client.say(DISPOSITION, True, UInt(0), None, False, outcome(ACCEPTED))
    scene.client.say(DISPOSITION, True, UInt(1), None, False, outcome(ACCEPTED))


async def deliveries_that_are_deleted(scene: Scene) -> None:
    scene.connect()
    scene.receiver(settled=True)
    worker, channel = await scene.opened()
    worker.say([Op.DELIVER, channel, 1, [b"\0\0" + b"t" * 14, 1, 0, RECORD, None]])


async def deliveries_that_wait_for_the_window(scene: Scene) -> None:
    scene.connect()
    scene.client.say(0x13, UInt(0), UInt(0), UInt(0), UInt(1000))  # the session's window is closed
    await deliveries_on_the_session(scene)


async def deliveries_on_the_session(scene: Scene) -> None:
    client, handle = scene.client, scene.client.next_handle
    client.next_handle += 1
    client.say(ATTACH, f"link-{handle}", UInt(handle), True, UByte(0), UByte(0), source("orders"), target("here"))
    client.say(0x13, UInt(0), UInt(0), UInt(0), UInt(1000), UInt(handle), UInt(0), UInt(10))
    worker, channel = await scene.opened()
    run = len(RECORD).to_bytes(4, "big") + RECORD
    worker.say([Op.DELIVER_RUN, channel, 1, b"\0\0" + b"v" * 14, 3, 0, 1, run])


async def requests(scene: Scene) -> None:
    scene.connect()
    handle = scene.sender("orders/$management")
    scene.client.attach(sender=False, address="orders/$management", credit=0)
    for _ in range(3):
        scene.client.transfer(handle, PEEK)


async def responses_without_credit(scene: Scene) -> None:
    await requests(scene)
    await scene.answer()


async def a_token(scene: Scene) -> None:
    scene.connect()
    handle = scene.sender("$cbs")
    scene.client.attach(sender=False, address="$cbs", credit=5)
    properties = {"operation": "put-token", "type": "servicebus.windows.net:sastoken", "name": "orders"}
    scene.client.transfer(handle, message(properties=["1", None, None, None, "here"], application=properties))


async def a_transaction(scene: Scene) -> None:
    scene.connect()
    client, handle = scene.client, scene.client.next_handle
    client.next_handle += 1
    ends = source("here"), coordinator()
    client.say(ATTACH, f"link-{handle}", UInt(handle), False, None, None, *ends, None, None, UInt(0))
    client.frames()
    declare = encode(Described(ULong(0x77), Described(ULong(0x31), [])))
    client.transfer(handle, declare)
    [declared] = [frame for frame in client.frames() if frame.code == DISPOSITION]
    transaction = declared.fields[4].value[0]
    sender = scene.sender()
    state = Described(ULong(0x34), [transaction])
    for number, payload in ((1, message(b"x")), (2, KEYED)):
        fields = UInt(sender), UInt(number), b"t", UInt(0), False, False, None, state
        client.say(TRANSFER, *fields, payload=payload)


async def a_transaction_at_a_worker_that_does_not_answer(scene: Scene) -> None:
    for worker in scene.workers:
        worker.connection.is_stalled = True
    await a_transaction(scene)
    scene.client.connection.flush()
    for worker in scene.workers:
        worker.connection.is_stalled = False


async def more_to_do(scene: Scene) -> None:
    scene.connect()
    scene.client.transport.feed(HOSTILE["links"].of(100_000))


async def refused_links(scene: Scene) -> None:
    scene.connect()
    scene.sender("nowhere")
    scene.client.attach(sender=False, address="nowhere")


async def a_session_that_has_ended(scene: Scene) -> None:
    scene.connect()
    scene.sender()
    scene.receiver()
    scene.client.say(END)


async def a_fault(scene: Scene) -> None:
    scene.connect()
    scene.sender()
    scene.client.transport.feed(b"nonsense" * 10)


async def a_close(scene: Scene) -> None:
    scene.connect()
    scene.sender()
    scene.receiver()
    scene.client.say(CLOSE)


async def the_end_of_the_gateway(scene: Scene) -> None:
    scene.connect()
    scene.sender()
    scene.receiver()
    scene.client.connection.shut_down()


async def a_client_that_does_not_read(scene: Scene) -> None:
    await deliveries(scene)
    scene.client.connection.pause_writing()
    await scene.answer()


async def a_named_session(scene: Scene) -> None:
    scene.connect()
    scene.receiver(filters=SESSION_FILTER)
    await scene.opened()


async def the_next_session(scene: Scene) -> None:
    scene.connect()
    scene.receiver(filters=NEXT_SESSION)


def are_back(workers: list[Worker]) -> None:
    for number, worker in enumerate(workers):
        worker.transport.ended = False
        worker.transport.connect()
        worker.say([Op.HELLO, VERSION, [number]])


async def what_waits_for_a_worker(scene: Scene) -> None:
    are_back(scene.workers)
    await a_transaction(scene)
    for worker in scene.workers:
        worker.lose()
    scene.client.next_delivery_id = 3
    scene.client.transfer(scene.sender(), KEYED)
    scene.client.transfer(scene.sender(), message(b"x"))
    body = encode(Described(ULong(0x77), {"from-sequence-number": Long(0), "message-count": Int(1)}))
    asked = encode(Described(ULong(0x74), {"operation": "com.microsoft:peek-message"})) + body
    scene.client.transfer(scene.sender("orders/$management"), asked)
    assert any(len(worker.connection._waiting) for worker in scene.workers)


async def a_session_that_waits_for_a_worker(scene: Scene) -> None:
    are_back(scene.workers)
    for worker in scene.workers:
        worker.lose()
    scene.connect()
    for filters in (SESSION_FILTER, NEXT_SESSION):
        scene.receiver(filters=filters)
    assert any(len(worker.connection._waiting) for worker in scene.workers)


STATES: list[State] = [
    what_waits_for_a_worker,
    nothing,
    half_of_sasl,
    open_connection,
    begun_messages,
    a_frame_that_is_not_whole,
    messages_that_wait_for_answers,
    messages_that_are_answered,
    deliveries,
    deliveries_that_are_deleted,
    deliveries_that_wait_for_the_window,
    requests,
    responses_without_credit,
    a_token,
    a_transaction,
    a_transaction_at_a_worker_that_does_not_answer,
    more_to_do,
    refused_links,
    a_session_that_has_ended,
    a_fault,
    a_close,
    the_end_of_the_gateway,
    a_client_that_does_not_read,
]
OF_SESSIONS: list[State] = [a_named_session, the_next_session, a_session_that_waits_for_a_worker]
CASES = [
    *((state, workers, {}) for state in STATES for workers in (1, 3)),
    *((state, workers, {"requires_session": True}) for state in OF_SESSIONS for workers in (1, 3)),
]


@pytest.mark.parametrize("dies", [False, True], ids=["answers", "worker dies"])
@pytest.mark.parametrize(
    ("state", "workers", "properties"), CASES, ids=[f"{state.__name__}-{workers}" for state, workers, _ in CASES]
)
def test_nothing_of_a_connection_lives_on(
    state: State, workers: int, properties: dict[str, Any], dies: bool, tmp_path: Path
) -> None:
    async def end_one(gateway: Gateway, all_: list[Worker], leftovers: Leftovers | None) -> None:
        scene = Scene(gateway, all_)
        connection = scene.client.connection
        await state(scene)
        if leftovers is not None:
            leftovers.ended(connection, *filter(None, [getattr(connection, "engine", None)]))
        scene.client.transport.abort()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert connection.state is life.State.ENDED
        if dies:
            for worker in all_:
                worker.lose()
        else:
            await scene.answer()

    async def run() -> None:
        gateway, all_ = gateway_with_workers(tmp_path, workers, **properties)
        await end_one(gateway, all_, None)  # what is made once is made
        if dies:
            all_ = [Worker(worker.connection, number) for number, worker in enumerate(all_)]
        with Leftovers("broker", "protocol", "tests") as leftovers:
            await end_one(gateway, all_, leftovers)
            for _ in range(3):
                await asyncio.sleep(0)
        assert not gateway.metrics.connection_failures
        assert gateway.unfinished.held_bytes == 0
        assert QUEUE_ID

    asyncio.run(run())
