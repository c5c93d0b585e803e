"""What the state machine needs of an entity's description, and how descriptions are stored.

An ENTITIES value is a document: {"queue": the description's fields} or, while a deleted entity's messages are being
freed, {"deleted": True}.
"""

from typing import Any, NamedTuple

from broker.entities import QueueDescription, Status
from storage.records import decode_document, encode_document

DELETED = encode_document({"deleted": True})


class Terms(NamedTuple):
    """Kept for each entity, so it is small: 10,000 descriptions would fill tens of megabytes."""

    name: str
    lock_duration_ms: int
    max_delivery_count: int
    time_to_live_ms: int | None
    dead_letter_expired: bool
    size_bytes_max: int
    status: Status

    @classmethod
    def of(cls, description: QueueDescription) -> "Terms":
        return cls(
            name=description.name,
            lock_duration_ms=description.lock_duration_ms,
            max_delivery_count=description.max_delivery_count,
            time_to_live_ms=description.default_message_time_to_live_ms,
            dead_letter_expired=description.dead_lettering_on_message_expiration,
            size_bytes_max=description.max_size_mb << 20,
            status=description.status,
        )

    @property
    def can_send(self) -> bool:
        return self.status in (Status.ACTIVE, Status.RECEIVE_DISABLED)

    @property
    def can_receive(self) -> bool:
        return self.status in (Status.ACTIVE, Status.SEND_DISABLED)


def encode_description(description: QueueDescription) -> bytes:
    return encode_document({"queue": description.model_dump(mode="json")})


def decode_description(value: bytes) -> QueueDescription | None:
    """None for a deleted entity. Raises CorruptRecord, pydantic.ValidationError."""
    document: dict[str, Any] = decode_document(value)
    return None if "deleted" in document else QueueDescription.model_validate(document["queue"])
