"""The engine against itself: connections, sessions and links, over bytes alone."""

import pytest

from protocol import codec
from protocol.engine.links import Link
from protocol.engine.proton.incoming import FramingError
from protocol.errors import DecodeError, InvalidField
from tests.protocol_engine.pair import MESSAGE, Pair, Side, performatives, raw_frame


def test_both_sides_open(pair: Pair) -> None:
    assert pair.server.named("open") == [("client",)]
    assert pair.client.named("open") == [("server",)]
    assert pair.server.named("session") == [()]


def test_begin_has_all_fields_for_peers_that_read_by_position(pair: Pair) -> None:
    (begin,) = performatives(pair.sent, 0x11)
    assert len(begin) == 8


def test_a_refused_link_is_attached_without_terminus_and_detached_with_the_reason(pair: Pair) -> None:
    pair.server.refusal = ("amqp:not-found", "The messaging entity 'q' could not be found.")
    pair.attach(sender=True)
    (attach,) = performatives(pair.sent, 0x12)
    assert (attach[5], attach[6]) == (None, None)
    assert pair.client.named("attach")[0][2] is True
    assert pair.client.named("detach") == [("link", True, *pair.server.refusal)]


def test_detach_frees_the_link_on_both_sides(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    ours.detach()
    pair.run()
    assert pair.server.named("detach") == [("link", True, "", "")]
    assert not pair.server.engine.links
    assert not pair.client.engine.links


@pytest.mark.parametrize("end", ["detach", "end", "free"])
def test_what_a_link_has_told_can_be_asked_when_it_has_ended(pair: Pair, end: str) -> None:
    """Its owner may not know yet, and proton's link is gone."""
    ours, _ = pair.attach(sender=True)
    assert ours.credit > 0
    if end == "detach":
        ours.detach()
    elif end == "end":
        pair.session.end()
    pair.run()
    if end == "free":
        pair.client.engine.free()
    assert ours.credit == 0
    assert ours.remote_max_message_bytes == pair.server.max_message_bytes


def test_an_ended_session_takes_its_links_with_it(pair: Pair) -> None:
    pair.attach(sender=True)
    pair.session.end("amqp:session:errant-link", "why")
    pair.run()
    assert pair.server.named("detach") == [("link", True, "amqp:session:errant-link", "why")]
    assert pair.server.named("session end") == [()]
    assert not pair.server.engine.sessions


def test_a_detach_behind_the_end_of_its_session_does_no_harm(pair: Pair) -> None:
    """pyamqp ends a session that had links, and then detaches them."""
    pair.attach(sender=True)
    end = raw_frame(0, b"\x00\x53\x17\x45")
    detach = raw_frame(0, b"\x00\x53\x16\xc0\x03\x02\x43\x41")
    close = raw_frame(0, b"\x00\x53\x18\x45")
    pair.server.engine.push(end + detach)
    pair.server.engine.push(detach + close)
    assert pair.server.engine.fault() == ("", "")
    assert pair.server.named("close") == [("", "")]


def test_a_detach_on_a_channel_that_never_had_a_session_is_a_fault(pair: Pair) -> None:
    pair.server.engine.push(raw_frame(3, b"\x00\x53\x16\xc0\x03\x02\x43\x41"))
    assert pair.server.engine.fault() == ("amqp:not-allowed", "no such channel: 3")


def test_a_session_that_ends_at_once_is_answered_with_its_channel(pair: Pair) -> None:
    begin = raw_frame(4, b"\x00\x53\x11\xc0\x07\x04\x40\x43\x52\x09\x52\x09")
    end = raw_frame(4, b"\x00\x53\x17\x45")
    pair.server.engine.push(begin + end)
    [answer] = performatives(pair.server.engine.pull(), 0x11)
    assert (answer[0], len(answer)) == (4, 8)


def test_close_carries_its_reason(pair: Pair) -> None:
    pair.server.engine.close("amqp:connection:forced", "maintenance")
    pair.run()
    assert pair.client.named("close") == [("amqp:connection:forced", "maintenance")]
    (close,) = performatives(pair.sent, 0x18)
    assert len(close[0].value) == 3


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x00\x00\x04\x02\x00\x00\x00",  # shorter than a frame's header
        b"\x7f\xff\xff\xff\x02\x00\x00\x00",  # larger than the frame size that was agreed
    ],
)
def test_a_frame_of_impossible_size_is_a_framing_error(pair: Pair, data: bytes) -> None:
    with pytest.raises(FramingError):
        pair.server.engine.push(data)


