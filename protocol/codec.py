"""The AMQP 1.0 type system (part 1): bytes to Python values and back, without losing the AMQP type.

    null, boolean         None, bool
    ubyte ... ulong       UByte, UShort, UInt, ULong; byte ... long: Byte, Short, Int, Long (all are int)
    float, double         Float, float
    decimal32/64/128      Decimal32, Decimal64, Decimal128: the undecoded bytes
    char, string, symbol  Char, str, Symbol (all are str)
    timestamp, uuid       Timestamp (an int: milliseconds since 1970 UTC), uuid.UUID
    binary                bytes
    list, map, array      list, dict, Array
    described             Described

A decoded value is encoded to the same type again. A plain int is encoded as long. Bytes from a peer raise only
DecodeError or LimitExceeded; a value without an AMQP encoding raises TypeError or ValueError.
"""

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final, NoReturn
from uuid import UUID

from protocol.errors import DecodeError, LimitExceeded

Buffer = bytes | bytearray | memoryview

MAX_DEPTH = 32  # nesting of values; a management request needs 5
MAX_ITEMS = 65_536  # values in one decoded value: about 50 ms of work
MAX_EMPTY_ITEMS = 4096  # elements of one array that take no bytes
MAX_UUID_KEYS = 64  # of one map. Chosen uuids can all have the same hash; that of text is secret


class UByte(int): ...


class UShort(int): ...


class UInt(int): ...


class ULong(int): ...


class Byte(int): ...


class Short(int): ...


class Int(int): ...


class Long(int): ...


class Timestamp(int):
    """Milliseconds since 1970-01-01 UTC; any signed 64-bit number, including .NET's limits in the years 1 and 10000."""


class Float(float):
    """32-bit; a Python float is AMQP's double."""


class Char(str):
    """One Unicode character (UTF-32BE, 1.6.18), but no surrogate, which is half a character in UTF-16."""


class Symbol(str):
    """ASCII text from a constrained domain; equal to the str with the same text."""


class Decimal32(bytes): ...


class Decimal64(bytes): ...


class Decimal128(bytes): ...


@dataclass(frozen=True, slots=True)
class Described:
    descriptor: Any
    value: Any


@dataclass(frozen=True, slots=True)
class Array:
    """Values of one type. `kind` is the Python type as in the module's table (NoneType for null).

    With a `descriptor`, each of `items` is a bare value that it describes.
    """

    kind: type
    items: tuple[Any, ...]
    descriptor: Any = None

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)


def array(kind: type, items: Iterable[Any]) -> Array:
    """An Array of `items`, each converted to `kind`: array(Long, [1, 2])."""
    return Array(kind, tuple(item if isinstance(item, kind) else kind(item) for item in items))


# --- decoding ---------------------------------------------------------------------------------------------------------

_u8 = struct.Struct(">B").unpack_from
_u32 = struct.Struct(">I").unpack_from
_count8 = struct.Struct(">BB").unpack_from
_count32 = struct.Struct(">II").unpack_from

# Constructors without width (1.2.2): array elements with these take no bytes at all, as do empty lists.
_EMPTY: Final[dict[int, Any]] = {0x40: None, 0x41: True, 0x42: False, 0x43: UInt(0), 0x44: ULong(0)}
_EMPTY_LIST: Final = 0x45

_FIXED: Final[dict[int, tuple[Callable[..., tuple[Any, ...]], int, Callable[[Any], Any]]]] = {
    code: (struct.Struct(form).unpack_from, struct.calcsize(form), make)
    for code, form, make in (
        (0x50, ">B", UByte),
        (0x51, ">b", Byte),
        (0x52, ">B", UInt),
        (0x53, ">B", ULong),
        (0x54, ">b", Int),
        (0x55, ">b", Long),
        (0x60, ">H", UShort),
        (0x61, ">h", Short),
        (0x70, ">I", UInt),
        (0x71, ">i", Int),
        (0x72, ">f", Float),
        (0x74, ">4s", Decimal32),
        (0x80, ">Q", ULong),
        (0x81, ">q", Long),
        (0x82, ">d", float),
        (0x83, ">q", Timestamp),
        (0x84, ">8s", Decimal64),
        (0x94, ">16s", Decimal128),
        (0x98, ">16s", lambda octets: UUID(bytes=octets)),
    )
}

