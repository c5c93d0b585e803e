"""Walks a connection's outgoing frames: for what proton does not tell, and for what it cannot say.

It gives a link's end a handle and does not tell which; it says flows of a session where the peer waits for a link's; it
settles what was not settled when its link ends; it may know deliveries by other ids than the peer (`delivery_ids`); and
it leaves out fields that some peers look for (`padding`). All of that is rare: most of what is written goes out unread.
"""

from collections import deque
from collections.abc import Iterable
from typing import Protocol

from protocol import codec
from protocol.codec import Symbol, UInt, UShort
from protocol.engine.delivery_ids import DeliveryIds
from protocol.engine.incoming import frame_of
from protocol.engine.padding import CONTROL, EVERYTHING, pad
from protocol.engine.performatives import ATTACH, BEGIN, CLOSE, DISPOSITION, FLOW, OPEN, TRANSFER
from protocol.symbols import AMQP_HEADER

_LIST8 = 0xC0
_SESSION_FLOW_FIELDS, _LINK_FLOW_FIELDS = 4, 9  # as proton writes the first, and we the second
_AVAILABLE_AND_DRAIN = {drain: codec.encode(UInt(0)) + codec.encode(drain) for drain in (False, True)}


class OwnEnd(Protocol):
    """Our end of a link whose attach is among the next output. `own_handle` is set to its channel and handle."""

    name: str
    is_sender: bool
    own_handle: tuple[int, int] | None


class OutputWalk:
    """State of one connection's output.

    `is_due`: the next output must be walked; to be set when proton is made to say something else than transfers, flows
    and dispositions. `attaching` has the ends whose attach is to come. `is_abandoned`: unsettled deliveries ended with
    their link, and proton is about to say that they are settled. `answering` has the peer's channels of begins that it
    is about to answer, in order.

    `channels` has the peer's channel by ours. `translated` is that of `FrameWalk`: dispositions of what these sessions
    received must be translated, and while there are any, everything is walked.
    """

    def __init__(self, translated: dict[int, DeliveryIds]) -> None:
        self.is_due = False
        self.attaching: list[OwnEnd] = []
        self.is_abandoned = False
        self.answering: deque[int] = deque()
        self.channels: dict[int, int] = {}
        self._translated = translated
        self._answers: list[tuple[int, bytes]] = []  # channel, and what a flow of its session is to say beyond
        self._widths = CONTROL

    def pad_everything(self) -> None:
        """The peer reads all performatives by position."""
        self._widths = EVERYTHING
        self.is_due = True

    def tell_link(self, own_handle: tuple[int, int], delivery_count: int, credit: int, drain: bool) -> None:
        """Have a flow tell of the link (2.7.4). The engine must be about to say one of its session."""
        channel, handle = own_handle
        fields = b"".join(codec.encode(UInt(field)) for field in (handle, delivery_count, credit))
        self._answers.append((channel, fields + _AVAILABLE_AND_DRAIN[drain]))
        self.is_due = True

    def walk(self, output: bytes) -> bytes:
        """`output` as the peer is to have it: whole frames, with the protocol header before them or not."""
        if self.attaching or self._answers or self.is_abandoned or self.answering or self._translated:
            output = self._walk_frames(output)
            self.is_abandoned = False
        # A flow that was not among this output is still to come.
        self.is_due = bool(self._answers) or self._widths is EVERYTHING
        return pad(output, self._widths)

    def _walk_frames(self, output: bytes) -> bytes:
        frames = []
        at = len(AMQP_HEADER) if output[:4] == b"AMQP" else 0
        frames.append(output[:at])
        while at < len(output):
            size = int.from_bytes(output[at : at + 4], "big")
            frame = output[at : at + size]
            at += size
            code = frame[10] if size > 10 else 0
            if code == ATTACH and self.attaching:
                self._note_handle(frame)
            elif code == BEGIN and self.answering:
                frames.append(self._answer(frame))
                continue
            elif code == DISPOSITION and self.is_abandoned and _settles_without_state(frame):
                continue  # a link's end settles nothing: its locks last (2.6.6)
            elif code == DISPOSITION and self._translated:
                frames += self._by_peers_ids(frame)
                continue
            elif code == FLOW and self._answers and frame[11] == _LIST8 and frame[13] == _SESSION_FLOW_FIELDS:
                frames += self._completed(frame)
                continue
            frames.append(frame)
        return b"".join(frames)

    def _note_handle(self, attach: bytes) -> None:
        name, handle, is_receiver = codec.decode(attach, 8)[0].value[:3]
        for end in self.attaching:
            if end.name == name and end.is_sender is not bool(is_receiver):
                end.own_handle = int.from_bytes(attach[6:8], "big"), handle
                self.attaching.remove(end)
                break

    def _answer(self, begin: bytes) -> bytes:
        """The answer to a begin, which says which: proton does not if the session has ended since."""
        fields = codec.decode(begin, 8)[0].value
        channel, peers_channel = int.from_bytes(begin[6:8], "big"), self.answering.popleft()
        self.channels[channel] = peers_channel
        if fields[0] is not None:
            return begin
        return frame_of(channel, BEGIN, [UShort(peers_channel), *fields[1:]])

    def _by_peers_ids(self, disposition: bytes) -> list[bytes]:
        """In place of a disposition of what was received: as many as it takes with the ids that the peer used."""
        channel = int.from_bytes(disposition[6:8], "big")
        peers_channel = self.channels.get(channel, -1)
        ids = self._translated.get(peers_channel)
        fields = codec.decode(disposition, 8)[0].value
        if ids is None or fields[0] is False:
            return [disposition]
        first, last = fields[1], fields[1] if len(fields) < 3 or fields[2] is None else fields[2]
        frames = []
        for start, end in ids.peers(first, last):
            fields[1:3] = UInt(start), None if start == end else UInt(end)
            frames.append(frame_of(channel, DISPOSITION, fields))
        if len(fields) > 3 and fields[3]:
            ids.settled(first, last)
            if not ids.translates:
                del self._translated[peers_channel]
        return frames

    def _completed(self, flow: bytes) -> list[bytes]:
        """In place of a session's flow: one for each link of the session that is to be told of, or itself."""
        channel = int.from_bytes(flow[6:8], "big")
        told = [fields for at_channel, fields in self._answers if at_channel == channel]
        self._answers = [answer for answer in self._answers if answer[0] != channel]
        return [
            (len(flow) + len(fields)).to_bytes(4, "big")
            + flow[4:12]
            + bytes((flow[12] + len(fields), _LINK_FLOW_FIELDS))
            + flow[14:]
            + fields
            for fields in told
        ] or [flow]


