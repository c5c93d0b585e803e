"""Rows of the journal as Parquet files, under any URL that pyarrow's file systems know.

    <url>/table=ledger/date=2026-01-31/hour=07/<name>.parquet     all rows, without the columns record and overlay
    <url>/table=messages/date=2026-01-31/hour=07/<name>.parquet   the rows that have either, with all columns
    <url>/manifest/<sequence>-<term>-<writer>.json                which files count; see `storage.capture.chain`

Date and hour are those of eventTime, in UTC. Each file has the columns of `storage.journal.schema.SCHEMA` and before
them `namespace` and `epoch`, and is sorted by entity, partition, epoch and journalOffset. The ledger has each captured
offset of a partition and epoch exactly once.

Only files that the manifest names count. What else lies there was written by a capture that was killed, or replaced by
compaction, and is removed when it is old enough.
"""