_KIND: Final[dict[int, type]] = {
    0x40: type(None),
    0x41: bool,
    0x42: bool,
    0x43: UInt,
    0x44: ULong,
    0x45: list,
    0x56: bool,
    0x73: Char,
    0x98: UUID,
    **{code: make for code, (_, _, make) in _FIXED.items() if isinstance(make, type)},
    **dict.fromkeys((0xA0, 0xB0), bytes),
    **dict.fromkeys((0xA1, 0xB1), str),
    **dict.fromkeys((0xA3, 0xB3), Symbol),
    **dict.fromkeys((0xC0, 0xD0), list),
    **dict.fromkeys((0xC1, 0xD1), dict),
    **dict.fromkeys((0xE0, 0xF0), Array),
}


# Of these, a peer can make many with the same hash, or they have none.
_NO_KEYS: Final = frozenset((list, dict, Array, Described))


def decode(data: Buffer, offset: int = 0, max_items: int = MAX_ITEMS) -> tuple[Any, int]:
    """The value that begins at `offset`, and the offset behind it.

    Raises DecodeError if the bytes are malformed or end early, or if a map has equal keys, or keys that are not simple
    values; LimitExceeded beyond MAX_DEPTH, `max_items` or another limit of this module.
    """
    return _Decoder(data, max_items).value(offset, 0)


def decode_exactly(data: Buffer, max_items: int = MAX_ITEMS) -> Any:
    """The value of `data`. Raises as `decode` does, and DecodeError if bytes follow the value."""
    value, end = decode(data, 0, max_items)
    if end != len(data):
        raise DecodeError("bytes after the end of a value", end)
    return value


