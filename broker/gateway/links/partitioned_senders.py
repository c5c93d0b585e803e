"""Links on which clients send to a partitioned entity.

A message with a key goes to the fragment of its key. Any other goes to each fragment in turn, and to the next one if a
fragment is down, full or busy (PE4 of Service Bus): its client sees no error while any fragment can take it.

If a fragment ends before it answers, it is asked what it has stored as soon as it is back (`wire.Mark`), and only the
rest is sent again. Only if it is not back soon, or does not answer for long (PE13), a message goes to another fragment
without an answer of the first. It may then be stored twice, as after a time-out of any client that tries again. With
duplicate detection each message has a key, so this cannot happen.
"""

import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

from broker import requests, wire
from broker.errors import BrokerError, OutcomeUnknown, PartitionParked, QuotaExceeded, ServerBusy
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host
from broker.gateway.links.channel import LinkChannel
from broker.gateway.links.pending import TakenDeliveries
from broker.gateway.links.senders import ClientSender
from broker.gateway.namespace import Entity
from broker.gateway.router import EARLY_BYTES
from broker.namespace.fragments import fragment_of, key_of, split
from broker.runs import RunMessages
from protocol import error_texts
from protocol.addresses import Address
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, settle
from protocol.engine.links import Link
from protocol.engine.proton.native import address_of, native

# Bytes of messages without a key that go to a fragment before the end of the turn. The workers share the messages, so
# each has time to wait for more: with less at once it would commit more often. With more than receivers have granted to
# the fragment it would hand them out in several turns.
SHARED_EARLY_BYTES = 2 * EARLY_BYTES
AVOID_SECONDS = 1.0  # a fragment that refused a message is not tried again for this time, if there are others
# Messages whose fragment has ended wait for it so long. A worker that is started anew is back in about a second, and in
# less than this if it has ended some times in a row.
BACK_SECONDS = 8.0

# The fragment could not take the message, or did not say; another one may take it.
_NOT_HERE = (ServerBusy, QuotaExceeded, PartitionParked, OutcomeUnknown)


