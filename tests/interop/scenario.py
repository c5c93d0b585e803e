"""A scenario, and the entity of the broker that it runs on."""

from collections.abc import Mapping
from dataclasses import dataclass, field

ENTITY_PREFIX = "interop-"


@dataclass(frozen=True)
class Scenario:
    """The entity is named ENTITY_PREFIX and `id`, so that all can run at once.

    `seeds` are the lines of the requirements it shows. `queue` differs from `QueueDescription`'s defaults; None
    declares no queue. `topic`, with its subscriptions and their rules, is declared in place of a queue. `others` is the
    number of more queues, named after the entity: `-1` and so on.
    """

    id: str
    sentence: str
    seeds: tuple[str, ...]
    queue: Mapping[str, object] | None = field(default_factory=dict)
    topic: Mapping[str, object] | None = None
    others: int = 0

    @property
    def entity(self) -> str:
        return ENTITY_PREFIX + self.id

    @property
    def other_queues(self) -> list[str]:
        return [f"{self.entity}-{number}" for number in range(1, self.others + 1)]
