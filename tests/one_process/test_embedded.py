"""A real worker in a real event loop, and the gateway's end of its connection: answers, timers, commits, limits."""

import asyncio
import os
import select
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import uvloop

from broker import requests, wire
from broker.errors import BrokerError, LockLost
from broker.gateway.router import Channel, Router, WorkerConnection
from broker.metrics import GatewayMetrics
from broker.one_process.embedded import WAITING_BYTES, EmbeddedWorker
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.partition.state.terms import Terms
from broker.runs import Part, entries_of
from broker.touched_partition import TouchedPartition
from broker.wire import ENTRY, Outcome
from broker.worker.clock import Clock
from broker.worker.commits import TURNS_TOGETHER
from broker.worker.dialling import UnixDialler
from broker.worker.listening import UnixListener
from broker.worker.worker import Worker
from storage.memory import MemoryStore
from storage.store import StoreError, Table
from tests.logs import InMemory
from tests.partition.driver import LOCK_MS, MAIN, define, describe, message
from tests.patience import PATIENCE_S

SOON_MS = 300  # before the worker's next beat, which is each second


class Turns(InMemory):
    """Counts commits; each fails while `fails`. While `is_slow`, a commit takes until `written`, or is waited for."""

    lost_segments = 0

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.commits = 0
        self.waits = 0
        self.fails = self.is_slow = self._is_writing = self._is_written = False
        self._event = os.eventfd(0)

    @property
    def is_committing(self) -> bool:
        return self._is_writing

    def begin_commit(self, time_ms: int) -> bool:
        if self.fails:
            raise StoreError("the disk is gone")
        assert not self._is_writing
        done = super().begin_commit(time_ms)
        self.commits += done
        self._is_writing, self._is_written = done and self.is_slow, False
        return done

    def end_commit(self, wait: bool = True) -> None:
        self.waits += wait and self._is_writing and not self._is_written
        if wait or self._is_written:
            self._is_writing = False

    def written(self) -> None:
        self._is_written = True
        os.eventfd_write(self._event, 1)

    def watch(self, poll: select.epoll) -> None:
        poll.register(self._event, select.EPOLLIN | select.EPOLLET)

    def serve(self, descriptor: int) -> bool:
        if descriptor == self._event:
            self.end_commit(wait=False)
        return descriptor == self._event

    def close(self) -> None:
        os.close(self._event)


