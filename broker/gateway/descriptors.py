"""File descriptors of a gateway: as many as the system allows, and how many connections they are enough for."""

import os
import resource
import time

from broker.http.ops import MAX_CONNECTIONS as OPS_CONNECTIONS
from broker.logging import get_logger
from broker.settings.config import Settings

# Connections over the limit still get an answer that says so; this many over it are cut off at once.
REFUSED_CONNECTIONS = 200
# Libraries, listeners, the event loop, workers; and TLS handshakes, which are no connections yet.
OWN_DESCRIPTORS = 100
LOG_SECONDS = 5.0

log = get_logger("gateway")


def raise_limit() -> int:
    """Let this process have as many file descriptors as it is allowed; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # some systems allow less than they say
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def connections_for(settings: Settings, descriptors: int) -> tuple[int, int]:
    """How many connections are served, and how many more are refused with an answer, with so many descriptors."""
    free = descriptors - OWN_DESCRIPTORS - OPS_CONNECTIONS - settings.worker_count
    refused = max(1, min(REFUSED_CONNECTIONS, free // 4))
    return max(1, min(settings.amqp.max_connections, free - refused)), refused


def allowed_connections(settings: Settings) -> tuple[int, int]:
    """As `connections_for` what this process gets; says so if that is less than is set."""
    descriptors = raise_limit()
    served, refused = connections_for(settings, descriptors)
    most = settings.amqp.max_connections
    if served < most:
        log.warning(
            "fewer connections than amqp.max_connections",
            connections=served,
            set=most,
            file_descriptors=descriptors,
            fix=f"raise the limit of open files (ulimit -n) by {most - served}, or lower amqp.max_connections",
        )
    return served, refused


def are_used_up() -> bool:
    """No descriptor is left: the event loop closes what it accepts."""
    try:
        os.close(os.dup(0))
    except OSError:
        return True
    return False


class RefusalLog:
    """Says that connections are refused, and how many were since it last said so, at most every few seconds."""

    def __init__(self) -> None:
        self._count = 0
        self._silent_until_s = 0.0

    def refused(self, reason: str, peer: str = "") -> None:
        self._count += 1
        now_s = time.monotonic()
        if now_s >= self._silent_until_s:
            log.warning("connections refused", reason=reason, count=self._count, last_peer=peer)
            self._count = 0
            self._silent_until_s = now_s + LOG_SECONDS
