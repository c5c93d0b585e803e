"""One lock token, three forms: inside the broker, on transfers, in $management.

Inside the broker a token is 16 opaque bytes, and these are the delivery tag as they are: nothing is converted where
messages are sent and settled. Clients read the tag as a GUID in the byte order of .NET (first group of four and the
next two groups of two reversed), and name that GUID in $management as an AMQP uuid, big-endian.
"""

from uuid import UUID

TOKEN_BYTES = 16
COMMON_BYTES = 8  # with which all tokens of a partition begin as long as its worker runs


def uuid_of(token: bytes) -> UUID:
    """The token, or delivery tag, of 16 bytes as the GUID that clients know it by."""
    return UUID(bytes_le=token)


def uuid_bytes(token: bytes) -> bytes:
    """The bytes of `uuid_of`. Its last eight are the token's own."""
    return token[3::-1] + token[5:3:-1] + token[7:5:-1] + token[8:]


def token_of(uuid: UUID) -> bytes:
    return uuid.bytes_le
