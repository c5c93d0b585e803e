"""Estimates the memory that an engine keeps of a peer's open, sessions and links, never too low, and limits it.

Proton keeps the content of a performative until its session or link has ended. It keeps text up to three times (as the
peer's terminus, as ours, in the answer). For each value of a filter or of properties, however short it is on the wire,
it keeps 72 bytes, twice. So the estimate counts bytes and values.
"""

from typing import Any, Final

from protocol.codec import Array, Described
from protocol.errors import InvalidField, ProtocolError

SESSION_BYTES: Final = 8192
LINK_BYTES: Final = 4096
COPIES: Final = 4
USUAL_DISPOSITION_BYTES: Final = 256
MAX_DISPOSITION_BYTES: Final = 16 << 20  # the size of a state, counted for each delivery that it is for
MAX_TRANSFER_LIST_BYTES: Final = 1024  # unlike its payload, a transfer's fields are kept until it is settled
OUTCOMES: Final = frozenset(
    (
        *(0x24, 0x25, 0x26, 0x27, 0x33, 0x34),
        *("amqp:accepted:list", "amqp:rejected:list", "amqp:released:list", "amqp:modified:list"),
        *("amqp:declared:list", "amqp:transactional-state:list"),
    )
)
_CONTAINERS: Final = (list, dict, Array)  # of which there may be arrays with more values
VALUE_BYTES: Final = 150  # measured: 143 for a value of a source's filter, which is kept twice


class StateTooLarge(ProtocolError):
    """The peer would make the connection keep more than its limit."""


class StateBytes:
    """The sum of kept bytes, by channel and handle."""

    def __init__(self) -> None:
        self.maximum: int | None = None
        self._sessions: dict[int, int] = {}
        self._links: dict[int, dict[int, int]] = {}
        self.total = 0

    def open(self, size: int, fields: list[Any]) -> None:
        """The peer has opened the connection by a frame of `size` bytes. Raises StateTooLarge, as other methods do."""
        self._add(_kept(size, fields))

    def begin(self, channel: int, size: int, fields: list[Any]) -> None:
        kept = self._sessions[channel] = SESSION_BYTES + _kept(size, fields)
        self._links[channel] = {}
        self._add(kept)

    def end(self, channel: int) -> None:
        links = self._links.pop(channel, {})
        self.total -= self._sessions.pop(channel, 0) + sum(links.values())

    def attach(self, channel: int, handle: int, size: int, fields: list[Any]) -> None:
        kept = self._links[channel][handle] = LINK_BYTES + _kept(size, fields)
        self._add(kept)

    def detach(self, channel: int, handle: int) -> None:
        self.total -= self._links[channel].pop(handle, 0)

    def _add(self, kept: int) -> None:
        self.total += kept
        if self.maximum is not None and self.total > self.maximum:
            raise StateTooLarge(f"The sessions and links of the connection take more than {self.maximum} bytes.")


def check_disposition(size: int, fields: list[Any]) -> None:
    """Every delivery may keep its own copy of a disposition of `size` bytes. Raises StateTooLarge, InvalidField.

    The state is freed when the delivery is settled, which is soon after an outcome. Other states may stay.
    """
    if size <= USUAL_DISPOSITION_BYTES:
        return
    _, first, last, settled, state, *_ = fields
    descriptor = state.descriptor if state is not None else None
    if not settled and descriptor not in OUTCOMES:
        raise InvalidField("disposition.state", f"must be an outcome, or in a frame of {USUAL_DISPOSITION_BYTES} bytes")
    deliveries = 1 if last is None else 1 + ((last - first) & 0xFFFFFFFF)
    if size * deliveries > MAX_DISPOSITION_BYTES:
        raise StateTooLarge(f"A state of {size} bytes is for {deliveries} deliveries; settle fewer of them at once.")


def _kept(size: int, fields: list[Any]) -> int:
    return COPIES * size + VALUE_BYTES * _values_in(fields)


def _values_in(value: Any) -> int:
    """The number of values in this decoded value, itself included."""
    count = 0
    pending = [value]
    while pending:
        each = pending.pop()
        count += 1
        kind = type(each)
        if kind is list:
            pending += each
        elif kind is dict:
            pending += each
            pending += each.values()
        elif kind is Array:
            if each.kind in _CONTAINERS:
                pending += each.items
            else:
                count += len(each.items)
        elif kind is Described:
            pending += (each.descriptor, each.value)
    return count
