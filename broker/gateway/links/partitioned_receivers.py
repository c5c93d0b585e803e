"""Links on which clients receive from a partitioned entity: from all fragments, with one credit (see `shares`)."""

import time
from collections.abc import Iterable

from broker import runs, wire
from broker.errors import BrokerError, PartitionParked
from broker.gateway.host import Host
from broker.gateway.links.receivers import ClientReceiver, ReceiverChannel
from broker.gateway.links.shares import Action, Kind, Shares
from broker.gateway.namespace import Entity
from broker.runs import Part
from broker.wire import ENTRY
from protocol.addresses import Address
from protocol.engine.links import Link

# A fragment that does not answer a recall for this long is slow: its credit is used elsewhere.
RECALL_SECONDS = 0.2
# A link without credit does not use its entity (AutoDeleteOnIdle). The fragments are told that some time later, because
# most links get credit again with each message.
REST_SECONDS = 60.0


class PartitionedReceiver(ClientReceiver):
    """A link on which the client receives from a partitioned entity."""

    is_spread = True

    def __init__(
        self, connection: Host, link: Link, entity: Entity, address: Address, selector: str | None = None
    ) -> None:
        self._shares = Shares(entity.partitions)
        self._recalls = dict.fromkeys(entity.partitions, 0)  # the number of recalls of each fragment
        self._will_rest = False  # a timer for that runs
        self._will_spread = False  # the same
        super().__init__(connection, link, entity, address, entity.partitions, selector)
        self._by_prefix = {channel.partition.to_bytes(2, "big"): channel for channel in self._channels}
        self._rest_later()

    def _channel_of(self, token: bytes) -> ReceiverChannel:
        return self._by_prefix[token[:2]]  # see docs/design/lock-tokens.md

    def _open(self, channel: ReceiverChannel) -> None:
        channel.open()
        channel.is_down = False  # nothing waits for an answer, and it is opened when the worker is back
        if channel.worker.post(wire.watch(channel.partition, channel.number)):
            self._shares.connected(channel.partition)

    # -- credit

    def grant(self) -> None:
        self._may_get_more = False
        link = self.link
        if link.closed or self.is_ending:
            return
        transfers = link.session.room
        if self._must_wait(transfers):
            self._shares.is_draining = False  # it has ended, or begins again
            self._spread(0)
            return
        room = self._room(self._shares.granted, transfers)
        if room <= 0:
            self._rest_later()
        if link.drain:
            self._do(self._shares.drain(room, time.monotonic()))
            if not self._shares.is_drained(room):
                return
            link.drained()
            room = 0  # who has said meanwhile that it has messages waits for an answer
        self._shares.is_draining = False
        self._spread(room)

    def _spread(self, room: int) -> None:
        now = time.monotonic()
        self._do(self._shares.spread(room, now))
        again_at = self._shares.again_at
        if again_at is None or self._will_spread:
            return
        self._will_spread = True

        def spread() -> None:
            self._will_spread = False
            if not self._closing:
                self.ask()

        self.connection.later(again_at - now, spread)

    def _rest_later(self) -> None:
        """If the link still has no credit then, let the fragments know that it waits for nothing."""
        if self._will_rest:
            return
        self._will_rest = True

        def rest() -> None:
            self._will_rest = False
            if self._closing or self.link.closed:
                return
            if self._room(self._shares.granted, self.link.session.room) <= 0:
                self._do(self._shares.rest())

        self.connection.later(REST_SECONDS, rest)

    def _do(self, actions: Iterable[Action]) -> None:
        for kind, partition, granted in actions:
            channel = self._by_partition(partition)
            if kind is Kind.GRANT:
                channel.grant(channel.delivered + granted)
            elif kind is Kind.RECALL:
                channel.drain(channel.delivered + granted)
                self._expect_answer(partition)
            else:
                channel.worker.post(wire.passes(channel.partition, channel.number))

    def _by_partition(self, partition: int) -> ReceiverChannel:
        return self._by_prefix[partition.to_bytes(2, "big")]

    def _expect_answer(self, partition: int) -> None:
        """A fragment that does not give back what it was granted keeps nothing from the others for long."""
        self._recalls[partition] = number = self._recalls[partition] + 1

        def look() -> None:
            if self._recalls[partition] == number and partition in self._shares.recalled and not self._closing:
                self._shares.overdue(partition)
                self.ask()

        self.connection.later(RECALL_SECONDS, look)

    def on_drained(self, channel: ReceiverChannel, is_used_up: bool) -> None:
        self._shares.returned(channel.partition, is_used_up)
        self.ask()

    def _recall(self, channel: ReceiverChannel) -> None:
        if self._shares.stop(channel.partition):
            channel.drain(channel.delivered)
            self._expect_answer(channel.partition)

    def on_available(self, channel: ReceiverChannel) -> None:
        self._shares.available(channel.partition, time.monotonic())
        self.ask()

    # -- deliveries, and the end

    def on_deliver(self, channel: ReceiverChannel, locked_until_ms: int, entries: list[object]) -> None:
        self._shares.delivered(channel.partition, len(entries) // ENTRY)
        super().on_deliver(channel, locked_until_ms, entries)
        self.ask()

    def _deliver_run(self, channel: ReceiverChannel, locked_until_ms: int, part: Part) -> bool:
        if not super()._deliver_run(channel, locked_until_ms, part):
            return False
        _, _, _, count, _ = part
        self._shares.delivered(channel.partition, count)
        self.ask()
        return True

    def _accept(self, tokens: list[bytes], count: int, is_quiet: bool) -> None:
        of: dict[bytes, list[bytes]] = {}
        for token in tokens:
            of.setdefault(token[:2], []).append(token)
        for prefix, those in of.items():
            self._by_prefix[prefix].accept(those, runs.count_of(those), is_quiet)

    def on_detach(self, broken: bool = False, unsent: int = 0) -> None:
        super().on_detach(broken, unsent)
        self._by_prefix.clear()

    def on_worker_lost(self, channel: ReceiverChannel) -> None:
        self._shares.lost(channel.partition)
        self.ask()

    def on_closed(self, channel: ReceiverChannel, error: BrokerError | None) -> None:
        if isinstance(error, PartitionParked) and not self.link.closed:
            # The other fragments are served. This one is opened again when its worker has been started anew.
            self._shares.lost(channel.partition)
            channel.worker.channels[channel.number] = channel
            self.ask()
        else:
            super().on_closed(channel, error)
