"""Proton's C library, and conversions of its texts, errors and encoded data.

Only this module imports `cproton_ffi`, which is internal to python-qpid-proton and therefore pinned to one minor
version. Proton's Python classes cost ten times as much as the engine they wrap, so the engine's modules call functions
of `lib`.
"""

import ctypes
import threading
from typing import Any

import cproton_ffi
from cproton_ffi import ffi as ffi
from cproton_ffi import lib as lib

from protocol import codec
from protocol.amqp_error import amqp_error
from protocol.errors import ProtocolError

Pointer = Any  # a cffi pointer: hashes and compares by address

SCRATCH_BYTES = 1 << 20


class _Scratch(threading.local):
    """One buffer serves all connections of a thread, which have one loop."""

    def __init__(self) -> None:
        self.buffer = ffi.new("char[]", SCRATCH_BYTES)
        self.view = ffi.buffer(self.buffer)


scratch = _Scratch()


def address_in_library(name: str) -> int:
    """The address of a function that the library has, and `lib` has not. Raises ImportError."""
    try:
        function = getattr(ctypes.CDLL(cproton_ffi.__file__), name)
    except AttributeError:
        raise ImportError(f"this proton has no {name}") from None
    return int(ctypes.cast(function, ctypes.c_void_p).value or 0)


def text_of(pointer: Pointer) -> str:
    return "" if pointer == ffi.NULL else ffi.string(pointer).decode("utf-8", "replace")


def text_or_none(pointer: Pointer) -> str | None:
    return None if pointer == ffi.NULL else text_of(pointer)


def condition_of(pointer: Pointer) -> tuple[str, str]:
    """Condition and description of an error; both empty if there is none."""
    if not lib.pn_condition_is_set(pointer):
        return "", ""
    return text_of(lib.pn_condition_get_name(pointer)), text_of(lib.pn_condition_get_description(pointer))


def set_condition(pointer: Pointer, name: str, description: str, info: dict[Any, Any] | None = None) -> None:
    """Set an error with all of its fields. Without an info map, and be it empty, proton leaves out the third."""
    condition, text, properties = amqp_error(name, description, info).value
    lib.pn_condition_set_name(pointer, condition.encode())
    lib.pn_condition_set_description(pointer, text.encode())
    set_value(lib.pn_condition_info(pointer), properties)


def value_of(data: Pointer) -> Any:
    """The value in proton's tree, decoded by our own codec; None if there is none.

    Raises ProtocolError (by the codec's limits) if the peer's value is nested too deep.
    """
    if data == ffi.NULL:
        return None
    size = lib.pn_data_encoded_size(data)
    if size <= 0:
        return None
    buffer = ffi.new("char[]", size)
    if lib.pn_data_encode(data, buffer, size) < 0:
        raise ProtocolError("a value that cannot be read")
    return codec.decode_exactly(bytes(ffi.buffer(buffer, size)))


def map_of(data: Pointer) -> dict[Any, Any]:
    """The map in proton's tree; empty if there is no map. Raises ProtocolError as `value_of` does."""
    found = value_of(data)
    return found if isinstance(found, dict) else {}


def symbols_of(data: Pointer) -> tuple[str, ...]:
    """The symbols of a field that has one or an array of them. Raises ProtocolError as `value_of` does."""
    found = value_of(data)
    symbols = found.items if isinstance(found, codec.Array) else (found,)
    return tuple(symbol for symbol in symbols if isinstance(symbol, codec.Symbol))


def set_value(data: Pointer, content: Any) -> None:
    encoded = codec.encode(content)
    lib.pn_data_clear(data)
    lib.pn_data_decode(data, encoded, len(encoded))