def test_another_protocols_header_is_a_framing_error() -> None:
    side = Side(server=True)
    with pytest.raises(FramingError):
        side.engine.push(b"GET / HTTP/1.1\r\n")
    side.engine.free()


def test_an_unknown_performative_is_a_decode_error(pair: Pair) -> None:
    with pytest.raises(DecodeError, match="0x99"):
        pair.server.engine.push(raw_frame(0, b"\x00\x53\x99\x45"))


def test_an_attach_without_its_mandatory_fields_is_refused_with_their_name(pair: Pair) -> None:
    with pytest.raises(InvalidField, match=r"attach\.name"):
        pair.server.engine.push(raw_frame(0, b"\x00\x53\x12\xc0\x03\x02\x40\x40"))


def test_a_transfer_on_no_link_closes_the_connection_with_the_reason(pair: Pair) -> None:
    pair.server.engine.push(raw_frame(0, b"\x00\x53\x14\xc0\x02\x01\x43" + MESSAGE))
    (close,) = performatives(pair.server.engine.pull(), 0x18)
    assert "handle" in close[0].value[1]
    assert pair.server.engine.finished


def test_bytes_may_come_one_by_one(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    ours.send(b"1", MESSAGE, b"", 0, False)
    for octet in pair.client.engine.pull():
        pair.server.engine.push(bytes((octet,)))
    assert pair.server.named("message")[0][1] == MESSAGE


DETACH = 0x16


# --- a detach that is answered later ----------------------------------------------------------------------------------


class LateSide(Side):
    """Its handler answers detaches later."""

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        super().on_detach(link, closed, condition, description)
        link.detaches_later = True


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr("tests.protocol_engine.pair.Side", LateSide)
    return Pair()


@pytest.mark.parametrize("reason", [("", ""), ("amqp:internal-error", "it cannot be deleted")])
def test_a_detach_can_be_answered_later(late: Pair, reason: tuple[str, str]) -> None:
    ours, theirs = late.attach(sender=False)
    ours.detach()
    late.run()
    assert performatives(late.sent, DETACH) == []
    theirs.finish_detach(*reason)
    theirs.finish_detach()  # nothing more
    late.run()
    [detach] = performatives(late.sent, DETACH)
    assert detach[1] is True
    assert late.client.named("detach") == [("link", True, *reason)]
    late.attach(sender=False)  # under the same name


@pytest.mark.parametrize("end", ["session", "connection", "attach"])
def test_a_peer_that_does_not_wait_for_the_answer_to_its_detach_does_no_harm(late: Pair, end: str) -> None:
    ours, theirs = late.attach(sender=False)
    ours.detach()
    late.run()
    if end == "session":
        late.session.end()
        late.run()
    elif end == "connection":
        late.server.engine.free()
    else:
        source, target = (codec.Described(codec.ULong(code), ["q"]) for code in (0x28, 0x29))
        attach = ["link", codec.UInt(0), True, codec.UByte(0), codec.UByte(0), source, target]
        late.server.engine.push(raw_frame(0, codec.encode(codec.Described(codec.ULong(0x12), attach))))
    theirs.finish_detach()
    if end != "connection":
        late.server.engine.pull()
        late.server.engine.close()
        late.server.engine.pull()
