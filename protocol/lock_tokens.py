"""The three forms of a lock token: inside the broker, on transfers, in $management.

Inside the broker a token is 16 opaque bytes. These bytes are also the delivery tag, so nothing is converted when
messages are sent and settled. Clients read the tag as a GUID in the byte order of .NET (first group of four and the
next two groups of two reversed), and name that GUID in $management as an AMQP uuid, big-endian.
"""

from uuid import UUID

TOKEN_BYTES = 16
COMMON_BYTES = 8  # the first bytes of all tokens of a partition, as long as its worker runs


def uuid_of(token: bytes) -> UUID:
    """The GUID by which clients know a token (or delivery tag) of 16 bytes."""
    return UUID(bytes_le=token)


def uuid_bytes(token: bytes) -> bytes:
    """The bytes of `uuid_of`. Its last eight are the token's own."""
    return token[3::-1] + token[5:3:-1] + token[7:5:-1] + token[8:]


def token_of(uuid: UUID) -> bytes:
    return uuid.bytes_le
