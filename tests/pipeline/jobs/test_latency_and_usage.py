"""How long messages wait, and what entities use."""

import argparse
import random
import statistics
from datetime import date, timedelta

import pytest

from tests.pipeline import ledgers
from tests.pipeline.ledgers import START, History

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812

from pipeline.jobs.latency import latency, waits
from pipeline.jobs.usage import Prices, parsed_prices, syphoned, usage

BACKLOG = "contoso/x-servicebus-transfer/3"


def waited(history, entity, ms, until_completed_ms):
    place = history.send(entity)
    began = history._now
    history._now = began + timedelta(milliseconds=ms) - timedelta(seconds=1)
    history.use(place)
    history._now = began + timedelta(milliseconds=until_completed_ms) - timedelta(seconds=1)
    history.end(place)
    history._now = began


def table(spark, history, **options):
    found = latency(ledgers.frame(spark, history.rows), **options).collect()
    return {(row.entity, row.hour and row.hour.hour, row.measure): row for row in found}


def test_percentiles_are_those_of_the_waits(spark):
    history = History(partitions=1)
    waits = [10 * index for index in range(1, 101)]
    for wait in waits:
        waited(history, "orders", wait, 2 * wait)
    row = table(spark, history)["orders", None, "delivered"]
    assert (row.messages, row.p50, row.longest) == (100, statistics.median(waits), 1000)
    assert row.p95 == pytest.approx(statistics.quantiles(waits, n=100, method="inclusive")[94])
    assert row.p99 == pytest.approx(statistics.quantiles(waits, n=100, method="inclusive")[98])
    assert row.approx50 == pytest.approx(row.p50, abs=10)
    assert table(spark, history)["orders", None, "completed"].p50 == 2 * row.p50


def test_percentiles_are_those_of_spark_without_holding_all_waits_in_memory(spark):
    history, chance = History(partitions=2), random.Random(7)
    for number in range(400):
        waited(history, chance.choice(("orders", "bills")), chance.choice((0, 1, chance.randrange(10**6))), 10**6)
        if number % 100 == 0:
            history.wait(timedelta(hours=1))
    ledger = ledgers.frame(spark, history.rows)
    exact = [F.percentile("wait_ms", share).alias(f"p{name}") for name, share in ((50, 0.5), (95, 0.95), (99, 0.99))]
    for keys in (("entity", "measure"), ("entity", "measure", "hour")):
        wanted = {
            tuple(row[: len(keys)]): row[len(keys) :] for row in waits(ledger).groupBy(*keys).agg(*exact).collect()
        }
        rows = latency(ledger).filter("hour is not null" if "hour" in keys else "hour is null").collect()
        found = {tuple(row[key] for key in keys): (row.p50, row.p95, row.p99) for row in rows}
        assert found == {key: pytest.approx(tuple(values), rel=1e-12) for key, values in wanted.items()}
        assert "percentile(" not in latency(ledger)._jdf.queryExecution().optimizedPlan().toString()


def test_hours_are_those_in_which_messages_were_enqueued(spark):
    history = History(partitions=1)
    waited(history, "orders", 5, 7_200_000)
    found = table(spark, history)
    assert {key[1] for key in found} == {None, START.hour}
    assert found["orders", START.hour, "completed"].p50 == 7_200_000


def test_scheduled_messages_count_from_their_activation(spark):
    history = History(partitions=1)
    place = history.schedule("orders")
    history.wait(timedelta(hours=5))
    activated = history.activate(place)
    history.use(activated)
    assert table(spark, history)["orders", None, "delivered"].p50 == 1000


def test_received_and_deleted_at_once_counts_as_delivered(spark):
    history = History(partitions=1)
    history.end(history.send("orders"), reason="receiveAndDelete")
    assert {key[2]: row.p50 for key, row in table(spark, history).items()} == {"delivered": 1000, "completed": 1000}


