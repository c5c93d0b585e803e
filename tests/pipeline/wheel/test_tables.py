"""The examples of docs/tables.md, and that of Avro, with the versions that the pages name."""

import json
import re
import struct

import pytest

from protocol.client.messages import Message
from tests import clients
from tests.pipeline.documents import examples, option_values, placed, section
from tests.pipeline.wheel.conftest import ORDERS
from tests.pipeline.wheel.environments import Environment

PAGE = "tables.md"
PREAMBLE = """
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
secret = {secret!r}
"""


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    [spark] = re.findall(r"`(pyspark==.*?)`", section(PAGE, "Delta"))
    [iceberg] = re.findall(r"pip install '(pyiceberg.*?)'", section(PAGE, "Iceberg"))
    return Environment(tmp_path_factory.mktemp("environment") / "venv", wheel, spark, iceberg)


@pytest.fixture
def ran(environment, shop, tmp_path):
    """Runs these texts, one after the other in one program. Returns what it printed."""

    def run(texts, *options):
        secret = tmp_path / "secret"
        program = tmp_path / "program.py"
        lines = [PREAMBLE.format(secret=str(secret))]
        lines += [placed(text, secret, f"http://localhost:{shop.http_port}") for text in texts]
        program.write_text("\n".join(lines))
        return environment.submit(environment.bin / "spark-submit", tmp_path, *options, program)

    return run


def commands(page, heading):
    """The options of spark-submit that a section has."""
    return [
        each
        for option in ("--packages", "--conf")
        for value in option_values(page, heading, option)
        for each in (option, value)
    ]


def test_delta_has_each_row_once_when_the_stream_runs_again(ran):
    [example] = examples(PAGE, "Delta")
    said = ran([example.text, example.text], *commands(PAGE, "Delta"))
    assert len(re.findall(r"^\|orders\|enqueued\| +3\|$", said, re.MULTILINE)) == 2


def test_iceberg_has_each_row_once_when_the_stream_and_a_batch_run_again(ran):
    [example] = examples(PAGE, "Iceberg")
    again = "append(spark.range(1), 0)"
    said = ran([example.text, example.text, again, "print(catalog.load_table('shop.journal').scan().count(), 'rows')"])
    assert said.splitlines()[-1] == "3 rows"


def in_avro(order):
    def zigzag(number):
        return bytes([number << 1])

    customer = order["customer"].encode()
    return zigzag(order["id"]) + zigzag(len(customer)) + customer + struct.pack("<d", order["amount"])


def test_bodies_in_avro_become_columns(ran, shop):
    async def measured(connection):
        await clients.send(connection, "measured", *(Message.of(in_avro(order)) for order in ORDERS))

    clients.run(shop, measured)
    _, of_avro = examples("spark.md", "Bodies as columns")
    packages = option_values("spark.md", "Bodies as columns", "--packages")
    show = "import json; print(json.dumps([row.order.asDict() for row in sent.orderBy('journalOffset').collect()]))"
    said = ran([of_avro.text, show], "--packages", *packages)
    assert json.loads(said.splitlines()[-1]) == ORDERS
