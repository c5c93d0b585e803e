"""What clients begin while a worker is away, in a gateway without sockets: it is done when the worker is back, or not
at all."""

import asyncio
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from broker import requests
from broker.gateway.links.receivers import OPEN_BYTES
from broker.gateway.waiting_room import REPEATED, Bounds
from broker.namespace.fragments import fragment_of
from broker.partition import requests as handlers
from broker.wire import Op
from protocol.codec import Array, Described, Int, Long, Symbol, Timestamp, UByte, UInt, ULong, encode
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    TRANSFER,
    Frame,
    error_of,
    message,
    outcome,
    source,
    target,
)
from tests.gateway.in_process import Client, Worker, gateway_with_workers
from tests.patience import until

BUSY = "com.microsoft:server-busy"
NAMED = {Symbol("com.microsoft:session-filter"): "s"}
NEXT = {Symbol("com.microsoft:session-filter"): None}
SENDS = (Op.SEND, Op.SEND_BATCH)
TIMEOUT = "com.microsoft:timeout"
SESSION_LOST = "com.microsoft:session-lock-lost"


def asking(operation: str, body: Any) -> bytes:
    sections = (
        (0x73, ["1", None, None, None, "here"]),
        (0x74, {"operation": f"com.microsoft:{operation}"}),
        (0x77, body),
    )
    return b"".join(encode(Described(ULong(code), section)) for code, section in sections)


PEEK = asking("peek-message", {"from-sequence-number": Long(0), "message-count": Int(1)})
RENEW = asking("renew-lock", {"lock-tokens": Array(UUID, (UUID(int=1),))})
GET_STATE = asking("get-session-state", {"session-id": "s"})
SET_STATE = asking("set-session-state", {"session-id": "s", "session-state": b"state"})
CANCEL = asking("cancel-scheduled-message", {"sequence-numbers": Array(Long, (Long(1),))})
SCHEDULE = asking(
    "schedule-message",
    {
        "messages": [
            {
                "message-id": "id",
                "message": message(b"m", annotations={Symbol("x-opt-scheduled-enqueue-time"): Timestamp(1 << 42)}),
            }
        ]
    },
)


class Scene:
    """A client and some workers, which are lost and come back."""

    def __init__(self, directory: Path, workers: int = 1, bounds: Bounds | None = None, **properties: Any) -> None:
        self.gateway, self.workers = gateway_with_workers(directory, workers, **properties)
        if bounds is not None:
            for connection in self.gateway.router.workers:
                connection._waiting._bounds = bounds
        self.client = self.connected()

    def connected(self) -> Client:
        client = Client(self.gateway)
        client.connect()
        client.frames()
        return client

    def sender(self, address: str = "orders") -> int:
        handle = self.client.attach(sender=True, address=address)
        self.client.frames()
        return handle

    def requester(self) -> int:
        handle = self.sender("orders/$management")
        self.client.attach(sender=False, address="orders/$management", credit=10)
        self.client.frames()
        return handle

    def session_receiver(self, filters: Any, wait_ms: int | None = None) -> int:
        client, handle = self.client, self.client.next_handle
        client.next_handle += 1
        ends = source("orders", filters=filters), target("here")
        fields: list[Any] = [f"link-{handle}", UInt(handle), True, UByte(0), UByte(0), *ends]
        if wait_ms is not None:
            fields += [None] * 6 + [{Symbol("com.microsoft:timeout"): UInt(wait_ms)}]
        client.say(ATTACH, *fields)
        return handle

    def ends(self) -> list[Any]:
        """`ATTACH` for each session that a link got, the condition for each link that was detached."""
        frames = [frame for frame in self.client.frames() if frame.code in (ATTACH, DETACH)]
        ends = [ATTACH if frame.code == ATTACH else error_of(frame)[0] for frame in frames]
        # A link that is refused is attached without a source, and detached.
        refused = {frame.fields[1] for frame in frames if frame.code == ATTACH and frame.fields[5] is None}
        return [
            each
            for frame, each in zip(frames, ends, strict=True)
            if frame.code != ATTACH or frame.fields[1] not in refused
        ]

    def lose(self, *numbers: int) -> None:
        for number in numbers or range(len(self.workers)):
            self.workers[number].lose()

    def back(self, *numbers: int) -> None:
        for number in numbers or range(len(self.workers)):
            self.workers[number] = Worker(self.workers[number].connection, number)

    def is_over(self) -> None:
        """The time to wait is."""
        self.gateway.router.await_no_more()

    async def commands(self, *codes: int, number: int = 0) -> list[list[Any]]:
        found = await self.workers[number].commands()
        return [each for each in found if not codes or each[0] in codes]

    def answers(self) -> list[Any]:
        """The state of each disposition, or its error's condition."""
        frames = [frame for frame in self.client.frames() if frame.code == DISPOSITION]
        return [state for frame in frames for state in [self._answer(frame)] * self._count(frame)]

    def _answer(self, frame: Frame) -> Any:
        return ACCEPTED if frame.fields[4] == outcome(ACCEPTED) else error_of(frame)[0]

    def _count(self, frame: Frame) -> int:
        first, last = frame.fields[1], frame.fields[2]
        return 1 if last is None else last - first + 1

    def nothing_waits(self) -> bool:
        return not any(len(each._waiting) for each in self.gateway.router.workers)