def test_only_the_first_delivery_counts_and_no_clock_makes_a_negative_wait(spark):
    history = History(partitions=1)
    place = history.send("orders")
    history.wait(timedelta(hours=-1))
    history.use(place)
    history.wait(timedelta(hours=3))
    history.use(place)
    history.use(history.dead_letter(history.send("orders")))  # another queue
    row = table(spark, history)["orders", None, "delivered"]
    assert (row.messages, row.p50) == (1, 0)
    assert table(spark, history, sub_queues=["deadletter"])["orders", None, "delivered"].messages == 1


def test_messages_from_before_the_ledger_are_not_counted(spark):
    history = History(partitions=1)
    place = history.send("orders")
    history.end(place)
    history.rows.pop(0)
    assert table(spark, history) == {}


def used(spark, history, prices=None):
    rows = usage(ledgers.frame(spark, history.rows), prices).collect()
    return {(row.entity, row.day): row for row in rows}


def test_sends_receives_and_bytes_are_counted_by_entity_and_day(spark):
    history = History(partitions=1)
    place = history.send("orders", bodySize=70_000)
    history.use(place)
    history.wait(timedelta(days=1))
    history.use(place)
    history.end(place)
    history.drop("orders", "ping")
    history.drop("orders", "duplicate")
    history.forward(history.send("orders"), "bills")  # moved by the broker: no operation of a client
    history.publish("news", ["a", "b"])
    first, second = used(spark, history)["orders", START.date()], used(spark, history)["orders", date(2026, 3, 3)]
    assert (first.sends, first.receives, first.sentBytes, first.receivedBytes) == (1, 1, 70_000, 70_000)
    assert first.operations == 4  # of more than 64 KiB, twice each
    assert (second.sends, second.pings, second.receives, second.receivedBytes) == (3, 1, 1, 70_000)
    assert set(used(spark, history)) == {
        ("orders", START.date()),
        ("orders", date(2026, 3, 3)),
        ("news", date(2026, 3, 3)),
    }


def test_a_receive_that_deletes_is_one_receive_whether_it_was_told_once_or_twice(spark):
    history = History(partitions=1)
    once, twice = history.send("orders"), history.send("orders")
    history.end(once, reason="receiveAndDelete")
    history.use(twice)
    history.end(twice, reason="receiveAndDelete")
    assert used(spark, history)["orders", START.date()].receives == 2


def test_costs_are_the_prices_times_what_was_used(spark):
    history = History(partitions=1)
    for _ in range(10):
        history.use(history.send("orders", bodySize=1000))
    prices = Prices("EUR", operations=1e6, sends=2e6, receives=3e6, gigabytes=1e9)
    assert used(spark, history, prices)["orders", START.date()].cost == 20 + 20 + 30 + 20_000
    assert used(spark, history)["orders", START.date()].cost is None


def test_each_syphoned_message_costs_four_operations(spark):
    history = History(partitions=1)
    for _ in range(3):
        place = history.send(BACKLOG)
        history.use(place)
        history.end(place)
    history.use(history.send(BACKLOG))
    history.use(history.send("contoso/x-servicebus-transfer-leases"))
    [row] = syphoned(ledgers.frame(spark, history.rows)).collect()
    assert (row.entity, row.syphoned, row.sendBacklog, row.receiveBacklog) == (BACKLOG, 3, 4, 4)
    assert (row.sendPrimary, row.receivePrimary, row.operations) == (3, 3, 14)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("operations = 1", "currency must be given"),
        ('currency = "EUR"\nsends = -1', "sends is -1"),
        ('currency = "EUR"\nsend = 1', "send is none of"),
        ('currency = "EUR"\nsends = inf', "sends is inf"),
        ('currency = "EUR"\nsends = true', "sends is True"),
        ("currency", "prices.toml"),
    ],
)
def test_wrong_prices_are_refused_with_their_names(tmp_path, text, told):
    (tmp_path / "prices.toml").write_text(text)
    with pytest.raises(argparse.ArgumentTypeError, match=told):
        parsed_prices(str(tmp_path / "prices.toml"))


def test_prices_are_read(tmp_path):
    (tmp_path / "prices.toml").write_text('currency = "EUR"\noperations = 0.05')
    assert parsed_prices(str(tmp_path / "prices.toml")) == Prices("EUR", 0.05)
