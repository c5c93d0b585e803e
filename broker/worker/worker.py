"""The loop around partitions: read what the sockets hold, apply it all, commit, answer.

A worker is a plain synchronous process. One turn takes everything that has arrived from all gateways, applies it to the
partitions it is for, fires timers, and hands out messages. What turns have changed is committed to the log, and only
then are they answered (see `commits`).

When a commit fails, nothing is answered and the process ends, because memory and disk may disagree and an fsync is
never tried again. The supervisor restarts the worker from what is on disk. The process also ends when anything but a
BrokerError comes out of a partition. There is one exception: if the failed command had changed nothing, its caller gets
an internal error and the worker continues.
"""

import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar, cast

from broker import requests, runs, wire
from broker.catalog.catalog import HOME, catalog_version
from broker.catalog.changing import Limits
from broker.errors import BrokerError, InternalError, InvalidArgument, SessionTakenOver
from broker.logging import get_logger
from broker.metrics import WorkerMetrics
from broker.named_records import Malformed
from broker.partition.forwarding.destination import ENTRY
from broker.partition.messages.deliveries import NOTHING, Delivery, Pumped
from broker.partition.partition import Partition
from broker.partition.requests import Underway
from broker.touched_partition import TouchedPartition
from broker.wire import (
    Answer,
    Await,
    Beat,
    Catalog,
    Changed,
    CloseReceiver,
    Command,
    Credit,
    Deleted,
    Followed,
    Forward,
    Forwarded,
    ForWorker,
    Join,
    Mark,
    Message,
    Op,
    OpenReceiver,
    OpenSelective,
    Operation,
    Refused,
    Remove,
    Request,
    Restore,
    Send,
    SendOperation,
    SendRun,
    SendRunOperation,
    Sent,
    Settle,
    SettleOperation,
    Stores,
    TakesRuns,
    Unused,
    Watch,
    unpack_operations,
)
from broker.worker.clock import Clock
from broker.worker.commits import Commits, TurnLog
from broker.worker.copies import Copies
from broker.worker.dialling import Dialler
from broker.worker.heartbeats import Heartbeats
from broker.worker.held_changes import HoldBounds
from broker.worker.home import Home
from broker.worker.listening import WorkerListener
from broker.worker.neighbours import Neighbours, Replies
from broker.worker.parked import ParkedPartition
from broker.worker.peer import COPIED_BYTES, Peer
from broker.worker.shortages import Shortages
from storage.heap import Freed
from storage.log.commit_log import LogUsage
from storage.records import NAMESPACE_ID_BYTES, NEVER, decode_document
from storage.store import Store, StoreError, Table

log = get_logger("worker")

# Pages of stores that were read are released after this time, so that they do not count as this process's memory (see
# storage.mapped_pages).
RELEASE_AFTER_MS = 250
# The time between two signs of life to the supervisor, also while there is nothing to do.
BEAT_SECONDS = 1.0
# The time after which the worker tries again to accept a connection that could not be accepted.
ACCEPT_AGAIN_MS = 100
EVENTS_AT_ONCE = 64  # others come with the next turn
# Messages that one caller sends or settles in one turn. If all that is under way came in one turn, client, gateway and
# worker would wait for each other one after the other: with 1,000 under way on one link, both cores are busier so.
TURN_MESSAGES = 512
SET_BACK_MS = 1000  # the smallest change of the system's clock that is logged

DEFAULT_LIMITS = Limits()
INTERNAL_ERROR = "The service was unable to process the request; nothing of it was done. The broker's log says why."

_EPOLLIN, _EPOLLOUT = select.EPOLLIN, select.EPOLLOUT
_READABLE = select.EPOLLIN | select.EPOLLHUP | select.EPOLLERR
# Does the request that a message has brought for this partition. Returns the result; an `Underway` that will have it;
# or _LATER, if it comes when other workers have followed.
_Do = Callable[["Caller", Partition, Request, Any], Any]
_LATER = object()

R = TypeVar("R", bound=requests.Request)


class Turns(TurnLog, Protocol):
    """The log, and the checkpointer behind it."""

    @property
    def lost_segments(self) -> int: ...

    def usage(self) -> LogUsage: ...

    def watch(self, poll: select.epoll) -> None: ...

    def serve(self, descriptor: int) -> bool: ...

    def beat(self) -> None: ...


# What leaves when its turns are committed: callers, who hold their answers themselves; batches to other partitions, and
# answers to partitions of this worker; what the home is to be told, and what it is answered. Not a named tuple, because
# one is made in each turn.
Held = tuple[list["Caller"], list[Forward], list[Forwarded], list[Remove | Unused], Replies | None]


class Caller(Peer):
    """A gateway, or another worker that forwards to partitions here. Later callers have higher numbers."""

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        self.number = 0  # the worker sets it
        self.unread: deque[Command | ForWorker] = deque()  # commands that the last turn did not get to
        self.receivers: dict[int, Partition] = {}
        self.transactions: dict[bytes, Partition] = {}  # those that have not ended
        self.takes_runs = self.takes_several_runs = False  # it has said so
        self.mark: Mark | None = None  # of the deliveries that come next
        self.marks_sender = b""  # of its last mark


