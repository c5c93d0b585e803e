"""Whether captured bodies are those that were enqueued: each stored message begins with a checksum of the rest, which
the broker made when it accepted the message."""

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.ledger import enters, has_place, kept
from storage.records import CorruptRecord, check_message

SHOWN: Final = ("namespace", "entity", "subQueue", "partition", "epoch", "journalOffset", "sequenceNumber")
_TYPES: Final = (
    "namespace string, entity string, subQueue string, partition int, epoch string, journalOffset bigint, "
    "sequenceNumber bigint"
)


def damaged(messages: DataFrame) -> DataFrame:
    """Return the places of those of these normalized rows whose body is not what was enqueued."""
    rows = messages.filter(has_place() & enters() & F.col("record").isNotNull()).select(*SHOWN, "record")
    return rows.mapInArrow(_damaged, _TYPES).transform(kept)


def _damaged(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        wrong = [not _is_whole(record) for record in batch.column("record").to_pylist()]
        yield batch.drop_columns(["record"]).filter(pa.array(wrong, pa.bool_()))


def _is_whole(record: bytes) -> bool:
    try:
        check_message(record)
    except CorruptRecord:
        return False
    return True
