"""A cheap form of the flow audit: which queues have a fault, without saying which message.

For each queue and partition: what entered, less what left, must be what is present, as a count and as two sums of
hashes of the sequence numbers. It needs one row for each queue where the audit has one for each message.

It cannot see a message that entered and left equally often, but more than once, nor the order of events, nor moves that
do not match. So it says where to look first, and does not replace the audit. A wrong set passes by chance once in 2^64.
"""

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.ledger import ENDS, MOVED, MOVES, QUEUE, enters, has_place

_LOW_BITS = 0xFFFF_FFFF


def balances(rows: DataFrame, snapshot: DataFrame, opening: DataFrame | None = None) -> DataFrame:
    """Return by QUEUE (see `queues.names_of`) `surplus` (entered and not left, less present) and `isFlagged`.

    `snapshot` is what is present at the ledger's end, `opening` what was before its first row, both as `verdicts.keyed`
    gives them; without `opening`, nothing was.
    """
    leaves = F.col("op").isin(*ENDS, *MOVES, MOVED)
    events = rows.filter(has_place()).select(
        *QUEUE, "sequenceNumber", F.when(enters(), 1).when(leaves, -1).otherwise(0).alias("change")
    )
    events = events.filter("change <> 0")
    for more, change in ((snapshot, F.lit(-1)), (opening, 1 + F.col("ahead") - F.col("leftBefore"))):
        if more is not None:
            events = events.unionByName(more.select(*QUEUE, "sequenceNumber", change.alias("change")))
    digest = F.xxhash64("sequenceNumber")
    low, high = digest.bitwiseAND(F.lit(_LOW_BITS)), F.shiftright(digest, 32)
    sums = events.groupBy(*QUEUE).agg(
        F.sum("change").alias("surplus"),
        F.sum(F.col("change") * low).alias("low"),
        F.sum(F.col("change") * high).alias("high"),
    )
    is_flagged = (F.col("surplus") != 0) | (F.col("low") != 0) | (F.col("high") != 0)
    return sums.select(*QUEUE, "surplus", is_flagged.alias("isFlagged"))


def flagged(rows: DataFrame, balances: DataFrame) -> DataFrame:
    """The rows of those queues that are flagged."""
    queues = balances.filter("isFlagged").select(*QUEUE)
    return rows.join(F.broadcast(queues), list(QUEUE), "left_semi")
