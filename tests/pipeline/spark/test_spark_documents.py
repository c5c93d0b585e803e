"""The examples of docs/spark.md and docs/pipeline.md do what the pages say, and the pages name what there is."""

import json
import re
import textwrap

import pytest

pytest.importorskip("pyspark")

from protocol.client.messages import Message
from pyspark_peeklock import count_rows
from pyspark_peeklock.options import _KNOWN, _USES, Use
from pyspark_peeklock.rows import SCHEMA
from tests import clients
from tests.brokers import Broker
from tests.patience import eventually
from tests.pipeline.documents import examples, run, section
from tests.pipeline.spark.taking import take_all

PAGE = "spark.md"
CONFIG = """
[[queues]]
name = "orders"
[[queues]]
name = "checked"
[journal]
mode = "bodies"
"""
ORDERS = [{"id": number, "customer": f"c{number}", "amount": number / 2} for number in range(3)]


@pytest.fixture
def shop(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        (tmp_path / "secret").write_text(broker.connection_string)
        yield broker


@pytest.fixture
def example(spark, shop, tmp_path):
    """Runs examples. Returns the names that there are then."""

    def run_them(found):
        names = {"spark": spark, "secret": str(tmp_path / "secret")}
        run(spark, found, tmp_path / "secret", f"http://localhost:{shop.http_port}", names)
        return names

    yield run_them
    for view in ("orders", "journal", "checked"):
        spark.catalog.dropTempView(view)


async def abandoned(connection, queue, times):
    """The first message of the queue is taken and given back."""
    async with await connection.receiver(queue, credit=0) as receiver:
        for _ in range(times):
            [received] = await receiver.fetch(1, timeout_s=10)
            await receiver.modify(received)


async def orders(connection):
    messages = [Message.of(json.dumps(order).encode(), message_id=f"m{order['id']}") for order in ORDERS]
    await clients.send(connection, "orders", *messages)


def journaled(shop, tmp_path, rows):
    """Wait until the journal's process, which is a moment behind, has so many rows."""
    options = {"connectionStringFile": str(tmp_path / "secret"), "httpEndpoint": f"http://localhost:{shop.http_port}"}
    eventually(lambda: count_rows({"mode": "journal", **options}) >= rows, "the journal has all")


def ids_in(shop, queue):
    return sorted(message.message_id for message in take_all(shop, queue))


def test_the_first_example_sends_on_what_fails(shop, example):
    clients.run(shop, orders)
    clients.run(shop, lambda connection: abandoned(connection, "orders", 4))
    example(examples(PAGE, "Queues and topics in Spark"))
    assert ids_in(shop, "checked") == ["m0"]


def test_views_show_and_send(shop, example, tmp_path, capsys):
    clients.run(shop, orders)
    clients.run(shop, lambda connection: abandoned(connection, "orders", 4))
    journaled(shop, tmp_path, len(ORDERS))
    example(examples(PAGE, "SQL"))
    shown = capsys.readouterr().out
    assert '|             1|       m0|{"id": 0, "custom...|' in shown
    assert re.search(r"^\|orders\| *enqueued\| +3\|$", shown, re.MULTILINE)
    assert ids_in(shop, "checked") == ["m0", "m1", "m2"]


def test_bodies_in_json_become_columns(shop, example, tmp_path, capsys):
    clients.run(shop, orders)
    journaled(shop, tmp_path, len(ORDERS))
    of_json, _ = examples(PAGE, "Bodies as columns")
    names = example([of_json])
    assert "|            0|  0|      c0|   0.0|" in capsys.readouterr().out
    assert [row.order.asDict() for row in names["sent"].orderBy("journalOffset").collect()] == ORDERS


def test_the_batch_of_the_pipelines_page_shows_what_the_page_shows(shop, example, tmp_path, capsys):
    async def traffic(connection):
        await clients.send(connection, "orders", *(Message.of(b'{"id": 1}') for _ in range(1000)))
        async with await connection.receiver("orders", credit=0) as receiver:
            for received in await receiver.fetch(10, timeout_s=10):
                await receiver.accept(received)

    clients.run(shop, traffic)
    journaled(shop, tmp_path, 1020)
    [batch] = examples("pipeline.md", "From a broker to a report")
    example([batch._replace(text=batch.text.replace('"connection-string"', repr(str(tmp_path / "secret"))))])
    shown = re.search(
        r"^    \+-.*?\+\n(?:    [+|].*\n)+", section("pipeline.md", "From a broker to a report"), re.MULTILINE
    )
    assert textwrap.dedent(shown[0]) in capsys.readouterr().out


TABLES = {
    "Queues and topics in Spark": set(Use),
    "Writing": {Use.SINK},
    "Browsing": {Use.BROWSE},
    "The journal": {Use.BATCH, Use.STREAM},
}


def test_each_option_is_in_the_table_of_what_it_is_for():
    named = {
        heading: {
            name
            for line in re.findall(r"^\| (`.*?) \|", section(PAGE, heading), re.MULTILINE)
            for name in re.findall(r"`(\w+)`", line)
        }
        for heading in TABLES
    }
    for heading, names in named.items():
        wrong = [name for name in names if not {*_USES[name.lower()]} & TABLES[heading]]
        assert wrong == [], heading
    text = "".join(section(PAGE, heading) for heading in TABLES)
    assert [name for name in _KNOWN.values() if f"`{name}`" not in text] == []


def test_the_columns_are_those_of_the_source_in_their_order():
    [listed] = re.findall(r"^`namespace`,.*?`amqpMessage`$", section(PAGE, "Columns"), re.MULTILINE | re.DOTALL)
    assert re.findall(r"`(\w+)`", listed) == SCHEMA.fieldNames()
