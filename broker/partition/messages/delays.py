"""The delay that a receiver asks for while it abandons a message: a property with the name `DELAY`.

The property is meant for us, so it is taken out of those that are stored. Only where `PartitionSettings.abandon_delays`
is set; else it is a property like others. What becomes of the message is in `moves.put_off` and `schedule`.
"""

from broker.errors import BrokerError, InvalidArgument, NotAllowed, OutOfRange
from broker.partition.messages.moves import Properties
from broker.partition.state.core import Core
from broker.wire import Outcome
from protocol.bounds import MAX_DELAY_MS
from protocol.codec import Timestamp, decode_exactly
from protocol.symbols import DELAY
from storage.records import Place

_REFUSED = {
    Outcome.DEFERRED: f"'{DELAY}' is for messages that are abandoned, not for messages that are deferred.",
    Outcome.DEAD_LETTERED: f"'{DELAY}' is for messages that are abandoned, not for messages that are dead-lettered.",
}


def refusal(core: Core, outcome: Outcome, properties: Properties, place: Place | int) -> BrokerError | None:
    """The reason why a message in this place cannot be settled with these properties, or None."""
    if DELAY not in properties or not core.settings.abandon_delays:
        return None
    if outcome != Outcome.ABANDONED:
        return NotAllowed(_REFUSED[outcome]) if outcome in _REFUSED else None  # others set no properties
    if place == Place.DEFERRED:
        return NotAllowed(f"'{DELAY}': a deferred message stays deferred when it is abandoned, so it takes no delay.")
    delay_ms = _number(properties)
    if delay_ms is None:
        return InvalidArgument(f"'{DELAY}' is no whole number; it is 0 to {MAX_DELAY_MS} milliseconds.")
    if not 0 <= delay_ms <= MAX_DELAY_MS:
        return OutOfRange(f"'{DELAY}' is {delay_ms}; it is 0 to {MAX_DELAY_MS} milliseconds.")
    return None


def taken_out(core: Core, properties: Properties | None) -> tuple[int, Properties | None]:
    """The delay in milliseconds, 0 if there is none, and the other properties. `refusal` was None."""
    if not properties or DELAY not in properties or not core.settings.abandon_delays:
        return 0, properties
    return _number(properties) or 0, {name: value for name, value in properties.items() if name != DELAY}


def _number(properties: Properties) -> int | None:
    """The delay as a number; None if it is none. Clients whose numbers are all doubles send a double."""
    value = properties[DELAY]
    if isinstance(value, bytes):
        value = decode_exactly(value)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return int(value) if isinstance(value, int) and not isinstance(value, bool | Timestamp) else None
