"""When clients last accessed an entity: AccessedAt (management.md 1.7).

A command of a client for a queue or for its dead-letter queue is an access: to send, receive, settle, browse or
schedule, in transactions, too. So are a message that another entity forwards to it, a delivery, and a receiver's change
of its credit; as long as the receiver has credit, it accesses the queue all the time, and so does who browses
it and waits for more. An access of a subscription is
none of its topic, and a message that a topic publishes is none of the subscription. Nor is it an access when somebody
looks at an entity or at its rules, or changes them. A new subscription is an access of its topic.

The time is only in memory, so that no message costs a write more. After a start, the partition knows of no access
before it.
"""

from broker.partition.state.core import PARTS, Core
from broker.partition.state.queue import Queue
from storage.queue_ids import queue_id_of


def note_receivers(queue: Queue, now_ms: int) -> None:
    """Call this before the broker may close receivers of the queue: they have accessed it until now."""
    if queue.is_in_use:
        queue.accessed_ms = now_ms


def last_ms(core: Core, entity_id: int, now_ms: int) -> int:
    """0 if there was no access since the partition was opened."""
    found = core.entities.accessed_ms.get(entity_id, 0)
    for part in PARTS:
        if (queue := core.queues.get(queue_id_of(entity_id, part))) is not None:
            if queue.is_in_use:
                return now_ms
            found = max(found, queue.accessed_ms)
    return found
