"""Settings that have lost their public names, because nobody could say what another value is good for.

Files and variables of 0.1 may still have them: they have their effect, and a warning names them. Later versions refuse
them. Tests set them on the model.
"""

from typing import Final

from broker.settings.config import Place

LAST_VERSION: Final = "0.1"
"""The last minor version that takes these names from files and variables."""

ADVICE: Final = f"has its effect in {LAST_VERSION} and is refused by later versions; leave it out"

INTERNAL: Final[frozenset[Place]] = frozenset(
    {
        ("amqp", "max_frame_size_bytes"),
        ("amqp", "max_output_buffer_bytes"),
        ("amqp", "max_state_bytes_per_connection"),
        ("amqp", "max_unfinished_bytes"),
        ("amqp", "max_unfinished_bytes_per_connection"),
        ("amqp", "open_timeout_ms"),
        ("amqp", "receiver_window"),
        ("amqp", "sasl_timeout_ms"),
        ("amqp", "sender_credit"),
        ("amqp", "write_stall_timeout_ms"),
        ("tls", "handshake_timeout_ms"),
        ("worker_restart_wait_bytes",),
        ("worker_restart_wait_operations",),
    }
)
