"""Peers that number their deliveries wrongly: messages arrive, and are settled by the numbers that the peer gave."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import Described, UInt, ULong
from protocol.engine.deliveries import ACCEPTED, REJECTED, settle
from protocol.errors import ProtocolError
from tests.examples import examples
from tests.protocol_engine.pair import Pair, performatives, raw_frame

BATCH_FORMAT = 0x80013700
NULLS = [None] * 3


def body(content: bytes) -> bytes:
    return b"\x00\x53\x75\xa0" + bytes((len(content),)) + content


def transfer(
    handle: int,
    delivery_id: int | None,
    content: bytes,
    *,
    channel: int = 0,
    more: bool = False,
    settled: bool = False,
    aborted: bool = False,
    tag: bytes | None = b"tag",
    message_format: int | None = 0,
    payload: bytes | None = None,
) -> bytes:
    numbers = [None if number is None else UInt(number) for number in (handle, delivery_id, message_format)]
    fields = [numbers[0], numbers[1], tag, numbers[2], settled, more, *NULLS, aborted]
    return raw_frame(
        channel, codec.encode(Described(ULong(0x14), fields)) + (body(content) if payload is None else payload)
    )


class Server:
    """A server with links 0 and 1 to it, on one session, or on two; `push` gives it bytes, in pieces of any size."""

    def __init__(self, sessions: int = 1) -> None:
        self.pair = pair = Pair()
        self.engine = pair.server.engine
        for number in range(2):
            session = pair.session if number < 2 - sessions + 1 or sessions == 1 else pair.client.engine.begin()
            pair.client.engine.attach(session, f"link-{number}", sender=True, source="q", target="q", credit=0)
            pair.run()

    def push(self, data: bytes, piece: int | None = None) -> None:
        step = piece or len(data)
        for at in range(0, len(data), step):
            self.engine.push(data[at : at + step])

    @property
    def messages(self) -> list[bytes]:
        return [payload[5:] for _, payload, _, _ in self.pair.server.named("message")]

    def settle(self, state: int = ACCEPTED) -> list[tuple[int, int, int]]:
        """Settle all messages; channel, first and last id of each disposition that is written."""
        for delivery, *_ in self.pair.server.named("message"):
            settle(delivery, state)
        self.pair.server.events.clear()
        return self.dispositions()

    def dispositions(self) -> list[tuple[int, int, int]]:
        output = self.engine.pull()
        found = []
        at = 0
        while at < len(output):
            size = int.from_bytes(output[at : at + 4], "big")
            if output[at + 10] == 0x15:
                role, first, last, *_ = codec.decode(output, at + 8)[0].value
                assert role is True
                found.append((int.from_bytes(output[at + 6 : at + 8], "big"), first, first if last is None else last))
            at += size
        return found


def settled_ids(dispositions: list[tuple[int, int, int]], channel: int = 0) -> list[int]:
    return [number for own, first, last in dispositions if own == channel for number in range(first, last + 1)]


@pytest.mark.parametrize("piece", [None, 1, 7, 40])
@pytest.mark.parametrize(
    "ids", [(0, 1, 1, 3, 4), (0, 0, 0, 3), (5, 6, 6, 7, 8), (0, 2, 1, 3), (1, 9, 300), (254, 255, 255, 257, 258)]
)
def test_messages_arrive_and_are_settled_by_the_ids_that_the_peer_used(ids: tuple[int, ...], piece: int | None) -> None:
    server = Server()
    contents = [b"%d" % number for number in range(len(ids))]
    server.push(b"".join(transfer(0, *each) for each in zip(ids, contents, strict=True)), piece)
    assert server.messages == contents
    assert sorted(settled_ids(server.settle())) == sorted(ids)
    assert server.engine.fault() == ("", "")
    following = max(ids) + 1
    server.push(transfer(0, following, b"next") + transfer(1, following + 1, b"last"))
    assert server.messages == [b"next", b"last"]
    assert settled_ids(server.settle(REJECTED)) == [following, following + 1]


@pytest.mark.parametrize("piece", [None, 1, 50])
@pytest.mark.parametrize("says_id", [True, False])
def test_a_message_of_several_transfers_may_have_a_repeated_id(piece: int | None, says_id: bool) -> None:
    server = Server()
    whole = body(b"a message in parts")
    again = 4 if says_id else None
    server.push(transfer(0, 4, b"one") + transfer(0, 4, b"", more=True, payload=whole[:7]), piece)
    server.push(transfer(1, 5, b"between"), piece)
    server.push(transfer(0, again, b"", tag=None, message_format=None, more=True, payload=whole[7:9]), piece)
    server.push(transfer(0, again, b"", tag=None, message_format=None, payload=whole[9:]), piece)
    assert server.messages == [b"one", b"between", b"a message in parts"]
    assert sorted(settled_ids(server.settle())) == [4, 4, 5]


def test_an_aborted_message_takes_an_id_too() -> None:
    server = Server()
    server.push(transfer(0, 0, b"a") + transfer(0, 0, b"b", more=True) + transfer(0, 0, b"", aborted=True))
    server.push(transfer(0, 0, b"", aborted=True) + transfer(0, 1, b"c"))
    assert server.messages == [b"a", b"c"]
    assert sorted(settled_ids(server.settle())) == [0, 1]


def test_sessions_have_ids_of_their_own() -> None:
    server = Server(sessions=2)
    for number in (0, 1, 1, 1):
        server.push(transfer(0, number, b"a") + transfer(0, 7 + number // 2, b"b", channel=1))
    assert server.messages == [b"a", b"b"] * 4
    found = server.settle()
    assert sorted(settled_ids(found)) == [0, 1, 1, 1]
    assert settled_ids(found, 1) == [7, 7, 7, 7]


def test_two_deliveries_with_one_tag_are_a_batch_and_not_one() -> None:
    """Who repeats an id repeats a tag, too."""
    server = Server()
    server.push(
        transfer(0, 0, b"not")
        + transfer(0, 0, b"batch", message_format=BATCH_FORMAT)
        + transfer(0, 1, b"not")
        + transfer(0, 2, b"batch", message_format=BATCH_FORMAT)
        + transfer(0, 2, b"batch", message_format=BATCH_FORMAT)
    )
    assert [(payload[5:], batch) for _, payload, batch, _ in server.pair.server.named("message")] == [
        (b"not", False),
        (b"batch", True),
        (b"not", False),
        (b"batch", True),
        (b"batch", True),
    ]


def test_the_reason_of_a_close_that_proton_writes_has_three_fields() -> None:
    server = Server()
    server.push(transfer(9, 0, b"no such link"))
    [[error]] = performatives(server.engine.pull(), 0x18)
    assert (error.value[0], len(error.value)) == ("amqp:invalid-field", 3)


def test_a_delivery_goes_on_under_its_own_id_only() -> None:
    server = Server()
    server.push(transfer(0, 0, b"", more=True))
    with pytest.raises(ProtocolError, match="delivery-id"):
        server.push(transfer(0, 1, b""))


@settings(max_examples=examples(200))
@given(
    st.lists(
        st.tuples(
            st.integers(0, 1),  # the link
            st.sampled_from([0] * 6 + [-2, -1, 1, 70_000]),  # off what is due
            st.sampled_from([1] * 4 + [2, 3]),  # transfers
            st.booleans(),  # later transfers say the id
            st.sampled_from([False] * 3 + [True]),  # settled
            st.sampled_from([0] * 4 + [1]),  # settle what is there after it
        ),
        min_size=1,
        max_size=20,
    ),
    st.sampled_from([0, 253, 0xFFFFFFFE]),
    st.sampled_from([1, 13, 100, 10_000]),
)
def test_any_numbering_is_understood(deliveries: list[Any], start: int, piece: int) -> None:
    server = Server()
    due = start
    sent: list[bytes] = []
    unsettled: list[int] = []
    data = b""
    for number, (link, off, parts, says_id, settled, settles) in enumerate(deliveries):
        mine = (due + (off if number else 0)) & 0xFFFFFFFF
        whole = body(b"%04d" % number)
        for part in range(parts):
            last = part == parts - 1
            data += transfer(
                link,
                mine if part == 0 or says_id else None,
                b"",
                more=not last,
                settled=settled,
                tag=b"t" if part == 0 else None,
                message_format=0 if part == 0 else None,
                payload=whole[part * 4 :] if last else whole[part * 4 : part * 4 + 4],
            )
        due = (mine + 1) & 0xFFFFFFFF
        sent.append(b"%04d" % number)
        if not settled:
            unsettled.append(mine)
        if settles or number == len(deliveries) - 1:
            server.push(data, piece)
            server.engine.check()
            assert server.messages == sent
            told = sorted(
                (first + at) & 0xFFFFFFFF
                for _, first, last in server.settle()
                for at in range(((last - first) & 0xFFFFFFFF) + 1)
            )
            assert told == sorted(unsettled)
            data, sent, unsettled = b"", [], []
    assert server.engine.fault() == ("", "")
    assert not performatives(server.engine.pull(), 0x18)


@pytest.mark.parametrize(("ids", "tag_bytes"), [((0, 0), 4), ((255, 255), 4), ((254, 254), 4), ((0, 0), 236)])
def test_a_full_frame_stays_within_its_size(ids: tuple[int, int], tag_bytes: int) -> None:
    """The id that proton wants may be longer than the one that is there."""
    server = Server()
    frame = transfer(1, ids[1], b"", tag=b"t" * tag_bytes, payload=b"")
    payload = b"\x00\x53\x75\xb0" + (65_536 - len(frame) - 8).to_bytes(4, "big") + bytes(65_536 - len(frame) - 8)
    full = transfer(1, ids[1], b"", tag=b"t" * tag_bytes, payload=payload)
    assert len(full) == 65_536
    server.pair.server.link.max_message_bytes = 0
    server.push(transfer(0, ids[0], b"a") + full + transfer(0, ids[1] + 1, b"c"), 5000)
    assert [len(payload) for _, payload, _, _ in server.pair.server.named("message")] == [6, len(payload), 6]
    assert sorted(settled_ids(server.settle())) == sorted((*ids, ids[1] + 1))
