"""Links to a partitioned queue in a gateway without sockets: what goes to which worker, and what their answers do."""

import asyncio
from bisect import bisect_right
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from broker.gateway.links import partitioned_receivers, partitioned_senders
from broker.gateway.links.session_links import FIRST_ANSWER_S
from broker.namespace.fragments import fragment_of
from broker.runs import run_of
from broker.wire import VERSION, VERSION_WITH_MARKS, Op, Outcome
from protocol.codec import Described, Symbol, UByte, UInt, ULong, encode
from storage.records import LAYOUT_BYTES, MESSAGE_HEADER_BYTES
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    DETACH,
    DISPOSITION,
    FLOW,
    REJECTED,
    TRANSFER,
    Frame,
    error_of,
    message,
    outcome,
    performative,
    source,
    target,
)
from tests.gateway.in_process import QUEUE_ID, Client, Worker, gateway_with_workers

WORKERS = 3
RECORD = bytes(8) + bytes(16) + bytes(LAYOUT_BYTES) + b"\x00\x53\x77\xa1\x01m"
assert len(RECORD) > MESSAGE_HEADER_BYTES


def keyed(key: str, body: bytes = b"m") -> bytes:
    annotations = encode(Described(ULong(0x72), {Symbol("x-opt-partition-key"): key}))
    return annotations + message(body)


def identified(message_id: str) -> bytes:
    return encode(Described(ULong(0x73), [message_id])) + message(b"m")


def id_of_worker(number: int) -> str:
    ids = (f"id-{index}" for index in range(1000))
    return next(each for each in ids if fragment_of(each.encode(), range(WORKERS)) == number)


def key_of_worker(number: int) -> str:
    """A key whose messages go to this worker's partition."""
    keys = (f"key-{index}" for index in range(1000))
    return next(key for key in keys if fragment_of(key.encode(), range(WORKERS)) == number)


class Scene:
    """One client with a sender and a receiver, and the other ends of the gateway's connections to its workers."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    async def begin(self, **properties: Any) -> None:
        """In the test's loop. `properties` are those of the queue."""
        self.gateway, self.workers = gateway_with_workers(self._directory, WORKERS, **properties)
        self.client = Client(self.gateway)
        self.client.connect()
        self.sender = self.client.attach(sender=True, address="orders")
        self.client.frames()
        for worker in self.workers:
            await worker.commands()

    def send_batch(self, *messages: bytes) -> None:
        """As the first delivery."""
        payload = b"".join(encode(Described(ULong(0x75), each)) for each in messages)
        fields = (UInt(self.sender), UInt(0), b"0", UInt(0x80013700), False)
        self.client.say(TRANSFER, *fields, payload=payload)

    async def sends(self) -> dict[int, list[list[Any]]]:
        """The commands with messages since the last call, by worker."""
        found = {}
        for number, worker in enumerate(self.workers):
            if not worker.transport.ended:
                commands = [each for each in await worker.commands() if each[0] in (Op.SEND, Op.SEND_BATCH)]
                if commands:
                    found[number] = commands
        return found

    async def took(self) -> Counter[int]:
        """The messages that each worker got since the last call."""
        return Counter({number: sum(len(each[4]) for each in found) for number, found in (await self.sends()).items()})

    def answer(self, number: int, command: list[Any], count: int | None = None) -> None:
        """The worker has stored so many of the deliveries, or all."""
        deliveries = 1 if command[0] == Op.SEND_BATCH else len(command[4])
        self.workers[number].say([Op.SENT, command[2], deliveries if count is None else count])

    def refuse(self, number: int, command: list[Any], error: str) -> None:
        deliveries = 1 if command[0] == Op.SEND_BATCH else len(command[4])
        self.workers[number].say([Op.REFUSED, command[2], deliveries, error, "it says why"])

    def lose(self, number: int) -> None:
        """The worker dies, and is not back as soon as clients can wait for."""
        self.workers[number].lose()
        self.workers[number].connection.await_no_more()

    def stall(self, number: int) -> None:
        """The worker has not answered for long."""
        self.gateway.router.busy_seconds = 1
        self.workers[number].connection._look()

    def restart(self, number: int, version: int = VERSION) -> None:
        self.workers[number] = Worker(self.workers[number].connection, number, version)

    def outcomes(self) -> dict[int, int]:
        """Delivery numbers of the client, and how they ended, since the last call."""
        found = {}
        for frame in self.client.frames():
            if frame.code == DISPOSITION:
                first, last = frame.fields[1], frame.fields[2]
                for number in range(first, (first if last is None else last) + 1):
                    found[number] = int(frame.fields[4].descriptor)
        return found


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


