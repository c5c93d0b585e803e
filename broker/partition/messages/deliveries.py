"""What one hand-out gives: deliveries, and what else the receivers are told. Its limits are here, too."""

from collections.abc import Hashable, Sequence
from struct import Struct
from typing import Any, NamedTuple

from broker.errors import BrokerError
from broker.partition.state.core import Core
from broker.wire import Forward

RECEIVED_AND_DELETED = "receiveAndDelete"  # in the journal

READ_MAX = 128  # messages read at once
WEIGHT_BYTES = 512  # counted for a delivery besides its record, so that small messages count for their work

_token_number = Struct(">Q").pack

Delivery = tuple[Hashable, int, list[Any]]  # receiver, locked until, entry items: see `Pumped`
Deliveries = list[Delivery]
Drained = list[tuple[Hashable, int]]


class Pumped(NamedTuple):
    """`deliveries`: (receiver, locked_until_ms or 0 if not locked, entry items: see broker.wire).

    `drained`: (receiver, deliveries since it was opened). `available`: receivers that watch, and could take messages,
    and browsers for which there are more.
    `closed`: receivers that the partition closed, and the errors. `more`: there is more to do at once, which this turn
    was too short for. `forwards` may leave after the commit. `accepted`: (receiver, session id, locked_until_ms) of
    receivers that have got their session.
    """

    deliveries: Sequence[Delivery] = ()
    drained: Sequence[tuple[Hashable, int]] = ()
    closed: Sequence[tuple[Hashable, BrokerError]] = ()
    more: bool = False
    forwards: Sequence[Forward] = ()
    accepted: Sequence[tuple[Hashable, str, int]] = ()
    available: Sequence[Hashable] = ()


NOTHING = Pumped()


def token_of(core: Core, number: int) -> bytes:
    """The token with this number: see `Core.take_tokens`."""
    return core.token_prefix + _token_number(number)


def new_token(core: Core) -> bytes:
    return token_of(core, core.take_tokens(1))
