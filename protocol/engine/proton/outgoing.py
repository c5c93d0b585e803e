"""Walks a connection's outgoing frames: finds what proton does not tell, and corrects what it writes.

Proton gives a link's end a handle and does not tell it. It writes flows of a session where the peer waits for those of
a link. It settles unsettled deliveries when their link ends. It may have other ids of deliveries than the peer
(`delivery_ids`). It knows no message format but 0. It leaves out fields that some peers need (`padding`). All of that
is rare: most output is not walked.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any, Protocol

from protocol import codec
from protocol.amqp_error import amqp_error
from protocol.codec import UInt, UShort
from protocol.engine.delivery_ids import DeliveryIds
from protocol.engine.frames import frame_of, walk
from protocol.engine.padding import CONTROL, EVERYTHING, pad
from protocol.engine.performatives import ATTACH, BEGIN, CLOSE, DISPOSITION, FLOW, OPEN, TRANSFER
from protocol.symbols import AMQP_HEADER, BATCH_FORMAT

_LIST8 = 0xC0
_HANDLE_MAX = 4  # its field in a begin
_SESSION_FLOW_FIELDS, _LINK_FLOW_FIELDS = 4, 9  # proton writes the first, we the second
_AVAILABLE_AND_DRAIN = {drain: codec.encode(UInt(0)) + codec.encode(drain) for drain in (False, True)}


class OwnEnd(Protocol):
    """Our end of a link whose attach is in the next output. `own_handle` is set to its channel and handle."""

    name: str
    is_sender: bool
    own_handle: tuple[int, int] | None


class OutputWalk:
    """The state of one connection's output.

    `is_due`: the next output must be walked. Set it when proton will write anything but transfers, flows and
    dispositions. `attaching` has the ends whose attach is not written yet. `is_abandoned`: unsettled deliveries ended
    with their link, and proton is about to write that they are settled. `answering` has the peer's channels of begins
    that proton is about to answer, in order. `batches` has channel, handle and tag of the deliveries that are batches
    and not completely written.

    `channels` has the peer's channel by ours. `translated` is that of `FrameWalk`: dispositions of deliveries that
    these sessions received must be translated. While there are any, all output is walked.
    """

    def __init__(self, translated: dict[int, DeliveryIds], handle_max: int | None = None) -> None:
        """`handle_max` is the highest handle of a session that we answer; None leaves that to proton, which has no
        setting for it."""
        self.is_due = False
        self.attaching: list[OwnEnd] = []
        self.is_abandoned = False
        self.answering: deque[int] = deque()
        self.batches: set[tuple[int, int, bytes]] = set()
        self.channels: dict[int, int] = {}
        self._translated = translated
        self._handle_max = handle_max
        self._answers: dict[int, list[bytes]] = {}  # by channel, the fields of links for flows of their session
        self._widths = CONTROL

    def pad_everything(self) -> None:
        """Pad all performatives, because the peer reads fields by position."""
        self._widths = EVERYTHING
        self.is_due = True

    def tell_link(self, own_handle: tuple[int, int], delivery_count: int, credit: int, drain: bool) -> None:
        """Let a flow tell of the link (2.7.4). Proton must be about to write a flow of its session or its links."""
        channel, handle = own_handle
        fields = b"".join(codec.encode(UInt(field)) for field in (handle, delivery_count, credit))
        self._answers.setdefault(channel, []).append(fields + _AVAILABLE_AND_DRAIN[drain])
        self.is_due = True

    def walk(self, output: bytes) -> bytes:
        """`output` with corrections for the peer: whole frames, perhaps with the protocol header before them."""
        if self.attaching or self._answers or self.is_abandoned or self.answering or self.batches or self._translated:
            output = self._walk_frames(output)
            self.is_abandoned = False
        # Flows that are not in this output will be in a later one.
        self.is_due = bool(self._answers) or bool(self.batches) or self._widths is EVERYTHING
        return pad(output, self._widths)

    def _walk_frames(self, output: bytes) -> bytes:
        frames: list[bytes] = []
        for start, end, channel, code in walk(output):
            frame = output[start:end]
            if code == ATTACH and self.attaching:
                self._note_handle(channel, frame)
            elif code == TRANSFER and self.batches:
                frame = self._with_format(channel, frame)
            elif code == BEGIN and self.answering:
                frames.append(self._answer(channel, frame))
                continue
            elif code == DISPOSITION and self.is_abandoned and _settles_without_state(frame):
                continue  # the end of a link settles nothing: locks stay (2.6.6)
            elif code == DISPOSITION and self._translated:
                frames += self._by_peers_ids(channel, frame)
                continue
            elif code == FLOW and self._answers and frame[11] == _LIST8:
                frames += self._completed(channel, frame)
                continue
            frames.append(frame)
        return b"".join(frames)

    def _note_handle(self, channel: int, attach: bytes) -> None:
        name, handle, is_receiver = _first_fields(attach, 3)
        for end in self.attaching:
            if end.name == name and end.is_sender is not bool(is_receiver):
                end.own_handle = channel, handle
                self.attaching.remove(end)
                break

    def _with_format(self, channel: int, transfer: bytes) -> bytes:
        """The transfer, with its message format if it is of a batch. All transfers of a delivery have it (2.7.5)."""
        performative, end = codec.decode(transfer, 8)
        fields = performative.value
        delivery = channel, fields[0], fields[2]
        if delivery not in self.batches:
            return transfer
        if len(fields) < 6 or not fields[5]:  # more
            self.batches.discard(delivery)
        fields[3] = UInt(BATCH_FORMAT)
        written = codec.encode(performative)
        size = 8 + len(written) + len(transfer) - end
        return b"".join((size.to_bytes(4, "big"), transfer[4:8], written, transfer[end:]))

    def _answer(self, channel: int, begin: bytes) -> bytes:
        """The answer to a begin, with the highest handle and the peer's channel: proton leaves that out if the session
        has ended since.
        """
        fields = codec.decode(begin, 8)[0].value
        peers_channel = self.answering.popleft()
        self.channels[channel] = peers_channel
        if self._handle_max is not None:
            fields[_HANDLE_MAX:] = UInt(self._handle_max), *fields[_HANDLE_MAX + 1 :]
        return frame_of(channel, BEGIN, [UShort(peers_channel), *fields[1:]])

    def _by_peers_ids(self, channel: int, disposition: bytes) -> list[bytes]:
        """Dispositions with the peer's ids, in place of one disposition of received deliveries."""
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

    def _completed(self, channel: int, flow: bytes) -> list[bytes]:
        """A flow for each link that must be told of, in place of the session's flow; or that flow itself.

        Proton may write a flow of a link in its place. That stays, behind the others: it is newer.
        """
        told = self._answers.pop(channel, ())
        if not told:
            return [flow]
        end = 14
        for _ in range(_SESSION_FLOW_FIELDS):
            _, end = codec.decode(flow, end)
        of_session = flow[14:end]
        flows = [
            (14 + len(of_session) + len(fields)).to_bytes(4, "big")
            + flow[4:12]
            + bytes((1 + len(of_session) + len(fields), _LINK_FLOW_FIELDS))
            + of_session
            + fields
            for fields in told
        ]
        return flows if flow[13] == _SESSION_FLOW_FIELDS else [*flows, flow]


