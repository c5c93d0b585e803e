"""What users read of errors of Spark, which it often wraps in others that say nothing."""

import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from py4j.protocol import Py4JJavaError, Py4JNetworkError
from pyspark.errors import PySparkException
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.datasource import DataSource, DataSourceReader

from pipeline.jobs import running
from pipeline.jobs.causes import told
from pyspark_peeklock.errors import CaptureFailed

LIMIT = "spark.sql.maxBroadcastTableSize"


@pytest.fixture
def said(capsys):
    """What a job says that fails so."""

    def run(failing):
        def job(_):
            failing()
            return 0

        assert running.run(job, []) == running.NOT_DONE
        [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("peeklock: ")]
        assert "awaitResult" not in line
        return line.removeprefix("peeklock: Spark could not do it: ")

    return run


def wide(spark, rows):
    return spark.range(10).withColumnRenamed("id", "other").join(F.broadcast(rows), F.col("other") == F.col("id"))


def test_a_table_that_is_too_large_to_be_sent_to_all_tasks(spark, said, tmp_path):
    before = spark.conf.get(LIMIT)
    spark.conf.set(LIMIT, "1000")
    try:
        large = wide(spark, spark.range(10_000))
        for act in (large.toArrow, large.localCheckpoint, lambda: large.write.parquet(str(tmp_path / "out"))):
            assert said(act).startswith("Cannot broadcast the table that is larger than 1000.0 B: ")
    finally:
        spark.conf.set(LIMIT, before)


def test_a_file_that_is_lost(spark, said, tmp_path):
    pq.write_table(pa.table({"id": range(100)}), tmp_path / "lost.parquet")
    rows = spark.read.parquet(str(tmp_path))
    (tmp_path / "lost.parquet").unlink()
    for act in (rows.toArrow, rows.localCheckpoint, wide(spark, rows).toArrow):
        assert said(act) == f"FileNotFoundException: File file:{tmp_path}/lost.parquet does not exist"


def test_a_file_that_is_damaged(spark, said, tmp_path):
    path = tmp_path / "damaged.parquet"
    pq.write_table(pa.table({"id": range(100_000)}), path, write_page_checksum=True)
    rows = spark.read.option("parquet.page.verify-checksum.enabled", "true").parquet(str(tmp_path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    text = said(rows.toArrow)
    assert text.startswith(f"[FAILED_READ_FILE.NO_HINT] Encountered error while reading file file://{path}: Parquet")
    assert text.endswith("CRC checksum verification failed")


def test_an_error_of_python_in_a_task(spark, said):
    def failing(batches):
        try:
            {}["key"]
        except KeyError as error:
            raise ValueError("a value\nis wrong") from error
        yield from batches

    def ours(batches):
        raise CaptureFailed("the capture cannot be read")
        yield from batches

    def without_memory(batches):
        raise MemoryError
        yield from batches

    for function, text in (
        (failing, "ValueError: a value"),
        (ours, "the capture cannot be read"),
        (without_memory, "MemoryError"),
    ):
        rows = spark.range(3).mapInArrow(function, "id bigint")
        for act in (rows.toArrow, rows.localCheckpoint, wide(spark, rows).toArrow):
            assert said(act) == text


def test_a_worker_of_python_that_dies(spark, said):
    def dying(batches):
        for _ in batches:
            os._exit(9)
        yield from batches

    text = said(spark.range(3, numPartitions=1).mapInArrow(dying, "id bigint").toArrow)
    assert text.startswith("Python worker exited unexpectedly (crashed).")


class Source(DataSource):
    @classmethod
    def name(cls):
        return "failing"

    def schema(self):
        return "id bigint"

    def reader(self, schema):
        return Reader(self.options["fails"])


class Reader(DataSourceReader):
    def __init__(self, fails):
        self.fails = fails

    def partitions(self):
        if self.fails == "planning":
            raise CaptureFailed("no plan")
        return super().partitions()

    def read(self, partition):
        raise CaptureFailed("no rows")
        yield


@pytest.mark.parametrize(("fails", "text"), [("planning", "no plan"), ("reading", "no rows")])
def test_an_error_of_a_data_source(spark, said, fails, text):
    spark.dataSource.register(Source)
    assert said(lambda: spark.read.format("failing").option("fails", fails).load().toArrow()) == text


def test_memory_that_is_not_enough_is_named(spark):
    """As Spark wraps it when it cannot build a table to be sent to all tasks."""
    java = spark._jvm.java.lang
    error = java.RuntimeException("Exception thrown in awaitResult: ", java.OutOfMemoryError("Java heap space"))
    assert told(Py4JJavaError("An error occurred.\n", error)) == "OutOfMemoryError: Java heap space"


def test_a_process_of_java_that_has_ended(said):
    def failing():
        raise Py4JNetworkError("Answer from Java side is empty")

    text = "peeklock: Spark's process has ended, or does not answer: Answer from Java side is empty"
    assert said(failing) == text


def test_causes_of_python_are_followed():
    error = PySparkException("Exception thrown in awaitResult: ")
    error.__cause__ = ValueError("the reason")
    assert told(error) == "the reason"
    assert told(PySparkException("")) == "PySparkException"
