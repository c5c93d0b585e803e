"""Frames of AMQP as bytes: where one ends, what it is, and how to write one (AMQP 1.0 2.3).

Most frames pass the sidecar unread. So `transfer` and `outcomes` read only what is needed of the usual encodings, and
fall back on decoding the whole performative.
"""

from collections.abc import Iterator, Sequence
from struct import Struct
from typing import Any, Final, NamedTuple

from protocol.codec import Described, ULong, decode, encode
from protocol.engine import rejections
from protocol.engine.frames import HEAD, HEADER_BYTES, PROTOCOL, USUAL, USUAL_OFFSET, walk
from protocol.engine.padding import EVERYTHING
from protocol.engine.performatives import checked_fields
from protocol.errors import DecodeError, ProtocolError
from protocol.symbols import DESCRIPTOR_OF, Descriptor

MAX_FRAME_BYTES: Final = 1 << 20  # until a side has said what it takes
SASL_TYPE: Final = 1
MAX_VALUES: Final = 4096  # in one performative

_U32: Final = Struct(">I").unpack_from
_NULL, _TRUE, _FALSE, _ZERO, _SMALL, _WIDE = 0x40, 0x41, 0x42, 0x43, 0x52, 0x70
_LIST8, _LIST32, _BINARY8 = 0xC0, 0xD0, 0xA0
_LIST_AT: Final = HEADER_BYTES + 3  # behind the descriptor in its usual form
_DISPOSITION: Final = int(Descriptor.DISPOSITION)
_TRANSFER_DESCRIPTOR: Final = bytes((0x00, 0x53, Descriptor.TRANSFER))
# Fields of a transfer by index. Few have so many that one says whether they are aborted.
_SETTLED, _MORE, _ABORTED = 4, 5, 9


class FrameTooLarge(ProtocolError):
    """A frame is larger than its receiver has allowed."""


class Frame(NamedTuple):
    """`fields` are all of the performative, of the types that they must have; `payload` is what comes behind it.

    Those of SASL, and of what is no performative, are as they came.
    """

    channel: int
    code: int
    fields: list[Any]
    payload: bytes

    def field(self, index: int) -> Any:
        return self.fields[index] if index < len(self.fields) else None


def read(data: bytes, start: int, end: int) -> Frame | None:
    """Decode the frame that lies there; None for an empty one, which is a heartbeat. Raises ProtocolError."""
    _, words, kind, channel = HEAD.unpack_from(data, start)
    body = start + 4 * words
    if words < USUAL_OFFSET or body > end:
        raise DecodeError(f"a frame of {end - start} bytes whose body begins at {4 * words}", start)
    if body == end:
        return None
    value, stop = decode(memoryview(data)[:end], body, MAX_VALUES)
    if not isinstance(value, Described) or not isinstance(value.value, list):
        raise DecodeError("a frame without a performative", body)
    descriptor = value.descriptor
    code = DESCRIPTOR_OF.get(descriptor) if isinstance(descriptor, str) else descriptor
    if not isinstance(code, int):
        raise DecodeError("a frame with an unknown performative", body)
    fields = checked_fields(int(code), value.value) if Descriptor.OPEN <= code <= Descriptor.CLOSE else value.value
    return Frame(channel if kind != SASL_TYPE else 0, int(code), fields, data[stop:end])


def write(channel: int, code: int, fields: Sequence[Any], payload: bytes = b"", kind: int = 0) -> bytes:
    """One frame. Some clients read fields by position, so it has all that its performative has.

    Only transfers, which go to the primary alone, leave out nulls at their end: they may fill a frame.
    """
    written = [*fields, *[None] * (0 if kind else EVERYTHING[code] - len(fields))]
    while written and written[-1] is None and (kind or code == Descriptor.TRANSFER):
        written.pop()
    body = encode(Described(ULong(code), written))
    return HEAD.pack(HEADER_BYTES + len(body) + len(payload), USUAL_OFFSET, kind, channel) + body + payload


class Transfer(NamedTuple):
    """What is read of a transfer (2.7.5). `delivery_id` is None in some of the later frames of a delivery.

    `is_last`: the delivery has no more frames.
    """

    handle: int
    delivery_id: int | None
    settled: bool
    aborted: bool
    is_last: bool


