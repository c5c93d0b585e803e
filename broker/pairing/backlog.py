"""The backlog queues of a pairing: their names, their settings, and which one a client uses (PN3, PN5, PN7)."""

import ipaddress
import re
from collections.abc import Callable, Sequence
from typing import Final

from broker.pairing.options import InvalidPairing

_NAME: Final = re.compile(r"[A-Za-z0-9](?:[\w.~-]*[\w-])?", re.ASCII)
MAX_NAME_CHARACTERS: Final = 200  # of 260 that the path of a queue may have

# As PN3 wants them; everything else is the service's default. A partitioned queue keeps no order of a session's
# messages, which are without their session id there, so it must not be the namespace's default either.
BACKLOG_SETTINGS: Final = {
    "LockDuration": "PT1M",
    "MaxSizeInMegabytes": "5120",
    "DeadLetteringOnMessageExpiration": "true",
    "MaxDeliveryCount": str((1 << 31) - 1),
    "EnableBatchedOperations": "true",
    "EnablePartitioning": "false",
}
# Of the queue whose sessions are the leases of syphons. It never has messages.
LEASE_SETTINGS: Final = {"LockDuration": "PT1M", "RequiresSession": "true", "EnablePartitioning": "false"}


def namespace_name(host: str) -> str:
    """The name of a namespace by its host: `contoso` of contoso.servicebus.windows.net, or an IP address as it is."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host.partition(".")[0].lower()
    return host.replace(":", "-").lower()


def check_name(name: str) -> str:
    """Return `name`. Raises InvalidPairing if it cannot be the primary's name in paths of queues."""
    if not _NAME.fullmatch(name) or len(name) > MAX_NAME_CHARACTERS:
        raise InvalidPairing(
            f"the primary's name is {name[:MAX_NAME_CHARACTERS]!r}; it must be 1 to {MAX_NAME_CHARACTERS} letters, "
            "digits and . _ - ~, with a letter or digit at the start, and one or _ or - at the end"
        )
    return name


def backlog_queues(primary: str, count: int) -> list[str]:
    """The paths of the backlog queues in the secondary."""
    return [f"{primary}/x-servicebus-transfer/{index}" for index in range(count)]


def lease_queue(primary: str) -> str:
    """The path of the queue whose session `<index>` is the lease of the backlog queue with that index."""
    return f"{primary}/x-servicebus-transfer-leases"


class Rotation:
    """The backlog queues that the senders of a pairing may use.

    A client picks one at random, and another one when that has failed. All senders of the pairing learn of a queue that
    was pulled. It comes back after `retry_ms`. If all are pulled, the one that was pulled first is tried again.
    `choose` picks from a sequence, as `random.choice` does. Times are of one monotonic clock.
    """

    def __init__(self, queues: Sequence[str], retry_ms: int, choose: Callable[[Sequence[str]], str]) -> None:
        self._queues = tuple(queues)
        self._retry_ms = retry_ms
        self._choose = choose
        self._pulled: dict[str, int] = {}  # when it comes back; the first is the one that was pulled first

    def pick(self, present: str | None, now_ms: int) -> str:
        """The queue that a client should use which uses `present` now, or none."""
        self._return(now_ms)
        if present is not None and present not in self._pulled:
            return present
        free = [queue for queue in self._queues if queue not in self._pulled]
        return self._choose(free) if free else next(iter(self._pulled))

    def pull(self, queue: str, now_ms: int) -> bool:
        """A send to the queue has failed. False if the queue was pulled before."""
        was_pulled = self._pulled.pop(queue, None) is not None
        self._pulled[queue] = now_ms + self._retry_ms
        return not was_pulled

    def pulled(self, now_ms: int) -> list[str]:
        """The queues that are out of rotation now."""
        self._return(now_ms)
        return list(self._pulled)

    @property
    def is_exhausted(self) -> bool:
        """All queues are pulled."""
        return len(self._pulled) == len(self._queues)

    def _return(self, now_ms: int) -> None:
        self._pulled = {queue: until_ms for queue, until_ms in self._pulled.items() if until_ms > now_ms}
