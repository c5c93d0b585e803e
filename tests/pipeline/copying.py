"""A program for spark-submit: copies each message that comes into the queue `orders` to the queue `copies`.

It runs until a file is there that says to stop, and then copies what there is. It says what it does, line by line.
"""

import argparse
import sys
import time
from pathlib import Path

from pyspark.sql import SparkSession


def main() -> int:
    parser = argparse.ArgumentParser()
    for name in ("--secret", "--http", "--checkpoint", "--stop-file", "--capture"):
        parser.add_argument(name)
    arguments = parser.parse_args()
    spark = SparkSession.builder.appName("copying").getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.readStream.format("peeklock").options(
        connectionStringFile=arguments.secret,
        httpEndpoint=arguments.http,
        entity="orders",
        startingOffsets="earliest",
        maxMessagesPerTrigger="2000",
        minPartitions="2",
    )
    if arguments.capture is not None:
        source = source.option("capturePath", arguments.capture)
    enqueued = source.load().where("op = 'enqueued' and entity = 'orders'").drop("messageId")
    sink = enqueued.writeStream.format("peeklock").options(connectionStringFile=arguments.secret, entity="copies")
    sink = sink.option("checkpointLocation", arguments.checkpoint)
    query = sink.trigger(processingTime="100 milliseconds").start()
    print(f"copying: query {query.id}, run {query.runId}", flush=True)
    last = None
    while not Path(arguments.stop_file).exists():
        if query.exception() is not None:
            print(f"copying: failed: {query.exception()}", flush=True)
            return 1
        progress = query.lastProgress
        if progress is not None and progress.batchId != last and progress.numInputRows:
            last = progress.batchId
            print(
                f"copying: batch {last}: {progress.numInputRows} rows, to {progress.sources[0].endOffset}", flush=True
            )
        time.sleep(0.1)
    query.processAllAvailable()
    query.stop()
    print("copying: all is copied", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
