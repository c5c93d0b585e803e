"""The engine against itself: what one side does, the other side's handler is told, over bytes alone."""

from typing import Any

import pytest

from protocol import codec
from protocol.deliveries import (
    ACCEPTED,
    MODIFIED,
    REJECTED,
    RELEASED,
    describe_modified,
    describe_rejected,
    is_settled,
    modification,
    reject,
    rejection,
    settle,
)
from protocol.engine import Engine
from protocol.errors import DecodeError, InvalidField
from protocol.frames import FramingError
from protocol.links import Link, Session

MESSAGE = b"\x00\x53\x75\xa0\x05hello"


class Side:
    """One end of a connection: a handler that notes what it is told, as (name, values)."""

    def __init__(self, server: bool, max_frame_size: int = 65_536) -> None:
        self.events: list[tuple[Any, ...]] = []
        self.engine = Engine(
            self,
            server=server,
            container_id="server" if server else "client",
            max_frame_size=max_frame_size,
        )
        self.credit = 10
        self.max_message_bytes = 1000
        self.refusal: tuple[str, str] | None = None
        self.server = server
        self.link: Link | None = None

    def named(self, name: str) -> list[tuple[Any, ...]]:
        return [event[1:] for event in self.events if event[0] == name]

    def on_open(self, container_id: str, hostname: str) -> None:
        self.events.append(("open", container_id))
        if self.server:
            self.engine.open()

    def on_session(self, session: Session) -> None:
        self.events.append(("session",))

    def on_session_end(self, session: Session) -> None:
        self.events.append(("session end",))

    def on_attach(self, link: Link) -> None:
        self.events.append(("attach", link.name, link.address, link.is_refused))
        self.link = link
        if self.server:
            if self.refusal:
                link.refuse(*self.refusal)
            else:
                link.accept(self.max_message_bytes, 0 if link.is_sender else self.credit)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None:
        self.events.append(("detach", link.name, closed, condition, description))

    def on_flow(self, link: Link) -> None:
        self.events.append(("flow", link.credit, link.drain))

    def on_message(self, link: Link, delivery: Any, payload: bytes, batch: bool, settled: bool) -> None:
        self.events.append(("message", delivery, payload, batch, settled))

    def on_oversized(self, link: Link, delivery: Any, size_bytes: int, settled: bool) -> None:
        self.events.append(("oversized", delivery, size_bytes))

    def on_outcome(self, link: Link, delivery: Any, token: bytes, state: int, settled: bool) -> None:
        self.events.append(("outcome", delivery, token, state, settled))

    def on_close(self, condition: str, description: str) -> None:
        self.events.append(("close", condition, description))


class Pair:
    """A client and a server whose bytes reach each other when `run` is called; `sent` is what the server wrote.

    `received` is what the client wrote.
    """

    def __init__(self, max_frame_size: int = 65_536) -> None:
        self.client = Side(server=False, max_frame_size=max_frame_size)
        self.server = Side(server=True, max_frame_size=max_frame_size)
        self.client.engine.open()
        self.session = self.client.engine.begin()
        self.sent = b""
        self.received = b""
        self.run()

    def run(self) -> None:
        while True:
            up = self.client.engine.pull()
            self.received += up
            if up:
                self.server.engine.push(up)
            down = self.server.engine.pull()
            self.sent += down
            if down:
                self.client.engine.push(down)
            if not up and not down:
                return

    def attach(self, *, sender: bool, **options: Any) -> tuple[Link, Link]:
        """The client's link and the server's."""
        ours = self.client.engine.attach(self.session, "link", sender=sender, source="q", target="q", **options)
        self.run()
        theirs = self.server.link
        assert theirs is not None
        return ours, theirs


@pytest.fixture
def pair() -> Any:
    pair = Pair()
    yield pair
    pair.client.engine.free()
    pair.server.engine.free()


def frames(output: bytes) -> list[bytes]:
    at = 8 if output[:4] == b"AMQP" else 0
    result = []
    while at < len(output):
        size = int.from_bytes(output[at : at + 4], "big")
        result.append(output[at : at + size])
        at += size
    return result


