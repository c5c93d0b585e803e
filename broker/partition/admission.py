"""Whether a queue or topic takes what is sent to it."""

from collections.abc import Sequence
from typing import Any

from broker.errors import EntityDisabled, NotAllowed, QuotaExceeded
from broker.partition.core import Core
from broker.partition.queue import Queue
from broker.partition.terms import Kind
from storage.records import MESSAGE_HEADER_BYTES, Part

Incoming = Sequence[Any]  # layout, body, ttl_ms | None, extra | None: see broker.wire


def check(core: Core, queue: Queue, messages: Sequence[Incoming]) -> None:
    """Raises NotAllowed, EntityDisabled, QuotaExceeded."""
    terms = queue.terms
    if queue.id & 7 != Part.MAIN:
        raise NotAllowed(f"Messages cannot be sent to the dead-letter queue of '{terms.name}'.")
    if terms.kind == Kind.SUBSCRIPTION:
        raise NotAllowed(f"Messages cannot be sent to the subscription '{terms.name}'; send them to its topic.")
    if not terms.can_send:
        raise EntityDisabled(f"Messaging entity '{terms.name}' is currently disabled for sending.")
    size_bytes = queue.size_bytes
    if terms.kind == Kind.QUEUE:
        size_bytes += core.queue(queue.id | Part.DEAD_LETTER).size_bytes
    added_bytes = sum(len(message[1]) for message in messages) + MESSAGE_HEADER_BYTES * len(messages)
    if size_bytes + added_bytes > terms.size_bytes_max:
        raise QuotaExceeded(
            f"The maximum entity size has been reached or exceeded for '{terms.name}'. "
            f"Size of entity in bytes: {size_bytes}, max entity size in bytes: {terms.size_bytes_max}."
        )
    if core.store_is_full():
        raise QuotaExceeded("The store of this partition is nearly full; messages must be received first.")
