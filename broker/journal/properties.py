"""What the journal shows of a stored message's own properties."""

from typing import Final

from protocol.codec import skip
from protocol.message.fields import id_text
from protocol.message.layout import LAYOUT
from protocol.message.stored import annotation
from protocol.symbols import PARTITION_KEY
from storage.journal.columns import Properties
from storage.journal.rows import Decoding
from storage.records import MESSAGE_HEADER_BYTES

_unpack_layout = LAYOUT.unpack_from
_LAYOUT_AT: Final = MESSAGE_HEADER_BYTES - LAYOUT.size
_PARTITION_KEY: Final = PARTITION_KEY.encode()
_SHORT: Final = (0xA1, 0xA3)  # a string, a symbol, of up to 255 bytes
_NULL: Final = 0x40
# Of the fields of the properties section: message-id, subject, correlation-id, content-type, group-id.
_WANTED: Final = (True, False, False, True, False, True, True, False, False, False, True)
_NONE: Final = Properties()


def text(encoded: bytes) -> str:
    """The text of one encoded AMQP value; what is malformed, is shown as it is."""
    try:
        return id_text(encoded).decode(errors="replace")
    except Exception:
        return encoded.hex()


def properties_of(record: bytes) -> tuple[str | None, str | None, str | None, str | None, str | None, str | None]:
    """`Properties` of a stored record; without those that cannot be read."""
    try:
        _, _, annotation_values, annotation_bytes, properties_bytes, _ = _unpack_layout(record, _LAYOUT_AT)
        begin = MESSAGE_HEADER_BYTES + annotation_bytes
        partition_key = _partition_key(record[MESSAGE_HEADER_BYTES:begin]) if annotation_values else None
        if not properties_bytes:
            return None, None, partition_key, None, None, None
        found: list[str | None] = [None] * 11
        if record[begin + 3] == 0xC0:
            count, at = record[begin + 5], begin + 6
        else:
            count, at = _list_at(record, begin + 3)
        for index in range(count if count < 11 else 11):
            constructor = record[at]
            if constructor == _NULL:
                at += 1
                continue
            if constructor in _SHORT:
                end = at + 2 + record[at + 1]
                if _WANTED[index]:
                    found[index] = str(record[at + 2 : end], "utf-8", "replace")
            else:
                end = skip(record, at)
                if _WANTED[index]:
                    found[index] = text(record[at:end])
            at = end
    except Exception:
        return _NONE
    message_id, _, _, subject, _, correlation_id, content_type, _, _, _, group_id = found
    return message_id, group_id, partition_key, correlation_id, subject, content_type


def _list_at(data: bytes, at: int) -> tuple[int, int]:
    """The count of an encoded list that is large or empty, and the offset of its first value."""
    if data[at] == 0xD0:
        return int.from_bytes(data[at + 5 : at + 9], "big"), at + 9
    return 0, at + 1


def _partition_key(pairs: bytes) -> str | None:
    value = annotation(pairs, _PARTITION_KEY)
    return None if value is None or value[0] == _NULL else text(value)


DECODING: Final = Decoding(properties_of, text)
