"""What is in the queues of a broker, as the flow audit compares it with the ledger; also as a program."""

import argparse
import sys
from pathlib import Path
from typing import Any

from tests.pipeline.traffic import WAITING


def browsed(spark: Any, connection_string_file: Path) -> Any:
    """A DataFrame of the messages in all queues: the columns that `pipeline.jobs.auditing.verdicts.Snapshot` needs."""
    found = None
    for entity, sub_queue in WAITING:
        own = (
            spark.read.format("peeklock")
            .schema("namespace string, entity string, subQueue string, sequenceNumber bigint")
            .options(connectionStringFile=str(connection_string_file), entity=entity, subQueue=sub_queue)
            .option("includeBody", "false")
            .load()
        )
        found = own if found is None else found.union(own)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--secret", type=Path, required=True, help="a file with the connection string")
    parser.add_argument("--output", required=True, help="where Parquet is written")
    options = parser.parse_args()
    from pipeline.jobs import running

    spark = running.session("browse all queues")
    browsed(spark, options.secret).coalesce(2).write.mode("overwrite").parquet(options.output)
    print(f"{spark.read.parquet(options.output).count()} messages are in the queues", file=sys.stderr)


if __name__ == "__main__":
    main()
