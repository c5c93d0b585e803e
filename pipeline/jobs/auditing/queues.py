"""The queues of a ledger by their hash. They are few beside its messages, so that their names are held in Python: each
question that Spark answers about a small table costs a job half a second.
"""

from itertools import chain
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.offsets import local_table
from pipeline.jobs.ledger import NAMES, LedgerError, queue

_QUEUES: Final = pa.schema(
    [
        ("queue", pa.int64()),
        ("namespace", pa.string()),
        ("entity", pa.string()),
        ("entityId", pa.int32()),
        ("subQueue", pa.string()),
        ("name", pa.string()),
    ]
)
_NEWEST: Final = pa.schema([("namespace", pa.string()), ("name", pa.string()), ("entityId", pa.int32())])


def names_of(table: DataFrame, known: DataFrame | None = None) -> DataFrame:
    """`queue`, NAMES and `name` (the entity in lower case) of all queues in a table that has NAMES, and of those that
    are `known` as this gives them.

    Raises LedgerError if two queues have one hash.
    """
    distinct = table.filter(F.col("entity").isNotNull() & F.col("subQueue").isNotNull()).select(*NAMES).distinct()
    found: dict[int, dict[str, Any]] = {}
    rows = distinct.select(queue(), *NAMES, F.lower("entity").alias("name")).collect()
    for each in chain(() if known is None else known.collect(), rows):
        row = each.asDict()
        known = found.setdefault(row["queue"], row)
        if any(known[name] != row[name] for name in ("namespace", "name", "entityId", "subQueue")):
            raise LedgerError(
                "two queues (columns entity, entityId, subQueue) have one hash, so that they cannot be told apart"
            )
        # Clients spell a name as they like; which of the spellings is shown does not depend on the order of rows.
        known["entity"] = min(known["entity"], row["entity"])
    return local_table(distinct.sparkSession, found.values(), _QUEUES)


def newest_of(queues: DataFrame) -> DataFrame:
    """Return the newest entity of each name that `names_of` found: `namespace`, `name`, `entityId`."""
    newest: dict[tuple[str, str], int] = {}
    for row in queues.collect():
        key = row.namespace, row.name
        newest[key] = max(row.entityId, newest.get(key, row.entityId))
    rows = [{"namespace": space, "name": name, "entityId": number} for (space, name), number in newest.items()]
    return local_table(queues.sparkSession, rows, _NEWEST)
