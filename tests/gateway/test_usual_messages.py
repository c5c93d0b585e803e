"""Usual messages, which the extension takes if it is there: what they are beside, and where they end."""

from typing import Any

import pytest

from broker import runs, wire
from broker.errors import EntityNotFound
from broker.wire import Extra, Op, Outcome
from protocol.codec import Described, UInt, ULong, encode
from protocol.extension import extension
from storage.records import NEVER, encode_message, message_expires_ms
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, REJECTED, TRANSFER, message, outcome
from tests.gateway.in_process import Client, Worker, started_gateway

EXPIRING = encode(Described(ULong(0x70), [None, None, UInt(60_000)]))
FIRST_ACQUIRER = encode(Described(ULong(0x70), [None, None, None, True]))


class Scene:
    def __init__(self, directory: Any, **properties: Any) -> None:
        self.gateway, self.worker = started_gateway(directory, **properties)
        self.client = Client(self.gateway)
        self.client.connect()

    @property
    def link(self) -> Any:
        [link] = self.client.connection.engine.links.values()
        return link

    @property
    def channel(self) -> int:
        channel: int = getattr(self.link.context, "_only").number  # noqa: B009 - of senders and receivers
        return channel


def bodies(worker_commands: list[list[Any]]) -> list[bytes]:
    return [each[1][-1:] for command in worker_commands if command[0] == Op.SEND for each in command[4]]


async def test_usual_and_unusual_messages_stay_in_order(tmp_path):
    scene = Scene(tmp_path)
    handle = scene.client.attach(sender=True, address="orders")
    await scene.worker.commands()
    numbers = [
        scene.client.transfer(
            handle, (FIRST_ACQUIRER if number % 3 == 0 else b"") + message(bytes((number,))), settled=number == 4
        )
        for number in range(9)
    ]
    sends = [command for command in await scene.worker.commands() if command[0] == Op.SEND]
    assert bodies(sends) == [bytes((number,)) for number in range(9)]
    scene.client.frames()
    scene.worker.say([Op.SENT, scene.channel, 9])
    told = [frame.fields for frame in scene.client.frames() if frame.code == DISPOSITION]
    ids = [
        each
        for first, last in [(f[1], f[1] if f[2] is None else f[2]) for f in told]
        for each in range(first, last + 1)
    ]
    assert ids == [number for number in numbers if number != 4]


@pytest.mark.parametrize("version", [wire.VERSION_WITH_TIMES_TO_LIVE - 1, wire.VERSION])
async def test_a_worker_gets_times_to_live_as_its_version_takes_them(tmp_path, version):
    scene = Scene(tmp_path)
    scene.worker = Worker(scene.worker.connection, version=version)
    handle = scene.client.attach(sender=True, address="orders")
    await scene.worker.commands()
    for expiring in (b"", EXPIRING, b""):
        scene.client.transfer(handle, expiring + message(b"body"))
    commands = await scene.worker.commands(as_they_are=True)
    sent = [each[2] for command in commands if command[0] == Op.SEND for each in command[4]]
    records = [each for command in commands if command[0] == Op.SEND_RUN for each in runs.records_of(command[5])]
    in_runs = [message_expires_ms(each) for each in records]
    if extension is None:
        assert sent == [None, 60_000, None]
    elif version < wire.VERSION_WITH_TIMES_TO_LIVE:
        assert (sent, in_runs) == ([60_000], [0, 0])
    else:
        assert (sent, in_runs) == ([], [0, 60_000, 0])


async def test_what_comes_after_the_broker_has_closed_the_link_is_not_stored(tmp_path):
    scene = Scene(tmp_path)
    handle = scene.client.attach(sender=True, address="orders")
    scene.client.transfer(handle, message(b"stored"))
    await scene.worker.commands()
    connection = scene.client.connection
    connection.detach(scene.link, EntityNotFound("gone"))
    connection.flush()
    scene.client.transfer(handle, message(b"too late"))
    assert bodies(await scene.worker.commands()) == []
    assert not scene.client.has_ended


