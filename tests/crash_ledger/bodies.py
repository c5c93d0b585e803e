"""Bodies that say who sent them and whether they are whole: number, time, filling, digest."""

import hashlib
import struct

from tests.crash_ledger.ledger import Key

HEAD = struct.Struct(">4sIQQI")  # mark, sender, number, time of sending (ns), length of the filling
MARK = b"LDGR"
DIGEST_BYTES = 16
LONGEST_FILLING = 4096


class Damaged(Exception):
    """The bytes are not a body made here, or not all of one."""


def make(key: Key, sent_ns: int) -> bytes:
    """44 bytes and 0 to 4095 bytes of filling that depend on the key."""
    sender, number = key
    seed = hashlib.blake2b(struct.pack(">IQ", sender, number), digest_size=64).digest()
    length = int.from_bytes(seed[:2], "big") % LONGEST_FILLING
    filling = (seed * (length // len(seed) + 1))[:length]
    content = HEAD.pack(MARK, sender, number, sent_ns, length) + filling
    return content + _digest(content)


def read(body: bytes) -> tuple[Key, int]:
    """The key and the time of sending (ns). Raises Damaged."""
    if len(body) < HEAD.size + DIGEST_BYTES:
        raise Damaged(f"{len(body)} bytes: {body[:40]!r}")
    mark, sender, number, sent_ns, length = HEAD.unpack_from(body)
    if mark != MARK or len(body) != HEAD.size + length + DIGEST_BYTES:
        raise Damaged(f"{len(body)} bytes: {body[:40]!r}")
    if _digest(body[:-DIGEST_BYTES]) != body[-DIGEST_BYTES:]:
        raise Damaged(f"digest of message {number} of sender {sender}")
    return (sender, number), sent_ns


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST_BYTES).digest()