class _Decoder:
    def __init__(self, data: Buffer, max_items: int) -> None:
        self._data = data
        self._end = len(data)
        self._max_items = max_items
        self._items = max_items

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        if at >= self._end:
            self._truncated()
        code = self._data[at]
        if code:
            return self._payload(code, at + 1, depth)
        depth = self._enter(depth)
        self._take(1)
        descriptor, at = self.value(at + 1, depth)
        value, at = self.value(at, depth)
        return Described(descriptor, value), at

    def _payload(self, code: int, at: int, depth: int) -> tuple[Any, int]:
        """The value of constructor `code` whose payload begins at `at`."""
        fixed = _FIXED.get(code)
        if fixed is not None:
            unpack, width, make = fixed
            if at + width > self._end:
                self._truncated()
            return make(unpack(self._data, at)[0]), at + width
        if code in _EMPTY:
            return _EMPTY[code], at
        kind = _KIND.get(code)
        if kind is list or kind is dict:
            return self._compound(code, kind, at, depth)
        if kind is Array:
            return self._array(code, at, depth)
        if code == 0x56:
            octet = self._unpack(_u8, at, 1)[0]
            if octet > 1:
                raise DecodeError(f"boolean of value {octet}", at)
            return octet == 1, at + 1
        if code == 0x73:
            point = self._unpack(_u32, at, 4)[0]
            if point > 0x10FFFF or 0xD800 <= point < 0xE000:
                raise DecodeError(f"char of code point {point:#x}", at)
            return Char(chr(point)), at + 4
        if kind is None:
            raise DecodeError(f"unknown constructor {code:#04x}", at - 1)
        return self._variable(code, kind, at)

    def _variable(self, code: int, kind: type, at: int) -> tuple[Any, int]:
        if code < 0xB0:
            begin = at + 1
            end = begin + self._unpack(_u8, at, 1)[0]
        else:
            begin = at + 4
            end = begin + self._unpack(_u32, at, 4)[0]
        if end > self._end:
            self._truncated()
        octets = self._data[begin:end]
        if kind is bytes:
            return bytes(octets), end
        try:
            return kind(str(octets, "ascii" if kind is Symbol else "utf-8")), end
        except UnicodeDecodeError:
            raise DecodeError(f"{'symbol' if kind is Symbol else 'string'} of invalid bytes", at) from None

    def _compound(self, code: int, kind: type, at: int, depth: int) -> tuple[Any, int]:
        if code == _EMPTY_LIST:
            return [], at
        depth = self._enter(depth)
        start = at
        count, at, end = self._size_and_count(code < 0xD0, at)
        data, data_end = self._data, self._end
        values = []
        for _ in range(count):
            if at >= data_end:
                self._truncated()
            octet = data[at]
            if octet in _EMPTY:  # most fields of a performative are null
                value = _EMPTY[octet]
                at += 1
            elif octet:
                value, at = self._payload(octet, at + 1, depth)
            else:
                value, at = self.value(at, depth)
            values.append(value)
        if at != end:
            raise DecodeError(f"{kind.__name__} whose size and content differ", start)
        if kind is list:
            return values, end
        if count % 2:
            raise DecodeError("map with an odd number of values", start)
        keys = values[::2]
        kinds = set(map(type, keys))
        if not kinds.isdisjoint(_NO_KEYS):
            raise DecodeError("map with a key that cannot be one", start)
        if UUID in kinds and sum(type(key) is UUID for key in keys) > MAX_UUID_KEYS:
            raise LimitExceeded("number of uuids that are keys of a map", MAX_UUID_KEYS)
        pairs = dict(zip(keys, values[1::2], strict=True))
        if len(pairs) * 2 != count:
            raise DecodeError("map with equal keys", start)
        return pairs, end

    def _array(self, code: int, at: int, depth: int) -> tuple[Array, int]:
        depth = self._enter(depth)
        start = at
        count, at, end = self._size_and_count(code == 0xE0, at)
        descriptor = None
        if count == 0 and at == end:  # some encoders leave out the constructor if there are no elements
            return Array(type(None), ()), end
        element = self._unpack(_u8, at, 1)[0]
        at += 1
        if element == 0:
            descriptor, at = self.value(at, depth)
            element = self._unpack(_u8, at, 1)[0]
            at += 1
        kind = _KIND.get(element)
        if kind is None:
            raise DecodeError(f"array of unknown constructor {element:#04x}", at - 1)
        if element in _EMPTY or element == _EMPTY_LIST:
            if count > MAX_EMPTY_ITEMS:
                raise LimitExceeded("number of elements of an array that take no bytes", MAX_EMPTY_ITEMS)
            items = (self._payload(element, at, depth)[0],) * count
        else:
            several = []
            for _ in range(count):
                item, at = self._payload(element, at, depth)
                several.append(item)
            items = tuple(several)
        if at != end:
            raise DecodeError("array whose size and content differ", start)
        return Array(kind, items, descriptor), end

    def _size_and_count(self, short: bool, at: int) -> tuple[int, int, int]:
        """Count, offset of the content, offset behind it; the count is subtracted from the remaining items."""
        size, count = self._unpack(_count8, at, 2) if short else self._unpack(_count32, at, 8)
        width = 1 if short else 4
        end = at + width + size
        if end > self._end:
            self._truncated()
        if size < width:
            raise DecodeError("list, map or array too small to hold its count", at)
        self._take(count)
        return count, at + 2 * width, end

    def _take(self, count: int) -> None:
        """Count values that there are or will be."""
        self._items -= count
        if self._items < 0:
            raise LimitExceeded("number of values in one value", self._max_items)

    def _enter(self, depth: int) -> int:
        if depth >= MAX_DEPTH:
            raise LimitExceeded("nesting of values", MAX_DEPTH, "levels")
        return depth + 1

    def _unpack(self, unpack: Callable[..., tuple[Any, ...]], at: int, width: int) -> tuple[Any, ...]:
        if at + width > self._end:
            self._truncated()
        return unpack(self._data, at)

    def _truncated(self) -> NoReturn:
        raise DecodeError("the bytes end within a value", self._end)


