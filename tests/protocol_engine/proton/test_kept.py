"""What proton keeps in memory, and for how long. See docs/design/proton.md."""

import ctypes

import pytest

from protocol.codec import Described, Symbol, UInt, ULong
from protocol.engine.proton.library import ffi, lib
from tests.protocol_engine.proton.bare import ATTACH, Bare, frame, send, told, transferred


class _Info(ctypes.Structure):
    """The `mallinfo2` of glibc: all but two numbers are only there for their place."""

    _fields_ = [(f"number{at}", ctypes.c_size_t) for at in range(4)] + [
        ("mapped", ctypes.c_size_t),
        *[(f"number{at}", ctypes.c_size_t) for at in (5, 6)],
        ("used", ctypes.c_size_t),
        *[(f"number{at}", ctypes.c_size_t) for at in (8, 9)],
    ]


def allocated() -> int:
    """Bytes that the process has from the C library."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this C library has no mallinfo2")
    function.restype = _Info
    info = function()
    return int(info.mapped + info.used)


def test_a_value_of_a_map_that_was_read_takes_72_bytes(bare: Bare) -> None:
    bare.begin()
    pairs = 1000
    source = ["q", *[None] * 6, {Symbol(f"f{number}"): True for number in range(pairs)}]
    attach = frame(ATTACH, "link", UInt(0), True, None, None, Described(ULong(0x28), source))
    [link] = told(lib.PN_LINK_REMOTE_OPEN, bare.push(attach))
    before = allocated()
    lib.pn_terminus_filter(lib.pn_link_remote_source(link))
    assert 60 < (allocated() - before) / (2 * pairs) < 100


def test_the_buffer_of_a_delivery_is_kept_when_its_bytes_were_taken(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=True)
    size = 60_000
    buffer = ffi.new("char[]", size)
    before = allocated()
    bare.push(transferred(0, payload=bytes(size)))
    assert lib.pn_link_recv(link, buffer, size) == size
    lib.pn_link_advance(link)
    assert allocated() - before > size


def test_a_settled_delivery_is_used_again(bare: Bare) -> None:
    """With its buffer, so a connection keeps those of its largest deliveries."""
    bare.begin()
    link = bare.attach(sends=False)
    first = send(link, b"1")
    bare.pull()
    lib.pn_delivery_settle(first)
    bare.pull()
    bare.events()
    assert send(link, b"2") == first


def test_a_released_connection_is_not_freed() -> None:
    connection = lib.pn_connection()
    lib.pn_connection_release(connection)
    assert lib.pn_decref(connection) == 0  # so there was a reference
