"""Translates outcomes of AMQP to those of a partition and back."""

from collections.abc import Collection
from typing import Any

from broker.errors import NotImplementedByBroker
from broker.gateway.links.properties import dead_letter_properties, encode_properties
from broker.wire import Outcome
from protocol.codec import Described
from protocol.engine.deliveries import ACCEPTED, MODIFIED, REJECTED, RELEASED
from protocol.nodes.coordinator import outcome_of

# The state in the answer to an outcome, which is of the same kind (amqp.md 6.2).
STATE_OF = {
    Outcome.ACCEPTED: ACCEPTED,
    Outcome.ABANDONED: MODIFIED,
    Outcome.DEFERRED: MODIFIED,
    Outcome.DEAD_LETTERED: REJECTED,
    Outcome.RELEASED: RELEASED,
}


def transactional_outcome(
    value: Described | None, directives: Collection[str] = ()
) -> tuple[Outcome, dict[str, Any] | None]:
    """The outcome in a transactional-state, and the properties that it sets; `directives`: see `encode_properties`.

    Raises NotImplementedByBroker.
    """
    found = outcome_of(value)
    if found is None:
        raise NotImplementedByBroker("The transactional-state has no known outcome.")
    fields = [*found.fields, None, None, None]
    if found.state == MODIFIED:
        outcome = Outcome.DEFERRED if fields[1] else Outcome.ABANDONED
        return outcome, encode_properties(fields[2], directives) if isinstance(fields[2], dict) else None
    if found.state == REJECTED:
        error = fields[0].value if isinstance(fields[0], Described) else None
        _, description, info = (*error, None, None, None)[:3] if isinstance(error, list) else (None, None, None)
        return Outcome.DEAD_LETTERED, dead_letter_properties(
            info if isinstance(info, dict) else {}, description if isinstance(description, str) else ""
        )
    return Outcome.RELEASED if found.state == RELEASED else Outcome.ACCEPTED, None