def transfer(data: bytes, start: int, end: int) -> Transfer:
    """Read a transfer in its usual form or in any other. Raises ProtocolError."""
    if data[start + 4] != USUAL_OFFSET or data[start + HEADER_BYTES : start + _LIST_AT] != _TRANSFER_DESCRIPTOR:
        return _whole_transfer(data, start, end)
    try:
        at = start + _LIST_AT
        form = data[at]
        if form == _LIST8:
            count, at = data[at + 2], at + 3
        elif form == _LIST32:
            (count,), at = _U32(data, at + 5), at + 9
        else:
            return _whole_transfer(data, start, end)
        if count > _ABORTED:
            return _whole_transfer(data, start, end)
        handle, at = _uint(data, at)
        number, at = _uint(data, at) if count > 1 else (None, at)
        settled = more = False
        if count > _SETTLED:
            form = data[at]
            if form == _BINARY8:
                at += 2 + data[at + 1]
            elif form == _NULL:
                at += 1
            else:
                return _whole_transfer(data, start, end)
            _, at = _uint(data, at)
            settled = _flag(data[at])
            if count > _MORE:
                more = _flag(data[at + 1])
        if handle is None or at > end:
            return _whole_transfer(data, start, end)
    except (IndexError, _Unusual):
        return _whole_transfer(data, start, end)
    return Transfer(handle, number, settled, False, not more)


class _Unusual(Exception):
    pass


def _flag(form: int) -> bool:
    if form not in (_TRUE, _FALSE, _NULL):
        raise _Unusual
    return form == _TRUE


def _uint(data: bytes, at: int) -> tuple[int | None, int]:
    form = data[at]
    if form == _SMALL:
        return data[at + 1], at + 2
    if form == _ZERO:
        return 0, at + 1
    if form == _WIDE:
        return _U32(data, at + 1)[0], at + 5
    if form == _NULL:
        return None, at + 1
    raise _Unusual


def _whole_transfer(data: bytes, start: int, end: int) -> Transfer:
    frame = read(data, start, end)
    if frame is None or frame.code != Descriptor.TRANSFER or not isinstance(frame.field(0), int):
        raise DecodeError("a transfer without a handle", start)
    number = frame.field(1)
    return Transfer(
        int(frame.field(0)),
        int(number) if isinstance(number, int) else None,
        frame.field(_SETTLED) is True,
        frame.field(_ABORTED) is True,
        frame.field(_MORE) is not True or frame.field(_ABORTED) is True,
    )


class Outcomes(NamedTuple):
    """A disposition (2.7.6). `by_receiver`: the deliveries are the other side's. `state` is None without one."""

    by_receiver: bool
    first: int
    last: int
    settled: bool
    state: Described | None


def outcomes(frame: Frame) -> Outcomes:
    role, first, last, settled, state = frame.fields[:5]
    return Outcomes(role, int(first), int(first if last is None else last), settled is True, state)


class Incoming:
    """The bytes of one side, up to the last whole frame."""

    def __init__(self) -> None:
        self._rest = bytearray()  # the beginning of a frame
        self._needed = 0  # bytes that the frame has
        self._maximum = MAX_FRAME_BYTES
        self._end = 0

    def limit(self, max_frame_size: object) -> None:
        """The other side has said in its open what it takes."""
        if isinstance(max_frame_size, int):
            self._maximum = min(self._maximum, max(512, int(max_frame_size)))

    def feed(self, data: bytes) -> bytes:
        """Return the bytes to look at now; none while a frame is not whole, however small the pieces are."""
        if not self._rest:
            return data
        self._rest += data
        if len(self._rest) < self._needed:
            return b""
        data = bytes(self._rest)
        self._rest.clear()
        return data

    def frames(self, data: bytes) -> Iterator[tuple[int, int, int, int]]:
        """Start, end, channel and performative of each whole frame; 0 is none."""
        at, length, maximum = 0, len(data), self._maximum
        if length:
            self._needed = HEADER_BYTES
        for start, end, channel, code in walk(data):
            at, size = start, end - start
            if size > maximum and (
                size > rejections.MAX_FRAME_BYTES or (code != _DISPOSITION and length - at >= USUAL.size)
            ):  # a rejection with long texts is for the other side to judge, which may cut them
                raise FrameTooLarge(f"a frame of {size} bytes; {maximum} are taken")
            if size < HEADER_BYTES:
                raise DecodeError(f"a frame that claims to have {size} bytes", at)
            if end > length:
                self._needed = size
                break
            if not code and data.startswith(PROTOCOL, start):
                at = end
                continue
            if code is None:
                frame = read(data, at, end)
                code = 0 if frame is None else frame.code
            yield at, end, channel, code
            at = end
        self._end = at

    def rest_of(self, data: bytes, kept: int, pieces: list[bytes]) -> bytes:
        """`pieces` and what is behind `kept`, up to the last whole frame; the rest waits."""
        if not data:
            return b""
        end = self._end
        self._rest += data[end:]
        if not pieces:
            return data if end == len(data) else data[:end]
        pieces.append(data[kept:end])
        return b"".join(pieces)