# --- skipping ---------------------------------------------------------------------------------------------------------

# Bytes of payload by the constructor's high nibble (1.2); from 0xA on, the bytes of the size.
_WIDTH: Final = {4: 0, 5: 1, 6: 2, 7: 4, 8: 8, 9: 16}
_SIZE_WIDTH: Final = {0xA: 1, 0xB: 4, 0xC: 1, 0xD: 4, 0xE: 1, 0xF: 4}


def skip(data: Buffer, offset: int) -> int:
    """The offset behind the value at `offset`. Its content is not checked.

    Raises DecodeError; LimitExceeded if it has more than MAX_DEPTH descriptors.
    """
    length = len(data)
    pending = 1
    descriptors = 0
    while pending:
        if offset >= length:
            raise DecodeError("the bytes end within a value", length)
        code = data[offset]
        offset += 1
        if code == 0:
            pending += 1
            descriptors += 1
            if descriptors > MAX_DEPTH:
                raise LimitExceeded("nesting of values", MAX_DEPTH, "levels")
            continue
        pending -= 1
        width = _WIDTH.get(code >> 4)
        if width is None:
            width = _SIZE_WIDTH.get(code >> 4)
            if width is None:
                raise DecodeError(f"unknown constructor {code:#04x}", offset - 1)
            width += int.from_bytes(data[offset : offset + width], "big")
        offset += width
    if offset > length:
        raise DecodeError("the bytes end within a value", length)
    return offset


# --- encoding ---------------------------------------------------------------------------------------------------------

_code_u8 = struct.Struct(">BB").pack
_code_i8 = struct.Struct(">Bb").pack
_code_u32 = struct.Struct(">BI").pack
_code_count8 = struct.Struct(">BBB").pack
_code_count32 = struct.Struct(">BII").pack


def encode(value: Any) -> bytes:
    """The shortest AMQP encoding of `value` in its type. Raises TypeError or ValueError if it has none."""
    kind = type(value)
    write = _ENCODERS.get(kind)
    if write is None:
        raise TypeError(f"{kind.__name__} has no AMQP encoding")
    try:
        return write(value)
    except (struct.error, OverflowError) as error:
        raise ValueError(f"{kind.__name__} {value!r} is outside its AMQP type: {error}") from None


def _encode_uint(value: int) -> bytes:
    if value == 0:
        return b"\x43"
    return _code_u8(0x52, value) if 0 < value < 256 else _code_u32(0x70, value)


def _encode_ulong(value: int) -> bytes:
    if value == 0:
        return b"\x44"
    return _code_u8(0x53, value) if 0 < value < 256 else b"\x80" + _ELEMENTS[ULong][1](value)


def _encode_int(value: int) -> bytes:
    return _code_i8(0x54, value) if -128 <= value < 128 else b"\x71" + _ELEMENTS[Int][1](value)


def _encode_long(value: int) -> bytes:
    return _code_i8(0x55, value) if -128 <= value < 128 else b"\x81" + _ELEMENTS[Long][1](value)


def _variable(short: int, octets: bytes) -> bytes:
    length = len(octets)
    return (_code_u8(short, length) if length < 256 else _code_u32(short | 0x10, length)) + octets


def _compound(short: int, count: int, content: bytes) -> bytes:
    if len(content) < 255 and count < 256:
        return _code_count8(short, len(content) + 1, count) + content
    return _code_count32(short | 0x10, len(content) + 4, count) + content


def _encode_list(value: list[Any]) -> bytes:
    return _compound(0xC0, len(value), b"".join(map(encode, value))) if value else b"\x45"


def _map_content(value: dict[Any, Any]) -> bytes:
    return b"".join(encode(item) for pair in value.items() for item in pair)


def _encode_map(value: dict[Any, Any]) -> bytes:
    return _compound(0xC1, 2 * len(value), _map_content(value))


