"""Pings: messages that ask an entity of the primary whether it takes some, and that no receiver gets (PN8)."""

from typing import Final

from protocol.client.connection import Connection
from protocol.client.messages import Message
from protocol.symbols import PING_CONTENT_TYPE

# A service that does not know pings stores one; it should be gone soon.
TTL_MS: Final = 1000


async def ping(connection: Connection, path: str) -> None:
    """Send one on a link of its own. Raises what attaching and sending raise."""
    sender = await connection.sender(path)
    await sender.send(Message(ttl_ms=TTL_MS, content_type=PING_CONTENT_TYPE).encode())
    await sender.close()
