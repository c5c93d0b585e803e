"""When the checkpoint of a partition is tried again whose tables had no room for it. Pure: times are arguments.

A try writes until there is no room left, and then deletes what the partition has deleted, which may make room. That
costs much, so the time to the next one doubles while nothing changes. It is tried at once when there is more room than
the last time, as after somebody has freed a part of the disk, or when much more was deleted. While the log takes little
more, any change is enough, as what was deleted need not be written.
"""

FIRST_SECONDS, LONGEST_SECONDS = 1.0, 16.0
MORE_BYTES = 1 << 20  # with so much more room than the last time it is tried again
MORE_PART = 8  # of what waits, if that is more: so few tries are made while the room grows slowly
CHANGED_KEYS = 32_768  # with so many changes since then, too: where nothing is accepted, most of them delete


class Shortage:
    """A partition's shortage of room, from the first checkpoint that had no room until one that has."""

    def __init__(self) -> None:
        self.problem = ""  # as the last try had it
        self.changed_keys = 0  # in checkpoints that others have had since
        self._seconds = FIRST_SECONDS / 2  # from the last try to the next
        self._tried_s = self._again_s = 0.0
        self._room_bytes: int | None = None  # after the last try
        self._more_bytes = MORE_BYTES

    def failed(self, problem: str, now_s: float, room_bytes: int, waiting_bytes: int) -> None:
        """A try found no room, and left `room_bytes`. The log has `waiting_bytes` of what the tables lack."""
        has_helped = self._room_bytes is not None and room_bytes >= self._room_bytes + self._more_bytes
        self._seconds = FIRST_SECONDS if has_helped else min(2 * self._seconds, LONGEST_SECONDS)
        self.problem = problem
        self.changed_keys = 0
        self._tried_s, self._again_s = now_s, now_s + self._seconds
        self._room_bytes = room_bytes
        self._more_bytes = max(MORE_BYTES, waiting_bytes // MORE_PART)

    def is_due(self, now_s: float, room_bytes: int, changed_keys: int, is_pressing: bool = False) -> bool:
        """`changed_keys` are those since the last checkpoint of others. `is_pressing`: the log takes little more."""
        assert self._room_bytes is not None
        changed_keys += self.changed_keys
        return (
            now_s >= self._again_s
            or room_bytes >= self._room_bytes + self._more_bytes
            or changed_keys >= CHANGED_KEYS
            or (is_pressing and changed_keys > 0 and now_s >= self._tried_s + FIRST_SECONDS)
        )
