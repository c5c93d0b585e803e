"""The usual message path of a gateway in C: if there is the extension, `native` is it, with the functions of proton.

It takes whole messages from bytes to bytes, and declines what it does not know, which Python's code does then.
"""

import os
from collections.abc import Callable
from typing import Any, Final

from protocol.engine.proton.library import Pointer, address_in_library, ffi, lib
from protocol.extension import extension

# Signatures in `protocol/native/proton.h`, as cffi writes them.
_SIGNATURES: Final = {
    "transport_push": "ssize_t(*)(struct pn_transport_t *, char *, size_t)",
    "transport_peek": "ssize_t(*)(struct pn_transport_t *, char *, size_t)",
    "transport_pop": "void(*)(struct pn_transport_t *, size_t)",
    "transport_get_remote_max_frame": "uint32_t(*)(struct pn_transport_t *)",
    "collector_peek": "struct pn_event_t *(*)(struct pn_collector_t *)",
    "collector_pop": "_Bool(*)(struct pn_collector_t *)",
    "event_type": "pn_event_type_t(*)(struct pn_event_t *)",
    "event_delivery": "struct pn_delivery_t *(*)(struct pn_event_t *)",
    "delivery_link": "struct pn_link_t *(*)(struct pn_delivery_t *)",
    "delivery_settled": "_Bool(*)(struct pn_delivery_t *)",
    "delivery_remote_state": "uint64_t(*)(struct pn_delivery_t *)",
    "delivery_readable": "_Bool(*)(struct pn_delivery_t *)",
    "delivery_partial": "_Bool(*)(struct pn_delivery_t *)",
    "link_current": "struct pn_delivery_t *(*)(struct pn_link_t *)",
    "link_advance": "_Bool(*)(struct pn_link_t *)",
    "link_session": "struct pn_session_t *(*)(struct pn_link_t *)",
    "link_send": "ssize_t(*)(struct pn_link_t *, char *, size_t)",
    "delivery": "struct pn_delivery_t *(*)(struct pn_link_t *, struct pn_bytes_t)",
    "delivery_tag": "struct pn_bytes_t(*)(struct pn_delivery_t *)",
    "delivery_local": "struct pn_disposition_t *(*)(struct pn_delivery_t *)",
    "delivery_remote": "struct pn_disposition_t *(*)(struct pn_delivery_t *)",
    "disposition_data": "struct pn_data_t *(*)(struct pn_disposition_t *)",
    "data_clear": "void(*)(struct pn_data_t *)",
    "data_decode": "ssize_t(*)(struct pn_data_t *, char *, size_t)",
    "data_encode": "ssize_t(*)(struct pn_data_t *, char *, size_t)",
    "delivery_update": "void(*)(struct pn_delivery_t *, uint64_t)",
    "delivery_settle": "void(*)(struct pn_delivery_t *)",
}
_WINDOW: Final = "pn_session_remote_incoming_window"  # uint32_t(*)(pn_session_t *), which cffi does not know
_DELIVERY_EVENT: Final = 28


def address_of(pointer: Pointer) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def delivery_at(address: int) -> Pointer:
    return ffi.cast("pn_delivery_t *", address)


def link_at(address: int) -> Pointer:
    return ffi.cast("pn_link_t *", address)


def _functions() -> dict[str, int]:
    """Addresses by name. Raises ImportError if this proton is not the one that the extension was written for."""
    functions = {}
    for name, signature in _SIGNATURES.items():
        function = getattr(lib, f"pn_{name}")
        if ffi.typeof(function).cname != signature:
            raise ImportError(f"pn_{name} of this proton is {ffi.typeof(function).cname}, not {signature}")
        functions[f"pn_{name}"] = address_of(ffi.addressof(lib, f"pn_{name}"))
    functions[_WINDOW] = address_in_library(_WINDOW)
    if _DELIVERY_EVENT != lib.PN_DELIVERY:
        raise ImportError("this proton has other numbers of events")
    return functions


def _ready() -> Any:
    if extension is not None:
        extension.setup(_functions(), b"\xa1\x20" + os.urandom(8).hex().encode())
    return extension


native: Final[Any] = _ready()


def _window_of() -> Callable[[int], int]:
    if native is not None:
        window: Callable[[int], int] = native.window
        return window
    function: Callable[[int], int] = ffi.cast("uint32_t(*)(uintptr_t)", address_in_library(_WINDOW))
    return function


# By the address of a session: how many transfers its peer takes at the moment (2.5.6), as far as they are written.
incoming_window_of: Final = _window_of()