def _encode_described(value: Described) -> bytes:
    descriptor = value.descriptor
    # A number without an AMQP type is a descriptor code. Only the form 00 53 xx is understood by every client.
    if type(descriptor) is int or isinstance(descriptor, IntEnum):
        descriptor = ULong(descriptor)
    return b"\x00" + encode(descriptor) + encode(value.value)


def _wide_compound(count: int, content: bytes) -> bytes:
    return _code_count32(0, len(content) + 4, count)[1:] + content


def _array_content(value: Array) -> bytes:
    element = _ELEMENTS.get(value.kind)
    if element is None:
        raise TypeError(f"{value.kind.__name__} cannot be in an AMQP array")
    code, payload = element
    described = b"" if value.descriptor is None else b"\x00" + encode(value.descriptor)
    for item in value.items:
        if not isinstance(item, value.kind):
            raise TypeError(f"{type(item).__name__} in an array of {value.kind.__name__}")
    return described + bytes((code,)) + b"".join(map(payload, value.items))


def _fixed(form: str) -> Callable[[Any], bytes]:
    return struct.Struct(">" + form).pack


def _sized(octets: bytes) -> bytes:
    return len(octets).to_bytes(4, "big") + octets


def _char(value: str) -> bytes:
    if len(value) != 1:
        raise ValueError(f"a char of {len(value)} characters")
    return value.encode("utf-32-be")


# The constructor of array elements, and their payload: always the wide form, because all elements share it.
_ELEMENTS: Final[dict[type, tuple[int, Callable[[Any], bytes]]]] = {
    type(None): (0x40, lambda _: b""),
    bool: (0x56, lambda value: b"\x01" if value else b"\x00"),
    UByte: (0x50, _fixed("B")),
    Byte: (0x51, _fixed("b")),
    UShort: (0x60, _fixed("H")),
    Short: (0x61, _fixed("h")),
    UInt: (0x70, _fixed("I")),
    Int: (0x71, _fixed("i")),
    ULong: (0x80, _fixed("Q")),
    Long: (0x81, _fixed("q")),
    Float: (0x72, _fixed("f")),
    float: (0x82, _fixed("d")),
    Timestamp: (0x83, _fixed("q")),
    Char: (0x73, _char),
    Decimal32: (0x74, _fixed("4s")),
    Decimal64: (0x84, _fixed("8s")),
    Decimal128: (0x94, _fixed("16s")),
    UUID: (0x98, lambda value: value.bytes),
    bytes: (0xB0, _sized),
    str: (0xB1, lambda value: _sized(value.encode())),
    Symbol: (0xB3, lambda value: _sized(value.encode("ascii"))),
    list: (0xD0, lambda value: _wide_compound(len(value), b"".join(map(encode, value)))),
    dict: (0xD1, lambda value: _wide_compound(2 * len(value), _map_content(value))),
    Array: (0xF0, lambda value: _wide_compound(len(value), _array_content(value))),
}


def _wide(kind: type) -> Callable[[Any], bytes]:
    code, payload = _ELEMENTS[kind]
    constructor = bytes((code,))
    return lambda value: constructor + payload(value)


_ENCODERS: Final[dict[type, Callable[[Any], bytes]]] = {
    **{kind: _wide(kind) for kind in _ELEMENTS},
    bool: lambda value: b"\x41" if value else b"\x42",
    int: _encode_long,
    UInt: _encode_uint,
    ULong: _encode_ulong,
    Int: _encode_int,
    Long: _encode_long,
    bytes: lambda value: _variable(0xA0, value),
    bytearray: lambda value: _variable(0xA0, bytes(value)),
    memoryview: lambda value: _variable(0xA0, bytes(value)),
    str: lambda value: _variable(0xA1, value.encode()),
    Symbol: lambda value: _variable(0xA3, value.encode("ascii")),
    list: _encode_list,
    tuple: lambda value: _encode_list(list(value)),
    dict: _encode_map,
    Array: lambda value: _compound(0xE0, len(value), _array_content(value)),
    Described: _encode_described,
}
