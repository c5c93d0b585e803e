"""Logs when partitions begin and end to refuse messages for want of room."""

from broker.logging import get_logger

log = get_logger("worker")


class Shortages:
    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # by partition; monotonic seconds

    def note(self, partition: int, shortage: str | None, now_s: float) -> None:
        """`shortage` is why the partition refuses messages; None if it takes them."""
        since_s = self._since.get(partition)
        if shortage is not None and since_s is None:
            self._since[partition] = now_s
            log.error(
                "messages are refused",
                partition=partition,
                reason=shortage,
                fix="receive messages, or make room: free disk space, or set store.map_size_bytes higher",
            )
        elif shortage is None and since_s is not None:
            del self._since[partition]
            log.info("messages are taken again", partition=partition, seconds=round(now_s - since_s))
