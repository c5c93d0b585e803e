"""A series of audits, each of which goes on where the one before ended.

A folder has an audit in each of its folders, which are named by the time of their begin (UTC). Of the newest whose
report is there, which is written last, the next one takes:

- where it ended in each partition: rows before that are not read again, nor are files that have no others;
- the messages that were in the queues then;
- the moves between partitions whose other side had not come yet.
"""

import re
from datetime import datetime
from typing import Final, NamedTuple

import pyarrow as pa
from pyarrow.fs import FileSelector, FileType
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.auditing.moves import Pending
from pipeline.jobs.auditing.offsets import Log, from_micros, local_table
from pipeline.jobs.ledger import LedgerError, kept
from pipeline.jobs.running import REPORT_NAME, files_at

_ENDS: Final = pa.schema(
    [("namespace", pa.string()), ("partition", pa.int32()), ("epoch", pa.string()), ("knownEnd", pa.int64())]
)
_NAME: Final = re.compile(r"\d{8}T\d{6}Z")


class Before(NamedTuple):
    """What the audit before knew at its end. `is_whole`: all that had happened until then. `logs` has those of epochs
    that ended with a restore, too."""

    folder: str
    logs: list[Log]
    opening: DataFrame
    moves: Pending
    is_whole: bool

    def ends(self) -> dict[tuple[int, str], int] | None:
        """The offset behind the last row, by partition and epoch; None if the audit is of several namespaces."""
        if len({log.namespace for log in self.logs}) > 1:
            return None
        return {(log.partition, log.epoch): log.end for log in self.logs}

    def following(self, ledger: DataFrame) -> DataFrame:
        """The rows that it did not have."""
        rows = [
            {"namespace": log.namespace, "partition": log.partition, "epoch": log.epoch, "knownEnd": log.end}
            for log in self.logs
        ]
        ends = local_table(ledger.sparkSession, rows, _ENDS)
        found = ledger.join(F.broadcast(ends), ["namespace", "partition", "epoch"], "left")
        is_new = F.col("journalOffset") >= F.coalesce("knownEnd", F.lit(0))
        return found.filter(is_new).select(*ledger.columns)


def folder_for(series: str, begin: datetime) -> str:
    """Where the tables and the report of an audit of the series go."""
    return f"{series.rstrip('/')}/{begin:%Y%m%dT%H%M%SZ}"


def newest(series: str) -> str | None:
    """The folder of the last audit that was finished; None if there is none. Raises OSError."""
    files, path = files_at(series)
    found = files.get_file_info(FileSelector(path, allow_not_found=True))
    names = sorted((each.base_name for each in found if each.type is FileType.Directory), reverse=True)
    for name in filter(_NAME.fullmatch, names):
        if files.get_file_info(f"{path.rstrip('/')}/{name}/{REPORT_NAME}").type is FileType.File:
            return f"{series.rstrip('/')}/{name}"
    return None


def before(spark: SparkSession, folder: str) -> Before:
    """What an audit left in its folder. Raises LedgerError."""
    from pyspark.errors import AnalysisException

    def table(name: str) -> DataFrame:
        try:
            return spark.read.parquet(f"{folder}/{name}")
        except AnalysisException as error:
            raise LedgerError(f"{folder}: its table {name} cannot be read ({error.getCondition()})") from error

    offsets = table("offsets")
    if "isWhole" not in offsets.columns:
        raise LedgerError(f"{folder}: was written by an earlier version; begin a new series of audits")
    times = (F.unix_micros("firstTime").alias("first"), F.unix_micros("lastTime").alias("last"))
    rows = offsets.select("*", *times).collect()
    logs = [
        Log(
            *(row.namespace, row.partition, row.epoch, row.generation, row.low, row.end, row.rows),
            *(from_micros(row.first), from_micros(row.last), ()),
        )
        for row in rows
    ]
    moves = Pending(table("pending").transform(kept), table("blind").transform(kept))
    return Before(folder, logs, table("open"), moves, all(row.isWhole for row in rows))
