"""`format("peeklock")` for Spark: queues and topics as DataFrames, read and written, in batch and as streams.

Spark finds this package by its name and registers `DefaultSource` itself. `python -m pyspark_peeklock` says whether
everything that it needs is installed.
"""

from typing import Any

__all__ = ["DefaultSource", "count_rows"]


def __getattr__(name: str) -> Any:
    # Only here, so that `python -m pyspark_peeklock` can say in one line that pyspark is missing.
    if name == "DefaultSource":
        from pyspark_peeklock.source import DefaultSource

        return DefaultSource
    if name == "count_rows":
        from pyspark_peeklock.counting import count_rows

        return count_rows
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
