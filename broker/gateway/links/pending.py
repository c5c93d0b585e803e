"""Deliveries of a link that wait for a partition's answer, in the order of the commands.

Those of a link that the extension serves are kept there, because it adds to them and answers them itself.
"""

from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, overload

from broker.gateway.links.outcomes import STATE_OF
from broker.wire import Outcome
from protocol.engine.deliveries import ACCEPTED, TRANSACTIONAL, Delivery, settle, state_in
from protocol.engine.proton.native import address_of, delivery_at, native

_ADDRESS_BYTES = 8


class Arrivals(Protocol):
    """Deliveries that came; None for one that was sent settled."""

    def append(self, delivery: Delivery | None) -> None: ...

    def popleft(self) -> Delivery | None: ...

    def accept(self, count: int) -> None:
        """Settle the first `count` as accepted."""

    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class PlainArrivals(deque[Delivery | None]):
    def accept(self, count: int) -> None:
        for _ in range(count):
            delivery = self.popleft()
            if delivery is not None:
                settle(delivery, ACCEPTED)


class NativeArrivals:
    """`incoming` is the extension's."""

    def __init__(self, incoming: Any) -> None:
        self._incoming = incoming
        self.accept = incoming.accept
        self.clear = incoming.clear

    def append(self, delivery: Delivery | None) -> None:
        self._incoming.append(0 if delivery is None else address_of(delivery))

    def popleft(self) -> Delivery | None:
        address = self._incoming.popleft()
        return delivery_at(address) if address else None

    def __len__(self) -> int:
        return len(self._incoming)


class TakenDeliveries(Sequence[Delivery | None]):
    """Deliveries that the extension has given up, as `Incoming.take_pending` has them."""

    def __init__(self, addresses: bytes) -> None:
        self._addresses = addresses

    def accept(self) -> None:
        native.accept_all(self._addresses)

    def accept_in(self, transaction: bytes) -> None:
        native.settle_all(self._addresses, TRANSACTIONAL, state_in(transaction, ACCEPTED))

    def __len__(self) -> int:
        return len(self._addresses) // _ADDRESS_BYTES

    @overload
    def __getitem__(self, index: int) -> Delivery | None: ...
    @overload
    def __getitem__(self, index: slice) -> "TakenDeliveries": ...
    def __getitem__(self, index: int | slice) -> "Delivery | TakenDeliveries | None":
        addresses = memoryview(self._addresses).cast("Q")[index]
        if isinstance(addresses, memoryview):
            return TakenDeliveries(bytes(addresses))
        return delivery_at(addresses) if addresses else None


class Settlements(Protocol):
    """Deliveries that went out, and the outcomes that the client has given them."""

    def append(self, delivery: Delivery, outcome: Outcome) -> None: ...

    def popleft(self) -> Delivery: ...

    def settle(self, count: int) -> Sequence[int]:
        """Settle the first `count` as the client wants. Returns how many had each outcome."""

    def clear(self) -> None: ...

    def __len__(self) -> int: ...


class PlainSettlements:
    def __init__(self) -> None:
        self._waiting: deque[tuple[Delivery, Outcome]] = deque()
        self.clear = self._waiting.clear

    def append(self, delivery: Delivery, outcome: Outcome) -> None:
        self._waiting.append((delivery, outcome))

    def popleft(self) -> Delivery:
        return self._waiting.popleft()[0]

    def settle(self, count: int) -> Sequence[int]:
        counts = [0] * len(STATE_OF)
        for _ in range(count):
            delivery, outcome = self._waiting.popleft()
            settle(delivery, STATE_OF[outcome])
            counts[outcome] += 1
        return counts

    def __len__(self) -> int:
        return len(self._waiting)


class NativeSettlements:
    """The deliveries that wait for answers in one `line` of the extension's `outgoing`."""

    def __init__(self, outgoing: Any, line: int) -> None:
        self._outgoing = outgoing
        self._line = line

    def append(self, delivery: Delivery, outcome: Outcome) -> None:
        self._outgoing.append(self._line, address_of(delivery), outcome)

    def popleft(self) -> Delivery:
        return delivery_at(self._outgoing.popleft(self._line)[0])

    def settle(self, count: int) -> Sequence[int]:
        counts: Sequence[int] = self._outgoing.settle(self._line, count)
        return counts

    def clear(self) -> None:
        self._outgoing.clear(self._line)

    def __len__(self) -> int:
        return int(self._outgoing.pending(self._line))