class _Parts:
    """A batch that is stored on several fragments; it is done when all its parts are."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.error: BrokerError | None = None


class _Command:
    """Deliveries that were sent to a fragment together. A batch is one delivery of several messages."""

    __slots__ = (
        "deliveries", "has_key", "has_moved", "is_batch", "mark", "messages", "number", "parts", "since", "size_bytes",
        "tried",
    )  # fmt: skip

    def __init__(self, has_key: bool, is_batch: bool, since: float, tried: tuple[int, ...] = ()) -> None:
        self.has_key = has_key
        self.is_batch = is_batch
        self.since = since
        self.tried = tried  # partitions that did not take it
        self.deliveries: Sequence[Delivery | None] = []  # None for one that was sent settled
        self.parts: _Parts | None = None  # of the only delivery, if this is one of several
        self.messages: list[Any] | RunMessages = []
        self.size_bytes = 0
        self.has_moved = False  # another fragment has it now, and only that one's answer counts
        self.mark: int | None = None  # see `SendMarks`
        self.number = 0  # with a mark: that of the first delivery

    def add(self, delivery: Delivery | None, message: Any, size_bytes: int) -> None:
        """A message that Python has taken apart, in a command of such messages."""
        assert isinstance(self.deliveries, list)
        assert isinstance(self.messages, list)
        self.deliveries.append(delivery)
        self.messages.append(message)
        self.size_bytes += size_bytes

    def split(self, count: int) -> "_Command":
        """Remove the first `count` deliveries; returns a command of them."""
        first = _Command(self.has_key, self.is_batch, self.since, self.tried)
        first.has_moved, first.mark, first.number = self.has_moved, self.mark, self.number
        self.number += count
        share = self.size_bytes * count // len(self.deliveries)
        first.deliveries, self.deliveries = self.deliveries[:count], self.deliveries[count:]
        first.messages, self.messages = self.messages[:count], self.messages[count:]
        first.size_bytes, self.size_bytes = share, self.size_bytes - share
        return first

    def again(self, partition: int) -> "_Command":
        """The same for another fragment, because this partition does not answer."""
        again = _Command(self.has_key, self.is_batch, self.since, (*self.tried, partition))
        again.deliveries, again.parts = self.deliveries, self.parts
        again.messages, again.size_bytes = self.messages, self.size_bytes
        return again


class FragmentChannel(LinkChannel):
    """A sender on one fragment."""

    def __init__(self, sender: "PartitionedSender", partition: int) -> None:
        super().__init__(sender.connection, partition)
        self._sender = sender
        self._marks = sender.connection.gateway.router.marks(partition)
        self._gathering: _Command | None = None  # messages with keys
        self._sent: deque[_Command] = deque()
        # What was under way without a key when the worker ended, and the time until which it waits (time.monotonic).
        self._unknown: list[tuple[_Command, float]] = []
        self.unanswered = 0
        self.avoided_until = 0.0  # by time.monotonic

    @property
    def is_usable(self) -> bool:
        return self.worker.is_usable

    def gather(self, delivery: Delivery | None, message: Any, size_bytes: int) -> None:
        """Keep a message with a key until enough have come, or the turn ends."""
        command = self._gathering
        if command is None:
            command = self._gathering = _Command(True, False, time.perf_counter())
        command.add(delivery, message, size_bytes)
        self.unanswered += 1
        if command.size_bytes > EARLY_BYTES:
            self.post_gathered()

    def send_batch(
        self, delivery: Delivery | None, parts: _Parts | None, messages: list[Any], size_bytes: int, has_key: bool
    ) -> None:
        self.post_gathered()
        command = _Command(has_key, True, time.perf_counter())
        command.deliveries = [delivery]
        command.parts = parts
        command.messages = messages
        command.size_bytes = size_bytes
        self.unanswered += 1
        self.post(command)

    def take(self, command: _Command) -> None:
        """Send messages without a key."""
        self.unanswered += len(command.deliveries)
        self.post(command)

    def post_gathered(self) -> None:
        command, self._gathering = self._gathering, None
        if command is not None:
            self.post(command)

    def post(self, command: _Command) -> None:
        if not command.has_key and self.worker.knows_marks:
            self._post_mark(command)
        self._sent.append(command)
        if not self._post(command) and not self._let_wait(command):
            self._sent.pop()
            self._end(command, ServerBusy(error_texts.fragment_away(self._sender.entity.name, self.partition)))

    def _post_mark(self, command: _Command) -> None:
        command.mark = command.number = self._marks.begin(len(command.deliveries))
        self._say_mark(command, command.mark)

    def _say_mark(self, command: _Command, mark: int) -> None:
        marks, count = self._marks, len(command.deliveries)
        self.worker.post(wire.mark(self.partition, self.number, marks.sender, mark, count, marks.below))

    def _let_wait(self, command: _Command) -> bool:
        """The worker is away: it gets the command when it is back, if it may wait. Its mark goes with it."""
        count = len(command.deliveries)
        return self.let_wait(count, command.size_bytes, partial(self._post_now, command), partial(self.on_sent, count))

    def _post_now(self, command: _Command) -> None:
        if command.mark is not None and self.worker.knows_marks:
            self._say_mark(command, command.mark)
        self._post(command)

    def _post(self, command: _Command) -> bool:
        messages, queue = command.messages, self._sender.queue
        if isinstance(messages, RunMessages):
            return self.worker.post_run(self.partition, self.number, queue, len(messages), messages.run)
        make = wire.send_batch if command.is_batch else wire.send
        return self.worker.post(make(self.partition, self.number, queue, messages))

    def on_sent(self, count: int, error: BrokerError | None) -> None:
        while count > 0:
            command = self._sent[0]
            deliveries = len(command.deliveries)
            if deliveries > count:
                command = command.split(count)
                deliveries = count
            else:
                self._sent.popleft()
            count -= deliveries
            self._end(command, error)

    def _end(self, command: _Command, error: BrokerError | None) -> None:
        self.unanswered -= len(command.deliveries)
        self._end_mark(command)
        if command.has_moved:
            return
        if isinstance(error, _NOT_HERE):
            self.avoided_until = time.monotonic() + AVOID_SECONDS
            command.tried += (self.partition,)
            if not command.has_key and self._sender.move_on(command):
                return
        self._sender.end(command, error)

    def on_worker_lost(self) -> None:
        lost, self._sent = self._sent, deque()
        until = time.monotonic() + BACK_SECONDS
        waits = False
        for command in lost:
            if command.mark is None or command.has_moved:
                self._end_unknown(command)
            else:
                self._unknown.append((command, until))
                waits = True
        if waits:
            self.connection.later(BACK_SECONDS, self._give_up)

    def _end_unknown(self, command: _Command) -> None:
        self._end(command, OutcomeUnknown(error_texts.OUTCOME_UNKNOWN))

    def _end_mark(self, command: _Command) -> None:
        if command.mark is not None:
            self._marks.end(command.mark, len(command.deliveries))
            command.mark = None

    def on_worker_back(self) -> None:
        if self._unknown:
            asked = requests.Stored(self._marks.sender)
            self.connection.gateway.router.request(self.partition, 0, asked, self._on_stored, self.connection)

    def _on_stored(self, ranges: list[int] | None, error: BrokerError | None) -> None:
        """The fragment says which marked deliveries it has."""
        if isinstance(error, OutcomeUnknown | ServerBusy):
            return  # it has ended again, or is not up to it yet; what waits does so for its time
        unknown, self._unknown = self._unknown, []
        for command, _ in unknown:
            if ranges is None:
                self._end_unknown(command)
            else:
                self._end_stored(command, ranges)
        self.connection.flush()

    def _end_stored(self, command: _Command, ranges: list[int]) -> None:
        """End the deliveries of the command that are in these ranges, and send the others again."""
        while command.deliveries:
            at = bisect_right(ranges, command.number)
            is_stored = at % 2 == 1  # ranges are first numbers and ends in turn
            left = len(command.deliveries)
            count = min(left, ranges[at] - command.number) if at < len(ranges) else left
            part = command.split(count) if count < left else command
            if is_stored:
                self._end(part, None)
            else:
                self._end_mark(part)
                self.post(part)
            if part is command:
                return

    def _give_up(self) -> None:
        """The fragment is not back in time."""
        now = time.monotonic()
        late = [command for command, until in self._unknown if until <= now]
        self._unknown = [each for each in self._unknown if each[1] > now]
        for command in late:
            self._end_unknown(command)

    def on_worker_stalled(self) -> None:
        for command in self._sent:
            if not (command.has_key or command.has_moved):
                command.has_moved = self._sender.move_on(command.again(self.partition))

    def end(self) -> None:
        """The client is gone. Its messages are still stored; nobody is told."""
        self.post_gathered()
        self.forget()
        for command in (*self._sent, *[each for each, _ in self._unknown]):
            self._end_mark(command)
        self._sent.clear()
        self._unknown.clear()


class PartitionedSender(ClientSender):
    """A link on which the client sends to a partitioned entity."""

    def __init__(
        self, connection: Host, link: Link, entity: Entity, address: Address, destination: Entity | None = None
    ) -> None:
        super().__init__(connection, link, entity, address, destination)
        self._channels = {partition: FragmentChannel(self, partition) for partition in entity.partitions}
        self._turns = deque(self._channels.values())  # the first is the next that gets messages without a key
        self._turns.rotate(-next(connection.gateway.sender_turns))  # many clients open a sender for each message
        # A fragment that is slow gets no more than its share of the client's credit, so that the others get the rest.
        self._share = max(1, self.window // len(self._channels))
        # Messages without a key that gather for one fragment, and how many more these may be.
        self._gathering: tuple[FragmentChannel, _Command] | None = None
        self._room = 0
        self._has_ended = False
        # Usual messages without a key gather here.
        self._incoming: Any = None
        if native is not None and self.takes_usual and not (self.wants_id or self.requires_session):
            self._incoming = native.Incoming(address_of(link.pointer), self, link.max_message_bytes, gives_ids=True)
            link.engine.take_usual(link, self._incoming)

    # -- what the extension calls

    def on_gathering(self) -> None:
        self.link.known_credit = None
        self.connection.active[self] = None

    def post_early(self) -> None:
        if self._incoming.message_bytes > SHARED_EARLY_BYTES:
            self._post_runs()

    # -- messages

    def _spread(self, delivery: Delivery, messages: list[Any], size_bytes: int, batch: bool, settled: bool) -> None:
        try:
            if batch:
                self._spread_batch(delivery, messages, size_bytes, settled)
                return
            key = key_of(messages[0][3])
            if key is None:
                command = self._gathering[1] if self._gathering is not None else self._gather()
            else:
                channel = self._channel_for(fragment_of(key, self.entity.partitions))
        except BrokerError as error:
            self.refuse(delivery, settled, error)
            return
        self.unanswered += 1
        if settled:
            forget(delivery)
        if key is not None:
            channel.gather(None if settled else delivery, messages[0], size_bytes)
            return
        command.add(None if settled else delivery, messages[0], size_bytes)
        self._room -= 1
        if self._room <= 0 or command.size_bytes > SHARED_EARLY_BYTES:
            self._post_keyless()

    def _gather(self) -> _Command:
        """Begin to gather messages without a key. Raises ServerBusy."""
        channel = self._channel_for(None)
        command = _Command(False, False, time.perf_counter())
        self._gathering = channel, command
        self._room = self._room_of(channel)
        return command

    def _room_of(self, channel: FragmentChannel) -> int:
        """The number of messages without a key that the fragment gets next, 1 at least."""
        room = self._share - channel.unanswered
        return room if room > 0 else self._share  # all have their share: the client has sent more than its credit

    def _post_keyless(self) -> None:
        if self._gathering is not None:
            (channel, command), self._gathering = self._gathering, None
            channel.take(command)

    def _post_runs(self) -> None:
        """Post the usual messages that have gathered: to each fragment its share at most, while that is possible."""
        incoming = self._incoming
        if incoming is None or not incoming.count:
            return
        command = _Command(False, False, time.perf_counter())
        command.size_bytes, count = incoming.message_bytes, incoming.count
        command.messages = RunMessages(incoming.take_run(), count)
        command.deliveries = TakenDeliveries(incoming.take_pending(len(incoming)))
        self.unanswered += count
        while True:
            try:
                channel = self._channel_for(None)
            except BrokerError as error:
                self.end(command, error)
                return
            room = self._room_of(channel)
            if len(command.deliveries) <= room:
                channel.take(command)
                return
            channel.take(command.split(room))

    def _spread_batch(self, delivery: Delivery, messages: list[Any], size_bytes: int, settled: bool) -> None:
        """Send each message of a batch to the partition of its key. Raises BrokerError."""
        self._post_keyless()
        parts = split(messages, self.entity.partitions)
        channels = {partition: self._channel_for(partition) for partition in parts}
        self.unanswered += len(parts)
        if settled:
            forget(delivery)
        waits = None if settled else delivery
        several = _Parts(len(parts)) if len(parts) > 1 else None
        for partition, part in parts.items():
            channels[partition].send_batch(waits, several, part, size_bytes // len(parts), partition is not None)

    def _channel_for(self, partition: int | None) -> FragmentChannel:
        """The channel to this partition, or for messages without a key. Raises ServerBusy."""
        channel = self._next() if partition is None else self._channels[partition]
        if channel is None or not channel.is_usable:
            channel = self._awaited(partition)
        if partition is None:
            self._turns.remove(channel)
            self._turns.append(channel)
        return channel

    def _next(self, tried: Iterable[int] = ()) -> FragmentChannel | None:
        """The fragment for a message without a key; None if all are down, or among those that were `tried`."""
        first = self._turns[0]
        if not (tried or first.avoided_until) and first.unanswered < self._share and first.is_usable:
            return first  # the usual case
        usable = [each for each in self._turns if each.is_usable and each.partition not in tried]
        now = time.monotonic()
        for channel in usable:
            if channel.avoided_until <= now:
                channel.avoided_until = 0.0
                if channel.unanswered < self._share:
                    return channel
        return min(usable, key=lambda each: (each.avoided_until, each.unanswered), default=None)

    def _awaited(self, partition: int | None) -> FragmentChannel:
        """This fragment is down, or all are: it, or any of them, whose worker is being restarted. Raises ServerBusy."""
        wanted = self._turns if partition is None else (self._channels[partition],)
        for channel in wanted:
            if channel.worker.is_awaited:
                return channel
        name = self.entity.name
        away = error_texts.fragments_away(name) if partition is None else error_texts.fragment_away(name, partition)
        raise ServerBusy(away)

    def move_on(self, command: _Command) -> bool:
        """A fragment did not take the command, which has no key: send it to another one. False if there is none."""
        channel = None if self._has_ended else self._next(command.tried)
        if channel is None:
            return False
        channel.take(command)
        return True

    def post_gathered(self) -> bool:
        for channel in self._channels.values():
            channel.post_gathered()
        self._post_keyless()
        self._post_runs()
        return False

    def end(self, command: _Command, error: BrokerError | None) -> None:
        """The deliveries of the command have this outcome."""
        if self._has_ended:
            return
        count, metrics = len(command.deliveries), self.metrics
        metrics.incoming_requests += count
        self.latency.observe_many(time.perf_counter() - command.since, count)
        if error is None:
            metrics.successful_requests += count
            metrics.incoming_messages += len(command.messages)
            metrics.incoming_bytes += command.size_bytes
        else:
            metrics.failed(type(error).__name__, count)
        parts = command.parts
        if parts is not None:
            parts.left -= 1
            parts.error = parts.error or error
            if not parts.left:
                self._tell(command.deliveries, parts.error)
        else:
            self._tell(command.deliveries, error)
        self.answered(count)

    def _tell(self, deliveries: Iterable[Delivery | None], error: BrokerError | None) -> None:
        if error is None:
            self.link.begin_outcomes()
            if isinstance(deliveries, TakenDeliveries):
                deliveries.accept()
                return
            for delivery in deliveries:
                if delivery is not None:
                    settle(delivery, ACCEPTED)
            return
        condition, text = condition_of(error), str(error)
        for delivery in deliveries:
            if delivery is not None:
                self.connection.reject(delivery, condition, text, self.tracker)

    def on_detach(self) -> None:
        self._post_keyless()
        self._post_runs()
        self.link.engine.forget_native(self.link)
        self._has_ended = True
        for channel in self._channels.values():
            channel.end()
        self._channels.clear()
        self._turns.clear()
        self._incoming = None
