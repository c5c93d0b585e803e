"""File descriptors of a gateway: raises the limit, and computes how many connections there can be."""

import resource

from broker.http.ops import MAX_CONNECTIONS as OPS_CONNECTIONS
from broker.logging import get_logger
from broker.settings.config import Settings

# Connections over the limit get an answer that says so; beyond this number of them they are closed at once.
REFUSED_CONNECTIONS = 200
# For libraries, listeners, the event loop and workers.
OWN_DESCRIPTORS = 100

log = get_logger("gateway")


def raise_limit() -> int:
    """Raise this process's limit of file descriptors to what the system allows, and return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (OSError, ValueError):
            pass  # some systems allow less than they say
    return soft if soft != resource.RLIM_INFINITY else 1 << 20


def connections_for(settings: Settings, descriptors: int) -> tuple[int, int]:
    """The number of connections that are served, and of further ones that are refused with an answer."""
    free = descriptors - OWN_DESCRIPTORS - OPS_CONNECTIONS - settings.worker_count
    refused = max(1, min(REFUSED_CONNECTIONS, free // 4))
    return max(1, min(settings.amqp.max_connections, free - refused)), refused


def allowed_connections(settings: Settings) -> tuple[int, int]:
    """`connections_for` the descriptors that this process gets; logs if that is fewer than the setting."""
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
