"""Which fragment of a partitioned entity has a message, or gets it (PE4, PE5 of Service Bus: its partition key)."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

from xxhash import xxh3_64_intdigest

from broker.errors import NotAllowed
from broker.wire import Extra
from protocol import error_texts
from protocol.message.fields import id_text
from storage.records import PARTITION_SHIFT

_SESSION_ID, _PARTITION_KEY, _MESSAGE_ID = int(Extra.SESSION_ID), int(Extra.PARTITION_KEY), int(Extra.MESSAGE_ID)


class Keys(IntEnum):
    """Which keys of a message choose its fragment of an entity. The extension has the same numbers."""

    NONE = 0  # the entity is not partitioned
    SET = 1  # the session id, else the partition key
    WITH_MESSAGE_ID = 2  # else the message id, because the entity detects duplicates


def key_of(extra: dict[int, Any] | None) -> bytes | None:
    """The key of a message with this extra map (`broker.wire`); None if it may go to any fragment.

    It is the session id, else the partition key, else the message id, which is given only if the entity detects
    duplicates. A session id and a partition key are equal if both are set: that was checked before.
    """
    if not extra:
        return None
    key = _set_key(extra)
    if key is not None:
        return key.encode()
    message_id: bytes | None = extra.get(_MESSAGE_ID)
    return None if message_id is None else id_text(message_id)  # duplicates have the same text, and maybe another type


def _set_key(extra: dict[int, Any] | None) -> str | None:
    """The key that the sender has set."""
    if not extra:
        return None
    key: str | None = extra.get(_SESSION_ID)
    return extra.get(_PARTITION_KEY) if key is None else key


def fragment_of(key: bytes, partitions: Sequence[int]) -> int:
    """The partition, of an entity on these, for messages with this key. Must never change while the entity exists."""
    return partitions[xxh3_64_intdigest(key) % len(partitions)] if len(partitions) > 1 else partitions[0]


def common_key(messages: Sequence[Any]) -> bytes | None:
    """The key of all of these messages, which are to be stored together. Raises NotAllowed if their keys differ."""
    first, *others = [key_of(extra) for _, _, _, extra in messages]
    if any(other != first for other in others):
        raise NotAllowed(error_texts.SEVERAL_PARTITION_KEYS)
    return first


def split(messages: Sequence[Any], partitions: Sequence[int]) -> dict[int | None, list[Any]]:
    """The messages of a batch by partition; None is for those that may go to any. Raises NotAllowed if keys differ.

    Only message ids may differ. Then the batch is stored in parts. If one of these fails and the client sends all
    again, the other parts are dropped as duplicates.
    """
    set_keys = {_set_key(extra) for _, _, _, extra in messages}
    if len(set_keys) > 1:
        raise NotAllowed(error_texts.SEVERAL_PARTITION_KEYS)
    parts: dict[int | None, list[Any]] = {}
    for message in messages:
        key = key_of(message[3])
        parts.setdefault(None if key is None else fragment_of(key, partitions), []).append(message)
    return parts


def partition_of_number(sequence_number: int) -> int:
    """The partition that gave a message on a partitioned entity this sequence number (see `storage.records`)."""
    return sequence_number >> PARTITION_SHIFT


def partition_of_token(lock_token: bytes) -> int:
    return int.from_bytes(lock_token[:2], "big")
