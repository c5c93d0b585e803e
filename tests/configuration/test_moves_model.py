"""Moves between partitions of several workers: each message is in one place, whoever dies at whatever moment."""

import socket
from collections import Counter
from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker import requests
from broker.catalog.catalog import definitions
from broker.errors import BrokerError
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.wire import ENTRY, Op
from storage.queue_ids import entity_of, queue_id_of
from storage.records import ARRIVED_AS_PREFIX, ARRIVED_FROM_PREFIX, MESSAGE_HEADER_BYTES
from storage.store import Table
from tests.configuration.workers_in_process import Workers
from tests.models import model_settings

T0 = 1_000_000
PARTITIONS = 5
QUEUE, TOPIC, FIRST, SECOND = 1, 2, 3, 4  # entity ids
ENTITIES: list[Description] = [
    QueueDescription(name="orders"),
    TopicDescription(name="news"),
    SubscriptionDescription(topic="news", name="first"),
    SubscriptionDescription(topic="news", name="second"),
]
PATHS = {QUEUE: "orders", TOPIC: "news"}
OF = {QUEUE: (QUEUE,), TOPIC: (FIRST, SECOND)}  # where the messages are
LAYOUT = bytes(16)
KILLS = st.sampled_from([None] * 20 + [0, 1, 2])  # the commits of its worker before it is killed
SELDOM = st.sampled_from([False] * 9 + [True])


class Gateway:
    """A connection to the home."""

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.setblocking(False)
        self._number = 0
        self._data = b""

    def ask(self, *change: Any) -> int:
        self._number += 1
        frame = msgpack.packb([[Op.REQUEST, 0, self._number, "change-catalog", 0, list(change)]])
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)
        return self._number

    def answer(self, number: int) -> Any:
        """None if there is none yet. Raises BrokerError for a refusal, OSError if the home is gone."""
        try:
            while data := self._socket.recv(1 << 20):
                self._data += data
            raise ConnectionResetError
        except BlockingIOError:
            pass
        found = None
        while len(self._data) >= 4 and len(self._data) >= (end := 4 + int.from_bytes(self._data[:4], "big")):
            for message in msgpack.unpackb(self._data[4:end], strict_map_key=False):
                if message[0] == Op.CHANGED:
                    self._follow(message[1])
                if message[0] in (Op.REPLY, Op.FAILED) and message[1] == number:
                    found = message
            self._data = self._data[end:]
        if found is not None and found[0] == Op.FAILED:
            raise BrokerError(found[2:])
        return found

    def _follow(self, version: int) -> None:
        frame = msgpack.packb([[Op.FOLLOWED, version]])
        self._socket.sendall(len(frame).to_bytes(4, "big") + frame)

    def close(self) -> None:
        self._socket.close()


class Move:
    def __init__(self, entity_id: int, source: int, to: int, token: bytes) -> None:
        self.entity_id, self.source, self.to, self.token = entity_id, source, to, token
        self.is_frozen = False
        self.is_read = False


