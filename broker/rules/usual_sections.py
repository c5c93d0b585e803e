"""The usual encodings of the sections that rules read, decoded to canonical values in one pass.

The codec takes several times as long, because it knows and keeps every type. For unusual encodings and for invalid
bytes the functions return None, and the caller uses the codec.
"""

from struct import Struct
from typing import Any, Final

from broker.rules.values import Instant

# By constructor: the value, for constructors without further bytes.
_CONSTANTS: Final = {0x40: None, 0x41: True, 0x42: False, 0x43: 0, 0x44: 0}
# By constructor: the number of bytes, and True if it is signed.
_INTEGERS: Final = {
    0x50: (1, False),  # ubyte
    0x51: (1, True),  # byte
    0x52: (1, False),  # small uint
    0x53: (1, False),  # small ulong
    0x54: (1, True),  # small int
    0x55: (1, True),  # small long
    0x60: (2, False),  # ushort
    0x61: (2, True),  # short
    0x70: (4, False),  # uint
    0x71: (4, True),  # int
    0x80: (8, False),  # ulong
    0x81: (8, True),  # long
}
_double = Struct(">d").unpack_from


def user_properties(section: bytes, as_spelled: bool = False) -> dict[str, Any] | None:
    """Application properties by lower-case name; of names that differ only in case, the first counts.

    `as_spelled`: by their names as they are.
    """
    if section[:4] == b"\x00\x53\x74\xc1" and len(section) > 5:
        at, count = 6, section[5]
    elif section[:4] == b"\x00\x53\x74\xd1":
        at, count = 12, int.from_bytes(section[8:12], "big")
    else:
        return None
    found: dict[str, Any] = {}
    try:
        for _ in range(count >> 1):
            if section[at] != 0xA1:
                return None
            end = at + 2 + section[at + 1]
            name = section[at + 2 : end].decode()
            if not as_spelled:
                name = name.lower()
            code = section[end]
            value: Any
            if code == 0xA1:
                at = end + 2 + section[end + 1]
                value = section[end + 2 : at].decode()
            elif code in _INTEGERS:
                size, signed = _INTEGERS[code]
                at = end + 1 + size
                value = int.from_bytes(section[end + 1 : at], "big", signed=signed)
            elif code in _CONSTANTS:
                at = end + 1
                value = _CONSTANTS[code]
            elif code == 0x82 and end + 9 <= len(section):
                at = end + 9
                (value,) = _double(section, end + 1)
            elif code == 0x83:
                at = end + 9
                value = Instant.from_ms(int.from_bytes(section[end + 1 : at], "big", signed=True))
            else:
                return None
            if name not in found:
                found[name] = value
    except (IndexError, UnicodeDecodeError):
        return None
    return found if at == len(section) and not count & 1 else None


def properties_fields(section: bytes) -> list[str | int | None] | None:
    """The fields of the properties section: texts, None for null, and times in milliseconds since 1970."""
    if section[:4] == b"\x00\x53\x73\xc0" and len(section) > 5:
        at, count = 6, section[5]
    elif section[:4] == b"\x00\x53\x73\xd0":
        at, count = 12, int.from_bytes(section[8:12], "big")
    else:
        return None
    fields: list[str | int | None] = []
    try:
        for _ in range(count):
            code = section[at]
            if code == 0x40:
                at += 1
                fields.append(None)
            elif code in (0xA1, 0xA3):
                end = at + 2 + section[at + 1]
                fields.append(section[at + 2 : end].decode())
                at = end
            elif code == 0x83:  # absolute-expiry-time, creation-time
                at += 9
                fields.append(int.from_bytes(section[at - 8 : at], "big", signed=True))
            else:
                return None
    except (IndexError, UnicodeDecodeError):
        return None
    return fields if at == len(section) else None
