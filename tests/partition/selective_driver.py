"""What the tests of receivers with selectors share: messages with properties, and receivers that want some of them."""

from typing import Any

from protocol.codec import Described, Int, ULong, encode
from protocol.message.intake import take_apart
from storage.records import LAYOUT_AT, MESSAGE_HEADER_BYTES
from tests.partition.driver import MAIN, Delivery, Driver, deliveries, message


def colored(color: str, number: int = 0, body: str = "b", ttl_ms: int | None = None, **given: Any) -> list[Any]:
    """An incoming message with the properties `color` and `n`; `given` is of `driver.message`."""
    sections = encode(Described(ULong(0x74), {"color": color, "n": Int(number)})) + encode(Described(ULong(0x77), body))
    layout, stored, _, _ = take_apart(sections, False)
    _, _, _, extra = message(b"", **given)
    return [layout, stored, ttl_ms, extra]


def color_of(delivery: Delivery) -> str:
    """The name of the color, found in the bytes of the message."""
    assert len(delivery.record) > LAYOUT_AT
    body = delivery.record[MESSAGE_HEADER_BYTES:]
    at = body.index(b"\xa1\x05color") + 7
    assert body[at] == 0xA1
    return body[at + 2 : at + 2 + body[at + 1]].decode()


class Selective(Driver):
    """`open` takes a selector; `turn` is one turn."""

    def open_selective(self, receiver: Any, selector: str, queue: int = MAIN, receive_and_delete: bool = False) -> None:
        self.partition.open_receiver(receiver, queue, receive_and_delete, self.now_ms, None, selector)
        self._limits[receiver] = 0

    def turn(self) -> tuple[dict[Any, list[Delivery]], list[Any], list[Any], bool]:
        """Deliveries by receiver, receivers whose drain has ended, those that are told of messages, and whether there
        is more to do at once.
        """
        pumped = self.partition.pump(self.now_ms)
        self.partition.commit()
        self.partition.check()
        found: dict[Any, list[Delivery]] = {}
        for receiver, _, items in pumped.deliveries:
            found.setdefault(receiver, []).extend(deliveries(items))
        return found, [receiver for receiver, _ in pumped.drained], list(pumped.available), pumped.more

    def turns(self) -> tuple[dict[Any, list[Delivery]], list[Any], list[Any], int]:
        """As many as there are, and how many these were."""
        found: dict[Any, list[Delivery]] = {}
        drained: list[Any] = []
        available: list[Any] = []
        count, more = 0, True
        while more:
            given, ended, told, more = self.turn()
            for receiver, received in given.items():
                found.setdefault(receiver, []).extend(received)
            drained += ended
            available += told
            count += 1
            assert count < 10_000, "it never ends"
        return found, drained, available, count

    def drain(self, count: int, receiver: Any) -> None:
        self._limits[receiver] += count
        self.partition.drain(receiver, self._limits[receiver])