class Worker:
    """The partitions of one process, and the connections that use them."""

    def __init__(
        self,
        number: int,
        restarts: int,
        partitions: dict[int, Partition],
        stores: dict[int, Store],
        listener: WorkerListener,
        dialler: Callable[[select.epoll], Dialler],
        partition_count: int,
        clock: Clock,
        touching: TouchedPartition,
        turns: Turns,
        beat: Callable[[], None] = lambda: None,
        limits: Limits = DEFAULT_LIMITS,
        heartbeats: Heartbeats | None = None,
        hold_bounds: HoldBounds = HoldBounds(),  # noqa: B008 - it is immutable
    ) -> None:
        """`dialler` connects to the other workers, `partition_count` is the number of all partitions.

        The partitions were created with the time of `clock`. `beat` is called each second, as long as turns are made.
        `heartbeats` are those to other machines, if there are any. `hold_bounds` is of changes of entities that wait
        for other workers.
        """
        self._number = number
        self._restarts = restarts
        self._partitions = partitions
        self._stores = stores
        self._touching = touching
        self._turns = turns
        self._listener = listener
        self._peers: dict[int, Caller] = {}
        self._unfinished: dict[int, Caller] = {}  # callers with more commands than fit into a turn; keys as in `_peers`
        self._callers = 0  # the number of callers that connected since the start
        self._last_caller: dict[bytes, int] = {}  # store id -> number of the last caller that forwarded from that store
        self._touched: set[Partition] = set()
        self._messages_in_turn = 0
        self._came_bytes = 0  # from callers, in this turn
        # Of the turns since the last commit began:
        self._worked: set[Partition] = set()
        self._forwards: list[Forward] = []
        self._answers: list[Forwarded] = []  # from partitions of this worker to others of this worker
        self._clock = clock
        self._beat = beat
        self._heartbeats = heartbeats
        self._lost_segments = 0  # of the log, for the journal, as was logged
        self._beat_at = 0.0  # by time.monotonic
        self._shortages = Shortages()
        self._now_ms = clock.now_ms
        self._due_ms = 0  # the first timer of a partition when the turn began
        self._release_ms: int | None = None  # when to release the pages of the stores
        self._accept_ms: int | None = None  # when to accept connections again, if that was not possible
        self._cannot_accept = False  # so that it is logged once
        self._metrics = WorkerMetrics()
        self._commits = Commits(turns, self._metrics, self._hold, self._release)
        self._poll = select.epoll()
        self._freed = Freed()
        self._copies = Copies(partitions, stores, self._touch)
        self._home: Home[Caller] | None = None
        if HOME in partitions:
            self._home = Home(
                self._copies, partitions, stores, partition_count, limits, hold_bounds, now_ms=self._now_ms
            )
        self._identity = os.urandom(16)
        self._neighbours = Neighbours(
            dialler(self._poll),
            self._identity,
            partitions,
            partition_count,
            self._poll,
            self._touch,
            self._copies,
            heartbeats,
        )
        self._underway: deque[tuple[Caller, int, Partition, Underway]] = deque()  # requests, with their ids
        self._more = False  # a partition could hand out more at once
        self._turn_at = time.monotonic()  # when the last turn began
        self._held_back = False  # the last turn handed out nothing, because a gateway had too much unread
        self._apply: dict[int, Callable[[Caller, Any], None]] = {
            Op.SEND: self._send,
            Op.SEND_BATCH: self._send_batch,
            Op.SEND_RUN: self._send_run,
            Op.TAKES_RUNS: self._takes_runs,
            Op.MARK: self._mark,
            Op.OPEN_RECEIVER: self._open_receiver,
            Op.OPEN_SELECTIVE: self._open_receiver,
            Op.GRANT: self._grant,
            Op.DRAIN: self._drain,
            Op.CLOSE_RECEIVER: self._close_receiver,
            Op.SETTLE: self._settle,
            Op.REQUEST: self._request,
            Op.RESTORE: self._restore,
            Op.WATCH: self._watch,
            Op.AWAIT: self._await_more,
            Op.PASS: self._pass,
            Op.FORWARD: self._forward,
            Op.REMOVE: self._remove,
            Op.JOIN: self._join,
            Op.STORES: self._recognize,
            Op.FOLLOWED: self._followed,
            Op.UNUSED: self._unused,
            Op.ANSWER: self._answered,
            Op.BEAT: self._hear_beat,
        }
        # All other requests are a partition's alone.
        self._do: dict[type, _Do] = {
            requests.Metrics: self._measure,
            requests.ChangeCatalog: self._change_catalog,
            requests.Stored: self._say_stored,
            requests.Transact: self._transact,
            requests.TransactRequest: self._request_in,
            requests.Discharge: self._discharge,
        }

    def begin(self) -> None:
        """To be called once, before the first turn."""
        self._poll.register(self._listener, select.EPOLLIN)
        self._turns.watch(self._poll)
        if HOME in self._partitions:
            if not self._copies.namespace_id():
                self._copies.adopt(os.urandom(NAMESPACE_ID_BYTES))
            if self._home is not None:
                self._home.recognize(self._copies.store_ids())
            self._neighbours.remove(self._copies.align(self._now_ms), self._now_ms)
        self._more = bool(self._touched)

    @property
    def descriptor(self) -> int:
        """Whoever calls `turn` finds events here, those of `poll`."""
        return self._poll.fileno()

    def poll(self, seconds: float = 0) -> list[tuple[int, int]]:
        """Events for `turn`: those that there are now, or the first ones within this time."""
        return self._poll.poll(seconds, EVENTS_AT_ONCE)

    def be_woken_by(self, connection: socket.socket) -> None:
        """`poll` ends when there is something to read from it, which nobody reads."""
        self._poll.register(connection, select.EPOLLIN)

    @property
    def must_wait(self) -> bool:
        """A turn would only wait for the disk now. There will be an event when it need not."""
        return self._commits.must_wait

    def wait_seconds(self) -> float:
        """The time after which `turn` is to be called even if there are no events."""
        if (
            self._more
            or self._neighbours.inbox
            or (self._home is not None and self._home.has_news)
            or (self._unfinished and not all(map(_is_behind, self._unfinished.values())))
        ):
            return 0.0
        return self._timeout_seconds(self._turn_at)

    def _look_at_journal(self) -> None:
        lost = self._turns.lost_segments
        if lost > self._lost_segments:
            log.error(
                "the journal has lost a part of the log",
                worker=self._number,
                segments=lost - self._lost_segments,
                fix="free disk space, or look why the journal's process is slow; journal.backlog_bytes limits the log",
            )
            self._lost_segments = lost

    def _tell_flaws(self, number: int, partition: Partition) -> None:
        for subscription, name, flaw in partition.take_flawed_rules():
            log.warning(
                "a stored rule fails on every message, and would be refused today",
                partition=number,
                subscription=subscription,
                rule=name,
                reason=flaw,
                fix="replace the rule, or remove it",
            )

    def turn(self, events: Iterable[tuple[int, int]]) -> None:
        """Do what callers want, and answer. `events` are pairs of a descriptor and what epoll says of it.

        Raises StoreError when a commit fails; then there must be no further turn.
        """
        self._commits.go_on()
        self._turn_at = started = time.monotonic()
        if started >= self._beat_at:
            self._beat()
            self._beat_at = started + BEAT_SECONDS
            self._turns.beat()
            self._look_at_journal()
            self._freed.look(started)
            for number, partition in self._partitions.items():
                partition.look_at_room()
                self._shortages.note(number, partition.shortage, started)
                self._tell_flaws(number, partition)
            if self._home is not None:
                self._home.look(self._now_ms)
                self._remove_orphans(self._home)
                self._make_held_changes(self._home)
            if self._heartbeats is not None:
                self._look_for_silence(self._heartbeats)
        self._read_clock(started)
        unfinished, self._unfinished = self._unfinished, {}
        for descriptor, event in events:
            peer = self._peers.get(descriptor)
            if peer is not None:
                self._serve(peer, event & _EPOLLOUT if descriptor in unfinished else event)
            elif descriptor == self._listener.fileno():
                self._accept()
            elif not self._turns.serve(descriptor):
                self._neighbours.serve(descriptor, event, self._now_ms)
        for peer in unfinished.values():  # after the others, so that one caller delays none of them
            if peer.socket.fileno() >= 0:
                self._take_commands(peer)
        if self._neighbours.inbox:
            self._take_inbox()
        if self._accept_ms is not None and self._accept_ms <= self._now_ms:
            self._accept_ms = None
            self._poll.register(self._listener, select.EPOLLIN)
        if (dial_ms := self._neighbours.dial_ms) is not None and dial_ms <= self._now_ms:
            self._neighbours.dial_due(self._now_ms)
        self._more = self._finish_turn(started, self._more)

    def end(self) -> None:
        """Answer whatever waits for a commit; to be called after the last turn. Raises StoreError."""
        self._commits.finish()

    def _read_clock(self, monotonic: float) -> None:
        clock = self._clock
        was_ahead_ms, self._now_ms = clock.ahead_ms, clock.read(int(time.time() * 1000), int(monotonic * 1000))
        if clock.ahead_ms == was_ahead_ms:
            return
        for partition in self._partitions.values():
            partition.ahead_ms = clock.ahead_ms
        if abs(clock.ahead_ms - was_ahead_ms) >= SET_BACK_MS:
            log.warning("the system's clock was set", seconds=(was_ahead_ms - clock.ahead_ms) / 1000)

    def _timeout_seconds(self, read_at: float) -> float:
        """Until the next timer. The clock was read at `read_at` of time.monotonic."""
        due_ms = NEVER
        for partition in self._partitions.values():
            if partition.timers:
                timer_ms = partition.next_timer_ms()
                if timer_ms is not None and timer_ms < due_ms:
                    due_ms = timer_ms
        self._due_ms = due_ms
        for own_ms in (self._release_ms, self._accept_ms, self._neighbours.dial_ms):
            if own_ms is not None and own_ms < due_ms:
                due_ms = own_ms
        left = (due_ms - self._now_ms) / 1000 - (time.monotonic() - read_at)
        if left > BEAT_SECONDS:
            return BEAT_SECONDS
        return left if left > 0 else 0.0

    def _finish_turn(self, started: float, more: bool) -> bool:
        """Timers, hand-out, commit, answers. True if a partition could hand out more at once."""
        now_ms = self._now_ms
        if self._underway:
            self._go_on()
        if self._home is not None and self._home.has_news:
            self._tell_news(self._home)
        remaining = bool(self._underway)
        is_behind = False
        for peer in self._peers.values():
            if peer.is_behind:
                is_behind = True
        more = more or (self._held_back and not is_behind)
        self._held_back = is_behind
        may_be_due = self._due_ms <= now_ms
        for partition in self._partitions.values() if more or may_be_due else tuple(self._touched):
            due_ms = partition.next_timer_ms() if partition.timers else None
            is_due = due_ms is not None and due_ms <= now_ms
            if not (is_due or partition in self._touched or more):
                continue
            self._touching.set(partition.id)
            self._worked.add(partition)
            if is_due:
                partition.advance(now_ms)
            if not is_behind:
                pumped = partition.pump(now_ms)
                if pumped is not NOTHING:
                    self._answer_pumped(pumped)
                    remaining = remaining or pumped.more
                    self._forwards += pumped.forwards
            partition.end_turn()
        if self._release_ms is None or self._release_ms <= now_ms:
            self._release_pages(used=bool(self._touched) or more)
        self._touched.clear()
        self._metrics.turns += 1
        messages, self._messages_in_turn = self._messages_in_turn, 0
        came_bytes, self._came_bytes = self._came_bytes, 0
        self._commits.end_turn(started, messages, came_bytes, now_ms)
        return remaining

    def _hold(self) -> Held:
        """What the turns since the last call want to send."""
        callers = []
        for caller in self._peers.values():
            if caller.answers:
                caller.hold_answers()
                callers.append(caller)
        forwards, answers = self._forwards, self._answers
        if forwards or answers:
            self._forwards, self._answers = [], []
        news = self._copies.take_news(self._worked)
        self._worked.clear()
        return callers, forwards, answers, news, self._neighbours.take_replies()

    def _release(self, held: Held) -> None:
        callers, forwards, answers, news, replies = held
        if replies is not None:
            self._neighbours.reply(replies, self._now_ms)
        if news:
            self._neighbours.tell_home(news, self._now_ms)
        if forwards or answers:
            self._neighbours.send(forwards, answers, self._now_ms)
        for caller in callers:
            caller.release()
            self._write(caller)

    def _release_pages(self, used: bool) -> None:
        if self._release_ms is not None and self._release_ms <= self._now_ms:
            for store in self._stores.values():
                store.release_pages()
            self._release_ms = None
        if used and self._release_ms is None:
            self._release_ms = self._now_ms + RELEASE_AFTER_MS

    def _answer_pumped(self, pumped: Pumped) -> None:
        # The partition hands back the keys of receivers that it was given: (caller, channel). It takes any as a key.
        peer: Caller
        channel: int
        for (peer, channel), session_id, locked_until_ms in pumped.accepted:  # type: ignore[misc]
            peer.answers.append(wire.opened(channel, session_id, locked_until_ms))
        for (peer, channel), locked_until_ms, entries in self._answer_together(pumped.deliveries):  # type: ignore[misc]
            parts = runs.parts_of(entries) if peer.takes_runs and locked_until_ms else None
            for part in parts or (entries,):
                if isinstance(part, tuple):
                    peer.answers.append(wire.deliver_run(channel, locked_until_ms, *part))
                else:
                    peer.answers.append(wire.deliver(channel, locked_until_ms, part))
        for (peer, channel), delivered in pumped.drained:  # type: ignore[misc]
            peer.answers.append(wire.drained(channel, delivered))
        for peer, channel in pumped.available:  # type: ignore[misc]
            peer.answers.append(wire.available(channel))
        for (peer, channel), error in pumped.closed:  # type: ignore[misc]
            if not isinstance(error, SessionTakenOver):  # after which the gateway says what never reached the client
                peer.receivers.pop(channel, None)
            peer.answers.append(wire.closed(channel, type(error).__name__, str(error)))

    def _answer_together(self, deliveries: Sequence[Delivery]) -> Sequence[Delivery]:
        """Answer the callers that get small runs on several channels. Returns the other deliveries."""
        if len(deliveries) < 2:
            return deliveries
        by_peer: dict[Caller, list[Delivery]] = {}
        for each in deliveries:
            by_peer.setdefault(each[0][0], []).append(each)  # type: ignore[index]
        left: list[Delivery] = []
        for peer, those in by_peer.items():
            together = runs.together(those, COPIED_BYTES) if peer.takes_several_runs else None
            if together is None:
                left += those
            else:
                peer.answers.append(wire.deliver_runs(together))
        return left

    # -- callers come and go

    def _accept(self) -> None:
        try:
            connection = self._listener.accept()
        except OSError as error:  # usually no file descriptor is free; the connection waits
            if not self._cannot_accept:
                log.warning("no connection can be accepted", reason=error.strerror)
            self._cannot_accept = True
            self._poll.unregister(self._listener)
            self._accept_ms = self._now_ms + ACCEPT_AGAIN_MS
            return
        self._cannot_accept = False
        self.admit(Caller(connection))

    def admit(self, peer: Caller) -> None:
        """Serve a caller that has connected. It is greeted at the end of a turn."""
        self._callers += 1
        peer.number = self._callers
        self._peers[peer.socket.fileno()] = peer
        self._poll.register(peer.socket, select.EPOLLIN)
        peer.answers.append(
            wire.hello(
                wire.VERSION,
                list(self._partitions),
                wire.OLDEST_VERSION,
                self._identity,
                self._copies.namespace_id(),
            )
        )
        if HOME in self._partitions and not isinstance(self._partitions[HOME], ParkedPartition):
            peer.answers.append(self._catalog())

    def _catalog(self) -> Catalog:
        store = self._stores[0]
        definitions = store.scan(Table.ENTITIES, b"", b"\xff" * 8, 1 << 30)
        return wire.catalog(catalog_version(store), [decode_document(value) for _, value in definitions])

    def _serve(self, peer: Caller, event: int) -> None:
        if event & _EPOLLOUT:
            was_behind = peer.is_behind
            self._write(peer)
            if was_behind and not peer.is_behind and not peer.unread:
                event |= _EPOLLIN  # to hear it before this turn hands out so much that it is behind again
        if event & _READABLE and not peer.is_behind:
            messages = peer.read()
            if messages is None:
                self._drop(peer)
                return
            self._came_bytes += peer.came_bytes
            if peer.waits_to_read:
                self._write(peer)
            peer.unread.extend(messages)  # type: ignore[arg-type] # callers send nothing else
            self._take_commands(peer)

    def _take_commands(self, peer: Caller) -> None:
        """Do the caller's commands as far as this turn's work allows. The rest waits for the next, behind others."""
        unread = peer.unread
        if peer.is_behind:
            self._unfinished[peer.socket.fileno()] = peer
            return
        apply, cut = self._apply, runs.cut
        most = self._messages_in_turn + TURN_MESSAGES
        while unread and self._messages_in_turn < most:
            message = unread[0]
            if not (isinstance(message, ForWorker) or self._partitions[message.partition].has_work_left):
                break
            message, rest = cut(unread.popleft())
            if rest is not None:
                unread.appendleft(rest)
            apply[message[0]](peer, message)
        if unread:
            self._unfinished[peer.socket.fileno()] = peer

    def _write(self, peer: Caller) -> None:
        if not peer.write():
            self._drop(peer)
            return
        if peer.output or peer.awaited != _EPOLLIN:
            interest = 0 if peer.is_behind else _EPOLLIN
            peer.await_events(self._poll, interest | _EPOLLOUT if peer.waits_to_write else interest)

    def _hear_beat(self, peer: Caller, message: Beat) -> None:
        """From its first one on, a caller on another machine is beaten to."""
        if self._heartbeats is not None and peer.silence is None:
            peer.be_watched(self._heartbeats.patience)
            self._heartbeats.add(peer)
            peer.answers.append(wire.beat())  # at once: from then on it knows silence when it hears it
        peer.on_beat()

    def _look_for_silence(self, heartbeats: Heartbeats) -> None:
        """Each second: drop the callers and links that have been silent for too long, or to which this worker was."""
        if heartbeats.turned():
            log.warning("this process stood still, and the others have given it up; connections are made again")
            for peer in [each for each in self._peers.values() if each.silence is not None]:
                self._drop(peer)
            self._neighbours.drop_watched(self._now_ms)
            return
        for peer in [*self._peers.values()]:
            if peer.unread and not peer.is_behind:
                continue  # it is not read, because it has sent more than there was time for
            if peer.is_silent():
                log.warning("a gateway or worker does not give a sign of life; its connection ends")
                self._drop(peer)
            elif peer.has_begun_beat:
                self._write(peer)
        self._neighbours.look_for_silence(self._now_ms)

    def _drop(self, peer: Caller) -> None:
        """A caller is gone. If it is a gateway, the connections of all its receivers are gone with it."""
        descriptor = peer.socket.fileno()
        if self._peers.pop(descriptor, None) is None:
            return
        if peer.problem:
            log.warning("connection of a gateway or worker failed", reason=peer.problem)
        self._unfinished.pop(descriptor, None)
        self._poll.unregister(descriptor)
        if self._heartbeats is not None:
            self._heartbeats.discard(peer)
        peer.close()
        if self._home is not None:
            self._home.leave(peer, self._now_ms)
        for channel, partition in peer.receivers.items():
            self._touch(partition)
            partition.close_receiver((peer, channel), True, self._now_ms)
        peer.receivers.clear()
        for transaction, partition in peer.transactions.items():
            self._touch(partition)
            partition.discharge((peer, transaction), False, self._now_ms)
        peer.transactions.clear()

    # -- commands

    def _refusal(self, partition: Partition, error: Exception) -> BrokerError:
        """Return the error to answer to a command that raised `error`.

        A bug of the broker becomes an InternalError if the command had changed nothing, or was malformed, so that no
        partition got it. Otherwise `error` is raised again and ends the process, because memory and disk may disagree.
        """
        if isinstance(error, BrokerError):
            return error.with_traceback(None)  # it refers to who holds the error, so that all of it would live on
        if not isinstance(error, Malformed) and (isinstance(error, StoreError) or partition.has_changed):
            raise error
        self._metrics.internal_errors += 1
        log.error("command failed by a bug of the broker; it changed nothing", partition=partition.id, exc_info=error)
        return InternalError(INTERNAL_ERROR)

    def _partition(self, message: Command) -> Partition:
        partition = self._partitions[message[1]]
        self._touching.set(partition.id)
        self._touched.add(partition)
        return partition

    def _touch(self, partition: Partition) -> None:
        """Note that the worker works on this partition now, and that the partition has something to commit."""
        self._touching.set(partition.id)
        self._touched.add(partition)

    def _send(self, peer: Caller, message: Send) -> None:
        partition = self._partition(message)
        _, _, channel, queue, messages = message
        self._messages_in_turn += len(messages)
        try:
            partition.send(queue, messages, self._now_ms)
        except Exception as error:
            refusal = self._refusal(partition, error)
            if len(messages) == 1:
                _answer(peer, wire.refused(channel, 1, type(refusal).__name__, str(refusal)))
                if peer.mark is not None:
                    _take_marks(peer, channel, 1)
            else:
                # The send is all or nothing, but each message is a delivery of its own and gets its own outcome.
                for each in messages:
                    self._send(peer, message._replace(messages=[each]))
        else:
            if channel:  # commands of channel 0 are not answered
                peer.answers.append(wire.sent(channel, len(messages)))
            if peer.mark is not None:
                self._note_marks(peer, channel, partition, len(messages))

    def _send_run(self, peer: Caller, message: SendRun) -> None:
        partition = self._partition(message)
        _, _, channel, queue, messages, run = message
        self._messages_in_turn += messages
        try:
            partition.send_run(queue, run, self._now_ms)
        except Exception as error:
            self._refusal(partition, error)
            self._messages_in_turn -= messages
            self._send(peer, wire.send(message.partition, channel, queue, runs.messages_of(run, with_extra=True)))
        else:
            if channel:
                peer.answers.append(wire.sent(channel, messages))
            if peer.mark is not None:
                self._note_marks(peer, channel, partition, messages)

    def _mark(self, peer: Caller, message: Mark) -> None:
        peer.mark = message
        peer.marks_sender = message.sender

    def _note_marks(self, peer: Caller, channel: int, partition: Partition, deliveries: int) -> None:
        """Deliveries of this channel are stored; if they have marks, note it."""
        mark = _take_marks(peer, channel, deliveries)
        if mark is not None:
            partition.note_stored(mark.sender, mark.first, deliveries, mark.below, self._now_ms)

    def _takes_runs(self, peer: Caller, message: TakesRuns) -> None:
        peer.takes_runs = True
        _, *also_several = message  # an older gateway does not say whether
        peer.takes_several_runs = any(also_several)

    def _send_batch(self, peer: Caller, message: Send) -> None:
        partition = self._partition(message)
        _, _, channel, queue, messages = message
        self._messages_in_turn += len(messages)
        try:
            partition.send(queue, messages, self._now_ms)
        except Exception as error:
            refusal = self._refusal(partition, error)
            _answer(peer, wire.refused(channel, 1, type(refusal).__name__, str(refusal)))
            if peer.mark is not None:
                _take_marks(peer, channel, 1)
        else:
            _answer(peer, wire.sent(channel, 1))
            if peer.mark is not None:
                self._note_marks(peer, channel, partition, 1)

    def _open_receiver(self, peer: Caller, message: OpenReceiver | OpenSelective) -> None:
        partition = self._partition(message)
        _, _, channel, queue, receive_and_delete, session, *selector = message
        try:
            partition.open_receiver((peer, channel), queue, receive_and_delete, self._now_ms, session, *selector)
        except Exception as error:
            refusal = self._refusal(partition, error)
            peer.answers.append(wire.closed(channel, type(refusal).__name__, str(refusal)))
        else:
            peer.receivers[channel] = partition
            if session is None:
                peer.answers.append(wire.opened(channel))

    def _grant(self, peer: Caller, message: Credit) -> None:
        _, _, channel, limit = message
        if channel in peer.receivers:
            self._partition(message).grant((peer, channel), limit)

    def _drain(self, peer: Caller, message: Credit) -> None:
        _, _, channel, limit = message
        if channel in peer.receivers:
            self._partition(message).drain((peer, channel), limit)

    def _watch(self, peer: Caller, message: Watch) -> None:
        if message.channel in peer.receivers:
            self._partition(message).watch((peer, message.channel))

    def _pass(self, peer: Caller, message: Watch) -> None:
        if message.channel in peer.receivers:
            self._partition(message).passes((peer, message.channel))

    def _await_more(self, peer: Caller, message: Await) -> None:
        partition = self._partition(message)
        _, _, channel, queue, number = message
        try:
            partition.await_more((peer, channel), queue, number, self._now_ms)
        except Exception as error:
            refusal = self._refusal(partition, error)
            peer.receivers.pop(channel, None)
            peer.answers.append(wire.closed(channel, type(refusal).__name__, str(refusal)))
        else:
            peer.receivers[channel] = partition

    def _close_receiver(self, peer: Caller, message: CloseReceiver) -> None:
        _, _, channel, broken, unsent_from = message
        if peer.receivers.pop(channel, None) is not None:
            self._partition(message).close_receiver((peer, channel), broken, self._now_ms, unsent_from)
        peer.answers.append(wire.closed(channel))

    def _settle(self, peer: Caller, message: Settle) -> None:
        partition = self._partition(message)
        _, _, queue, outcome, channels, tokens, properties = message
        count = sum(channels[1::2])
        self._messages_in_turn += count
        try:
            results = partition.settle(queue, tokens, outcome, properties, self._now_ms)
        except Exception as error:
            results = [self._refusal(partition, error)] * count
        if 0 not in channels and not any(results):
            peer.answers.append(wire.settled(channels))
            return
        at = 0
        for channel, count in zip(channels[0::2], channels[1::2], strict=True):
            if channel:
                told = partition.as_told(queue, (peer, channel), results[at : at + count], self._now_ms)
                self._answer_settlements(peer, channel, told)
            at += count

    def _answer_settlements(self, peer: Caller, channel: int, results: list[BrokerError | None]) -> None:
        at = 0
        for end in range(1, len(results) + 1):  # runs of the same result
            if end == len(results) or results[end] is not results[at]:
                error = results[at]
                if error is None:
                    peer.answers.append(wire.settled([channel, end - at]))
                else:
                    _answer(peer, wire.unsettled(channel, end - at, type(error).__name__, str(error)))
                at = end

    def _request(self, peer: Caller, message: Request) -> None:
        partition = self._partition(message)
        number = message.number
        try:
            asked = requests.parsed(message.name, message.arguments)
            do: _Do = self._do.get(type(asked), self._ask)
            result = do(peer, partition, message, asked)
        except Exception as error:
            refusal = self._refusal(partition, error)
            peer.answers.append(wire.failed(number, type(refusal).__name__, str(refusal)))
            return
        if isinstance(result, Underway):
            self._underway.append((peer, number, partition, result))
        elif result is not _LATER:
            peer.answers.append(wire.reply(number, result))

    def _ask(
        self, peer: Caller, partition: Partition, message: Request, asked: requests.OfQueue | requests.OfPartition
    ) -> Any:
        return partition.request(message.queue, _naming_receiver(peer, asked), self._now_ms)

    def _measure(self, peer: Caller, partition: Partition, message: Request, asked: requests.Metrics) -> dict[str, Any]:
        gauges = {each: partition.gauges() for each, partition in self._partitions.items()}
        return self._metrics.snapshot(self._number, self._restarts, gauges, self._turns.usage()._asdict())

    def _say_stored(self, peer: Caller, partition: Partition, message: Request, asked: requests.Stored) -> Any:
        """A gateway asks what is stored because it has lost its connection. What still waits there must not be stored
        after the answer, which the gateway follows.
        """
        for other in [*self._peers.values()]:
            if other is not peer and other.marks_sender and asked.sender == other.marks_sender:
                self._drop(other)
        return partition.request(message.queue, asked, self._now_ms)

    def _go_on(self) -> None:
        """Continue the requests that are under way, as far as the turn of each partition allows."""
        for _ in range(len(self._underway)):
            peer, number, partition, underway = self._underway.popleft()
            if peer.socket.fileno() < 0:
                continue  # the caller is gone: nobody waits for the answer
            self._touched.add(partition)
            try:
                done = partition.go_on(underway)
            except Exception as error:
                refusal = self._refusal(partition, error)
                peer.answers.append(wire.failed(number, type(refusal).__name__, str(refusal)))
                continue
            if done:
                peer.answers.append(wire.reply(number, underway.result))
            else:
                self._underway.append((peer, number, partition, underway))

    def _transact(self, peer: Caller, partition: Partition, message: Request, asked: requests.Transact) -> Any:
        transaction, begins, packed = asked
        operations = _operations(peer, packed)
        peer.transactions[transaction] = partition
        self._messages_in_turn += sum(map(_messages_of, operations))
        key, owner = _key_and_owner(peer, transaction)
        return partition.transact(key, begins, operations, self._now_ms, owner)

    def _request_in(self, peer: Caller, partition: Partition, message: Request, asked: requests.TransactRequest) -> Any:
        transaction, begins, name, arguments = asked
        part = _naming_receiver(peer, requests.parsed_in_transaction(name, arguments))
        peer.transactions[transaction] = partition
        key, owner = _key_and_owner(peer, transaction)
        return partition.request_in(key, begins, message.queue, part, self._now_ms, owner)

    def _discharge(self, peer: Caller, partition: Partition, message: Request, asked: requests.Discharge) -> None:
        peer.transactions.pop(asked.transaction, None)
        partition.discharge((peer, asked.transaction), asked.commit, self._now_ms)

    def _restore(self, peer: Caller, message: Restore) -> None:
        said: tuple[Any, ...] = message
        _, _, queue, entries, *request = said  # before version 6 there was no more
        number, *mark = request or (0,)
        partition = self._partition(message)
        try:
            partition.restore(queue, entries, self._now_ms, Mark(*mark) if mark else None)
        except Exception as error:
            refusal = self._refusal(partition, error)
            answer: Message = wire.failed(number, type(refusal).__name__, str(refusal))
        else:
            answer = wire.reply(number, None)
        if number:
            peer.answers.append(answer)

    # -- forwarded messages

    def _forward(self, peer: Caller, message: Forward) -> None:
        if peer.number < self._last_caller.get(message.store_id, 0):
            return  # from a lost connection or process; the source may have sent these messages elsewhere meanwhile
        self._last_caller[message.store_id] = peer.number
        self._take_over(message, peer.answers)

    def _take_over(self, message: Forward, answers: list[Message] | list[Forwarded]) -> None:
        partition = self._partition(message)
        if isinstance(partition, ParkedPartition):
            return  # like a partition that is down: nobody knows what it had taken over before
        _, _, store_id, _, source, entity_id, entries = message
        self._messages_in_turn += len(entries) // ENTRY
        try:
            result = partition.take_over(store_id, source, entity_id, entries, self._now_ms)
        except Exception as error:
            # The answer has only the mark, so the source tries again later.
            refusal = self._refusal(partition, error)
            mark, _, _ = partition.take_over(store_id, source, entity_id, (), self._now_ms)
            result = mark, [], str(refusal)
        answers.append(wire.forwarded(message.source_partition, message.source, message.partition, *result))

    def _take_inbox(self) -> None:
        """Do the commands and answers that partitions of this worker sent each other in the last turn."""
        neighbours = self._neighbours
        inbox, neighbours.inbox = neighbours.inbox, []
        for message in inbox:
            match message:
                case Forward():
                    self._take_over(message, self._answers)
                case Remove():
                    self._remove(None, message)
                case Unused():
                    self._unused(None, message)
                case _:
                    neighbours.answered(message, self._now_ms)

    # -- the catalog, at the home's worker

    def _join(self, peer: Caller, message: Join) -> None:
        if self._home is not None:
            peer.answers.append(self._home.join(peer, message.partitions, message.entity_ids, self._now_ms))
            self._make_held_changes(self._home)

    def _make_held_changes(self, home: Home[Caller]) -> None:
        """Make the changes that have waited for other workers, if they need not wait any more."""
        for held in home.take_held(self._now_ms):
            self._request(held.caller, wire.request(HOME, held.number, requests.CHANGE_CATALOG, 0, [*held.arguments]))

    def _recognize(self, peer: Caller, message: Stores) -> None:
        if self._home is not None and (replaced := self._home.recognize(message.ids)):
            peer.answers.append(wire.replaced(replaced))

    def _followed(self, peer: Caller, message: Followed) -> None:
        if self._home is not None:
            self._home.followed(peer, message.version, self._now_ms)

    def _change_catalog(
        self, peer: Caller, partition: Partition, message: Request, asked: requests.ChangeCatalog
    ) -> object:
        """The followers are told after the commit; the gateways, and the caller, when all have followed."""
        if self._home is None:
            raise InvalidArgument("This partition is not the home of the namespace.")
        if (news := self._home.change(peer, message.number, asked.change, self._now_ms)) is not None:
            self._tell_followers(self._home, news)
        return _LATER

    def _remove(self, peer: Caller | None, message: Remove) -> None:
        """Take a deletion from any worker."""
        if self._home is not None and (news := self._home.remove(message.entity_ids, self._now_ms)) is not None:
            self._tell_followers(self._home, news)

    def _remove_orphans(self, home: Home[Caller]) -> None:
        is_parked = isinstance(self._partitions[HOME], ParkedPartition)
        if not is_parked and (news := home.remove_orphans(self._now_ms)) is not None:
            self._tell_followers(home, news)

    def _unused(self, peer: Caller | None, message: Unused) -> None:
        """A partition of any worker says what nobody has used there."""
        if self._home is not None:
            news = self._home.said_unused(message.partition, message.entity_ids, self._now_ms)
            if news is not None:
                self._tell_followers(self._home, news)

    def _answered(self, peer: Caller, message: Answer) -> None:
        if self._home is not None and (news := self._home.answered(peer, message, self._now_ms)) is not None:
            self._tell_followers(self._home, news)

    def _tell_followers(self, home: Home[Caller], news: Changed | Deleted) -> None:
        for caller in home.followers:
            caller.answers.append(news)

    def _tell_news(self, home: Home[Caller]) -> None:
        for caller, message in home.take_messages():
            caller.answers.append(message)
        for news in home.take_news():
            for caller in self._peers.values():
                if caller not in home.followers:
                    caller.answers.append(news)
        for done in home.take_done():
            if done.caller is not None:
                done.caller.answers.append(wire.reply(done.number, done.result))