class Link(Channel):
    """Notes what it hears, and raises the next of `faults`."""

    def __init__(self, notes: list[Any], worker: WorkerConnection) -> None:
        self.partition = 0
        self.worker = worker
        self.notes = notes
        self.faults: list[BaseException] = []
        self.deliveries: list[Any] = []

    def _note(self, *what: Any) -> None:
        self.notes.append(what)

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        self._note("sent", count, error)

    def on_opened(self, session_id: str = "", locked_until_ms: int = 0) -> None:
        self._note("opened")

    def on_closed(self, error: BrokerError | None) -> None:
        self._note("closed")

    def on_drained(self, delivered: int) -> None:
        self._note("drained", delivered)

    def on_available(self) -> None:
        self.notes.append("available")

    def on_settled(self, count: int, error: BrokerError | None) -> None:
        self._note("settled", count, error)

    def on_deliver(self, locked_until_ms: int, entries: list[Any]) -> None:
        self.deliveries.append(entries)
        self._note("delivered", len(entries) // ENTRY)

    def on_deliver_run(self, locked_until_ms: int, part: Part) -> None:
        token, numbers, delivery_count, _, run = part
        self.on_deliver(locked_until_ms, entries_of(run, token, numbers, delivery_count))

    def on_worker_lost(self) -> None:
        self._note("lost")

    def on_worker_stalled(self) -> None:
        raise AssertionError

    def on_worker_back(self) -> None:
        self._note("back")

    @property
    def connection(self) -> Any:
        return self

    def flush(self) -> None:
        if self.faults:
            raise self.faults.pop()

    def fail(self, error: Exception) -> None:
        raise error


class Whole:
    """The worker in the loop, and a link of a gateway."""

    def __init__(self, directory: Path, lock_duration_ms: int = LOCK_MS) -> None:
        clock = Clock(int(time.time() * 1000), int(time.monotonic() * 1000))
        store = MemoryStore()
        define(store, 1, describe())
        store.commit()
        [(_, definition)] = store.scan(Table.ENTITIES, b"", b"\xff" * 8, 9)
        terms = Terms.of(describe())._replace(lock_duration_ms=lock_duration_ms)  # shorter than an entity may have
        self.beats = 0
        self.partition = Partition(
            0, store, now_ms=clock.now_ms, incarnation=bytes(6), settings=PartitionSettings(),
            known_terms={definition: terms},
        )  # fmt: skip
        self.turns = Turns(store)
        self.listener = UnixListener(str(directory / "s"))
        self.worker = Worker(
            0, 0, {0: self.partition}, {0: store}, self.listener, lambda _: UnixDialler(["s"]), 1, clock,
            TouchedPartition(directory / "touched"), self.turns, self._beat,
        )  # fmt: skip
        self.embedded = EmbeddedWorker(self.worker, asyncio.get_running_loop())
        self.router = Router(["s"], 1, GatewayMetrics(), lambda definitions: None, connection=self.embedded.connection)
        self.connection = self.router.workers[0]
        self.notes: list[Any] = []
        self.link = Link(self.notes, self.connection)
        self.number = self.router.next_number()

    def _beat(self) -> None:
        self.beats += 1

    async def begin(self) -> None:
        self.task = asyncio.create_task(self.connection.keep_connected())
        self.embedded.begin()
        await self.connection.connected.wait()
        self.connection.channels[self.number] = self.link
        home: Any = self.worker._home
        await self.until(lambda: home._gateways)  # its turn is over, too

    def send(self, *bodies: str, **extra: Any) -> None:
        for body in bodies:
            self.connection.post(wire.send(0, self.number, MAIN, [message(body, **extra)]))

    def receive(self, credit: int) -> None:
        self.connection.post(wire.open_receiver(0, self.number, MAIN, False, None))
        self.connection.post(wire.grant(0, self.number, credit))

    async def until(self, condition: Callable[[], Any]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():
                assert not self.embedded.failed.done(), self.embedded.failed
                await asyncio.sleep(0.001)


@pytest.fixture
def run(tmp_path: Path) -> Callable[..., None]:
    def run(story: Callable[[Whole], Awaitable[None]], **properties: Any) -> None:
        async def told() -> None:
            whole = Whole(tmp_path, **properties)
            with closing(whole.listener):
                await whole.begin()
                await story(whole)
                whole.task.cancel()
                await asyncio.wait((whole.task,))
                for peer in whole.worker._peers.values():
                    peer.socket.close()
                whole.turns.close()

        uvloop.run(told())

    return run


def test_answers_come_in_the_order_of_the_commands(run):
    async def story(whole: Whole) -> None:
        whole.receive(10)
        whole.send("a", "b")
        await whole.until(lambda: len(whole.notes) >= 4)
        [entries] = whole.link.deliveries
        whole.send("c")
        whole.connection.settle(0, MAIN, Outcome.ACCEPTED, whole.number, (entries[0],))
        whole.connection.settle(0, MAIN, Outcome.ACCEPTED, whole.number, (entries[ENTRY],))
        whole.send("d")
        await whole.until(lambda: ("delivered", 2) in whole.notes[4:])
        assert whole.notes == [
            ("opened",), ("sent", 1, None), ("sent", 1, None), ("delivered", 2),
            ("sent", 1, None), ("settled", 2, None), ("sent", 1, None), ("delivered", 2),
        ]  # fmt: skip

    run(story)


def test_commands_of_one_round_are_one_commit(run):
    async def story(whole: Whole) -> None:
        await asyncio.sleep(0.05)  # the turns of the begin
        commits = whole.turns.commits
        loop = asyncio.get_running_loop()
        for number in range(5):  # several callbacks of one round, as several clients' reads are
            loop.call_soon(whole.send, f"{number}", f"{number} again")
        await whole.until(lambda: len(whole.notes) == 10)
        assert whole.turns.commits == commits + 1

    run(story)


def test_the_loop_goes_on_while_the_disk_writes(run):
    """Some turns are applied meanwhile. Later commands wait until the disk is done, and nothing else does."""

    async def story(whole: Whole) -> None:
        turns = whole.turns
        turns.is_slow = True
        whole.send("a")
        await whole.until(lambda: turns.is_committing)
        sent = 1
        while not whole.worker.must_wait:
            whole.send("b")
            await asyncio.sleep(0.01)  # its turn is applied
            sent += 1
        assert sent == 1 + TURNS_TOGETHER
        commits = turns.commits
        for body in ("c", "d"):
            whole.send(body)
            await asyncio.sleep(0.01)  # it may not be applied
        assert (whole.notes, turns.waits, turns.commits) == ([], 0, commits)
        turns.written()
        await whole.until(lambda: len(whole.notes) == 1)  # the first, and those behind it are being written
        assert turns.commits == commits + 1
        turns.is_slow = False
        turns.written()
        await whole.until(lambda: len(whole.notes) == sent + 2)
        assert (turns.waits, turns.commits) == (0, commits + 2), "the last two were one commit"

    run(story)


def test_a_scheduled_message_comes_without_other_traffic(run):
    async def story(whole: Whole) -> None:
        whole.receive(1)
        beats = whole.beats
        whole.send("later", scheduled_ms=int(time.time() * 1000) + SOON_MS)
        sent = time.monotonic()
        await whole.until(lambda: ("delivered", 1) in whole.notes)
        assert time.monotonic() - sent >= SOON_MS / 1000 - 0.01
        assert whole.beats - beats <= 1, "its timer, and not the next beat, made the turn"

    run(story)


def test_a_lock_ends_without_other_traffic(run):
    async def story(whole: Whole) -> None:
        whole.send("m")
        whole.receive(2)
        await whole.until(lambda: len(whole.link.deliveries) == 2)  # the second time when the first lock has ended
        first, second = whole.link.deliveries
        assert (first[1], second[1]) == (1, 1), "the same message"
        assert first[0] != second[0]

    run(story, lock_duration_ms=SOON_MS)


def test_a_wait_that_is_shorter_than_a_tick_of_the_loop_is_kept(run):
    """For such a one, uvloop's handle does not say when it rings."""

    async def story(whole: Whole) -> None:
        whole.embedded._wake_in(0.0001)
        whole.embedded._wake_in(0.0002)
        whole.embedded._wake_in(0.00005)
        turns = whole.worker._metrics.turns
        await whole.until(lambda: whole.worker._metrics.turns > turns)
        await whole.until(lambda: whole.beats >= 2)

    run(story)


def test_the_worker_gives_signs_of_life_without_traffic(run):
    async def story(whole: Whole) -> None:
        await whole.until(lambda: whole.beats >= 3)

    run(story)


def test_a_failure_to_handle_answers_connects_again_and_loses_nothing(run):
    async def story(whole: Whole) -> None:
        whole.receive(1)
        await whole.until(lambda: whole.notes)
        whole.link.faults.append(ValueError("a mistake in the code"))
        whole.send("a")
        await whole.until(lambda: ("lost",) in whole.notes)
        assert not whole.connection.post(wire.send(0, whole.number, MAIN, [message("refused")]))
        await whole.until(lambda: ("back",) in whole.notes)
        whole.link.deliveries.clear()
        whole.receive(5)
        whole.send("b")
        await whole.until(lambda: sum(len(each) for each in whole.link.deliveries) >= 2 * ENTRY)
        numbers = [entries[at] for entries in whole.link.deliveries for at in range(1, len(entries), ENTRY)]
        assert numbers == [1, 2], "what was lost with the connection is back, in its place"

    run(story)


def test_answers_of_a_lost_connection_never_come_on_the_next(run):
    """They were held while the disk wrote, and leave when the worker has given the connection up."""

    async def story(whole: Whole) -> None:
        lost = whole.embedded._caller
        assert lost is not None
        whole.link.faults.append(ValueError("a mistake in the code"))
        whole.send("a")
        await whole.until(lambda: ("back",) in whole.notes)
        whole.notes.clear()
        lost.answers.append(wire.sent(whole.number, 7))
        lost.hold_answers()
        lost.release()
        assert lost.write()
        assert whole.notes == []

    run(story)


def test_a_turn_that_fails_is_told_and_is_the_last(run):
    async def story(whole: Whole) -> None:
        whole.turns.fails = True
        whole.send("a")
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.wait((whole.embedded.failed,))
        with pytest.raises(StoreError, match="the disk is gone"):
            whole.embedded.failed.result()
        turns = whole.worker._metrics.turns
        whole.send("b")
        await asyncio.sleep(0.05)  # it may not be applied
        assert whole.worker._metrics.turns == turns
        assert whole.notes == []

    run(story)


def test_a_gateway_that_is_far_ahead_is_told_to_wait_and_to_go_on(run):
    async def story(whole: Whole) -> None:
        large = "x" * (64 << 10)
        count = WAITING_BYTES // len(large) + 2
        whole.send(*[large] * count)  # in one round: no turn comes between
        assert whole.router.behind == {whole.connection}
        caught_up: list[bool] = []
        whole.router.on_caught_up = lambda: caught_up.append(not whole.router.behind)
        await whole.until(lambda: len(whole.notes) == count)
        assert caught_up == [True]

    run(story)


def test_neither_side_sees_later_changes_of_what_the_other_gave_it(run):
    """Arguments and results of requests are copied; what is not, nobody changes."""

    async def story(whole: Whole) -> None:
        whole.send("a")
        rule = {"name": "r", "filter": {"kind": "true"}}
        tokens = [bytes(16)]
        results: list[Any] = []
        asked: list[Any] = []
        original = whole.partition.request

        def request(queue: int, given: Any, now_ms: int) -> Any:
            asked.append(given)
            return kept if isinstance(given, requests.EnumerateRules) else original(queue, given, now_ms)

        whole.partition.request = request  # type: ignore[assignment]
        kept = [rule]
        whole.connection.request(0, MAIN, requests.RenewLocks(tokens), lambda _, error: results.append(error), None)
        tokens.clear()
        listing = requests.EnumerateRules(0, 1)
        whole.connection.request(0, MAIN, listing, lambda result, error: results.append(result), None)
        await whole.until(lambda: len(results) == 2)
        assert asked[0] == requests.RenewLocks([bytes(16)])
        assert isinstance(results[0], LockLost)
        results[1][0]["filter"]["kind"] = "changed"
        assert kept[0]["filter"] == {"kind": "true"}

    run(story)


def test_properties_of_a_settlement_are_copied(run):
    async def story(whole: Whole) -> None:
        whole.send("a")
        whole.receive(1)
        await whole.until(lambda: whole.link.deliveries)
        [(token, *_)] = whole.link.deliveries
        properties = {"reason": b"\xa1\x01r"}
        whole.connection.post(wire.settle(0, MAIN, Outcome.DEFERRED, (whole.number, 1), (token,), properties))
        properties.clear()
        await whole.until(lambda: ("settled", 1, None) in whole.notes)
        [_, _, _, _, overlay] = whole.partition.request(MAIN, requests.Peek(0, 1, 1 << 20), 0)
        assert {"reason": b"\xa1\x01r"} in overlay.values()

    run(story)


def test_commands_behind_one_that_takes_many_turns_are_done_without_further_ones(run):
    async def story(whole: Whole) -> None:
        whole.send(*[f"{number}" for number in range(PartitionSettings().turn_work)])
        await asyncio.sleep(0)  # so that these come while the worker has not finished with the first
        await asyncio.sleep(0)
        whole.send("last")
        await whole.until(lambda: sum(note[1] for note in whole.notes) == PartitionSettings().turn_work + 1)

    run(story)


def test_what_the_gateway_asked_last_is_done_when_it_has_ended(run):
    async def story(whole: Whole) -> None:
        whole.send("a", "b")
        whole.connection.send()  # as at the end of its turn
        whole.embedded.finish()
        assert whole.partition.request(MAIN, requests.Counts(), 0)[MAIN][0] == 2
        assert whole.notes == []

    run(story)
