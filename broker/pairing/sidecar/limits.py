"""What one client, and all of them, may use of the sidecar."""

from dataclasses import dataclass

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, slots=True)
class Limits:
    """Times are seconds, sizes bytes.

    `sasl_seconds` is what a client has until it shows credentials, `connect_seconds` what the primary has to answer
    a connection. `stall_seconds`: how long a client that is answered here may leave its output unread. `output_bytes`:
    how much may wait for the socket of one side until the other side is not read. `greeting_bytes` may be sent before
    the primary answers. `unfinished_bytes` are those of messages that have begun and not ended, of one connection that
    is answered here, `all_unfinished_bytes` of all. `held_bytes` are those of all messages that wait for the primary or
    for the backlog, `held_seconds` how long they wait at most.
    """

    max_connections: int = 5000
    max_links: int = 5000
    max_frame_bytes: int = 64 * KIB
    channel_max: int = 4999
    idle_time_out_ms: int = 240_000
    sasl_seconds: float = 10.0
    connect_seconds: float = 2.0
    stall_seconds: float = 30.0
    output_bytes: int = MIB
    greeting_bytes: int = 64 * KIB
    state_bytes: int = 16 * MIB
    unfinished_bytes: int = 64 * MIB
    all_unfinished_bytes: int = 512 * MIB
    held_bytes: int = 256 * MIB
    held_seconds: float = 60.0
    credit: int = 1000  # of a sender that is answered here
    max_message_bytes: int = MIB
