"""A client's session whose links are in two places: most in the primary, those of entities that have failed over here.

The client sees one session, and so does the primary. What the client sends on links that are here takes part in the
client's counts of transfers and deliveries (2.5.6, 2.6.12), but not in the primary's; so ids and windows are translated
from the first such transfer on. Until then all frames pass as they are.
"""

from collections.abc import Collection
from typing import Any, Final

from broker.pairing.sidecar.frames import Frame, Outcomes, write
from protocol.codec import UInt
from protocol.engine.delivery_ids import DeliveryIds
from protocol.symbols import Descriptor

_MASK: Final = (1 << 32) - 1
_FLOW_HANDLE: Final = 4


class SessionLink:
    """A link by the client's `handle`. `path` is the entity of a paired sender, else None.

    `began_ms` is when it was attached. `is_here`: it is answered by the sidecar. `is_moved`: it was in the primary, and
    the client was told that it has ended, so that it attaches it again. `is_accepted`: the primary has attached it.
    While a delivery has more frames, `unfinished` is the client's id of it, and `unfinished_id` the primary's.
    """

    __slots__ = (
        "began_ms",
        "handle",
        "is_accepted",
        "is_claims",
        "is_here",
        "is_moved",
        "is_sender",
        "name",
        "path",
        "peers_handle",
        "unfinished",
        "unfinished_id",
    )

    def __init__(self, handle: int, name: str, is_sender: bool, began_ms: int) -> None:
        self.handle = handle
        self.name = name
        self.is_sender = is_sender
        self.began_ms = began_ms
        self.path: str | None = None
        self.is_claims = False
        self.is_here = False
        self.is_moved = False
        self.is_accepted = False
        self.unfinished: int | None = None
        self.unfinished_id = 0
        self.peers_handle: int | None = None  # that of the end which the client sees, once it is attached


