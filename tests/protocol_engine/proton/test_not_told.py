"""What proton knows of a peer's frames and does not tell. See docs/design/proton.md."""

import ctypes

import pytest

from protocol.codec import UInt
from protocol.engine.proton.library import address_in_library, ffi, lib
from protocol.symbols import BATCH_FORMAT
from tests.protocol_engine.proton.bare import FLOW, TRANSFER, Bare, flowed, send, told, transferred


def window_of(session):
    window = ctypes.CFUNCTYPE(ctypes.c_uint32, ctypes.c_void_p)(address_in_library("pn_session_remote_incoming_window"))
    return window(int(ffi.cast("uintptr_t", session)))


def test_the_message_format_of_a_transfer_is_not_told(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=True)
    bare.push(transferred(0, 0, UInt(BATCH_FORMAT)))
    assert lib.pn_delivery_readable(lib.pn_link_current(link))
    assert bare.fault() == ("", "")
    assert [name for name in dir(lib) if "message_format" in name] == []


def test_channels_and_handles_are_not_told() -> None:
    names = [name for name in dir(lib) if "handle" in name or "channel" in name]
    assert [name for name in names if not name.endswith("channel_max")] == []


def test_states_of_transactions_have_no_names() -> None:
    assert [name for name in dir(lib) if "TRANSACTION" in name or "DECLARED" in name] == []


def test_the_peers_window_is_not_among_the_functions_of_cffi(bare: Bare) -> None:
    session = bare.begin(window=5)
    assert not hasattr(lib, "pn_session_remote_incoming_window")
    assert window_of(session) == 5


def test_a_window_that_the_peer_takes_back_is_a_large_number(bare: Bare) -> None:
    session = bare.begin(window=5)
    link = bare.attach(sends=False)
    bare.push(flowed(0, 0, 10, window=5))
    for tag in (b"1", b"2", b"3"):
        send(link, tag)
    bare.pull()
    bare.push(flowed(0, 0, 10, window=1))  # as of no transfer, so it has overrun the window by two
    assert window_of(session) == 2**32 - 2


def test_an_echo_is_not_answered(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    assert told(lib.PN_LINK_FLOW, bare.push(flowed(0, 0, 10, echo=True))) == [link]
    assert bare.written() == []


def test_a_drain_without_credit_is_not_answered(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    bare.push(flowed(0, 0, 0, drain=True))
    assert lib.pn_link_get_drain(link)
    lib.pn_link_drained(link)
    assert bare.written() == []


def test_a_drain_whose_credit_deliveries_use_up_is_not_answered(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    bare.push(flowed(0, 0, 1, drain=True))
    send(link, b"1")
    lib.pn_link_drained(link)
    assert [code for code, _, _ in bare.written()] == [TRANSFER]


def test_a_drain_that_ends_before_a_window_opens_is_forgotten(bare: Bare) -> None:
    bare.begin(window=1)
    link = bare.attach(sends=False)
    bare.push(flowed(0, 0, 10, drain=True, window=1))
    send(link, b"1")
    send(link, b"2")
    lib.pn_link_drained(link)
    assert [code for code, _, _ in bare.written()] == [TRANSFER]
    bare.push(flowed(0, 0, 10, drain=True, window=10, next_incoming=1))
    assert lib.pn_link_credit(link) == 0
    assert [code for code, _, _ in bare.written()] == [TRANSFER]


@pytest.mark.parametrize("credit", [5, 1])
def test_a_drain_that_gives_credit_back_is_answered(bare: Bare, credit: int) -> None:
    """The other side of the three tests above."""
    bare.begin()
    link = bare.attach(sends=False)
    bare.push(flowed(0, 0, credit, drain=True))
    lib.pn_link_drained(link)
    [(code, fields, _)] = bare.written()
    assert (code, fields[5:7], fields[8]) == (FLOW, [credit, 0], True)


def test_a_transfer_on_a_link_to_its_sender_is_no_fault(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    assert told(lib.PN_DELIVERY, bare.push(transferred(0))) == [link]
    assert bare.fault() == ("", "")
