"""Unpacks large frames between processes without a copy of the runs in them."""

from collections.abc import Iterable, Iterator
from typing import Any

import msgpack

from broker import wire
from broker.wire import Message, Op, items_of, run_head

# A run that is a smaller part of its frame is copied: it would keep the whole frame in memory, also where its client
# does not read.
_PART_OF_FRAME = 4
_LOOK_BYTES = 64 << 10  # of a large frame that are copied at once, to look for such runs


def unpack(frame: memoryview) -> list[Message]:
    """Unpack a frame, as `wire.unpack` does. Large runs are views of the frame, which must not change any more."""
    return wire.unpack(frame, _items_around_runs)


def _items_around_runs(frame: bytes | memoryview) -> Iterable[list[Any]]:
    try:
        return list(_LargeFrame(memoryview(frame)).items())
    except msgpack.OutOfData:  # something else in it is large, or there are many large runs
        items: list[list[Any]] = items_of(frame)
        return items


class _LargeFrame:
    """A frame that is unpacked piece by piece, up to a large run and on behind it."""

    def __init__(self, frame: memoryview) -> None:
        self._frame = frame
        self._go_on(0)

    def _go_on(self, at: int) -> None:
        self._unpacker = msgpack.Unpacker(strict_map_key=False, max_buffer_size=0)
        self._begin = self._fed = at

    @property
    def _at(self) -> int:
        """The offset of what comes next."""
        return self._begin + int(self._unpacker.tell())

    def _next(self, method: str) -> Any:
        """What this method of the unpacker returns. Raises OutOfData if that is large."""
        while True:
            try:
                return getattr(self._unpacker, method)()
            except msgpack.OutOfData:
                if self._fed - self._at >= _LOOK_BYTES or self._fed == len(self._frame):
                    raise
                piece = self._frame[self._fed : self._fed + _LOOK_BYTES]
                self._unpacker.feed(piece)
                self._fed += len(piece)

    def items(self) -> Iterator[list[Any]]:
        """Yield the items of each message."""
        for _ in range(self._next("read_array_header")):
            count = self._next("read_array_header")
            items = [self._next("unpack") for _ in range(count - 1)]
            run = self._large_run() if items and items[0] in (Op.SEND_RUN, Op.DELIVER_RUN) else None
            if count:
                items.append(self._next("unpack") if run is None else run)
            yield items

    def _large_run(self) -> memoryview | None:
        """The run that comes next, if it is large; then what is behind it comes next."""
        at = self._at
        begin = at + len(run_head(b""))
        if bytes(self._frame[at : at + 1]) != b"\xc6":  # bin 32
            return None
        end = begin + int.from_bytes(self._frame[at + 1 : begin], "big")
        if end - begin < max(wire.LARGE_RUN_BYTES, len(self._frame) // _PART_OF_FRAME) or end > len(self._frame):
            return None
        self._go_on(end)
        return self._frame[begin:end]