# Sending


async def test_messages_without_a_key_go_to_each_fragment_in_turn(scene: Scene) -> None:
    await scene.begin()
    order = []
    for _ in range(6):
        scene.client.transfer(scene.sender, message(b"m"))
        [(number, [command])] = (await scene.sends()).items()
        order.append(number)
        assert command[1] == number
        assert command[3] == QUEUE_ID
        scene.answer(number, command)
    assert order[:3] == order[3:]
    assert sorted(order[:3]) == [0, 1, 2]
    assert scene.outcomes() == dict.fromkeys(range(6), ACCEPTED)


async def test_messages_with_the_same_key_go_to_one_fragment(scene: Scene) -> None:
    await scene.begin()
    for number in range(WORKERS):
        for _ in range(4):
            scene.client.transfer(scene.sender, keyed(key_of_worker(number)))
            assert await scene.took() == {number: 1}


async def test_many_messages_of_one_read_are_cut_for_all_fragments(scene: Scene) -> None:
    """Of 1,000 credits each of three fragments gets a third at most, and each answer goes to the right deliveries."""
    await scene.begin()
    payloads = [identified(str(number)) for number in range(900)]
    scene.client.transport.feed(
        b"".join(
            performative(0, TRANSFER, [UInt(scene.sender), UInt(number), b"t", UInt(0), False], payload)
            for number, payload in enumerate(payloads)
        )
    )
    for _ in range(50):  # the read may be done in several steps
        await asyncio.sleep(0)
    sent = await scene.sends()
    stored = {number: [each[1] for command in found for each in command[4]] for number, found in sent.items()}
    assert sum(map(len, stored.values())) == 900
    assert max(map(len, stored.values())) == 333  # a read that is done in steps is cut at these, too
    [refused, *others] = sent
    for command in sent[refused]:
        scene.refuse(refused, command, "EntityDisabled")
    for number in others:
        for command in sent[number]:
            scene.answer(number, command)
    outcomes = scene.outcomes()
    of = {True: REJECTED, False: ACCEPTED}
    wanted = {body: of[number == refused] for number, found in stored.items() for body in found}
    assert {payloads[number]: told for number, told in outcomes.items()} == wanted


async def test_a_batch_goes_to_one_fragment_whole(scene: Scene) -> None:
    await scene.begin()
    scene.send_batch(message(b"a"), message(b"b"))
    [(number, [command])] = (await scene.sends()).items()
    assert command[0] == Op.SEND_BATCH
    assert len(command[4]) == 2
    scene.answer(number, command)
    assert scene.outcomes() == {0: ACCEPTED}


async def test_a_batch_with_several_keys_is_refused(scene: Scene) -> None:
    await scene.begin()
    scene.send_batch(keyed("a"), keyed("b"))
    assert await scene.sends() == {}
    [frame] = [frame for frame in scene.client.frames() if frame.code == DISPOSITION]
    [error, *_] = frame.fields[4].value
    assert error.value[0] == "amqp:not-allowed"
    assert "partition key" in error.value[1]


async def test_a_batch_of_several_ids_is_stored_in_parts_where_duplicates_are_detected(scene: Scene) -> None:
    await scene.begin(requires_duplicate_detection=True)
    ids = {number: id_of_worker(number) for number in (0, 2)}
    scene.send_batch(*(identified(name) for name in (ids[0], ids[2], ids[0])))
    sends = await scene.sends()
    assert {number: len(command[4]) for number, [command] in sends.items()} == {0: 2, 2: 1}
    scene.answer(0, sends[0][0])
    assert scene.outcomes() == {}
    scene.answer(2, sends[2][0])
    assert scene.outcomes() == {0: ACCEPTED}