async def test_deliveries_of_several_links_come_together(tmp_path):
    scene = Scene(tmp_path)
    channels = []
    for credit in (3, 3, 0):
        scene.client.attach(sender=False, address="orders", credit=credit)
        channels.append([*scene.worker.connection.channels][-1])
    await scene.worker.commands()
    record = encode_message(1, NEVER, bytes(16), message(b"body"))
    run = len(record).to_bytes(4, "big") + record
    tokens = [bytes(8) + number.to_bytes(8, "big") for number in range(1, 9)]
    gone = max(channels) + 1
    scene.worker.say(
        [
            Op.DELIVER_RUNS,
            [
                [channels[0], 1000, [tokens[0], 7, 0, 1, run]],
                [gone, 1000, [tokens[1], 8, 0, 1, run]],
                [channels[1], 1000, [tokens[2], 9, 0, 2, run * 2]],
                [channels[2], 1000, [tokens[4], 11, 0, 1, run]],
                [channels[0], 1000, [tokens[5], 12, 0, 1, run]],
            ],
        ]
    )
    ids = [frame.fields[1] for frame in scene.client.frames() if frame.code == TRANSFER]
    assert len(ids) == 4
    [given_back] = [c for c in await scene.worker.commands() if c[0] == Op.SETTLE]
    assert given_back[3:6] == [Outcome.RELEASED, [0, 1], tokens[4:5]]
    scene.client.say(DISPOSITION, True, ids[0], ids[-1], False, outcome(ACCEPTED))
    [settled] = [c for c in await scene.worker.commands() if c[0] == Op.SETTLE]
    counted = settled[4]
    of_channels = [counted[at] for at in range(0, len(counted), 2) for _ in range(counted[at + 1])]
    one, other, _ = channels
    assert dict(zip(settled[5], of_channels, strict=True)) == dict(
        zip((tokens[0], tokens[2], tokens[3], tokens[5]), (one, other, other, one), strict=True)
    )


@pytest.mark.parametrize("is_settled", [False, True])
async def test_accepted_deliveries_are_settled_in_order_with_others(tmp_path, is_settled):
    scene = Scene(tmp_path)
    scene.client.attach(sender=False, address="orders", credit=10)
    record = encode_message(1, NEVER, bytes(16), message(b"body"))
    run = b"".join(len(each).to_bytes(4, "big") + each for each in [record] * 4)
    first = bytes(8) + (1).to_bytes(8, "big")
    scene.worker.say([Op.DELIVER_RUN, scene.channel, 1000, first, 7, 0, 4, run])
    expiring = encode_message(1, 9_000_000_000_000, bytes(16), message(b"body"))
    tokens = [bytes(8) + number.to_bytes(8, "big") for number in range(1, 6)]
    scene.worker.say([Op.DELIVER, scene.channel, 1000, [tokens[4], 11, 0, expiring, None]])
    ids = [frame.fields[1] for frame in scene.client.frames() if frame.code == TRANSFER]
    assert len(ids) == 5
    await scene.worker.commands()
    released = Described(ULong(0x26), [])
    scene.client.say(DISPOSITION, True, ids[0], ids[1], is_settled, outcome(ACCEPTED))
    scene.client.say(DISPOSITION, True, ids[2], ids[2], is_settled, released)
    scene.client.say(DISPOSITION, True, ids[3], ids[4], is_settled, outcome(ACCEPTED))
    settled = [(c[3], list(c[4]), list(c[5])) for c in await scene.worker.commands() if c[0] == Op.SETTLE]
    channel = 0 if is_settled else scene.channel
    assert settled == [
        (Outcome.ACCEPTED, [channel, 2], tokens[:2]),
        (Outcome.RELEASED, [channel, 1], tokens[2:3]),
        (Outcome.ACCEPTED, [channel, 2], tokens[3:]),
    ]
    if not is_settled:
        scene.worker.say(*[[Op.SETTLED, [channel, count]] for count in (2, 1, 2)])
        told = [frame.fields for frame in scene.client.frames() if frame.code == DISPOSITION]
        assert sum((last or first) - first + 1 for _, first, last, *_ in told) == 5
    assert scene.link.unsettled == 0


@pytest.mark.parametrize("requires_session", [False, True])
async def test_a_session_id_comes_with_its_message(tmp_path, requires_session):
    scene = Scene(tmp_path, requires_session=requires_session)
    handle = scene.client.attach(sender=True, address="orders")
    await scene.worker.commands()
    names = ["one", None, "", "two"]
    numbers = [
        scene.client.transfer(
            handle, encode(Described(ULong(0x73), ["id", *[None] * 9, name])) + message(b"%d" % number)
        )
        for number, name in enumerate(names)
    ]
    told = [frame.fields for frame in scene.client.frames() if frame.code == DISPOSITION]
    assert [(fields[1], fields[4].descriptor) for fields in told] == [(numbers[1], REJECTED)] * requires_session
    sends = [command for command in await scene.worker.commands() if command[0] == Op.SEND]
    sessions = [(each[3] or {}).get(Extra.SESSION_ID) for command in sends for each in command[4]]
    assert sessions == [name for name in names if name is not None or not requires_session]
