"""A gateway's connections to the partitions: one connection to each worker, and channels on it.

Commands for a worker leave together at the end of a turn: one read from a client, or one from a worker. If a round of
the event loop has several turns, their commands leave together at its end, because they cost a write here and perhaps a
commit there. So many that they keep a worker busy leave at once, so that gateway, worker, disk and client work at the
same time.

A channel is one link on one partition; it takes the answers to its commands in their order. When a worker is lost, its
channels are told, and they are told again when it is back. Operations that begin meanwhile may wait for it, and so may
those that were under way and may be done twice (`broker.gateway.waiting_room`).
"""

import asyncio
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, Protocol

import msgpack

from broker import requests, runs, wire
from broker.catalog.changes import Put, decided
from broker.errors import BY_NAME, BrokerError, InternalError, OutcomeUnknown, ServerBusy
from broker.gateway.idle_loop import IdleLoop
from broker.gateway.owner import Owner
from broker.gateway.send_marks import SendMarks
from broker.gateway.waiting_room import REPEATED, Bounds, Waiting, WaitingRoom
from broker.logging import get_logger
from broker.metrics import GatewayMetrics
from broker.runs import Part
from broker.wire import (
    Available,
    Beat,
    Catalog,
    Changed,
    Closed,
    Command,
    Deleted,
    Deliver,
    DeliverRun,
    DeliverRuns,
    Drained,
    Failed,
    Followed,
    Hello,
    Join,
    Message,
    Op,
    Opened,
    Outcome,
    Refused,
    Request,
    RunBytes,
    Send,
    SendRun,
    Sent,
    Settled,
    TakesRuns,
)
from protocol import error_texts
from protocol.extension import extension

log = get_logger("gateway")

# Bytes of commands that are sent before the end of the turn. With fewer, the worker would commit more often.
EARLY_BYTES = 64 << 10
TURNS_AT_ONCE = 16  # after so many turns whose commands left at their end, the turns of one round are counted
LOOK_SECONDS = 1.0  # between two checks whether workers answer
RECONNECT_SECONDS = 0.05
MARKS_SENDER_BYTES = 8
# The worker answers this when all other workers have followed, so its silence says nothing about it.
_CHANGE_CATALOG = requests.CHANGE_CATALOG
# Bytes of commands kept for one worker before the clients that use it have to wait.
OUTPUT_HIGH_BYTES = 32 << 20

Reply = Callable[[Any, BrokerError | None], None]


class Channel(Protocol):
    """The object that takes a worker's answers on one channel."""

    partition: int
    worker: "WorkerConnection"

    def on_sent(self, count: int, error: BrokerError | None) -> None: ...

    def on_opened(self, session_id: str = "", locked_until_ms: int = 0) -> None:
        """The receiver is open. A receiver of a session has the lock of this session."""

    def on_closed(self, error: BrokerError | None) -> None:
        """The receiver is closed: by the broker, with an error, or as asked, with None. The channel is gone."""

    def on_drained(self, delivered: int) -> None: ...

    def on_available(self) -> None:
        """There are messages for the receiver, which watches and has no credit there."""

    def on_settled(self, count: int, error: BrokerError | None) -> None: ...

    def on_deliver(self, locked_until_ms: int, entries: list[Any]) -> None: ...

    def on_deliver_run(self, locked_until_ms: int, part: Part) -> None: ...

    def on_worker_lost(self) -> None:
        """Unanswered commands never will be answered, though they may have been done. The worker's locks are gone."""

    def on_worker_back(self) -> None: ...

    def on_worker_stalled(self) -> None:
        """The worker has not answered for long. It may still do, or be replaced."""

    @property
    def connection(self) -> "Owner":
        """The client's connection. It writes once per frame of answers, for all of its channels."""


def error_named(name: str, text: str) -> BrokerError:
    return BY_NAME.get(name, InternalError)(text)


class _Wanted(NamedTuple):
    """A request, and the queue that it is for."""

    partition: int
    queue: int
    asked: requests.Request


class _Asked(NamedTuple):
    """A request under way. `again`: to be asked again if the worker dies; None for one that must not be done twice."""

    reply: Reply
    owner: Owner | None
    again: _Wanted | None = None
    asker: object = None


