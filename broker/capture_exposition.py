"""Prometheus families of a capture. `docs/operations.md` explains each."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

_COUNTERS: Final = {  # key of the snapshot: name, help
    "rows": ("rows", "Rows of the journal that are in files which the manifest names."),
    "rolls": ("rolls", "Times that rows were written out."),
    "files": ("files", "Parquet files written."),
    "bytes": ("bytes", "Bytes of those files."),
    "compacted_files": ("compacted_files", "Files that compaction has replaced by fewer."),
    "removed_files": ("removed_files", "Files removed that the manifest does not name, or no longer."),
    "lost_rows": ("lost_rows", "Rows that the journal had dropped, or could not read, before they were captured."),
}
_GAUGES: Final = {
    "lag_rows": ("lag_rows", "Rows of the journal that are in no file yet."),
    "damaged": ("damaged_files", "Damaged files that compaction has found since the start."),
    "last_roll_s": ("last_roll_timestamp_seconds", "When rows were last written out, Unix time; 0 if not yet."),
    "up": ("up", "1 while the journal and the files can be reached, else 0."),
}


def families(snapshot: Mapping[str, Any]) -> Iterator[Metric]:
    """`snapshot` is that of `broker.capture.service`."""
    for key, (name, text) in _COUNTERS.items():
        yield CounterMetricFamily(f"peeklock_capture_{name}", text, value=snapshot[key])
    for key, (name, text) in _GAUGES.items():
        yield GaugeMetricFamily(f"peeklock_capture_{name}", text, value=float(snapshot[key]))