class MovesMachine(RuleBasedStateMachine):
    @initialize(count=st.sampled_from([1, 2, 3, 5]))
    def begin(self, count: int) -> None:
        self.workers = Workers(ENTITIES, PARTITIONS, count, T0)
        self.workers.connect()
        self.accepted: dict[int, set[int]] = {QUEUE: set(), TOPIC: set()}
        self.unknown: set[int] = set()  # sent to a worker that was killed in its commit
        self.count = 0
        self.gateway: Gateway | None = None
        self.move: Move | None = None
        self.moved = 0

    # -- clients

    @rule(
        entity_id=st.sampled_from([QUEUE, TOPIC]),
        by_chance=SELDOM,
        partition=st.integers(0, PARTITIONS - 1),
        kill_after=KILLS,
    )
    def send(self, entity_id: int, by_chance: bool, partition: int, kill_after: int | None) -> None:
        """To where it lives; or to any partition, as an old gateway may."""
        if not by_chance:
            partition = self._where(entity_id)
        found = self.workers.partitions.get(partition)
        if found is None:
            return
        self.count += 1
        number = self.count
        self.workers.touch(partition)
        try:
            found.send(queue_id_of(entity_id), [[LAYOUT, b"%d" % number, None, None]], self.workers.now_ms)
        except BrokerError:
            self._turn(partition, kill_after)
            return
        if self.move is not None and self.move.entity_id == entity_id:
            self.move.is_read = False  # something has changed
        if self._turn(partition, kill_after):
            self.accepted[entity_id].add(number)
        else:
            self.unknown.add(number)

    def _turn(self, partition: int, kill_after: int | None = None) -> bool:
        return self.workers.turn(partition % self.workers.count, kill_after)

    # -- the gateway that leads a move

    def _where(self, entity_id: int) -> int:
        """As the home has committed it."""
        [found] = [item for item in definitions(self.workers.stores[0]) if item.entity_id == entity_id]
        return found.partitions[0]

    @rule(
        entity_id=st.sampled_from([QUEUE, TOPIC]),
        further=st.integers(1, PARTITIONS - 1),
        times=st.integers(1, 8),
        limit=st.integers(2, 40),
        kill_source=KILLS,
        kill_to=KILLS,
        settles=st.sampled_from([True, True, False]),
    )
    def go_on(
        self,
        entity_id: int,
        further: int,
        times: int,
        limit: int,
        kill_source: int | None,
        kill_to: int | None,
        settles: bool,
    ) -> None:
        """The next step of a move. It is one rule, because hypothesis leaves some rules out of most examples."""
        if self.move is None:
            if 0 in self.workers.running:
                self.begin_move(entity_id, further)
        elif not self.move.is_read:
            self.pass_on(times, limit, kill_source, kill_to)
        elif not self.move.is_frozen:
            self.freeze(kill_source)
        else:
            self.end_move(settles)

    def begin_move(self, entity_id: int, further: int) -> None:
        to = (self._where(entity_id) + further) % PARTITIONS
        if self.gateway is None:
            self.gateway = Gateway(self.workers._sockets[0])
        reply = self._home("begin-move", PATHS[entity_id], to)
        if reply is not None:
            of, source, token = reply
            assert of == entity_id
            self.move = Move(entity_id, source, to, token)
            if self._partition(to, "arrive", token, entity_id) is False:
                return
            self._partition(source, "depart", token, entity_id)

    def _home(self, *change: Any) -> Any:
        """The result; None if it is refused or there is no answer, and then the move is over for the gateway."""
        assert self.gateway is not None
        try:
            number = self.gateway.ask(*change)
            self.workers.settle()
            reply = self.gateway.answer(number)
            return None if reply is None else reply[2]
        except BrokerError:
            return None
        except OSError:
            self._lose_gateway()
            return None

    def _partition(self, partition: int, name: str, *args: Any, kill_after: int | None = None) -> Any:
        """The result, which is False if there is none: then the gateway gives the move up."""
        found = self.workers.partitions.get(partition)
        try:
            if found is None:
                raise BrokerError("no worker")
            self.workers.touch(partition)
            try:
                result = found.request(0, requests.RECORDS.made(name, *args), self.workers.now_ms)
            finally:
                is_alive = self._turn(partition, kill_after)
            if is_alive:
                return result
        except BrokerError:
            pass
        self.cancel()
        return False

    def pass_on(self, times: int, limit: int, kill_source: int | None, kill_to: int | None) -> None:
        """So many times, and the last time the workers may be killed."""
        for at in range(times):
            if self.move is not None:
                last = at == times - 1
                self._pass_on(self.move, limit, kill_source if last else None, kill_to if last else None)

    def _pass_on(self, move: Move, limit: int, kill_source: int | None, kill_to: int | None) -> None:
        asked = (move.token, move.entity_id, 1 << 20, limit)
        result = self._partition(move.source, "rows", *asked, kill_after=kill_source)
        if result is not False:
            found, is_read, noted = result
            move.is_read = is_read and not noted
            if found:
                self._partition(move.to, "store-rows", move.token, found, kill_after=kill_to)

    def freeze(self, kill_after: int | None) -> None:
        move = self.move
        assert move is not None
        if self._partition(move.source, "hold", move.token, move.entity_id) is False:
            return
        if self._partition(move.source, "freeze", move.token, move.entity_id, kill_after=kill_after) is not False:
            move.is_frozen, move.is_read = True, False

    def end_move(self, settles: bool) -> None:
        move = self.move
        assert move is not None
        if self.gateway is None or 0 not in self.workers.running:
            self.move = None
            return
        if not settles:  # the answer is never heard
            with suppress(OSError):
                self.gateway.ask("end-move", move.token)
            self.move = None
            self.workers.turn(0)
            return
        if self._home("end-move", move.token) is not None:
            self.moved += 1
        self.move = None

    def cancel(self) -> None:
        move, self.move = self.move, None
        if move is not None and self.gateway is not None and 0 in self.workers.running:
            self._home("cancel-move", move.token)

    @rule(really=SELDOM)
    def lose_gateway(self, really: bool) -> None:
        if really:
            self._lose_gateway()

    def _lose_gateway(self) -> None:
        if self.gateway is not None:
            self.gateway.close()
        self.gateway = self.move = None

    # -- workers

    @rule(number=st.integers(0, 4), kill_after=KILLS)
    def turn(self, number: int, kill_after: int | None) -> None:
        if number in self.workers.running:
            self.workers.turn(number, kill_after)

    @rule(number=st.integers(0, 4), really=SELDOM)
    def kill(self, number: int, really: bool) -> None:
        if really and number in self.workers.running:
            self.workers.kill(number)
            if number == 0:
                self._lose_gateway()

    @precondition(lambda self: len(self.workers.running) < self.workers.count)
    @rule()
    def start_all(self) -> None:
        for number in range(self.workers.count):
            self.workers.start(number)
        self.workers.connect()

    @rule(ms=st.sampled_from([10, 200, 5000]))
    def wait(self, ms: int) -> None:
        self.workers.now_ms += ms
        self.workers.settle(1)

    # -- what must hold

    @invariant()
    def nobody_raises(self) -> None:
        if hasattr(self, "workers"):
            for partition in self.workers.partitions.values():
                partition.check()

    def teardown(self) -> None:
        if not hasattr(self, "workers"):
            return
        try:
            self._lose_gateway()
            self.start_all()
            for _ in range(20):
                self.wait(100)
            self.start_all()
            catalogs = [definitions(store) for store in self.workers.stores]
            assert all(each == catalogs[0] for each in catalogs)
            where = {item.entity_id: item.partitions for item in catalogs[0]}
            for entity_id, of in OF.items():
                assert {where[each] for each in (entity_id, *of)} == {where[entity_id]}
                [at] = where[entity_id]
                for each in of:
                    found = self._bodies(at, each)
                    counts = Counter(found)
                    assert not {number for number, count in counts.items() if count > 1}, "doubled"
                    assert not self.accepted[entity_id] - {*counts}, "lost"
                    assert {*counts} <= self.accepted[entity_id] | self.unknown, "never accepted"
                    assert found == sorted(found), "in order"
                for partition, store in enumerate(self.workers.stores):
                    if partition != at:
                        assert not self._rows(store, (entity_id, *of)), (entity_id, partition)
        finally:
            self.workers.close()

    def _bodies(self, partition: int, entity_id: int) -> list[int]:
        items = self.workers.partitions[partition].request(
            queue_id_of(entity_id), requests.Peek(0, 1000, 1 << 20), self.workers.now_ms
        )
        return [int(items[at + 3][MESSAGE_HEADER_BYTES:]) for at in range(0, len(items), ENTRY)]

    def _rows(self, store: Any, entity_ids: tuple[int, ...]) -> list[bytes]:
        found = []
        for table in (Table.QUEUE, Table.DUE, Table.COUNTS):
            for key, _ in store.scan(table, b"\0", b"\xff" * 40, 1 << 30):
                if entity_of(int.from_bytes(key[:4], "big")) in entity_ids:
                    found.append(key)
        names = (b"deleted-entity-", b"arriving-", ARRIVED_AS_PREFIX, ARRIVED_FROM_PREFIX, b"frozen-")
        for key, _ in store.scan(Table.META, b"\0", b"\xff" * 40, 1 << 30):
            of = [key[len(name) :][:4] for name in names if key.startswith(name)]  # a message id may follow
            if any(int.from_bytes(each, "big") in entity_ids for each in of):
                found.append(key)
        return found