def of_worker(number: int, workers: int) -> bytes:
    keys = (f"key-{index}" for index in range(1000))
    key = next(key for key in keys if fragment_of(key.encode(), range(workers)) == number)
    return message(b"m", annotations={Symbol("x-opt-partition-key"): key})


def bodies(commands: list[list[Any]]) -> list[bytes]:
    return [bytes(each[1])[-1:] for command in commands for each in command[4]]


async def test_messages_wait_for_the_worker_and_are_answered_as_it_does(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sender = scene.sender()
    scene.lose()
    for body in (b"0", b"1"):
        scene.client.transfer(sender, message(body))
    scene.client.transfer(sender, message(b"2"), settled=True)
    assert scene.answers() == []
    scene.back()
    scene.client.transfer(sender, message(b"3"))
    sends = await scene.commands(*SENDS)
    assert bodies(sends) == [b"0", b"1", b"2", b"3"]
    for command in sends:
        scene.workers[0].say([Op.SENT, command[2], len(command[4])])
    assert scene.answers() == [ACCEPTED] * 3
    assert scene.nothing_waits()


async def test_what_the_worker_had_got_is_not_sent_again(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sender = scene.sender()
    scene.client.transfer(sender, message(b"0"))
    assert bodies(await scene.commands(*SENDS)) == [b"0"]
    scene.lose()
    assert scene.answers() == ["com.microsoft:timeout"]
    scene.client.transfer(sender, message(b"1"))
    scene.back()
    assert bodies(await scene.commands(*SENDS)) == [b"1"]
    scene.lose()
    assert scene.answers() == ["com.microsoft:timeout"]
    scene.back()
    assert await scene.commands(*SENDS) == []


async def test_when_the_time_is_over_all_are_refused(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sender = scene.sender()
    scene.lose()
    for body in (b"0", b"1"):
        scene.client.transfer(sender, message(body))
    scene.is_over()
    assert scene.answers() == [BUSY] * 2
    scene.client.transfer(sender, message(b"2"))
    assert scene.answers() == [BUSY]
    scene.back()
    assert await scene.commands(*SENDS) == []
    scene.client.transfer(sender, message(b"3"))
    assert bodies(await scene.commands(*SENDS)) == [b"3"]


async def test_the_time_ends_by_itself(tmp_path: Path) -> None:
    scene = Scene(tmp_path, bounds=Bounds(0.01, 10, 1000))
    sender = scene.sender()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    [connection] = scene.gateway.router.workers
    await until(lambda: not connection.is_awaited)
    assert scene.answers() == [BUSY]


async def test_a_worker_that_hung_before_is_not_waited_for(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sender = scene.sender()
    [connection] = scene.gateway.router.workers
    connection._stall()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    assert scene.answers() == [BUSY]


@pytest.mark.parametrize("bounds", [Bounds(3, 2, 1 << 20), Bounds(3, 10, 2500)], ids=["number", "bytes"])
async def test_a_link_whose_messages_find_no_room_is_refused(tmp_path: Path, bounds: Bounds) -> None:
    """All of them: they are answered in their order."""
    scene = Scene(tmp_path, bounds=bounds)
    first, second = scene.sender(), scene.sender()
    scene.lose()
    for sender, body in ((first, b"0"), (second, b"1"), (second, b"2")):
        scene.client.transfer(sender, message(bytes(1000) + body))
    assert scene.answers() == [BUSY] * 2
    scene.client.transfer(second, message(b"3"))  # there is room again
    scene.back()
    assert bodies(await scene.commands(*SENDS)) == [b"0", b"3"]


async def test_no_link_of_a_session_waits_beyond_the_bounds(tmp_path: Path) -> None:
    scene = Scene(tmp_path, bounds=Bounds(3, 10, 2 * OPEN_BYTES), requires_session=True)
    scene.lose()
    for _ in range(3):
        scene.session_receiver(NAMED)
    assert [error_of(frame)[0] for frame in scene.client.frames() if frame.code == DETACH] == [BUSY]


async def test_a_link_that_was_detached_has_nothing_done(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sender, other = scene.sender(), scene.sender()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    scene.client.transfer(other, message(b"1"))
    scene.client.say(DETACH, UInt(sender), True)
    scene.back()
    assert bodies(await scene.commands(*SENDS)) == [b"1"]


@pytest.mark.parametrize("workers", [1, 3])
async def test_a_client_that_is_gone_has_nothing_done(tmp_path: Path, workers: int) -> None:
    scene = Scene(tmp_path, workers)
    sender, requester = scene.sender(), scene.requester()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    scene.client.transfer(requester, PEEK)
    assert not scene.nothing_waits()
    scene.client.transport.abort()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert scene.nothing_waits()
    scene.back()
    for number in range(workers):
        assert await scene.commands(*SENDS, Op.REQUEST, Op.MARK, number=number) == []


async def test_requests_wait_for_the_worker(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    requester = scene.requester()
    scene.lose()
    scene.client.transfer(requester, PEEK)
    assert not any(frame.code == TRANSFER for frame in scene.client.frames())
    scene.back()
    [request] = await scene.commands(Op.REQUEST)
    scene.workers[0].say([Op.REPLY, request[2], [[], {}]])
    assert any(frame.code == TRANSFER for frame in scene.client.frames())


async def test_requests_that_waited_are_answered_when_the_time_is_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    requester = scene.requester()
    scene.lose()
    for _ in range(20):  # more than may have large answers at once
        scene.client.transfer(requester, PEEK)
    scene.is_over()
    [*responses] = [frame for frame in scene.client.frames() if frame.code == TRANSFER]
    assert len(responses) == 10  # its credit
    assert all(b"server-busy" in frame.payload for frame in responses)


async def test_requests_of_a_link_that_was_detached_are_not_done_and_leave_room_for_others(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    requester, other = scene.requester(), scene.requester()
    scene.lose()
    for _ in range(20):
        scene.client.transfer(requester, PEEK)
    scene.client.say(DETACH, UInt(requester), True)
    scene.client.transfer(other, PEEK)
    scene.back()
    assert len(await scene.commands(Op.REQUEST)) == 1


@pytest.mark.parametrize("filters", [NAMED, NEXT], ids=["named", "next"])
async def test_who_wants_a_session_waits_for_the_worker(tmp_path: Path, filters: Any) -> None:
    scene = Scene(tmp_path, requires_session=True)
    scene.lose()
    scene.session_receiver(filters)
    assert not any(frame.code in (ATTACH, DETACH) for frame in scene.client.frames())
    scene.back()
    [opened] = await scene.commands(Op.OPEN_RECEIVER)
    scene.workers[0].say([Op.OPENED, opened[2], "s", 1])
    assert any(frame.code == ATTACH for frame in scene.client.frames())


async def test_who_wants_a_session_is_told_when_the_time_is_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, requires_session=True)
    scene.lose()
    scene.session_receiver(NAMED)
    scene.is_over()
    assert [error_of(frame)[0] for frame in scene.client.frames() if frame.code == DETACH] == [BUSY]
    scene.back()
    assert await scene.commands(Op.OPEN_RECEIVER) == []


async def test_a_message_without_a_key_goes_to_another_fragment_at_once(tmp_path: Path) -> None:
    scene = Scene(tmp_path, workers=3)
    sender = scene.sender()
    scene.lose(0, 1)
    scene.client.transfer(sender, message(b"0"))
    assert bodies(await scene.commands(*SENDS, number=2)) == [b"0"]


async def test_a_message_with_a_key_waits_for_its_fragment(tmp_path: Path) -> None:
    scene = Scene(tmp_path, workers=3)
    sender = scene.sender()
    scene.lose(1)
    scene.client.transfer(sender, of_worker(1, 3))
    assert scene.answers() == []
    scene.back(1)
    [command] = await scene.commands(*SENDS, number=1)
    scene.workers[1].say([Op.SENT, command[2], 1])
    assert scene.answers() == [ACCEPTED]


async def test_if_every_fragment_is_away_a_message_without_a_key_waits_with_its_mark(tmp_path: Path) -> None:
    scene = Scene(tmp_path, workers=3)
    sender = scene.sender()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    assert scene.answers() == []
    scene.back()
    found = [await scene.commands(Op.MARK, *SENDS, number=number) for number in range(3)]
    [(number, commands)] = [(number, each) for number, each in enumerate(found) if each]
    assert [each[0] for each in commands] == [Op.MARK, Op.SEND]
    scene.lose(number)  # before it answers: it is asked what it has, and the message goes nowhere else
    assert scene.answers() == []
    scene.back(number)
    [asked] = await scene.commands(Op.REQUEST, number=number)
    assert asked[3] == "stored"


async def test_an_older_worker_that_comes_back_gets_no_marks_and_no_runs(tmp_path: Path) -> None:
    scene = Scene(tmp_path, workers=3)
    sender = scene.sender()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    for number in range(3):
        scene.workers[number] = Worker(scene.workers[number].connection, number, version=1)
    found = [await scene.workers[number].commands() for number in range(3)]
    assert [[each[0] for each in commands] for commands in found if commands] == [[Op.SEND]]


async def test_when_the_gateway_stops_nothing_waits(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    sender = scene.sender()
    scene.lose()
    scene.client.transfer(sender, message(b"0"))
    stopping = asyncio.create_task(scene.gateway._stop())
    await asyncio.sleep(0)
    assert scene.answers() == [BUSY]
    scene.client.transport.abort()
    await stopping


async def test_what_the_gateway_itself_asks_does_not_wait(tmp_path: Path) -> None:
    """Metrics and health say at once what is."""
    scene = Scene(tmp_path)
    scene.lose()
    replies: list[Any] = []
    scene.gateway.router.request(0, 0, requests.Metrics(), lambda _, error: replies.append(error), waits=False)
    assert len(replies) == 1


async def test_a_request_over_http_that_is_given_up_is_not_done(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.lose()
    asking = asyncio.create_task(scene.gateway.router.ask(0, 0, requests.Counts()))
    await asyncio.sleep(0)
    assert not scene.nothing_waits()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert scene.nothing_waits()


# -- under way when the worker dies


@pytest.mark.parametrize("payload", [PEEK, RENEW, GET_STATE], ids=["peek", "renew", "get-state"])
async def test_a_request_that_changes_nothing_twice_is_asked_again(tmp_path: Path, payload: bytes) -> None:
    scene = Scene(tmp_path)
    requester = scene.requester()
    scene.client.transfer(requester, payload)
    [first] = await scene.commands(Op.REQUEST)
    scene.lose()
    assert not any(frame.code == TRANSFER for frame in scene.client.frames())
    scene.back()
    [again] = await scene.commands(Op.REQUEST)
    assert again[3:] == first[3:]
    scene.workers[0].say([Op.FAILED, again[2], "LockLost", "It is lost."])
    [response] = [frame for frame in scene.client.frames() if frame.code == TRANSFER]
    assert b"It is lost." in response.payload
    assert scene.nothing_waits()


@pytest.mark.parametrize("payload", [SET_STATE, SCHEDULE, CANCEL], ids=["set-state", "schedule", "cancel"])
async def test_a_request_that_might_be_done_twice_is_not_asked_again(tmp_path: Path, payload: bytes) -> None:
    scene = Scene(tmp_path)
    requester = scene.requester()
    scene.client.transfer(requester, payload)
    assert len(await scene.commands(Op.REQUEST)) == 1
    scene.lose()
    [response] = [frame for frame in scene.client.frames() if frame.code == TRANSFER]
    assert TIMEOUT.encode() in response.payload
    scene.back()
    assert await scene.commands(Op.REQUEST) == []


async def test_what_was_under_way_comes_before_what_began_later(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    requester = scene.requester()
    scene.client.transfer(requester, PEEK)
    assert len(await scene.commands(Op.REQUEST)) == 1
    scene.lose()
    scene.client.transfer(requester, CANCEL)
    scene.back()
    assert [each[3] for each in await scene.commands(Op.REQUEST)] == ["peek", "cancel-scheduled"]


async def test_what_was_under_way_is_told_when_it_may_not_wait(tmp_path: Path) -> None:
    """Because there is no room, or because the worker has hung before."""
    scene = Scene(tmp_path, bounds=Bounds(3, 1, 1 << 20))
    requester = scene.requester()
    for _ in range(2):
        scene.client.transfer(requester, PEEK)
    assert len(await scene.commands(Op.REQUEST)) == 2
    scene.lose()
    [response] = [frame for frame in scene.client.frames() if frame.code == TRANSFER]
    assert TIMEOUT.encode() in response.payload
    scene.back()
    assert len(await scene.commands(Op.REQUEST)) == 1
    [connection] = scene.gateway.router.workers
    connection._stall()
    scene.lose()
    [response] = [frame for frame in scene.client.frames() if frame.code == TRANSFER]
    assert TIMEOUT.encode() in response.payload


async def test_what_was_under_way_and_is_not_done_in_time_is_refused(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    requester = scene.requester()
    scene.client.transfer(requester, PEEK)
    scene.lose()
    scene.is_over()
    [response] = [frame for frame in scene.client.frames() if frame.code == TRANSFER]
    assert BUSY.encode() in response.payload


def test_each_request_that_is_asked_again_is_one_of_the_partitions() -> None:
    assert {*handlers._OF_QUEUE, *handlers._OF_PARTITION} > {*REPEATED}


@pytest.mark.parametrize("filters", [NAMED, NEXT], ids=["named", "next"])
async def test_who_waits_for_a_session_when_the_worker_dies_asks_the_next_one(tmp_path: Path, filters: Any) -> None:
    scene = Scene(tmp_path, requires_session=True)
    scene.session_receiver(filters, wait_ms=60_000)
    [first] = await scene.commands(Op.OPEN_RECEIVER)
    assert first[5][1] == 60_000
    scene.lose()
    assert scene.ends() == []
    await asyncio.sleep(0.002)
    scene.back()
    [opened] = await scene.commands(Op.OPEN_RECEIVER)
    assert opened[5][0] == first[5][0]
    assert 0 < opened[5][1] < 60_000  # what is left of the client's time
    scene.workers[0].say([Op.OPENED, opened[2], "s", 1])
    assert scene.ends() == [ATTACH]
    scene.lose()
    assert scene.ends() == [SESSION_LOST]


async def test_who_waits_for_a_session_no_longer_is_told_so_by_the_next_worker(tmp_path: Path) -> None:
    scene = Scene(tmp_path, requires_session=True)
    scene.session_receiver(NEXT, wait_ms=1)
    scene.lose()
    await asyncio.sleep(0.002)
    scene.back()
    [opened] = await scene.commands(Op.OPEN_RECEIVER)
    assert opened[5] == [None, 0]


async def test_who_waits_for_a_session_is_refused_when_the_time_is_over(tmp_path: Path) -> None:
    scene = Scene(tmp_path, requires_session=True)
    scene.session_receiver(NAMED)
    scene.lose()
    scene.is_over()
    assert scene.ends() == [BUSY]
    scene.back()
    assert await scene.commands(Op.OPEN_RECEIVER) == []


async def test_who_waits_for_a_session_of_a_worker_that_hung_is_refused(tmp_path: Path) -> None:
    scene = Scene(tmp_path, requires_session=True)
    scene.session_receiver(NAMED)
    [connection] = scene.gateway.router.workers
    connection._stall()
    scene.lose()
    assert scene.ends() == [BUSY]


async def test_who_waits_for_a_session_and_has_gone_asks_nobody(tmp_path: Path) -> None:
    scene = Scene(tmp_path, requires_session=True)
    handle = scene.session_receiver(NAMED)
    scene.lose()
    scene.client.say(DETACH, UInt(handle), True)
    assert scene.nothing_waits()
    scene.back()
    assert await scene.commands(Op.OPEN_RECEIVER) == []


async def test_the_next_session_is_awaited_on_the_fragments_that_are_lost_as_well(tmp_path: Path) -> None:
    scene = Scene(tmp_path, workers=2, requires_session=True)
    scene.session_receiver(NEXT, wait_ms=60_000)
    asked = [await scene.commands(Op.OPEN_RECEIVER, number=number) for number in range(2)]
    first = next(number for number, commands in enumerate(asked) if commands)
    scene.workers[first].say([Op.CLOSED, asked[first][0][2], "OperationTimeout", "none"])
    for number in range(2):  # it waits on both
        [opened] = await scene.commands(Op.OPEN_RECEIVER, number=number)
        assert opened[5][1] > 0
    scene.lose(0, 1)
    assert scene.ends() == []
    scene.back(1)
    [opened] = await scene.commands(Op.OPEN_RECEIVER, number=1)
    scene.workers[1].say([Op.OPENED, opened[2], "s", 1])
    assert scene.ends() == [ATTACH]
    scene.back(0)
    assert await scene.commands(Op.OPEN_RECEIVER, number=0) == []  # nor does one wait there


async def test_the_first_fragment_that_is_asked_for_the_next_session_may_be_lost(tmp_path: Path) -> None:
    scene = Scene(tmp_path, workers=2, requires_session=True)
    scene.session_receiver(NEXT, wait_ms=60_000)
    asked = [await scene.commands(Op.OPEN_RECEIVER, number=number) for number in range(2)]
    first = next(number for number, commands in enumerate(asked) if commands)
    scene.lose(first)
    [other] = await scene.commands(Op.OPEN_RECEIVER, number=1 - first)
    scene.workers[1 - first].say([Op.CLOSED, other[2], "OperationTimeout", "none"])
    assert scene.ends() == []
    scene.back(first)
    [opened] = await scene.commands(Op.OPEN_RECEIVER, number=first)
    assert opened[5][1] > 0
    scene.workers[first].say([Op.OPENED, opened[2], "s", 1])
    assert scene.ends() == [ATTACH]
