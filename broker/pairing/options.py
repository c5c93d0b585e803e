"""What can be chosen for a pairing (PN2)."""

from dataclasses import dataclass
from typing import Final

SECOND_MS: Final = 1000
MAX_BACKLOG_QUEUES: Final = 1000


class InvalidPairing(Exception):
    """The pairing cannot be made as it is asked for. The text is for the user: what is wrong, and the limit."""


@dataclass(frozen=True, slots=True)
class PairingOptions:
    """Durations are milliseconds. Raises InvalidPairing for values that make no sense.

    `failover_interval_ms`: how long an entity may fail before its messages go to the backlog; 0 is at the first
    failure that counts. `ping_interval_ms`: how often it is asked then whether it is back. `attempt_timeout_ms`: how
    long an answer may take until that counts as a failure. `busy_wait_ms`: how long a sender waits that was told that
    the service is busy. `runs_syphon`: whether this process also brings the backlog to the primary.
    """

    backlog_queue_count: int = 10
    failover_interval_ms: int = 10 * SECOND_MS
    ping_interval_ms: int = 60 * SECOND_MS
    attempt_timeout_ms: int = 10 * SECOND_MS
    busy_wait_ms: int = 10 * SECOND_MS
    runs_syphon: bool = False

    def __post_init__(self) -> None:
        _require("backlog_queue_count", self.backlog_queue_count, 1, MAX_BACKLOG_QUEUES)
        _require("failover_interval_ms", self.failover_interval_ms, 0, 24 * 3600 * SECOND_MS)
        _require("ping_interval_ms", self.ping_interval_ms, 100, 24 * 3600 * SECOND_MS)
        _require("attempt_timeout_ms", self.attempt_timeout_ms, 10, 3600 * SECOND_MS)
        _require("busy_wait_ms", self.busy_wait_ms, 0, 3600 * SECOND_MS)


def _require(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InvalidPairing(f"{name} is {value}; it must be {least} to {most}")
