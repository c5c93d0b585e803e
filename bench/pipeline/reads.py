"""Reads of the journal of a live broker, and of captured files, beside sources that Spark has itself."""

import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from bench.load import LoadFailed
from bench.pipeline import spark as on_spark
from bench.pipeline.brokers import ROWS, PeeklockWithJournal
from bench.pipeline.capturing import capture_once, fill
from bench.plan import KIB
from bench.recording import Recorder, alternating
from bench.servers import Peeklock

BATCHES = 4  # into which a stream divides the rows
NARROW = "body binary, op string, journalOffset bigint"
PATIENCE_S = 600.0


def reads(bench: Recorder, server: Peeklock) -> None:
    """Every row of the journal has a body of 1 KiB. The captured events are those rows and what became of them."""
    assert isinstance(server, PeeklockWithJournal)
    count = bench.plan.pipeline_messages
    server.start()
    fill(bench, server, "send", count)
    spark = on_spark.session()
    with on_spark.place(server) as place:
        works: dict[str, on_spark.Work] = {
            "stream": lambda: _stream(spark, place, None, count),
            "stream-narrow": lambda: _stream(spark, place, NARROW, count),
            "stream-rate": lambda: _rate_stream(spark, place, count),
            "batch": lambda: read_all(spark.read.format("peeklock").options(**place.journal()).load()),
            "batch-range": lambda: read_all(rows_of_1_kib(spark, count)),
        }
        rates = _in_turn(bench, server, count, works)
        fill(bench, server, "recv", count)
        folder = place.fresh()
        capture_once(server, Path(folder))
        events = count * ROWS["both"]
        from pipeline.jobs.ledger import read
        from storage.capture.reading import captured

        files = captured(folder).uris()
        captures: dict[str, on_spark.Work] = {
            "captured": lambda: read_all(read(spark, folder)),
            "captured-files": lambda: read_all(spark.read.parquet(*files)),
        }
        if (found := read(spark, folder).count()) != events:
            raise LoadFailed(f"{found:,} of {events:,} captured events were read")
        rates |= _in_turn(bench, server, events, captures)
    for name, rate in rates.items():
        bench.add(server, f"spark-{name}", rate)
    for ours, theirs in (("stream", "stream-rate"), ("batch", "batch-range"), ("captured", "captured-files")):
        bench.add(server, f"spark-{ours}-share", rates[ours] / rates[theirs])


def _in_turn(
    bench: Recorder, server: PeeklockWithJournal, count: int, works: Mapping[str, on_spark.Work]
) -> dict[str, float]:
    """Rows per second of each, the mean of its turns, in alternating order. Before that all are warmed up."""
    for _ in range(bench.plan.warm_up_rounds):
        for work in works.values():
            work()
    rates: dict[str, list[float]] = defaultdict(list)
    for order in alternating(list(works), bench.plan.turns):
        for name in order:
            seconds = on_spark.timed(bench, server, f"spark-{name}", count, works[name])
            rates[name].append(count / seconds)
    return {name: mean(values) for name, values in rates.items()}


def read_all(rows: Any) -> None:
    """Read all rows and columns, and drop them."""
    rows.write.format("noop").mode("overwrite").save()


def _stream(spark: Any, place: on_spark.Place, schema: str | None, count: int) -> float:
    """Seconds that all micro-batches together take to read the journal."""
    source = spark.readStream.format("peeklock").options(**place.journal(), startingOffsets="earliest")
    source = source.option("maxMessagesPerTrigger", -(-count // BATCHES))
    rows = source.load() if schema is None else source.schema(schema).load()
    sink = rows.writeStream.format("noop").option("checkpointLocation", place.fresh())
    query = sink.trigger(availableNow=True).start()
    query.awaitTermination(PATIENCE_S)
    found = on_spark.progress(query)
    if (read := sum(each["numInputRows"] for each in found)) != count:
        raise LoadFailed(f"a stream has read {read:,} of {count:,} rows")
    return sum(on_spark.seconds(each) for each in found)


def _rate_stream(spark: Any, place: on_spark.Place, count: int) -> float:
    """Seconds for the same number of rows of the same size from Spark's rate source, in as many micro-batches."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", -(-count // BATCHES))
    rows = _with_body(source.option("numPartitions", on_spark.TASKS).load())
    sink = rows.writeStream.format("noop").option("checkpointLocation", place.fresh())
    query = sink.trigger(processingTime="0 seconds").start()
    try:
        until = time.monotonic() + PATIENCE_S
        while len(found := on_spark.progress(query)) < BATCHES:
            if time.monotonic() > until:
                raise LoadFailed("the rate source made no rows")
            time.sleep(0.01)
    finally:
        on_spark.stop(spark, query)
    return sum(on_spark.seconds(each) for each in found[:BATCHES])


def rows_of_1_kib(spark: Any, count: int) -> Any:
    return _with_body(spark.range(0, count, 1, on_spark.TASKS).withColumnRenamed("id", "value"))


def _with_body(rows: Any) -> Any:
    """With a body that differs from row to row, so that Spark makes each."""
    from pyspark.sql import functions as f

    return rows.withColumn("body", f.rpad(f.col("value").cast("string"), KIB, "x").cast("binary"))