class Run:
    """Consecutive settlements with the same outcome on one queue."""

    __slots__ = ("channel", "channels", "outcome", "partition", "queue", "tokens")

    def __init__(self, partition: int, queue: int, outcome: Outcome) -> None:
        self.partition = partition
        self.queue = queue
        self.outcome = outcome
        self.channel = -1  # channel of the last settlement
        self.channels: list[int] = []  # channel, count of its tokens, ...
        self.tokens: list[bytes] = []


class WorkerConnection:
    """The connection to one worker, made again as long as the gateway lives. How commands get there is its subclass's.

    A subclass calls `_begin` when the worker has greeted, `take` with what comes, and `lost` when the connection is.
    """

    outlives_worker = True  # False: whatever ends the worker ends the gateway, too

    def __init__(self, path: str, router: "Router") -> None:
        self.name = path
        self._router = router
        self._lost = asyncio.Event()
        self._is_due = False  # it is among the router's workers with commands to send
        self.losses = 0  # how many times the connection was lost
        self._is_behind = False
        self.partitions: frozenset[int] = frozenset()  # those that the worker has said it has
        self.problem = ""  # why the worker is not used
        self._awaits = False  # True if an answer is due and nothing has come since the command
        self._silent_looks = 0  # checks since then
        self.is_stalled = False  # it has not answered for long, so commands for it are refused
        self._knows_runs = self._knows_times_to_live = False  # its version does
        self._knows_runs_in_transactions = False
        self.knows_marks = False
        self._knows_beats = False
        self._answers_restore = False
        self.knows_selectors = True  # not that of an older version, which takes no receivers with selectors
        self.knows_non_exclusive_sessions = True  # nor their receivers
        self.tells_lock_ends = False  # of peeked messages
        self.run: Run | None = None  # settlements that are not among the commands yet
        self.channels: dict[int, Channel] = {}
        self._requests: dict[int, _Asked] = {}
        self.connected = asyncio.Event()
        self._waiting = WaitingRoom(router.waiting_bounds)
        self._closes_room: asyncio.TimerHandle | None = None  # when what waits is refused

    @property
    def is_usable(self) -> bool:
        """It is connected, and has answered lately."""
        return self.connected.is_set() and not self.is_stalled

    async def keep_connected(self) -> None:
        """Connect, and connect again whenever the connection is lost; runs until cancelled."""
        raise NotImplementedError

    def _put(self, command: Command | Join | Followed | TakesRuns | Beat) -> None:
        """Take a command, to be sent by `send` or before."""
        raise NotImplementedError

    def _send(self) -> None:
        """Send the commands that were put."""
        raise NotImplementedError

    async def _stay_connected(self) -> None:
        """Returns when the connection is lost."""
        while not self._lost.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._lost.wait()
            self._look()

    def _look(self) -> None:
        """Each second: if the worker has not answered for long, refuse commands for it; clients wait no more."""
        self._silent_looks = self._silent_looks + 1 if self._awaits else 0
        if not self.is_stalled and self._silent_looks * LOOK_SECONDS >= self._router.busy_seconds:
            log.warning("worker does not answer; operations for it are refused as busy", worker=self.name)
            self._stall()

    def _stall(self) -> None:
        self.is_stalled = True
        self._router.metrics.worker_stalls += 1
        self._router.behind.discard(self)
        self._router.on_caught_up()
        self._tell_all(lambda channel: channel.on_worker_stalled())

    def _tell_all(self, tell: Callable[[Channel], None]) -> None:
        for channel in list(self.channels.values()):
            try:
                tell(channel)
            except Exception as error:
                channel.connection.fail(error)
            channel.connection.flush()

    # -- the connection comes and goes

    def _greeted(self, hello: Hello) -> None:
        """Use the worker, unless it speaks another version, or its partitions are another worker's."""
        self._knows_runs = hello.version >= wire.VERSION_WITH_RUNS
        self._knows_times_to_live = hello.version >= wire.VERSION_WITH_TIMES_TO_LIVE
        self._knows_runs_in_transactions = hello.version >= wire.VERSION_WITH_RUNS_IN_TRANSACTIONS
        self.knows_marks = self.outlives_worker and hello.version >= wire.VERSION_WITH_MARKS
        self._knows_beats = hello.version >= wire.VERSION_WITH_BEATS
        self._answers_restore = hello.version >= wire.VERSION_WITH_ANSWERS_TO_RESTORE
        self.knows_selectors = hello.version >= wire.VERSION_WITH_SELECTORS
        self.knows_non_exclusive_sessions = hello.version >= wire.VERSION_WITH_NON_EXCLUSIVE_SESSIONS
        self.tells_lock_ends = hello.version >= wire.VERSION_WITH_LOCK_ENDS
        self.problem = wire.incompatible(hello) or self._router.claim(self, hello)
        if self.problem:
            log.error("worker is not used", worker=self.name, reason=self.problem)
            self.await_no_more()
            self._end()
        else:
            self._begin()

    def _end(self) -> None:
        """End the connection; `lost` is called."""
        raise NotImplementedError

    def _begin(self) -> None:
        """The worker has sent HELLO. Before that it may be a dying worker, whose socket closes last."""
        self.connected.set()
        if extension is not None:
            self.post(wire.takes_runs())
        self._router.metrics.worker_connects += 1
        if self.losses:
            log.info("worker connected again", worker=self.name, operations_waited=self._waiting.operations)
        self._on_behalf_of_each(self._close_room(), lambda waiting: waiting.begin())
        self._tell_all(lambda channel: channel.on_worker_back())

    def adopt(self, other: "WorkerConnection", partition: int) -> None:
        """This worker has the partition, and not, or not any more, the other one."""
        for number, channel in [*other.channels.items()]:
            if channel.partition == partition:
                self.channels[number] = other.channels.pop(number)
                channel.worker = self
        other._waiting.hand_over(partition, self._waiting)

    def fall_behind(self) -> None:
        """The worker has too many unread commands."""
        self._is_behind = True
        self._router.behind.add(self)

    def catch_up(self) -> None:
        """The worker has read so many commands that clients can go on."""
        self._is_behind = False
        self._router.behind.discard(self)
        self._router.on_caught_up()

    def lost(self) -> None:
        """Tell the channels that nothing more comes. Requests wait for the worker if they may be done twice; else they
        are answered that the outcome is unknown.
        """
        self._lost.set()
        was_stalled, self._awaits, self.is_stalled = self.is_stalled, False, False
        if not self.connected.is_set():
            return
        self.connected.clear()
        self.catch_up()
        self.losses += 1
        self.run = None
        log.warning("worker connection lost", worker=self.name)
        if self.outlives_worker and not was_stalled and self._router.waiting_bounds.seconds > 0:
            self._await_restart()
        lost, self._requests = self._requests, {}
        for reply, owner, again, asker in lost.values():
            if again is None or not self._let_wait(again, reply, owner, asker):
                # Each gets its own: it may be raised, and then refers to the calls that it passes.
                self._answer(reply, owner, None, OutcomeUnknown(error_texts.OUTCOME_UNKNOWN))
        self._tell_all(lambda channel: channel.on_worker_lost())

    # -- what waits until the worker is back

    @property
    def is_awaited(self) -> bool:
        """It was lost a short time ago: it is probably being restarted, and what begins now may wait for it."""
        return self._waiting.until_s is not None

    def wait(self, waiting: Waiting) -> bool:
        """Begin this, which could not be posted, as soon as the worker is back. False if it is to be refused."""
        return self._waiting.enter(waiting, asyncio.get_running_loop().time())

    def drop_waiting(self, asker: object) -> None:
        """This link or connection is gone: nothing that waits is done for it."""
        if len(self._waiting):
            self._waiting.drop(asker)

    def refuse_waiting(self, asker: object) -> None:
        """Drop what waits, as `drop_waiting` does, and refuse it to those who asked."""
        if len(self._waiting):
            self._refuse(self._waiting.drop(asker))

    def await_no_more(self) -> None:
        """Refuse what waits, and what begins before the worker is back."""
        if self._waiting.operations:
            log.warning("what waited for the worker is refused", worker=self.name, operations=self._waiting.operations)
        self._refuse(self._close_room())

    def _refuse(self, refused: Iterable[Waiting]) -> None:
        self._on_behalf_of_each(
            refused, lambda waiting: waiting.refuse(ServerBusy(error_texts.partition_away(waiting.partition)))
        )

    def _await_restart(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = self._waiting.open(loop.time())
        self._closes_room = loop.call_at(until_s, self.await_no_more)

    def _close_room(self) -> Iterator[Waiting]:
        if self._closes_room is not None:
            self._closes_room.cancel()
            self._closes_room = None
        return self._waiting.close()

    def _on_behalf_of_each(self, all_: Iterable[Waiting], call: Callable[[Waiting], object]) -> None:
        """An exception is its connection's, if it has one. Each connection writes once."""
        touched: dict[Owner, None] = {}
        for waiting in all_:
            owner = waiting.owner
            try:
                call(waiting)
            except Exception as error:
                if owner is None:
                    raise
                owner.fail(error)
            if owner is not None:
                touched[owner] = None
        for owner in touched:
            owner.flush()

    def take(self, messages: Sequence[Message]) -> None:
        """Handle what the worker has sent together, in one turn."""
        if self.is_stalled:
            log.info("worker answers again", worker=self.name)
        self._awaits = self.is_stalled = False
        self._silent_looks = 0
        router = self._router
        router.begin_turn()
        try:
            self._dispatch(messages)
        finally:
            router.end_turn()

    # -- commands

    def post(self, command: Command | Join | Followed | TakesRuns) -> bool:
        """Send a command with the others of this turn; False if the worker is not connected."""
        if not self.connected.is_set():
            return False
        if self.run is not None:
            self._end_run()
        if self._is_behind:
            self._router.posted_behind.add(self)
        if isinstance(command, Send | SendRun) or (isinstance(command, Request) and command.name != _CHANGE_CATALOG):
            self._awaits = True  # these are answered soon
        self._put(command)
        return True

    def takes_run(self, run: RunBytes) -> bool:
        """Tell whether the worker takes this run, and not only its messages."""
        return self._knows_runs and (self._knows_times_to_live or not runs.has_times_to_live(run))

    def takes_run_in_transaction(self, run: RunBytes) -> bool:
        """Tell whether the worker takes this run as an operation of a transaction."""
        return self._knows_runs_in_transactions and self.takes_run(run)

    def post_run(self, partition: int, channel: int, queue: int, count: int, run: bytes) -> bool:
        """Post the messages of a run, as `post` does; each is a delivery of its own."""
        if self.takes_run(run):
            return self.post(wire.send_run(partition, channel, queue, count, run))
        return self.post(wire.send(partition, channel, queue, runs.messages_of(run, with_extra=True)))

    def settle(
        self, partition: int, queue: int, outcome: Outcome, channel: int, tokens: Sequence[bytes], count: int = 1
    ) -> bool:
        """Post `count` settlements, as `post` does. Consecutive ones, even of several links, go into one command.

        A token may stand for several: see `broker.runs`.
        """
        if not self.connected.is_set():
            return False
        run = self.run
        if run is None or run.queue != queue or run.outcome is not outcome or run.partition != partition:
            if run is not None:
                self._end_run()
            run = self.run = Run(partition, queue, outcome)
            if not self._is_due:
                self._become_due()
        if self._is_behind:
            self._router.posted_behind.add(self)
        if run.channel != channel:
            run.channel = channel
            run.channels += (channel, 0)
        run.channels[-1] += count
        run.tokens += tokens if self._knows_runs else runs.tokens_of(tokens)
        return True

    def _end_run(self) -> None:
        run, self.run = self.run, None
        assert run is not None
        tokens = runs.ranges_of(run.tokens) if self._knows_runs else run.tokens
        self._put(wire.settle(run.partition, run.queue, run.outcome, run.channels, tokens, None))

    def _become_due(self) -> None:
        self._is_due = True
        self._router.send_soon(self)

    def request(
        self,
        partition: int,
        queue: int,
        asked: requests.Request,
        reply: Reply,
        owner: Owner | None,
        waits: bool = True,
        asker: object = None,
    ) -> None:
        """`reply` gets ServerBusy if the request was not sent, OutcomeUnknown if the worker ended before its answer.

        `waits`: until the worker is back, if it is away, or dies before it answers a request that may be done twice.
        `asker`: the link that asks, with which such a request goes.
        """
        number = self._router.next_number()
        if self.is_stalled:
            self._answer(reply, owner, None, ServerBusy(error_texts.partition_away(partition)))
            return
        name, arguments = requests.packed(asked)
        wanted = _Wanted(partition, queue, asked)
        if self.post(wire.request(partition, number, name, queue, arguments)):
            again = wanted if waits and isinstance(asked, REPEATED) else None
            self._requests[number] = _Asked(reply, owner, again, asker)
        elif not (waits and self._let_wait(wanted, reply, owner, asker)):
            reply(None, ServerBusy(error_texts.partition_away(partition)))

    def _let_wait(self, wanted: _Wanted, reply: Reply, owner: Owner | None, asker: object) -> bool:
        if not self.is_awaited:
            return False
        partition, queue, asked = wanted
        again = partial(self._router.request, partition, queue, asked, reply, owner, asker=asker)
        askers = tuple(each for each in (owner, reply if asker is None else asker) if each is not None)
        size_bytes = len(msgpack.packb((partition, queue, *requests.packed(asked))))
        return self.wait(Waiting(partition, owner, askers, 1, size_bytes, again, partial(reply, None)))

    def restore(self, partition: int, queue: int, entries: Sequence[Any], mark: int, reply: Reply) -> bool:
        """Put messages back that were received and deleted, and never sent; at most `wire.ITEMS_AT_ONCE`.

        `mark` is that of one delivery, by `Router.marks` of the partition: with the same mark they are put back once.
        `reply` is called as that of a request. A worker of an older version does not say whether it has done it.
        Returns False if the worker is not connected.
        """
        if not self.connected.is_set():
            return False
        if not self._answers_restore:
            self.post(wire.restore(partition, queue, entries))
            reply(None, None)
            return True
        number, marks = self._router.next_number(), self._router.marks(partition)
        marked = wire.mark(partition, 0, marks.sender, mark, 1, marks.below) if self.knows_marks else None
        self._requests[number] = _Asked(reply, None)
        return self.post(wire.restore_as_request(partition, queue, entries, number, marked))

    def send(self) -> None:
        """Send the commands of this turn."""
        if self.run is not None:
            self._end_run()
        self._is_due = False
        self._send()

    # -- answers

    def _dispatch(self, messages: Iterable[Message]) -> None:
        touched = self._router.to_flush = set()
        try:
            self._dispatch_each(messages, touched)
        finally:
            self._router.to_flush = None
            for connection in touched:
                connection.flush()

    def _dispatch_each(self, messages: Iterable[Message], touched: set[Owner]) -> None:
        channels = self.channels
        for message in messages:
            match message:
                case Sent() | DeliverRun() | Deliver() | Refused() | Opened() | Drained() | Available() | Closed():
                    channel = channels.get(message.channel)
                    if channel is not None:
                        touched.add(channel.connection)
                        try:
                            self._tell(channel, message)
                        except Exception as error:
                            channel.connection.fail(error)
                case DeliverRuns():
                    for number, locked_until_ms, part in message.deliveries:
                        channel = channels.get(number)
                        if channel is not None:
                            touched.add(channel.connection)
                            try:
                                channel.on_deliver_run(locked_until_ms, part)
                            except Exception as error:
                                channel.connection.fail(error)
                case Settled():
                    told = message.channels
                    for at in range(0, len(told), 2):
                        channel = channels.get(told[at])
                        if channel is not None:
                            touched.add(channel.connection)
                            try:
                                channel.on_settled(told[at + 1], None)
                            except Exception as error:
                                channel.connection.fail(error)
                case wire.Reply():
                    if (request := self._requests.pop(message.number, None)) is not None:
                        self._answer(request.reply, request.owner, message.result, None)
                case Failed():
                    if (request := self._requests.pop(message.number, None)) is not None:
                        self._answer(request.reply, request.owner, None, error_named(message.error, message.text))
                case Hello():
                    self._greeted(wire.greeting(message))
                case Catalog():
                    self._router.on_catalog(message.definitions)
                    self.post(wire.join((), ()))
                case Changed():
                    self._router.on_changed(
                        [each.definition for each in decided(message.changes) if isinstance(each, Put)]
                    )
                    self.post(wire.followed(message.version))
                case Deleted():
                    self._router.on_deleted(message.entity_ids)
                    self.post(wire.followed(message.version))

    def _tell(
        self, channel: Channel, message: Deliver | DeliverRun | Sent | Refused | Opened | Drained | Available | Closed
    ) -> None:
        match message:
            case Sent():
                channel.on_sent(message.deliveries, None)
            case DeliverRun():
                channel.on_deliver_run(message.locked_until_ms, message[3:])
            case Deliver():
                channel.on_deliver(message.locked_until_ms, message.entries)
            case Refused():
                error = error_named(message.error, message.text)
                if message.op == Op.UNSETTLED:
                    channel.on_settled(message.deliveries, error)
                else:
                    channel.on_sent(message.deliveries, error)
            case Opened():
                channel.on_opened(message.session_id, message.locked_until_ms)
            case Drained():
                channel.on_drained(message.delivered)
            case Available():
                channel.on_available()
            case Closed():
                del self.channels[message.channel]
                channel.on_closed(error_named(message.error, message.text) if message.error else None)

    def _answer(self, reply: Reply, owner: Owner | None, result: Any, error: BrokerError | None) -> None:
        try:
            reply(result, error)
        except Exception as failure:
            if owner is None:
                raise
            owner.fail(failure)


class Router:
    """All workers of the namespace."""

    def __init__(
        self,
        sockets: Sequence[str],
        partitions: int,
        metrics: GatewayMetrics,
        on_catalog: Callable[[list[Any]], None],
        connection: "Callable[[str, Router], WorkerConnection]",
        busy_seconds: float = 10.0,
        poll_seconds: float = 0.0,
        waiting_bounds: Bounds = Bounds(),  # noqa: B008 - it is frozen
    ) -> None:
        """A worker that has not answered for `busy_seconds` is busy: it gets no commands until it answers.

        Before the loop sleeps, it may poll for `poll_seconds`.

        `connection` makes the connection to the worker with this socket. `waiting_bounds` is of what waits for each
        worker that is away; by default, nothing does.
        """
        self.metrics = metrics
        self.waiting_bounds = waiting_bounds
        self.busy_seconds = busy_seconds
        self.partitions = partitions
        self.on_catalog = on_catalog
        self.behind: set[WorkerConnection] = set()  # workers with too many unread commands
        # Those of `behind` that got another command. The connection that posts reads and clears the set.
        self.posted_behind: set[WorkerConnection] = set()
        self.on_caught_up: Callable[[], None] = lambda: None
        self.on_changed: Callable[[list[Any]], None] = lambda definitions: None
        self.on_deleted: Callable[[Sequence[int]], None] = lambda entity_ids: None
        self.workers = [connection(path, self) for path in sockets]
        # A partition that no worker has claimed yet has a connection that is never made, and that holds its channels.
        self._by_partition: dict[int, WorkerConnection] = {}
        self._namespace_id = b""
        self._marks_sender = os.urandom(MARKS_SENDER_BYTES)
        self._marks: dict[int, SendMarks] = {}
        self.to_flush: set[Owner] | None = None  # while a frame of a worker is handled: flushed at its end
        self._idle = IdleLoop(poll_seconds)
        self.in_turn = False  # True while a read is handled, at the end of which `end_turn` is called
        self._due: list[WorkerConnection] = []  # those with commands to send
        self._at_once = TURNS_AT_ONCE  # so many turns send at their end, before a round is counted
        self._gathers = False  # until the end of this round
        self._turns = 0  # of a round that gathers
        self._number = 0

    def send_soon(self, worker: WorkerConnection) -> None:
        """Send the worker's commands at the end of this turn or round."""
        self._due.append(worker)
        if not self.in_turn and not self._gathers:
            self._gather()  # a timer, or the loop itself, has called us

    def begin_turn(self) -> None:
        """Something was read. Commands for workers are sent at the end of its turn, or of the round."""
        self._idle.begins()
        self.in_turn = True

    def end_turn(self) -> None:
        self.in_turn = False
        self._idle.handled()
        if not self._due:
            return
        if self._gathers:
            self._turns += 1
        elif self._at_once:
            self._at_once -= 1
            self._send_due()
        else:
            self._gather()
            self._turns = 1

    def _gather(self) -> None:
        self._gathers = True
        self._turns = 0
        asyncio.get_running_loop().call_soon(self._end_round)

    def _end_round(self) -> None:
        self._gathers = False
        self._at_once = 0 if self._turns > 1 else TURNS_AT_ONCE
        self._send_due()

    def _send_due(self) -> None:
        due, self._due = self._due, []
        for worker in due:
            worker.send()

    @property
    def namespace_id(self) -> bytes:
        """The namespace id, which all partitions have; empty if no worker has told it yet."""
        return self._namespace_id

    def next_number(self) -> int:
        """A number for a channel or a request, never used before in this process; never 0."""
        self._number += 1
        return self._number

    def worker(self, partition: int) -> WorkerConnection:
        found = self._by_partition.get(partition)
        if found is None:
            found = self._by_partition[partition] = WorkerConnection(f"of partition {partition}", self)
        return found

    def number_of_worker(self, partition: int) -> int | None:
        """The place among `workers` of the one that has the partition; None if none has said so yet."""
        found = self._by_partition.get(partition)
        return next((number for number, each in enumerate(self.workers) if each is found), None)

    def claim(self, worker: WorkerConnection, hello: Hello) -> str:
        """The worker says which partitions it has. Returns why they cannot be used; empty if they can."""
        for partition in hello.partitions:
            other = self.worker(partition)
            if other is not worker and other.connected.is_set() and partition in other.partitions:
                return f"it claims partition {partition}, which is {other.name}'s"
        if hello.namespace_id:
            if self._namespace_id and self._namespace_id != hello.namespace_id and any(self._others(worker)):
                return "its data directory belongs to another namespace"
            self._namespace_id = hello.namespace_id
        worker.partitions = frozenset(hello.partitions)
        for partition in worker.partitions:
            if (before := self.worker(partition)) is not worker:
                self._by_partition[partition] = worker
                worker.adopt(before, partition)
        return ""

    def _others(self, worker: WorkerConnection) -> Iterator[WorkerConnection]:
        return (each for each in self.workers if each is not worker and each.connected.is_set())

    def marks(self, partition: int) -> SendMarks:
        """Return the marks of this gateway's deliveries to the partition."""
        if partition not in self._marks:
            self._marks[partition] = SendMarks(self._marks_sender)
        return self._marks[partition]

    def missing(self) -> str:
        """Why not all partitions can be used; empty if all can."""
        for partition in range(self.partitions):
            worker = self.worker(partition)
            if not (worker.connected.is_set() and partition in worker.partitions):
                problems = [f"{each.name}: {each.problem}" for each in self.workers if each.problem]
                return f"partition {partition} has no worker" + (f" ({'; '.join(problems)})" if problems else "")
        return ""

    def any_of(self, partitions: Sequence[int]) -> int:
        """One of the partitions at random, of those whose workers answer if there are any."""
        usable = [partition for partition in partitions if self.worker(partition).is_usable]
        return random.choice(usable or partitions)

    def request(
        self,
        partition: int,
        queue: int,
        asked: requests.Request,
        reply: Reply,
        owner: Owner | None = None,
        *,
        waits: bool = True,
        asker: object = None,
    ) -> None:
        """Ask a partition; `reply` is called with the result, or with the error.

        `owner` is the connection of the client that asks, or None if the gateway itself asks. `waits`: if the worker is
        being restarted, the request begins when that is done, and one that may be done twice is asked again if the
        worker dies before it answers; not if the client's connection has ended by then, nor if `asker`, the client's
        link, has.
        """
        self.worker(partition).request(partition, queue, asked, reply, owner, waits, asker)

    async def ask(self, partition: int, queue: int, asked: requests.Request, *, waits: bool = True) -> Any:
        """The awaitable form of `request`. Raises BrokerError."""
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        reply = partial(_resolve, answer)
        self.request(partition, queue, asked, reply, waits=waits)
        try:
            return await answer
        except asyncio.CancelledError:
            self.drop_waiting(reply)
            raise
        finally:
            del answer, reply  # they keep its error, which refers to this call

    def drop_waiting(self, asker: object) -> None:
        """This link or connection is gone: nothing that waits for any worker is done for it."""
        for worker in self.workers:
            worker.drop_waiting(asker)

    def refuse_waiting(self, asker: object) -> None:
        """Drop what waits at all workers, as `drop_waiting` does, and refuse it to those who asked."""
        for worker in self.workers:
            worker.refuse_waiting(asker)

    def await_no_more(self) -> None:
        """This gateway stops: refuse what waits for workers."""
        for worker in self.workers:
            worker.await_no_more()


def _resolve(answer: "asyncio.Future[Any]", result: Any, error: BrokerError | None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(result)
    else:
        answer.set_exception(error)