def _settles_without_state(disposition: bytes) -> bool:
    """Of what we sent: we settle it with a state only."""
    role, _, _, _, state = (*codec.decode(disposition, 8)[0].value, None, None, None, None)[:5]
    return role is False and state is None


def transfers_from(outputs: Iterable[bytes], start: int) -> dict[tuple[int, int], int]:
    """How many deliveries begin at `start` or after it, by channel and handle of our end of their links.

    `outputs` follow one another, and each is whole frames.
    """
    counts: dict[tuple[int, int], int] = {}
    begun: dict[tuple[int, int], int] = {}  # the delivery-id of the last transfer
    position = 0
    for output in outputs:
        at = len(AMQP_HEADER) if output[:4] == b"AMQP" else 0
        while at < len(output):
            size = int.from_bytes(output[at : at + 4], "big")
            frame = output[at : at + size]
            code = frame[10] if size > 10 else 0
            channel = int.from_bytes(frame[6:8], "big")
            if code == TRANSFER:
                handle, delivery_id = codec.decode(frame, 8)[0].value[:2]
                if begun.get((channel, handle)) != delivery_id and position + at >= start:
                    counts[channel, handle] = counts.get((channel, handle), 0) + 1
                begun[channel, handle] = delivery_id
            elif code == ATTACH:  # the handle was another link's before
                counts.pop((channel, codec.decode(frame, 8)[0].value[1]), None)
            at += size
        position += len(output)
    return counts


def refusal(container_id: str, condition: str, description: str, has_header: bool) -> bytes:
    """An open and a close: all that is to be written to a peer that has not sent its open (2.4.6).

    `has_header`: it has got the protocol header already.
    """
    error = codec.Described(0x1D, [Symbol(condition), description, {}])
    frames = frame_of(0, OPEN, [container_id]) + frame_of(0, CLOSE, [error])
    return pad(frames if has_header else AMQP_HEADER + frames)
