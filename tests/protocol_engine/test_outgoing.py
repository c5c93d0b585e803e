"""The walk over outgoing frames: what it notes of them, what it makes of them, and when it has nothing to do."""

from dataclasses import dataclass
from typing import Any

import pytest

from protocol import codec
from protocol.codec import Described, Symbol, UInt, ULong, UShort
from protocol.engine.frames import frame_of
from protocol.engine.performatives import ATTACH, BEGIN, CLOSE, DISPOSITION, FLOW, OPEN, TRANSFER
from protocol.engine.proton.outgoing import OutputWalk, refusal
from protocol.symbols import AMQP_HEADER

SENDER, RECEIVER = False, True  # roles on the wire (2.8.1)
ACCEPTED = Described(ULong(0x24), [])


@dataclass
class End:
    name: str
    is_sender: bool
    own_handle: tuple[int, int] | None = None


@pytest.fixture
def walk() -> OutputWalk:
    return OutputWalk({})


def attach(channel: int, name: str, handle: int, role: bool) -> bytes:
    return frame_of(channel, ATTACH, [name, UInt(handle), role])


def session_flow(channel: int) -> bytes:
    return frame_of(channel, FLOW, [UInt(1), UInt(1000), UInt(2), UInt(2000)])


def disposition(role: bool, state: Described | None) -> bytes:
    return frame_of(0, DISPOSITION, [role, UInt(0), UInt(0), True, *([] if state is None else [state])])


def performatives(output: bytes) -> list[tuple[int, int, list[Any]]]:
    """Channel, code and fields of each frame."""
    found = []
    at = len(AMQP_HEADER) if output.startswith(AMQP_HEADER) else 0
    while at < len(output):
        end = at + int.from_bytes(output[at : at + 4], "big")
        value = codec.decode(output[:end], at + 8)[0]
        assert isinstance(value, Described)
        found.append((int.from_bytes(output[at + 6 : at + 8], "big"), int(value.descriptor), value.value))
        at = end
    return found


@pytest.mark.parametrize("written", [UShort(5), None])
def test_the_answer_to_a_begin_has_the_highest_handle_and_the_peers_channel(written: UShort | None) -> None:
    """Proton allows any handle, and leaves the channel out if the session has ended since."""
    walk = OutputWalk({}, 255)
    walk.answering.append(5)
    begin = [written, UInt(0), UInt(1000), UInt(2000), UInt(0x7FFFFFFF)]
    [(channel, code, fields)] = performatives(walk.walk(frame_of(3, BEGIN, begin)))
    assert (channel, code, fields[:5]) == (3, BEGIN, [5, 0, 1000, 2000, 255])


def test_an_end_has_the_handle_of_the_attach_with_its_name_and_role(walk: OutputWalk) -> None:
    sender, receiver, later = End("a", True), End("a", False), End("b", True)
    walk.attaching += [receiver, later, sender]
    walk.walk(AMQP_HEADER + attach(3, "a", 7, SENDER) + attach(4, "a", 8, RECEIVER))
    assert (sender.own_handle, receiver.own_handle) == ((3, 7), (4, 8))
    assert walk.attaching == [later]


def test_an_attach_of_any_length_tells_the_handle(walk: OutputWalk) -> None:
    sender = End("a" * 300, True)
    walk.attaching.append(sender)
    walk.walk(attach(3, sender.name, 300, SENDER))
    assert sender.own_handle == (3, 300)


def test_the_end_of_a_link_settles_nothing(walk: OutputWalk) -> None:
    """Its locks last (2.6.6); what has a state was settled, and what came in is settled without one when aborted."""
    with_state, of_received = disposition(SENDER, ACCEPTED), disposition(RECEIVER, None)
    walk.is_abandoned = True
    output = walk.walk(with_state + disposition(SENDER, None) + of_received)
    assert output == with_state + of_received


def test_settlements_go_out_again_after_the_end_of_a_link(walk: OutputWalk) -> None:
    walk.is_abandoned = True
    walk.walk(disposition(SENDER, None))
    assert walk.walk(disposition(SENDER, None)) == disposition(SENDER, None)


def test_one_flow_of_a_session_tells_of_all_links_that_are_to_be_told_of(walk: OutputWalk) -> None:
    walk.tell_link((1, 5), 10, 0, True)
    walk.tell_link((1, 6), 20, 4, False)
    assert performatives(walk.walk(session_flow(1))) == [
        (1, FLOW, [1, 1000, 2, 2000, 5, 10, 0, 0, True, None, None]),
        (1, FLOW, [1, 1000, 2, 2000, 6, 20, 4, 0, False, None, None]),
    ]
    assert not walk.is_due


def test_a_link_is_told_of_when_its_own_session_says_a_flow(walk: OutputWalk) -> None:
    walk.tell_link((1, 5), 10, 0, True)
    assert [fields[4] for _, _, fields in performatives(walk.walk(session_flow(2)))] == [None]
    assert walk.is_due
    assert [fields[4] for _, _, fields in performatives(walk.walk(session_flow(1)))] == [5]


def test_a_flow_of_another_link_stays_and_others_are_told_of_before_it(walk: OutputWalk) -> None:
    """Proton writes it in place of the session's, so there may be no other."""
    of_link = frame_of(1, FLOW, [UInt(1), UInt(1000), UInt(2), UInt(2000), UInt(9), UInt(0), UInt(50)])
    walk.tell_link((1, 5), 10, 0, True)
    told, of_another = [1, 1000, 2, 2000, 5, 10, 0], [1, 1000, 2, 2000, 9, 0, 50]
    assert [fields[:7] for _, _, fields in performatives(walk.walk(of_link))] == [told, of_another]
    assert [fields[4] for _, _, fields in performatives(walk.walk(of_link + session_flow(1)))] == [9, None]


def test_output_with_nothing_to_do_is_the_same_object(walk: OutputWalk) -> None:
    output = frame_of(0, TRANSFER, [UInt(0), UInt(0), b"tag"]) + disposition(RECEIVER, ACCEPTED)
    assert walk.walk(output) is output
    assert not walk.is_due


def test_a_peer_that_reads_by_position_gets_all_at_full_width_from_then_on(walk: OutputWalk) -> None:
    walk.pad_everything()
    for _ in range(2):
        assert walk.is_due
        ((_, _, fields),) = performatives(walk.walk(disposition(RECEIVER, ACCEPTED)))
        assert len(fields) == 6


@pytest.mark.parametrize("has_header", [False, True])
def test_a_refusal_is_an_open_and_a_close_with_the_reason(has_header: bool) -> None:
    output = refusal("broker", "amqp:decode-error", "no", has_header)
    assert output.startswith(AMQP_HEADER) is not has_header
    (_, opened, opening), (_, closed, (error,)) = performatives(output)
    assert (opened, opening[0], closed) == (OPEN, "broker", CLOSE)
    assert error.value == [Symbol("amqp:decode-error"), "no", {}]
