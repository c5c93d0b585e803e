"""Prometheus families of the process that writes the journal.

`docs/operations.md` explains each.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_COUNTERS: Final = {  # key of the snapshot: name, help
    "restarts": ("restarts", "Times the journal was restarted since the broker was started."),
    "rows": ("rows", "Rows that were written to the journal."),
    "read_bytes": ("read_bytes", "Bytes of logged turns that were read for the journal."),
    "dropped_files": ("dropped_files", "Journal files that were deleted: they were old, or took too much of the disk."),
    "dropped_unread_files": (
        "dropped_unread_files",
        "Journal files that were deleted although a consumer of journal.hold_for had not read them.",
    ),
    "gaps": ("gaps", "Gaps that the journal has, each with a row that says why."),
    "unfounded": ("unfounded_events", "Events of messages leaving a queue that did not leave it; left out."),
}
_OF_WORKERS: Final = {
    "turns_behind": ("lag_turns", "Turns that a worker has logged and that are not in the journal yet."),
    "seconds_behind": ("lag_seconds", "Age of the last turn in the journal while there are later ones, else 0."),
}
_OF_PARTITIONS: Final = {
    "low": ("low_offset", "Offset of the first row that is kept."),
    "stable": ("stable_offset", "Offset behind the last row that can be read."),
    "bytes": ("bytes", "Size of the journal files."),
}
_OF_CONSUMERS: Final = {
    "consumers_behind": (
        "consumer_lag_rows",
        "Rows in the journal that a consumer has not read, as far as it has told.",
    ),
    "consumers_bytes_behind": (
        "consumer_lag_bytes",
        "What these rows take on disk, if they are of the mean size of all.",
    ),
}


def families(snapshot: Mapping[str, Any] | None) -> Iterator[Metric]:
    """`snapshot` is that of `broker.journal.process`; None if it has not answered."""
    up = "1 if the journal answered this scrape, else 0."
    yield GaugeMetricFamily("peeklock_journal_up", up, value=snapshot is not None)
    if snapshot is None:
        return
    for key, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"peeklock_journal_{name}", text, value=snapshot[key])
    text = "1 while the disk is full and the log waits for the journal, else 0."
    yield GaugeMetricFamily("peeklock_journal_disk_full", text, value=snapshot["is_full"])
    text = "Requests for rows that are being answered."
    yield GaugeMetricFamily("peeklock_journal_readers", text, value=snapshot["readers"])
    for key, (name, text) in _OF_WORKERS.items():
        family = GaugeMetricFamily(f"peeklock_journal_{name}", text, labels=["worker"])
        for worker, value in sorted(snapshot[key].items()):
            family.add_metric([worker], value)
        yield family
    for key, (name, text) in _OF_CONSUMERS.items():
        family = GaugeMetricFamily(f"peeklock_journal_{name}", text, labels=["consumer"])
        for consumer, value in snapshot.get(key, {}).items():  # one of an earlier version has no bytes
            family.add_metric([consumer], value)
        yield family
    for key, (name, text) in _OF_PARTITIONS.items():
        family = GaugeMetricFamily(f"peeklock_journal_{name}", text, labels=["partition"])
        for partition, values in sorted(snapshot["partitions"].items()):
            family.add_metric([partition], values[key])
        yield family