async def test_a_batch_is_refused_if_a_part_of_it_is(scene: Scene) -> None:
    await scene.begin(requires_duplicate_detection=True)
    scene.send_batch(identified(id_of_worker(0)), identified(id_of_worker(2)))
    sends = await scene.sends()
    scene.refuse(2, sends[2][0], "QuotaExceeded")
    assert await scene.sends() == {}, "a message with an id has a key here"
    scene.answer(0, sends[0][0])
    assert scene.outcomes() == {0: REJECTED}


async def test_without_duplicate_detection_a_message_id_is_no_key(scene: Scene) -> None:
    await scene.begin()
    homes = set()
    for _ in range(WORKERS):
        scene.client.transfer(scene.sender, identified("id"))
        homes |= (await scene.took()).keys()
    assert homes == {0, 1, 2}


async def test_while_a_fragment_is_down_the_others_get_all_messages_without_a_key(scene: Scene) -> None:
    await scene.begin()
    scene.lose(1)
    for _ in range(6):
        scene.client.transfer(scene.sender, message(b"m"))
        [(number, [command])] = (await scene.sends()).items()
        assert number != 1
        scene.answer(number, command)
    assert scene.outcomes() == dict.fromkeys(range(6), ACCEPTED)


@pytest.mark.parametrize("in_batch", [False, True])
async def test_while_its_fragment_is_away_a_message_with_a_key_is_refused(scene: Scene, in_batch: bool) -> None:
    await scene.begin()
    scene.lose(1)
    (scene.send_batch if in_batch else partial(scene.client.transfer, scene.sender))(keyed(key_of_worker(1)))
    assert await scene.sends() == {}
    condition, text = refusal(scene)
    assert condition == "com.microsoft:server-busy"
    assert text.startswith("The fragment of 'orders' on partition 1 is away or does not answer now. Please wait 2 ")


async def test_while_all_fragments_are_away_a_message_without_a_key_is_refused(scene: Scene) -> None:
    await scene.begin()
    for number in range(WORKERS):
        scene.lose(number)
    scene.client.transfer(scene.sender, message(b"m"))
    condition, text = refusal(scene)
    assert condition == "com.microsoft:server-busy"
    assert text.startswith("Every fragment of 'orders' is away")


def refusal(scene: Scene) -> tuple[str, str]:
    [frame] = [frame for frame in scene.client.frames() if frame.code == DISPOSITION]
    return error_of(frame)


@pytest.mark.parametrize("error", ["ServerBusy", "QuotaExceeded", "PartitionParked"])
async def test_what_a_fragment_cannot_take_goes_to_another(scene: Scene, error: str) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    tried = []
    for _ in range(WORKERS - 1):
        [(number, [command])] = (await scene.sends()).items()
        tried.append(number)
        scene.refuse(number, command, error)
        assert scene.outcomes() == {}
    [(number, [command])] = (await scene.sends()).items()
    assert {*tried, number} == {0, 1, 2}
    scene.answer(number, command)
    assert scene.outcomes() == {0: ACCEPTED}