def _take_marks(peer: Caller, channel: int, deliveries: int) -> Mark | None:
    """The mark of so many deliveries of the channel, which have an outcome now; None if they have none."""
    mark = peer.mark
    if mark is None or mark.channel != channel:
        peer.mark = None  # the command that it was for did not come
        return None
    left = mark.deliveries - deliveries
    peer.mark = mark._replace(first=mark.first + deliveries, deliveries=left) if left else None
    return mark


def _answer(peer: Caller, answer: Sent | Refused) -> None:
    if answer.channel:  # commands of channel 0 are not answered
        peer.answers.append(answer)


def _is_behind(peer: Caller) -> bool:
    return peer.is_behind


def _naming_receiver(peer: Caller, asked: R) -> R:
    """Return the request with the key that the partition knows its receiver by, in place of the channel.

    The key is None for channel 0: the client has no receiver that holds the session.
    """
    if isinstance(asked, requests.WITH_RECEIVER) and asked.receiver != requests.ANYONE:
        return cast(R, asked._replace(receiver=(peer, asked.receiver) if asked.receiver else None))
    return asked


def _key_and_owner(peer: Caller, transaction: bytes) -> tuple[tuple[Caller, bytes], tuple[Caller, bytes]]:
    """Return what a partition knows the transaction by, and the client's connection."""
    return (peer, transaction), (peer, transaction[: wire.TRANSACTION_OWNER_BYTES])


def _operations(peer: Caller, packed: Sequence[Any]) -> list[Operation]:
    """Return the operations of a transaction, with the keys of their receivers. Raises Malformed."""
    try:
        operations = unpack_operations(packed)
    except (IndexError, TypeError, ValueError):
        raise Malformed("An operation of a transaction cannot be read.") from None
    return [
        each._replace(receiver=(peer, each.receiver)) if isinstance(each, SettleOperation) else each
        for each in operations
    ]


def _messages_of(operation: Operation) -> int:
    if isinstance(operation, SendOperation):
        return len(operation.deliveries)
    return operation.messages if isinstance(operation, SendRunOperation) else len(operation.tokens)
