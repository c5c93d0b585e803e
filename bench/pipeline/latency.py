"""How long micro-batches take while few messages come: of the journal, and of sources that Spark has itself."""

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from bench import load
from bench.load import LoadFailed
from bench.pipeline import spark as on_spark
from bench.pipeline.brokers import PeeklockWithJournal
from bench.plan import KIB
from bench.recording import Recorder
from bench.servers import Peeklock

PER_S = 400
FILES_PER_S = 10
QUANTILES = [(2 * n + 1) / 40 for n in range(20)]  # each stands for a twentieth of a batch's rows
WARM_UP = 0.3  # the share of the rows that are read before the others come, and do not count
PATIENCE_S = 120.0


def latency(bench: Recorder, server: Peeklock) -> None:
    """Medians of the time of a micro-batch, and of the time from an event to the end of its micro-batch."""
    assert isinstance(server, PeeklockWithJournal)
    server.start()
    spark = on_spark.session()
    count = int(PER_S * bench.plan.rate_seconds / (1 - WARM_UP))
    warm_up = int(count * WARM_UP)
    with on_spark.place(server) as place:
        journal = spark.readStream.format("peeklock").options(**place.journal(), startingOffsets="latest").load()
        with _running(spark, journal, "eventTime", place) as query:
            _until_idle(query)
            sent = 0
            for rows in (warm_up, count - warm_up):
                options = ("--size", str(KIB), "--rate", str(PER_S), "-n", str(rows))
                command = load.command(bench.tools.load, "send", server.endpoint, server.address(1), *options)
                subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S)
                sent += rows
                _until_read("journal", query, sent)
            _add(bench, server, "journal", query, count)
        rate = spark.readStream.format("rate").option("rowsPerSecond", PER_S).load()
        with _running(spark, rate, "timestamp", place) as query:
            _add(bench, server, "rate", query, count)
        folder = Path(place.fresh())
        folder.mkdir()
        files = spark.readStream.schema("eventTime timestamp, body binary").parquet(str(folder))
        with _running(spark, files, "eventTime", place) as query:
            _until_idle(query)
            _write_files(folder, "first", warm_up)
            _until_read("files", query, warm_up)
            _write_files(folder, "then", count - warm_up)
            _add(bench, server, "files", query, count)
    for name in ("rate", "files"):
        share = bench.last(server, "spark-latency-journal") / bench.last(server, f"spark-latency-{name}")
        bench.add(server, f"spark-latency-of-{name}", share)


@contextmanager
def _running(spark: Any, rows: Any, time_column: str, place: on_spark.Place) -> Iterator[Any]:
    """A query with the shortest trigger. Its progress has quantiles of the rows' times."""
    from pyspark.sql import functions as f

    wanted = f"percentile(unix_micros({time_column}), array({', '.join(map(str, QUANTILES))}))"
    sink = rows.observe("seen", f.expr(wanted).alias("times_us")).writeStream.format("noop")
    query = sink.option("checkpointLocation", place.fresh()).trigger(processingTime="0 seconds").start()
    try:
        yield query
    finally:
        on_spark.stop(spark, query)


def _until_idle(query: Any) -> None:
    """Until the query has started and found nothing."""
    until = time.monotonic() + PATIENCE_S
    while query.status["isTriggerActive"] or "Waiting" not in query.status["message"]:
        on_spark.progress(query)  # raises what has failed
        if time.monotonic() > until:
            raise LoadFailed(f"a stream does not become idle: {query.status}")
        time.sleep(0.05)


def _add(bench: Recorder, server: Peeklock, name: str, query: Any, count: int) -> None:
    """Wait for `count` rows, and keep the medians of what came after the warm-up."""
    batches = _until_read(name, query, count)
    seen, durations_ms, latencies_ms = 0, [], []
    for batch in batches:
        seen += batch["numInputRows"]
        if seen > count * WARM_UP:
            took_ms = on_spark.seconds(batch) * 1000
            durations_ms.append(took_ms)
            end_ms = datetime.fromisoformat(batch["timestamp"]).astimezone(UTC).timestamp() * 1000 + took_ms
            each = [end_ms - at_us / 1000 for at_us in batch["observedMetrics"]["seen"]["times_us"]]
            latencies_ms += each * batch["numInputRows"]
    bench.add(server, f"spark-latency-{name}", median(durations_ms))
    bench.add(server, f"spark-latency-{name}-event", median(latencies_ms))


def _until_read(name: str, query: Any, count: int) -> list[dict[str, Any]]:
    """Wait until the query has read so many rows; return its micro-batches. Raises LoadFailed."""
    until = time.monotonic() + PATIENCE_S
    while True:
        batches = on_spark.progress(query)
        came = sum(each["numInputRows"] for each in batches)
        if came >= count:
            return batches
        if time.monotonic() > until:
            raise LoadFailed(f"{name}: {came:,} of {count:,} rows came")
        time.sleep(0.05)


def _write_files(folder: Path, name: str, count: int) -> None:
    """A file of rows at a time, at the rate of the messages."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    step = PER_S // FILES_PER_S
    began = time.monotonic()
    for number in range(-(-count // step)):
        time.sleep(max(0.0, began + number / FILES_PER_S - time.monotonic()))
        times = pa.array([datetime.now(UTC)] * step, pa.timestamp("us", "UTC"))
        rows = pa.table({"eventTime": times, "body": pa.array([b"x" * KIB] * step, pa.binary())})
        hidden = folder / f".{name}-{number}"
        pq.write_table(rows, hidden)
        hidden.rename(folder / f"{name}-{number}.parquet")