async def test_what_no_fragment_can_take_is_refused(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    for _ in range(WORKERS):
        [(number, [command])] = (await scene.sends()).items()
        scene.refuse(number, command, "QuotaExceeded")
    assert await scene.sends() == {}
    assert scene.outcomes() == {0: REJECTED}


async def test_a_message_with_a_key_is_refused_by_its_fragment_alone(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, keyed(key_of_worker(2)))
    [(number, [command])] = (await scene.sends()).items()
    scene.refuse(number, command, "QuotaExceeded")
    assert await scene.sends() == {}
    assert scene.outcomes() == {0: REJECTED}


async def test_a_fault_of_the_message_is_told_at_once(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    [(number, [command])] = (await scene.sends()).items()
    scene.refuse(number, command, "InvalidArgument")
    assert await scene.sends() == {}
    assert scene.outcomes() == {0: REJECTED}


async def test_what_a_fragment_of_an_older_version_had_when_it_ended_goes_to_others(scene: Scene) -> None:
    await scene.begin()
    for number in range(WORKERS):
        scene.lose(number)
        scene.restart(number, version=VERSION_WITH_MARKS - 1)
        await scene.workers[number].commands()
    numbers = [scene.client.transfer(scene.sender, message(b"%d" % index)) for index in range(9)]
    before = await scene.sends()
    victim, commands = max(before.items(), key=lambda item: item[0])
    scene.lose(victim)
    again = await scene.sends()
    assert victim not in again
    moved = [each[1] for found in again.values() for command in found for each in command[4]]
    assert moved == [each[1] for command in commands for each in command[4]]
    for found in (before, again):
        for number, sent in found.items():
            if number != victim:
                for command in sent:
                    scene.answer(number, command)
    assert scene.outcomes() == dict.fromkeys(numbers, ACCEPTED)


async def stored(scene: Scene, number: int) -> tuple[int, bytes]:
    """The number of the request with which the gateway asks the worker what it has stored, and the sender it names."""
    [[_, partition, request, name, queue, [sender]]] = [
        each for each in await scene.workers[number].commands() if each[0] == Op.REQUEST
    ]
    assert (partition, name, queue) == (number, "stored", 0)
    return request, sender


async def marks_of(scene: Scene, number: int) -> list[list[Any]]:
    return [each for each in await scene.workers[number].commands() if each[0] == Op.MARK]


def without(ranges: list[int], numbers: range) -> list[int]:
    """Those of `numbers` that are in no range."""
    return [each for each in numbers if bisect_right(ranges, each) % 2 == 0]


@pytest.mark.parametrize("ranges", [[], [0, 6], [0, 2], [4, 6], [1, 2, 3, 5], [0, 1, 5, 6], [0, 4]])
async def test_a_fragment_that_is_back_gets_again_what_it_has_not_stored(scene: Scene, ranges: list[int]) -> None:
    await scene.begin()
    scene.client.attach(sender=True, address="orders")
    scene.client.frames()
    for number in (1, 2):
        scene.lose(number)  # so that all goes to one
    sent = []
    for count in (1, 3, 2):
        data = b"".join(
            performative(
                0,
                TRANSFER,
                [UInt(scene.sender), UInt(len(sent) + each), b"%d" % (len(sent) + each), UInt(0), False],
                message(b"body %d" % (len(sent) + each)),
            )
            for each in range(count)
        )
        scene.client.transport.feed(data)
        sent += range(len(sent), len(sent) + count)
        await asyncio.sleep(0)
    assert await scene.took() == {0: 6}
    scene.lose(0)
    assert scene.outcomes() == {}, "nobody knows yet"
    scene.restart(0)
    request, _ = await stored(scene, 0)
    scene.workers[0].say([Op.REPLY, request, ranges])
    missing = without(ranges, range(6))
    assert scene.outcomes() == {each: ACCEPTED for each in sent if each not in missing}
    again = (await scene.sends()).get(0, [])
    bodies = [each[1] for command in again for each in command[4]]
    assert [body.endswith(b"body %d" % each) for body, each in zip(bodies, missing, strict=True)] == [True] * len(
        bodies
    )
    for command in again:
        scene.answer(0, command)
    assert scene.outcomes() == dict.fromkeys(missing, ACCEPTED)
    scene.client.transfer(scene.sender, message(b"next"))
    [[_, _, _, _, first, _, below]] = await marks_of(scene, 0)
    assert first == below == 6 + len(missing), "the fragment is asked for none of these any more"


async def test_marks_are_of_the_gateway_and_go_on_over_links_and_restarts(scene: Scene) -> None:
    await scene.begin()
    for number in (1, 2):
        scene.lose(number)
    other = Client(scene.gateway)
    other.connect()
    others = other.attach(sender=True, address="orders")
    scene.client.transfer(scene.sender, message(b"a"))
    other.transfer(others, message(b"b"))
    first, second = await marks_of(scene, 0)
    assert first[3] == second[3], "the gateway's random bytes"
    assert [first[4:], second[4:]] == [[0, 1, 0], [1, 1, 0]]
    other.say(DETACH, UInt(others), True)
    scene.lose(0)
    scene.restart(0)
    request, sender = await stored(scene, 0)
    assert sender == first[3]
    scene.workers[0].say([Op.REPLY, request, [0, 1]])
    assert scene.outcomes() == {0: ACCEPTED}
    scene.client.transfer(scene.sender, message(b"c"))
    [third] = await marks_of(scene, 0)
    assert third[3:] == [sender, 2, 1, 2]


async def test_what_a_fragment_had_that_is_not_back_in_time_goes_to_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_senders, "BACK_SECONDS", 0.0)
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    [(first, _)] = (await scene.sends()).items()
    scene.lose(first)
    await asyncio.sleep(0)  # its time is over
    await asyncio.sleep(0)
    [(second, [again])] = (await scene.sends()).items()
    scene.answer(second, again)
    assert scene.outcomes() == {0: ACCEPTED}
    scene.restart(first)
    assert not [each for each in await scene.workers[first].commands() if each[0] == Op.REQUEST], "nobody waits"


async def test_a_fragment_that_is_parked_when_it_is_back_is_passed_over(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    [(first, _)] = (await scene.sends()).items()
    scene.lose(first)
    scene.restart(first)
    request, _ = await stored(scene, first)
    scene.lose(first)  # it ends again before it has answered
    assert await scene.sends() == {}
    scene.restart(first)
    request, _ = await stored(scene, first)
    scene.workers[first].say([Op.FAILED, request, "PartitionParked", "damaged"])
    [(second, [again])] = (await scene.sends()).items()
    assert second != first
    scene.answer(second, again)
    assert scene.outcomes() == {0: ACCEPTED}


async def test_what_a_fragment_has_that_does_not_answer_for_long_goes_to_others(scene: Scene) -> None:
    await scene.begin()
    for _ in range(3):
        scene.client.transfer(scene.sender, message(b"m"))
    scene.client.transfer(scene.sender, keyed(key_of_worker(0)))
    before = await scene.sends()
    assert [len(each[4]) for each in before[0]] == [1, 1]
    for number in (1, 2):
        scene.answer(number, before[number][0])
    scene.outcomes()
    scene.stall(0)
    [(number, [again])] = (await scene.sends()).items()
    assert number != 0
    assert again[4] == before[0][0][4], "the one without a key"
    scene.answer(number, again)
    assert list(scene.outcomes().values()) == [ACCEPTED]
    for command in before[0]:
        scene.answer(0, command)  # it goes on after all; only the message with a key still waits for that
    assert scene.outcomes() == {3: ACCEPTED}
    scene.stall(0)
    scene.lose(0)
    assert await scene.sends() == {}
    assert scene.outcomes() == {}


async def test_what_went_to_another_fragment_does_not_go_again_when_the_first_one_ends(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    [(first, _)] = (await scene.sends()).items()
    scene.stall(first)
    [(second, [again])] = (await scene.sends()).items()
    scene.lose(first)
    assert await scene.sends() == {}
    scene.answer(second, again)
    assert scene.outcomes() == {0: ACCEPTED}


async def test_with_a_key_the_outcome_is_unknown_when_the_fragment_ends(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, keyed(key_of_worker(0)))
    assert await scene.took() == {0: 1}
    scene.lose(0)
    assert await scene.sends() == {}
    assert scene.outcomes() == {0: REJECTED}


async def test_a_slow_fragment_gets_only_its_share_of_the_credit(scene: Scene) -> None:
    """The others answer at once; it answers nothing."""
    await scene.begin()
    stuck = 0
    for _ in range(2000):
        scene.client.transfer(scene.sender, message(b"m"))
        for number, commands in (await scene.sends()).items():
            for command in commands:
                if number == 1:
                    stuck += len(command[4])
                else:
                    scene.answer(number, command)
    window = scene.gateway.settings.amqp.sender_credit
    assert stuck == window // WORKERS
    assert len(scene.outcomes()) == 2000 - stuck


async def test_answers_to_a_part_of_a_command_are_taken(scene: Scene) -> None:
    await scene.begin()
    worker = key_of_worker(1)
    numbers = [scene.client.transfer(scene.sender, keyed(worker)) for _ in range(4)]
    [commands] = (await scene.sends()).values()
    sent = sum(len(command[4]) for command in commands)
    assert sent == 4
    channel = commands[0][2]
    scene.workers[1].say([Op.SENT, channel, 3])
    assert scene.outcomes() == dict.fromkeys(numbers[:3], ACCEPTED)
    scene.workers[1].say([Op.REFUSED, channel, 1, "QuotaExceeded", "full"])
    assert scene.outcomes() == {numbers[3]: REJECTED}


async def test_messages_of_a_client_that_is_gone_are_still_stored(scene: Scene) -> None:
    await scene.begin()
    scene.client.transfer(scene.sender, message(b"m"))
    scene.client.say(DETACH, UInt(scene.sender), True)
    [(number, [command])] = (await scene.sends()).items()
    scene.refuse(number, command, "ServerBusy")
    scene.lose(number)
    assert await scene.sends() == {}
    assert not scene.client.has_ended


# Receiving


class Receiving(Scene):
    """A receiver, with all commands of the gateway by worker since the last look."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.receiver = -1  # its handle
        self.in_runs = False  # deliveries come as runs

    def attach(self, credit: int) -> None:
        self.receiver = self.client.attach(sender=False, address="orders", credit=credit)

    async def commands(self) -> dict[int, list[list[Any]]]:
        return {
            number: await worker.commands() for number, worker in enumerate(self.workers) if not worker.transport.ended
        }

    def channel(self, number: int) -> int:
        links = self.client.connection.engine.links.values()
        bound = next(link.context for link in links if link.name == f"link-{self.receiver}")
        return next(each.number for each in bound._channels if each.partition == number)

    def deliver(self, number: int, *tokens: int) -> None:
        if self.in_runs:
            for token in tokens:
                run = (token_of(number, token), (number << 48) + token, 0, 1, run_of([RECORD]))
                self.workers[number].say([Op.DELIVER_RUN, self.channel(number), 1, *run])
            return
        entries: list[Any] = []
        for token in tokens:
            entries += (token_of(number, token), (number << 48) + token, 0, RECORD, None)
        self.workers[number].say([Op.DELIVER, self.channel(number), 1, entries])

    def transfers(self) -> list[Frame]:
        return [frame for frame in self.client.frames() if frame.code == TRANSFER]


def token_of(partition: int, number: int) -> bytes:
    return partition.to_bytes(2, "big") + b"incarn" + number.to_bytes(8, "big")


def ops(commands: list[list[Any]]) -> list[int]:
    return [command[0] for command in commands]


@pytest.fixture(params=[False, True], ids=["entries", "runs"])
def receiving(request: pytest.FixtureRequest, tmp_path: Path) -> Receiving:
    receiving = Receiving(tmp_path)
    receiving.in_runs = request.param
    return receiving


async def test_a_receiver_is_open_on_all_fragments_with_a_part_of_the_credit(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    for number, found in (await receiving.commands()).items():
        assert ops(found) == [Op.OPEN_RECEIVER, Op.WATCH, Op.GRANT]
        assert found[0][1] == number
        assert found[2][3] == 10


async def test_deliveries_use_the_grant_of_their_fragment_once(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    await receiving.commands()
    if receiving.in_runs:
        run = run_of([RECORD] * 4)
        receiving.workers[1].say([Op.DELIVER_RUN, receiving.channel(1), 1, token_of(1, 1), (1 << 48) + 1, 0, 4, run])
    else:
        receiving.deliver(1, 1, 2, 3, 4)
    assert len(receiving.transfers()) == 4
    [link] = [each for each in receiving.client.connection.engine.links.values() if each.is_sender]
    share = link.context._shares._shares[1]
    assert (share.used, share.granted) == (4, 6)


async def test_scarce_credit_goes_to_the_fragment_with_messages(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=1)
    assert all(ops(found) == [Op.OPEN_RECEIVER, Op.WATCH] for found in (await receiving.commands()).values())
    receiving.workers[2].say([Op.AVAILABLE, receiving.channel(2)])
    granted = await receiving.commands()
    assert [number for number, found in granted.items() if found] == [2]
    assert granted[2][0][3] == 1
    receiving.workers[0].say([Op.AVAILABLE, receiving.channel(0)])
    recalled = await receiving.commands()
    assert ops(recalled[2]) == [Op.DRAIN]
    assert not recalled[0]
    receiving.workers[2].say([Op.DRAINED, receiving.channel(2), 0])
    assert ops((await receiving.commands())[0]) == [Op.GRANT]


async def test_a_receiver_without_credit_stops_watching_and_begins_again_with_credit(
    receiving: Receiving, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitioned_receivers, "REST_SECONDS", 0.05)
    await receiving.begin()
    receiving.attach(credit=0)
    seen: dict[int, list[int]] = {number: [] for number in range(WORKERS)}
    while not all(Op.PASS in found for found in seen.values()):
        for number, commands in (await receiving.commands()).items():
            seen[number] += ops(commands)
    assert all(found == [Op.OPEN_RECEIVER, Op.WATCH, Op.PASS] for found in seen.values())
    receiving.client.say(FLOW, UInt(0), UInt(2048), UInt(0), UInt(2048), UInt(receiving.receiver), UInt(0), UInt(1))
    for found in (await receiving.commands()).values():
        [[op, *_, limit]] = found
        assert (op, limit) == (Op.GRANT, 0)


async def test_outcomes_go_to_the_fragments_of_their_deliveries(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    await receiving.commands()
    receiving.deliver(2, 1, 2)
    receiving.deliver(0, 1)
    assert len(receiving.transfers()) == 3
    receiving.client.say(DISPOSITION, True, UInt(0), UInt(2), False, outcome(ACCEPTED))
    settled = {
        number: [command[5] for command in found if command[0] == Op.SETTLE]
        for number, found in (await receiving.commands()).items()
    }
    assert settled == {0: [[token_of(0, 1)]], 1: [], 2: [[token_of(2, 1), token_of(2, 2)]]}
    receiving.workers[0].say([Op.SETTLED, [receiving.channel(0), 1]])
    assert receiving.outcomes() == {2: ACCEPTED}
    receiving.workers[2].say([Op.UNSETTLED, receiving.channel(2), 2, "LockLost", "too late"])
    assert receiving.outcomes() == {0: REJECTED, 1: REJECTED}


async def test_settlements_of_a_fragment_that_ends_are_unknown_and_others_are_not(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    receiving.deliver(1, 1)
    receiving.deliver(2, 1)
    receiving.client.say(DISPOSITION, True, UInt(0), UInt(1), False, outcome(ACCEPTED))
    receiving.client.frames()
    receiving.lose(1)
    assert receiving.outcomes() == {0: REJECTED}
    receiving.workers[2].say([Op.SETTLED, [receiving.channel(2), 1]])
    assert receiving.outcomes() == {1: ACCEPTED}


async def test_credit_of_a_fragment_that_ends_goes_to_the_others(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=6)
    await receiving.commands()
    receiving.lose(0)
    receiving.deliver(1, 1, 2)
    receiving.workers[1].say([Op.AVAILABLE, receiving.channel(1)])
    limits = [command[3] for command in (await receiving.commands())[1] if command[0] == Op.GRANT]
    assert limits
    assert limits[-1] > 2
    receiving.restart(0)
    assert ops((await receiving.commands())[0])[:2] == [Op.OPEN_RECEIVER, Op.WATCH]


async def test_beside_a_parked_fragment_the_others_are_served(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    await receiving.commands()
    parked = receiving.channel(1)
    receiving.workers[1].say([Op.CLOSED, parked, "PartitionParked", "it is damaged"])
    receiving.deliver(0, 1)
    assert len(receiving.transfers()) == 1
    receiving.lose(1)
    receiving.restart(1)
    assert ops((await receiving.commands())[1])[:2] == [Op.OPEN_RECEIVER, Op.WATCH]


async def test_a_drain_ends_when_all_fragments_were_asked(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    await receiving.commands()
    receiving.client.frames()
    numbers = (UInt(0), UInt(1000), UInt(0), UInt(1000), UInt(receiving.receiver), UInt(0), UInt(30))
    receiving.client.say(FLOW, *numbers, None, True)
    asked = await receiving.commands()
    assert all(ops(found) == [Op.DRAIN] for found in asked.values())
    for number in (0, 1):
        receiving.workers[number].say([Op.DRAINED, receiving.channel(number), 0])
        assert receiving.client.frames() == []
    receiving.deliver(2, 1)
    receiving.workers[2].say([Op.DRAINED, receiving.channel(2), 1])
    frames = receiving.client.frames()
    assert [frame.code for frame in frames] == [TRANSFER, FLOW]
    assert frames[1].fields[6] == 0, "the credit is used up"


async def test_a_client_that_leaves_closes_its_receivers_on_all_fragments(receiving: Receiving) -> None:
    await receiving.begin()
    receiving.attach(credit=30)
    receiving.deliver(0, 1)
    receiving.deliver(2, 1)
    await receiving.commands()
    receiving.client.say(DETACH, UInt(receiving.receiver), True)
    closed = await receiving.commands()
    assert {number: ops(found) for number, found in closed.items()} == {
        number: [Op.CLOSE_RECEIVER] for number in range(3)
    }
    assert closed[2][0][4] == token_of(2, 1) + b"\0", "what it got stays locked"


async def test_deliveries_that_cannot_be_written_go_back_to_their_fragments(receiving: Receiving) -> None:
    """The client has closed its session while they were on their way."""
    await receiving.begin()
    receiving.attach(credit=30)
    await receiving.commands()
    numbers = (UInt(0), UInt(0), UInt(0), UInt(1000), UInt(receiving.receiver), UInt(0), UInt(30))
    receiving.client.say(FLOW, *numbers)
    receiving.deliver(0, 1)
    receiving.deliver(2, 1, 2)
    assert receiving.transfers() == []
    back: dict[int, list[bytes]] = {number: [] for number in range(WORKERS)}
    for number, commands in (await receiving.commands()).items():
        assert set(ops(commands)) <= {Op.GRANT, Op.SETTLE, Op.DRAIN}
        for command in commands:
            if command[0] == Op.SETTLE:
                assert command[3:5] == [Outcome.RELEASED, [0, len(command[5])]]
                back[number] += command[5]
    assert back == {0: [token_of(0, 1)], 1: [], 2: [token_of(2, 1), token_of(2, 2)]}
    receiving.client.say(DETACH, UInt(receiving.receiver), True)
    closed = await receiving.commands()
    assert {command[4] for [command] in closed.values()} == {b"\0"}, "the client has none of them"


# The next session

SESSION_FILTER = {Symbol("com.microsoft:session-filter"): None}
PASSES = "OperationTimeout"


async def ask_for_the_next(scene: Scene) -> tuple[int, int]:
    """Attach; the worker that is asked first, and its channel."""
    await scene.begin(requires_session=True)
    modes = UByte(0), UByte(1)
    ends = source("orders", filters=SESSION_FILTER), target("here")
    scene.client.say(ATTACH, "next", UInt(7), True, *modes, *ends)
    return next(iter((await asked(scene)).items()))


async def asked(scene: Scene) -> dict[int, int]:
    """The channels that workers were asked to open since the last call, by worker."""
    found = {}
    for number, worker in enumerate(scene.workers):
        for command in await worker.commands():
            if command[0] == Op.OPEN_RECEIVER:
                found[number] = command[2]
    return found


def has_session(scene: Scene) -> bool:
    return any(frame.code == ATTACH and frame.fields[5] is not None for frame in scene.client.frames())


async def test_if_the_first_fragment_has_no_session_all_are_asked(scene: Scene) -> None:
    first, channel = await ask_for_the_next(scene)
    scene.workers[first].say([Op.CLOSED, channel, PASSES, "no session"])
    assert (await asked(scene)).keys() == {0, 1, 2}
    await asyncio.sleep(FIRST_ANSWER_S * 1.5)  # nobody is asked again when the first would be late
    assert await asked(scene) == {}


async def test_if_the_first_fragment_is_slow_the_others_are_asked_and_the_first_is_when_it_has_answered(
    scene: Scene,
) -> None:
    first, channel = await ask_for_the_next(scene)
    await asyncio.sleep(FIRST_ANSWER_S * 1.5)
    others = await asked(scene)
    assert others.keys() == {0, 1, 2} - {first}
    scene.workers[first].say([Op.CLOSED, channel, PASSES, "no session"])
    assert (await asked(scene)).keys() == {first}
    number, opened = next(iter(others.items()))
    scene.workers[number].say([Op.OPENED, opened, "s", 0])
    assert has_session(scene)


async def test_the_session_of_a_fragment_that_was_slow_is_taken_if_no_other_has_one(scene: Scene) -> None:
    first, channel = await ask_for_the_next(scene)
    await asyncio.sleep(FIRST_ANSWER_S * 1.5)
    await asked(scene)
    scene.workers[first].say([Op.OPENED, channel, "s", 0])
    assert has_session(scene)


def test_the_keys_of_a_message() -> None:
    assert [fragment_of(b"a", (7,)), fragment_of(b"b", (7,))] == [7, 7]
    homes = Counter(fragment_of(b"key-%d" % index, range(4)) for index in range(1000))
    assert min(homes.values()) > 200
