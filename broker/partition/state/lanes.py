"""The state of one transfer queue in memory: a lane for each partition to which it sends messages.

The messages are in one queue, in the order of their numbers. Messages for one partition must not wait for those for
another. So each partition has an outbox, whose window skips messages for others. META lists the partitions; each is
added before the first message for it.
"""

from collections.abc import Callable, Iterable

from broker.partition.state.outbox import Outbox
from broker.partition.state.window import Ref, Window
from storage.records import Field


class Transfers:
    __slots__ = ("_home", "lanes", "next_partition")

    def __init__(self, home: Callable[[str], int]) -> None:
        """`home` returns the partition of a destination of this name, for messages that do not say it."""
        self._home = home
        self.lanes: dict[int, Outbox] = {}  # by partition
        self.next_partition: int | None = None  # the partition of the lane that the last turn did not get to

    def add(self, partition: int, cursor: int) -> Outbox:
        """Add a lane; no message with a number below `cursor` is for its partition."""
        window = Window()
        window.active = True
        window.cursor = cursor
        lane = self.lanes[partition] = Outbox(window, partition)
        lane.synced = True
        return lane

    def in_turn(self) -> list[Outbox]:
        """The lanes, beginning with the one that the last turn did not get to."""
        partitions = [*self.lanes]
        at = partitions.index(self.next_partition) if self.next_partition in self.lanes else 0
        self.next_partition = None
        return [self.lanes[partition] for partition in (*partitions[at:], *partitions[:at])]

    def of(self, partition: int, refs: Iterable[Ref]) -> list[Ref]:
        """Return those of `refs` that are for this partition."""
        return [ref for ref in refs if self._lane_of(ref) == partition]

    def extend(self, refs: list[Ref], first: int, end: int, limit: int) -> None:
        """Extend the windows as `Window.extend` does, by new messages of all lanes."""
        by_partition: dict[int, list[Ref]] = {partition: [] for partition in self.lanes}
        for ref in refs:
            by_partition[self._lane_of(ref)].append(ref)
        for partition, lane in self.lanes.items():
            lane.window.extend(by_partition[partition], first, end, limit)

    def _lane_of(self, ref: Ref) -> int:
        _, _, _, overlay = ref
        assert overlay is not None
        partition: int | None = overlay.get(Field.LANE)
        return self._home(overlay[Field.DESTINATION]) if partition is None else partition


def destination_of(ref: Ref) -> str:
    """The name, in lower case, of the destination of a message in a transfer queue."""
    _, _, _, overlay = ref
    assert overlay is not None
    name: str = overlay[Field.DESTINATION]
    return name
