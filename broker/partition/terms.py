"""What the state machine needs of an entity's definition. Definitions are stored by `broker.catalog`."""

from typing import Any, NamedTuple

from broker.entities import QueueDescription, Status


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

    @classmethod
    def of_definition(cls, document: dict[str, Any]) -> "Terms":
        """Of a stored definition: the description's fields, and some of the catalog's. Raises ValueError."""
        return cls.of(
            QueueDescription.model_validate(
                {name: value for name, value in document.items() if name in QueueDescription.model_fields}
            )
        )

    @property
    def can_send(self) -> bool:
        return self.status in (Status.ACTIVE, Status.RECEIVE_DISABLED)

    @property
    def can_receive(self) -> bool:
        return self.status in (Status.ACTIVE, Status.SEND_DISABLED)