def _first_fields(frame: bytes | memoryview, count: int) -> list[Any]:
    """The first fields of a performative that has at least so many, without a look at the others."""
    at = 14 if frame[11] == _LIST8 else 20
    fields = []
    for _ in range(count):
        field, at = codec.decode(frame, at)
        fields.append(field)
    return fields


def _settles_without_state(disposition: bytes) -> bool:
    """True for a disposition of our own deliveries without a state: we settle these only with a state."""
    role, _, _, _, state = (*codec.decode(disposition, 8)[0].value, None, None, None, None)[:5]
    return role is False and state is None


def transfers_from(outputs: Iterable[bytes | memoryview], start: int) -> dict[tuple[int, int], int]:
    """The number of deliveries that begin at `start` or behind it, by channel and handle of our end of their links.

    `outputs` are consecutive, and each consists of whole frames.
    """
    counts: dict[tuple[int, int], int] = {}
    begun: dict[tuple[int, int], int] = {}  # the delivery-id of the last transfer
    position = 0
    for output in outputs:
        for at, end, channel, code in walk(output):
            if code == TRANSFER:
                handle, delivery_id = _first_fields(output[at:end], 2)
                if begun.get((channel, handle)) != delivery_id and position + at >= start:
                    counts[channel, handle] = counts.get((channel, handle), 0) + 1
                begun[channel, handle] = delivery_id
            elif code == ATTACH:  # an earlier link had this handle
                _, handle = _first_fields(output[at:end], 2)
                counts.pop((channel, handle), None)
        position += len(output)
    return counts


def refusal(container_id: str, condition: str, description: str, has_header: bool) -> bytes:
    """An open and a close: the whole output for a peer that has not sent its open (2.4.6).

    `has_header`: the peer has got the protocol header already.
    """
    frames = frame_of(0, OPEN, [container_id]) + frame_of(0, CLOSE, [amqp_error(condition, description)])
    return pad(frames if has_header else AMQP_HEADER + frames)