class SplitSession:
    """Channels: the client's, and the primary's once it has begun.

    `unattached` are links that the primary has not answered yet, in the order in which the client has attached them.
    `unanswered` are paired deliveries in the primary, by the client's delivery id: the link, and when it was sent (ms).
    """

    def __init__(self, channel: int, begin: bytes, frame: Frame) -> None:
        self.channel = channel
        self.begin = begin  # the client's frame
        self.primary_channel: int | None = None
        self.links: dict[int, SessionLink] = {}  # by the client's handle
        self.in_primary: dict[int, SessionLink] = {}  # by the primary's handle
        self.unattached: list[SessionLink] = []
        self.unanswered: dict[int, tuple[SessionLink, int]] = {}
        self._untold: set[int] = set()  # the client's ids of deliveries on links that were moved
        self.last_id: int | None = None  # of the client's deliveries
        self.received = 0  # transfers that the primary has sent
        self.is_local_begun = False
        self.waiting: list[Frame] = []  # the engine's frames until the primary has begun
        self._first = _number(frame.field(1))
        handle_max = frame.field(4)
        self._top = int(handle_max) if isinstance(handle_max, int) else _MASK
        self._ids: DeliveryIds | None = None
        self._here = 0  # transfers of the client that were not for the primary
        self._primary_begin: Frame | None = None
        self._primary_flow: Frame | None = None

    @property
    def is_split(self) -> bool:
        return self._ids is not None

    def split(self) -> None:
        """Count delivery ids apart from now on: transfers of the client may not be for the primary."""
        if self._ids is None:
            self._ids = DeliveryIds()
            if self.last_id is not None:
                self._ids.next_id = (self.last_id + 1) & _MASK

    def forget(self, link: SessionLink) -> list[int]:
        """The link has ended: what it has sent gets no answer any more. Returns when each was sent (ms)."""
        lost = {number: sent_ms for number, (owner, sent_ms) in self.unanswered.items() if owner is link}
        for number in lost:
            del self.unanswered[number]
        return [*lost.values()]

    def move(self, link: SessionLink) -> None:
        """The client is told that the link has ended. The primary does not know that yet: what it says of the link's
        deliveries is kept from the client."""
        self.split()
        link.is_moved = True
        self._untold |= {number for number, (owner, _) in self.unanswered.items() if owner is link}
        self.forget(link)

    # -- what the primary says

    def primary_begun(self, channel: int, frame: Frame) -> None:
        self.primary_channel = channel
        self._primary_begin = frame

    def primary_flow(self, frame: Frame) -> None:
        """Remember the primary's windows, for flows of the engine here."""
        self._primary_flow = frame

    # -- from the client to the primary

    def take_here(self) -> None:
        """A transfer is not for the primary."""
        self._here = (self._here + 1) & _MASK

    def transfer_to_primary(self, frame: Frame, link: SessionLink) -> bytes:
        """The frame begins a delivery unless one is unfinished."""
        assert self._ids is not None
        fields = list(frame.fields)
        if link.unfinished is None:
            link.unfinished_id = self._ids.take(fields[1], frame.field(4) is True)
        if fields[1] is not None:
            fields[1] = UInt(link.unfinished_id)
        return write(frame.channel, frame.code, fields, frame.payload)

    def flow_to_primary(self, frame: Frame, with_link: bool) -> bytes:
        fields = list(frame.fields)
        fields[2] = UInt((_number(fields[2]) - self._here) & _MASK)
        return write(frame.channel, frame.code, fields if with_link else fields[:_FLOW_HANDLE])

    def settled_to_primary(self, frame: Frame, told: Outcomes) -> bytes:
        """A disposition of the client's own deliveries."""
        assert self._ids is not None
        if not self._ids.translates:
            return write(frame.channel, frame.code, frame.fields)
        return b"".join(
            write(frame.channel, frame.code, [frame.fields[0], UInt(first), UInt(last), *frame.fields[3:]])
            for first, last in self._ids.protons(told.first, told.last)
        )

    # -- from the primary to the client

    def answered_ranges(self, told: Outcomes) -> list[tuple[int, int]]:
        """The client's ids of the deliveries that a disposition of the primary tells the client of."""
        ids = self._ids
        if ids is None or ids.next_id is None or not ids.translates:
            return self._told(told.first, told.last)
        ranges = ids.peers(told.first, told.last)
        if told.settled:
            ids.settled(told.first, told.last)
        return [part for first, last in ranges for part in self._told(first, last)]

    def _told(self, first: int, last: int) -> list[tuple[int, int]]:
        """Parts of this range that the client is to hear of."""
        if not self._untold:  # as nearly always
            return [(first, last)]
        parts, at = [], first
        for number in sorted(within(first, last, self._untold), key=lambda number: (number - first) & _MASK):
            self._untold.discard(number)
            if number != at:
                parts.append((at, (number - 1) & _MASK))
            at = (number + 1) & _MASK
        if (last - at) & _MASK <= (last - first) & _MASK:
            parts.append((at, last))
        return parts

    def flow_to_client(self, frame: Frame, with_link: bool) -> bytes:
        fields = list(frame.fields)
        if fields[0] is not None:
            fields[0] = UInt((_number(fields[0]) + self._here) & _MASK)
        return write(frame.channel, frame.code, fields if with_link else fields[:_FLOW_HANDLE])

    # -- from the engine here to the client

    def visible(self, handle: int) -> int:
        """The engine's handles are the primary's, too, so the client sees other numbers."""
        return (self._top - handle) & _MASK

    def engine_flow_to_client(self, frame: Frame) -> bytes:
        """The engine's credit, with the state of the session that the client shares with the primary."""
        assert self.primary_channel is not None
        begin, flow = self._primary_begin, self._primary_flow
        assert begin is not None
        seen, window = (flow.field(0), flow.field(1)) if flow is not None else (None, begin.field(2))
        outgoing = flow.field(3) if flow is not None else begin.field(3)
        fields: list[Any] = [
            UInt(((self._first if seen is None else _number(seen)) + self._here) & _MASK),
            UInt(_number(window)),
            UInt((_number(begin.field(1)) + self.received) & _MASK),
            UInt(_number(outgoing)),
            UInt(self.visible(_number(frame.field(4)))),
            *frame.fields[5:],
        ]
        return write(self.primary_channel, Descriptor.FLOW, fields)


def within(first: int, last: int, known: Collection[int]) -> list[int]:
    """The ids from `first` to `last` that are known. Ids are serial numbers (RFC 1982)."""
    more = (last - first) & _MASK
    if more < len(known):
        return [number for each in range(more + 1) if (number := (first + each) & _MASK) in known]
    return [number for number in known if (number - first) & _MASK <= more]


def _number(value: Any) -> int:
    return int(value) if isinstance(value, int) else 0