def performatives(output: bytes, code: int) -> list[list[Any]]:
    return [codec.decode(frame, 8)[0].value for frame in frames(output) if len(frame) > 10 and frame[10] == code]


def test_both_sides_open(pair: Pair) -> None:
    assert pair.server.named("open") == [("client",)]
    assert pair.client.named("open") == [("server",)]
    assert pair.server.named("session") == [()]


def test_begin_has_all_fields_for_peers_that_read_by_position(pair: Pair) -> None:
    (begin,) = performatives(pair.sent, 0x11)
    assert len(begin) == 8


def test_a_message_arrives_and_its_outcome_returns(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    delivery = ours.send(b"1", MESSAGE, b"", 0, False)
    pair.run()
    ((received, payload, batch, settled),) = pair.server.named("message")
    assert (payload, batch, settled) == (MESSAGE, False, False)
    settle(received, ACCEPTED)
    pair.run()
    assert pair.client.named("outcome") == [(delivery, b"1", ACCEPTED, True)]


def test_prefix_and_rest_of_the_body_are_one_message(pair: Pair) -> None:
    _, theirs = pair.attach(sender=False, credit=1)
    theirs.send(b"t" * 16, b"pre", b"xxbody", 2, False)
    pair.run()
    assert pair.client.named("message")[0][1] == b"prebody"


def test_a_rejection_has_condition_description_and_three_elements(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    delivery = ours.send(b"1", MESSAGE, b"", 0, False)
    pair.run()
    reject(pair.server.named("message")[0][0], "amqp:not-allowed", "no")
    pair.run()
    assert pair.client.named("outcome") == [(delivery, b"1", REJECTED, True)]
    assert rejection(delivery) == ("amqp:not-allowed", "no", {})
    (disposition,) = performatives(pair.sent, 0x15)
    assert len(disposition[4].value[0].value) == 3


def test_a_message_in_many_transfers_is_put_together(pair: Pair) -> None:
    pair.server.max_message_bytes = 10_000_000
    ours, _ = pair.attach(sender=True)
    body = bytes(range(256)) * 12_000  # more than one scratch buffer
    ours.send(b"1", MESSAGE, body, 0, False)
    pair.run()
    assert pair.server.named("message")[0][1] == MESSAGE + body


def test_a_message_over_the_limit_is_counted_and_not_kept(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    for size in (1001, 200_000):
        ours.send(b"%d" % size, b"x" * size, b"", 0, False)
        ours.send(b"ok%d" % size, MESSAGE, b"", 0, False)
    pair.run()
    assert [size for _, size in pair.server.named("oversized")] == [1001, 200_000]
    assert [payload for _, payload, _, _ in pair.server.named("message")] == [MESSAGE, MESSAGE]


def test_a_settled_send_is_told_as_settled(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    ours.send(b"1", MESSAGE, b"", 0, True)
    pair.run()
    assert pair.server.named("message")[0][3] is True


@pytest.mark.parametrize("state", [ACCEPTED, RELEASED, MODIFIED, REJECTED])
def test_a_receivers_outcome_is_told_and_confirmed_in_kind(pair: Pair, state: int) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    pair.client.engine.offer(ours, delivery, state)
    pair.run()
    assert pair.server.named("outcome") == [(sent, b"t" * 16, state, False)]
    assert not pair.client.named("outcome")
    settle(sent, state)
    pair.run()
    answer = performatives(pair.sent, 0x15)[-1]
    assert answer[4].descriptor == state
    assert answer[3] is True
    assert pair.client.named("outcome") == [(delivery, b"t" * 16, state, True)]
    assert is_settled(delivery)
    assert not pair.client.engine.offered


def test_a_refused_outcome_has_its_reason(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    pair.client.engine.offer(ours, delivery, ACCEPTED)
    pair.run()
    reject(sent, "com.microsoft:message-lock-lost", "too late")
    pair.run()
    assert pair.client.named("outcome") == [(delivery, b"t" * 16, REJECTED, True)]
    assert rejection(delivery) == ("com.microsoft:message-lock-lost", "too late", {})


def test_a_rejection_may_carry_info(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    info = {"DeadLetterReason": "unreadable", "attempts": codec.Long(3)}
    describe_rejected(delivery, "com.microsoft:dead-letter", "no", info)
    pair.client.engine.offer(ours, delivery, REJECTED)
    pair.run()
    assert rejection(sent) == ("com.microsoft:dead-letter", "no", info)


def test_a_modification_may_carry_annotations(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    sent = theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    delivery = pair.client.named("message")[0][0]
    describe_modified(delivery, True, True, {codec.Symbol("step"): "two"})
    pair.client.engine.offer(ours, delivery, MODIFIED)
    pair.run()
    assert modification(sent) == (True, {"step": "two"})
    (disposition,) = performatives(pair.received, 0x15)
    assert disposition[4].value[:2] == [True, True]


def test_offers_end_with_their_link(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    theirs.send(b"t" * 16, MESSAGE, b"", 0, False)
    pair.run()
    pair.client.engine.offer(ours, pair.client.named("message")[0][0], ACCEPTED)
    theirs.detach("amqp:link:detach-forced", "bye")
    pair.run()
    assert pair.client.named("detach") == [("link", True, "amqp:link:detach-forced", "bye")]
    assert not pair.client.engine.offered


def test_drain_uses_up_the_credit(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    ours.ask_drain()
    pair.run()
    assert pair.server.named("flow")[-1] == (5, True)
    assert not pair.client.named("flow")
    pair.sent = b""
    theirs.drained()
    pair.run()
    (flow,) = performatives(pair.sent, 0x13)
    assert (flow[5], flow[6], flow[8]) == (5, 0, True)
    assert pair.client.named("flow") == [(0, True)]


def test_credit_may_be_granted_again_after_a_drain(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    ours.ask_drain()
    pair.run()
    theirs.drained()
    pair.run()
    ours.grant(2)
    pair.run()
    assert pair.server.named("flow")[-1] == (2, False)


def test_the_end_of_a_link_settles_nothing(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=3)
    for tag in (b"a", b"b"):
        theirs.send(tag * 16, MESSAGE, b"", 0, False)
    pair.run()
    pair.sent = b""
    ours.detach()
    pair.run()
    assert [frame[10] for frame in frames(pair.sent)] == [0x16]


def raw_frame(channel: int, body: bytes) -> bytes:
    return (8 + len(body)).to_bytes(4, "big") + b"\x02\x00" + channel.to_bytes(2, "big") + body


def flow(handle: int | None, delivery_count: int, credit: int, drain: bool, echo: bool) -> bytes:
    uint = codec.UInt
    link = [None] * 3 if handle is None else [uint(handle), uint(delivery_count), uint(credit)]
    fields = [uint(0), uint(1000), uint(0), uint(1000), *link, None, drain, echo]
    return raw_frame(0, codec.encode(codec.Described(codec.ULong(0x13), fields)))


def test_a_drain_without_credit_is_answered(pair: Pair) -> None:
    pair.attach(sender=False, credit=0)
    pair.sent = b""
    pair.server.engine.push(flow(0, 0, 0, True, False))
    answer = performatives(pair.server.engine.pull(), 0x13)[-1]
    assert (answer[4], answer[5], answer[6], answer[8]) == (0, 0, 0, True)
    assert len(answer) < 10 or not answer[9]


def test_a_client_answers_a_drain_without_credit_on_a_link_attached_later(pair: Pair) -> None:
    for sender in (False, True):
        pair.client.engine.attach(pair.session, "link", sender=sender, source="q", target="q")
        pair.run()
    pair.client.engine.push(flow(1, 0, 0, True, False))
    answer = performatives(pair.client.engine.pull(), 0x13)[-1]
    assert (answer[4], answer[6], answer[8]) == (1, 0, True)
    assert pair.client.engine.output.attaching == []


def test_a_drain_whose_credit_went_into_deliveries_is_answered_after_them(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=2)
    ours.ask_drain()
    pair.run()
    pair.sent = b""
    for tag in (b"a", b"b"):
        theirs.send(tag * 16, MESSAGE, b"", 0, False)
    theirs.drained()
    pair.run()
    assert [frame[10] for frame in frames(pair.sent)] == [0x14, 0x14, 0x13]
    (answer,) = performatives(pair.sent, 0x13)
    assert (answer[4], answer[5], answer[6], answer[8]) == (0, 2, 0, True)
    assert answer[2] == 2, "the next outgoing id is that after the deliveries"
    assert len(pair.client.named("message")) == 2


def test_an_echo_is_answered_with_the_links_state(pair: Pair) -> None:
    pair.attach(sender=False, credit=3)
    pair.server.engine.push(flow(0, 0, 3, False, True))
    answer = performatives(pair.server.engine.pull(), 0x13)[-1]
    assert (answer[4], answer[5], answer[6], answer[8]) == (0, 0, 3, False)


def test_drains_of_several_links_are_all_answered(pair: Pair) -> None:
    for name in ("one", "two", "three"):
        pair.client.engine.attach(pair.session, name, sender=False, source="q", target="q")
    pair.run()
    pair.server.engine.push(b"".join(flow(handle, 0, 0, True, False) for handle in range(3)))
    answers = performatives(pair.server.engine.pull(), 0x13)
    assert sorted(answer[4] for answer in answers) == [0, 1, 2]


def test_an_answered_flow_leaves_the_session_open_for_more_than_its_window(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    count = 40_000  # more than any window that is told
    pair.server.link.grant(count)
    pair.run()
    for _ in range(3):
        pair.sent = b""
        pair.server.engine.push(flow(None, 0, 0, False, True))
        pair.run()
        (answer,) = performatives(pair.sent, 0x13)
        assert answer[1] > 2000
    for number in range(count):
        ours.send(number.to_bytes(4, "big"), MESSAGE, b"", 0, True)
        if number % 1000 == 999:
            pair.run()
    assert len(pair.server.named("message")) == count


@pytest.mark.parametrize("max_frame_size", [512, 65_536, 1 << 20])
def test_a_session_flow_is_said_as_often_as_asked_for_whatever_the_frame_size(max_frame_size: int) -> None:
    pair = Pair(max_frame_size)
    for _ in range(3):
        pair.server.engine.push(flow(None, 0, 0, False, True))
        assert len(performatives(pair.server.engine.pull(), 0x13)) == 1
    pair.attach(sender=False)
    for _ in range(3):
        pair.server.engine.push(flow(None, 0, 0, False, True))
        assert len(performatives(pair.server.engine.pull(), 0x13)) == 1
    pair.client.engine.free()
    pair.server.engine.free()


def test_an_echo_of_the_session_is_answered_with_a_session_flow(pair: Pair) -> None:
    pair.attach(sender=False, credit=3)
    pair.server.engine.push(flow(None, 0, 0, False, True))
    answer = performatives(pair.server.engine.pull(), 0x13)[-1]
    assert len(answer) < 5 or answer[4] is None


def test_a_batch_is_told_by_its_message_format(pair: Pair) -> None:
    pair.attach(sender=True)
    for tag, message_format in ((b"a", 0x80013700), (b"b", 0)):
        fields = [codec.UInt(0), codec.UInt(tag[0] - 97), tag, codec.UInt(message_format), False, False]
        transfer = codec.encode(codec.Described(codec.ULong(0x14), fields))
        pair.server.engine.push(raw_frame(0, transfer + MESSAGE))
    assert [batch for _, _, batch, _ in pair.server.named("message")] == [True, False]


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


def test_an_ended_session_takes_its_links_with_it(pair: Pair) -> None:
    pair.attach(sender=True)
    pair.session.end("amqp:session:errant-link", "why")
    pair.run()
    assert pair.server.named("detach") == [("link", True, "amqp:session:errant-link", "why")]
    assert pair.server.named("session end") == [()]
    assert not pair.server.engine.sessions


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