TestMoves = MovesMachine.TestCase
TestMoves.settings = model_settings(60, 50)


def frozen(count: int) -> MovesMachine:
    """A queue that is frozen, and whose rows were passed on."""
    machine = MovesMachine()
    machine.begin(count)
    machine.send(QUEUE, False, 0, None)
    machine.begin_move(QUEUE, 2)
    for _ in range(2):
        while not (machine.move and machine.move.is_read):
            machine.pass_on(1, 40, None, None)
        if not machine.move.is_frozen:
            machine.freeze(None)
    return machine


@pytest.mark.parametrize("count", [3, 5])
@pytest.mark.parametrize("end_comes_first", [False, True])
def test_a_frozen_entity_stays_so_over_a_restart_until_its_partition_has_heard_the_home(
    count: int, end_comes_first: bool
) -> None:
    """Else it would accept what is lost when the home decides before it has heard of the restart."""
    machine = frozen(count)
    move = machine.move
    assert move is not None
    workers, source = machine.workers, move.source % machine.workers.count
    assert source != 0
    workers.kill(source)
    workers.start(source)
    machine.send(QUEUE, True, move.source, None)
    assert machine.accepted[QUEUE] == {1}
    if end_comes_first:
        assert machine.gateway is not None
        machine.gateway.ask("end-move", move.token)
        machine.move = None
        workers.turn(0)
    workers.connect()
    machine.send(QUEUE, False, 0, None)
    assert machine.accepted[QUEUE] == {1, 3}
    machine.teardown()


