"""Messages that Spark writes to queues, beside the same rows written as Parquet."""

from collections import defaultdict
from functools import partial
from statistics import mean
from typing import Any

from bench.pipeline import spark as on_spark
from bench.pipeline.brokers import IDS, PeeklockWithJournal
from bench.plan import KIB
from bench.recording import Recorder, alternating
from bench.servers import Peeklock

KINDS = ("sink", "sink-ids", "sink-files")


def sink(bench: Recorder, server: Peeklock) -> None:
    """Each has some turns in a round, in alternating order. Before that all are warmed up."""
    assert isinstance(server, PeeklockWithJournal)
    server.start()
    count = bench.plan.pipeline_messages
    spark = on_spark.session()
    rates: dict[str, list[float]] = defaultdict(list)
    with on_spark.place(server) as place:
        for number in range(bench.plan.warm_up_rounds):
            for kind in KINDS:
                _write(_messages(spark, count, f"warm-up-{number}-{kind}"), kind, server, place)
        for turn, order in enumerate(alternating(KINDS, bench.plan.turns)):
            for kind in order:
                rows = _messages(spark, count, f"{turn}-{kind}")
                write = partial(_write, rows, kind, server, place)
                seconds = on_spark.timed(bench, server, f"spark-{kind}", count, write)
                rates[kind].append(count / seconds)
    for kind, values in rates.items():
        bench.add(server, f"spark-{kind}", mean(values))
    for kind in KINDS[:2]:
        bench.add(server, f"spark-{kind}-share", mean(rates[kind]) / mean(rates["sink-files"]))


def _messages(spark: Any, count: int, prefix: str) -> Any:
    """Rows with a body of 1 KiB and an id, all of them new."""
    from pyspark.sql import functions as f

    number = f.col("id").cast("string")
    body = f.rpad(number, KIB, "x").cast("binary").alias("body")
    return spark.range(0, count, 1, on_spark.TASKS).select(
        body, f.concat(f.lit(f"{prefix}-"), number).alias("messageId")
    )


def _write(rows: Any, kind: str, server: Peeklock, place: on_spark.Place) -> None:
    if kind == "sink-files":
        rows.write.parquet(place.fresh())
        return
    entity = IDS if kind == "sink-ids" else server.address(1)
    rows.write.format("peeklock").mode("append").options(**place.access(), entity=entity).save()
