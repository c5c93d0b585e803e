"""Counts rows of the journal without Spark, which would have every row sent to it: its Python API has no place for a
count that a data source knows."""

from collections.abc import Mapping
from typing import Any

from pyspark.sql.types import StructType

from pyspark_peeklock.journal import JournalReader
from pyspark_peeklock.options import JournalOptions, Options
from pyspark_peeklock.rows import SCHEMA


def count_rows(options: Mapping[str, Any]) -> int:
    """How many rows a batch query of the journal with these options has. Truths may be bools, and numbers ints.

    Without `entity` nothing is read: offsets have no gaps. With it, the names of entities are read, here and in one
    process. Raises what such a query raises.
    """
    texts = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in options.items()}
    given = JournalOptions.of(Options(texts), is_stream=False)
    reader = JournalReader(given, StructType([SCHEMA["journalOffset"]]))
    planned = reader.partitions()
    if given.entity is None:
        return sum(each.part.offsets.end - each.part.offsets.first for each in planned)
    return sum(batch.num_rows for each in planned for batch in reader.read(each))