@pytest.mark.parametrize("lost", ["gateway", "source", "destination"])
def test_the_end_is_refused_when_somebody_was_lost(lost: str) -> None:
    machine = frozen(5)
    move = machine.move
    assert move is not None
    if lost == "gateway":
        other = Gateway(machine.workers._sockets[0])
        machine._lose_gateway()
        machine.gateway = other
    else:
        machine.workers.kill(move.source if lost == "source" else move.to)
    machine.workers.turn(0)
    assert machine.gateway is not None
    number = machine.gateway.ask("end-move", move.token)
    machine.workers.settle()
    with pytest.raises(BrokerError, match=r"has ended|is not in service"):
        machine.gateway.answer(number)
    assert machine._where(QUEUE) == move.source
    machine.teardown()


def test_the_definition_of_an_entity_that_is_moved_cannot_be_changed() -> None:
    for entity_id, changes in (
        (QUEUE, [("update", "orders", {}), ("delete", "orders"), ("begin-move", "orders", 0)]),
        (TOPIC, [("create", "subscription", {"topic": "news", "name": "third"}, None), ("delete", PATHS[TOPIC])]),
    ):
        machine = MovesMachine()
        machine.begin(2)
        machine.begin_move(entity_id, 1)
        assert machine.move is not None
        for change in changes:
            reply = machine.workers.ask(*change)
            assert (reply[2], "is being moved" in reply[3]) == ("ServerBusy", True), reply
        machine.teardown()
