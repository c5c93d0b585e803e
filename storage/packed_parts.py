"""msgpack of a value in parts, so that its large byte strings need not be copied."""

import struct
from collections.abc import Callable
from typing import Any, Final

import msgpack

# A shorter byte string is copied: a part of its own costs more than that.
APART_BYTES: Final = 256 << 10
# In a list with more items none is looked for, as that would take longer than to copy it.
FEW_ITEMS: Final = 256
_head = struct.Struct(">BI").pack
_BIN_32: Final = 0xC6


def packed_parts(value: Any, default: Callable[[Any], Any] | None = None) -> list[bytes]:
    """What `msgpack.packb` makes of the value, in parts one behind the other.

    Byte strings of APART_BYTES are parts, the same objects as in the value. They are found in lists and tuples of up to
    FEW_ITEMS items. `default` is that of `msgpack.Packer`. Raises what a Packer raises.
    """
    packer = msgpack.Packer(autoreset=False, default=default)
    parts: list[bytes] = []
    _put(value, packer, parts)
    parts.append(packer.bytes())
    return parts


# No function inside of the other one: that would refer to itself, and keep the parts until Python looks for cycles.
def _put(value: Any, packer: msgpack.Packer, parts: list[bytes]) -> None:
    kind = type(value)
    if kind is bytes and len(value) >= APART_BYTES:
        parts.extend((packer.bytes() + _head(_BIN_32, len(value)), value))
        packer.reset()
    elif kind in (list, tuple) and len(value) <= FEW_ITEMS:
        packer.pack_array_header(len(value))
        for item in value:
            _put(item, packer, parts)
    else:
        packer.pack(value)
