"""What can be chosen for a syphon."""

from dataclasses import dataclass
from math import inf

from broker.pairing.options import InvalidPairing, PairingOptions


@dataclass(frozen=True, slots=True)
class SyphonOptions:
    """`rate` are messages per second, None without a limit. `once`: end when all backlog queues are empty.

    Raises InvalidPairing for values that make no sense.
    """

    backlog_queue_count: int = 10
    rate: float | None = None
    once: bool = False

    def __post_init__(self) -> None:
        PairingOptions(backlog_queue_count=self.backlog_queue_count)
        if self.rate is not None and not 0 < self.rate < inf:
            raise InvalidPairing(f"the rate is {self.rate}; it must be a number of messages per second above 0")
