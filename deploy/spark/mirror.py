"""A stream: each message that is sent to one queue is sent to another one, too.

It reads the journal, so it takes nothing from receivers, and needs `journal.mode = "bodies"` for the queue. Messages
are sent whole, as they were: with all properties and their types, annotations, priority and time to live. What runs
again after a failure is sent again with the same ids; a target with duplicate detection keeps one of each.
"""

import argparse
import sys

from pyspark.sql import functions as F  # noqa: N812 - as everybody does

from pyspark_peeklock import readiness


def main() -> int:
    parser = argparse.ArgumentParser(prog="mirror.py", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--connection-string-file", required=True, metavar="FILE", help="On the driver and executors.")
    parser.add_argument("--source", required=True, metavar="QUEUE", help="The queue whose messages are sent on.")
    parser.add_argument("--target", required=True, metavar="QUEUE", help="A queue or topic with duplicate detection.")
    parser.add_argument("--checkpoint", required=True, metavar="DIR", help="The position; of this stream alone.")
    parser.add_argument("--http-endpoint", metavar="URL", help="The broker's address for HTTP, if it is unusual.")
    parser.add_argument("--bad-rows", metavar="QUEUE", help="For rows without a message that the target can take.")
    parser.add_argument("--max-messages", type=int, default=100_000, metavar="N", help="Journal rows in a batch.")
    parser.add_argument(
        "--available-now", action="store_true", help="End when all is sent that was there at the start."
    )
    options = parser.parse_args()
    spark = readiness.session(f"mirror {options.source}")
    spark.sparkContext.setLogLevel("WARN")
    place = {"connectionStringFile": options.connection_string_file}
    journal = place | {"mode": "journal", "entity": options.source, "startingOffsets": "earliest"}
    journal |= {"maxMessagesPerTrigger": str(options.max_messages), "includeAmqpMessage": "true"}
    if options.http_endpoint:
        journal["httpEndpoint"] = options.http_endpoint
    # Other columns are not read.
    columns = "op string, subQueue string, reason string, partition int, journalOffset bigint, amqpMessage binary"
    rows = spark.readStream.format("peeklock").schema(columns).options(**journal).load()
    # A reason says that the message was in another queue before, such as one that was forwarded.
    sent = rows.where((F.col("op") == "enqueued") & (F.col("subQueue") == "active") & F.col("reason").isNull())
    sent = sent.select("amqpMessage", "partition", "journalOffset")  # the place of a row is for errors
    sink = place | {"entity": options.target, "sendAmqpMessage": "true"}
    if options.bad_rows:
        sink |= {"onBadRow": "queue", "badRowEntity": options.bad_rows}
    writer = sent.writeStream.format("peeklock").options(**sink)
    writer = writer.option("checkpointLocation", options.checkpoint)
    query = writer.trigger(availableNow=True).start() if options.available_now else writer.start()
    query.awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
