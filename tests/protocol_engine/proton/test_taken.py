"""What proton takes from a peer without a word, or dies of. See docs/design/proton.md."""

import signal
import subprocess
import sys

import pytest

from protocol import codec
from protocol.codec import Described, Symbol, UInt, ULong
from protocol.engine.proton.library import ffi, lib
from tests.protocol_engine.proton.bare import (
    ATTACH,
    DISPOSITION,
    FLOW,
    WINDOW,
    Bare,
    attached,
    begun,
    flowed,
    frame,
    opened,
    send,
    told,
)

_RECEIVED = Described(ULong(0x23), [UInt(0), ULong(0)])


def test_a_handle_that_is_no_number_counts_as_0(bare: Bare) -> None:
    bare.begin()
    [link] = told(lib.PN_LINK_REMOTE_OPEN, bare.push(frame(ATTACH, "link", "text", True)))
    lib.pn_link_open(link)
    bare.pull()
    assert told(lib.PN_LINK_FLOW, bare.push(flowed(0, 0, 7))) == [link]
    assert lib.pn_link_credit(link) == 7


def test_a_field_of_a_wrong_type_counts_as_absent(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    bare.push(frame(FLOW, UInt(0), WINDOW, UInt(0), WINDOW, UInt(0), UInt(0), "text"))
    assert bare.fault() == ("", "")
    assert lib.pn_link_credit(link) == 0


def test_a_name_ends_at_a_null_character(bare: Bare) -> None:
    bare.begin()
    [link] = told(lib.PN_LINK_REMOTE_OPEN, bare.push(attached("a\0b", sends=False)))
    assert ffi.string(lib.pn_link_name(link)) == b"a"


def test_more_credit_than_2_to_the_31_is_negative(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    bare.push(flowed(0, 0, 0xFFFF_FFFF))
    assert lib.pn_link_credit(link) == -1


def test_a_second_open_is_taken(bare: Bare) -> None:
    assert told(lib.PN_CONNECTION_REMOTE_OPEN, bare.push(opened()))
    assert bare.fault() == ("", "")


def test_a_second_session_on_a_channel_is_taken(bare: Bare) -> None:
    session = bare.begin()
    assert told(lib.PN_SESSION_REMOTE_OPEN, bare.push(begun())) != [session]
    assert bare.fault() == ("", "")


def test_a_second_link_on_a_handle_is_taken(bare: Bare) -> None:
    bare.begin()
    bare.attach("first", 0, sends=True)
    assert told(lib.PN_LINK_REMOTE_OPEN, bare.push(attached("second", 0, sends=True)))
    assert bare.fault() == ("", "")


@pytest.mark.parametrize("descriptor", [ULong(0x99), Symbol("amqp:flow:list")])
def test_an_unusual_descriptor_ends_the_input_without_a_reason(bare: Bare, descriptor: object) -> None:
    bare.begin()
    body = codec.encode(Described(descriptor, [UInt(0), WINDOW, UInt(0), WINDOW]))
    events = bare.push((8 + len(body)).to_bytes(4, "big") + b"\x02\x00\x00\x00" + body)
    assert [kind for kind, _ in events] == [lib.PN_TRANSPORT_TAIL_CLOSED]
    assert bare.fault() == ("", "")


def test_a_state_that_is_told_again_is_news_again(bare: Bare) -> None:
    """So a few bytes of a peer may make as much work as it has unsettled deliveries, again and again."""
    bare.begin()
    link = bare.attach(sends=False)
    for tag in (b"1", b"2"):
        send(link, tag)
    bare.pull()
    bare.events()
    for _ in range(3):
        events = bare.push(frame(DISPOSITION, True, UInt(0), UInt(1), False, _RECEIVED))
        assert told(lib.PN_DELIVERY, events) == [link, link]


_FATAL = """
import sys

from protocol.codec import UInt, encode
from protocol.engine.proton.library import lib
from tests.protocol_engine.proton.bare import Bare, told
from tests.protocol_engine.pair import raw_frame


def listed(code, *fields):
    content = b"".join(fields)
    return bytes((0, 0x53, code, 0xC0, 1 + len(content), len(fields))) + content


bare = Bare()
bare.open()
bare.begin()
capabilities = b"\\xf0" + (5).to_bytes(4, "big") + int(sys.argv[1]).to_bytes(4, "big") + b"\\x41"
source = listed(0x28, encode("q"), *[b"\\x40"] * 9, capabilities)
attach = listed(0x12, encode("link"), encode(UInt(0)), b"\\x41", b"\\x40", b"\\x40", source)
[link] = told(lib.PN_LINK_REMOTE_OPEN, bare.push(raw_frame(0, attach)))
remote, own = lib.pn_link_remote_source(link), lib.pn_link_source(link)
lib.pn_terminus_capabilities(remote)
lib.pn_terminus_copy(own, remote)
lib.pn_terminus_capabilities(own)
lib.pn_link_open(link)
bare.pull()
"""


@pytest.mark.parametrize(("count", "ends"), [(3, 0), (0x7FFF_FFFF, -signal.SIGSEGV)])
def test_an_array_that_claims_2_to_the_31_elements_kills_the_process(count: int, ends: int) -> None:
    """It does so where a field is read and copied into the answer, as the engine does."""
    done = subprocess.run([sys.executable, "-c", _FATAL, str(count)], capture_output=True, check=False)
    assert done.returncode == ends, done.stderr.decode()
