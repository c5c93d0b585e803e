"""What was dead-lettered, and which of it is alike."""

import re
from datetime import timedelta

import pyarrow.parquet as pq
import pytest

from protocol.client.messages import Message
from protocol.message.intake import take_apart
from storage.records import NEVER, encode_message
from tests.pipeline import ledgers
from tests.pipeline.ledgers import START, History
from tests.pipeline.pages import Page

pytest.importorskip("pyspark")

from pyspark.sql import functions as F  # noqa: N812

from bench.pipeline import large_capture
from pipeline.jobs import audit, dead_letters
from pipeline.jobs.dead_letters import NO_REASON, poison, with_bodies
from pipeline.jobs.ledger import LedgerError, Source


def record(body):
    layout, stored, *_ = take_apart(Message.of(body).encode())
    return encode_message(0, NEVER, layout, stored)


def dead(history, entity, body, reason="MaxDeliveryCountExceeded", **more):
    return history.dead_letter(history.send(entity, record=record(body)), reason, **more)


def groups(spark, history, *, bodies=True, **options):
    frame = ledgers.frame(spark, history.rows)
    found = poison(with_bodies(dead_letters.dead_letters(frame), frame if bodies else None, frame), **options)
    return sorted(found.collect(), key=lambda row: (-row.messages, row.masked or ""))


def test_they_are_counted_by_entity_reason_and_hour(spark):
    history = History()
    for _ in range(3):
        history.dead_letter(history.send("orders"))
    history.wait(timedelta(hours=2))
    history.dead_letter(history.send("orders"), None)
    taken = history.dead_letter(history.send("bills"), "TTLExpiredException")
    history.end(taken)
    ledger = ledgers.frame(spark, history.rows)
    summed = dead_letters.summary(dead_letters.dead_letters(ledger)).collect()
    counts = {(row.entity, row.reason, row.hour.replace(tzinfo=START.tzinfo)): row.messages for row in summed}
    assert counts == {
        ("orders", "MaxDeliveryCountExceeded", START): 3,
        ("orders", NO_REASON, START + timedelta(hours=2)): 1,
        ("bills", "TTLExpiredException", START + timedelta(hours=2)): 1,
    }
    waiting = {row.entity: (row.entered, row.left, row.waiting) for row in dead_letters.queues(ledger).collect()}
    assert waiting == {"orders": (4, 0, 4), "bills": (1, 1, 0)}


def test_messages_that_differ_in_numbers_and_ids_are_alike(spark):
    history = History()
    for number in range(5):
        dead(history, "orders", f'{{"order": {number}, "id": "0b0e6f0{number}-1111-4222-8333-444455556666"}}'.encode())
    dead(history, "orders", b'{"order":  "x"}')
    first, second = groups(spark, history)
    assert (first.messages, first.masked, first.isOfBody) == (5, '{"order": <n>, "id": "<id>"}', True)
    assert len(first.samples) == len(first.messageIds) == dead_letters.SAMPLES
    assert all(sample.startswith('{"order": ') for sample in first.samples)
    assert second.messages == 1
    assert first.fingerprint != second.fingerprint
    assert len(first.fingerprint) == 16


def test_any_body_has_a_fingerprint(spark):
    history = History()
    bodies = [
        b"",
        b"\xff\xfe\x00" * 10,
        "näme ☃ \U0001f600".encode(),
        b"7" * 200_000,
        b"\x00",
        b"<script>alert(1)</script>",
    ]
    for body in bodies:
        dead(history, "orders", body)
    found = groups(spark, history)
    assert len(found) == len({each.fingerprint for each in found}) == len(bodies)
    for each in found:
        assert (each.messages, each.isOfBody) == (1, True)
        assert len(each.samples[0]) <= dead_letters.SAMPLE_CHARACTERS


def test_bodies_that_are_no_text_are_named_so(spark):
    history = History()
    texts = [
        "",
        "näme ☃ \U0001f600",
        "tab\tand\r\nlines \x1b[31mred",
        *("a" * more + "☃" * (90 << 10) for more in (0, 1, 2)),
    ]
    binaries = [b"\xff\xfe\x00" * 20, b"\x00", b"a" * 40 + b"\x01", b"\xc3"]
    for body in [*(text.encode() for text in texts), *binaries]:
        dead(history, "orders", body)
    found = groups(spark, history)
    named = sorted(row.samples[0] for row in found if row.masked == "binary")
    assert named == [
        "binary, 1 bytes: 00",
        "binary, 1 bytes: c3",
        f"binary, 41 bytes: {'61' * 32}…",
        f"binary, 60 bytes: {'fffe00' * 10}fffe…",
    ]
    assert len(found) == len(texts) + len(binaries)


def test_without_bodies_the_descriptions_are_compared(spark):
    history = History()
    for number in range(3):
        history.dead_letter(history.send("orders"), "Refused", description=f"line {number}: not a number")
    [only] = groups(spark, history, bodies=False)
    assert (only.messages, only.masked, only.isOfBody) == (3, "line <n>: not a number", False)


def test_no_text_is_kept_on_demand(spark):
    history = History()
    dead(history, "orders", b"secret")
    [only] = groups(spark, history, samples=False)
    assert (only.samples, only.masked, only.messages) == ([], None, 1)


def test_a_broken_record_is_a_message_without_a_body(spark):
    history = History()
    dead(history, "orders", b"fine")
    history.dead_letter(history.send("orders", record=b"\x00" * 50), "Refused", description="broken")
    by_text = {row.masked: row.isOfBody for row in groups(spark, history)}
    assert by_text == {"fine": True, "broken": False}


def test_messages_without_any_body_column_are_refused(spark):
    history = History()
    dead(history, "orders", b"x")
    ledger = ledgers.frame(spark, history.rows)
    with pytest.raises(LedgerError, match="neither a column record nor body"):
        with_bodies(dead_letters.dead_letters(ledger), ledger.drop("record"), ledger)


@pytest.mark.parametrize("most", [dead_letters.MAX_HASHES, 0])
def test_bodies_are_found_where_messages_came_from(spark, monkeypatch, most):
    """Whether Spark looks for the places of few dead letters, or sorts for those of many."""
    monkeypatch.setattr(dead_letters, "MAX_HASHES", most)
    history = History(partitions=1)
    scheduled = history._enter("scheduled", ("orders", "active"), "later", record=record(b"waited"))
    history.dead_letter(history.activate(scheduled))
    first = history.send("inbox", record=record(b"forwarded twice"))
    history.dead_letter(history.forward(history.forward(first, "relay"), "orders"))
    again = history.dead_letter(history.send("orders", record=record(b"dead twice")))
    history.dead_letter(history.forward(again, "graveyard"))
    moved = history.send("roaming", record=record(b"moved"))
    history.move_entity("roaming")
    history.dead_letter(moved)
    history.dead_letter(history.forward(history.send("inbox"), "orders"), "NoBody", description="nobody knows")
    found = {row.masked: (row.messages, row.isOfBody) for row in groups(spark, history)}
    assert found == {
        "waited": (1, True),
        "forwarded twice": (1, True),
        "dead twice": (1, True),
        "moved": (1, True),
        "nobody knows": (1, False),
    }


def test_bodies_are_not_sent_to_all_tasks_however_small_their_files_are(spark, tmp_path):
    """Spark takes the size of files for that of bodies."""
    history = History(partitions=1)
    dead(history, "orders", b"x")
    folder = ledgers.write(tmp_path / "ledger", history.rows, without=())
    ledger = Source.at(str(folder)).rows(spark)
    for rows in (ledger, ledger.withColumn("body", F.col("record"))):
        plan = with_bodies(dead_letters.dead_letters(ledger), rows, ledger)._jdf.queryExecution().executedPlan()
        sent = [node.output().toString() for node in nodes_of(plan) if node.nodeName() == "BroadcastExchange"]
        assert sent
        assert [each for each in sent if "record" in each or "body" in each] == []


def nodes_of(plan):
    yield plan
    children = plan.children()
    for number in range(children.size()):
        yield from nodes_of(children.apply(number))


def test_the_page_has_the_most_frequent_of_many_reasons(spark, tmp_path):
    history = History(partitions=1)
    for number in range(40):
        for _ in range(40 - number):
            history.dead_letter(history.send("orders"), f"reason {number:02}")
    ledgers.write(tmp_path / "ledger", history.rows)
    assert dead_letters.main(["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "out")]) == 0
    text = re.sub(r"\s+", " ", Page((tmp_path / "out" / "report.html").read_text()).text)
    assert "820 messages were dead-lettered, for 40 reasons. Most often: reason 00 (40)." in text
    assert "30 others" in text
    assert "reason 29" in text
    assert "reason 30" not in text
    assert "The first 30 of 40" in text


def test_a_large_capture_is_made_as_its_jobs_find_it(spark, tmp_path, capsys):
    """Of the program that they are measured with."""
    large_capture.write(tmp_path / "captured", 3000, body_bytes=200)
    given = ["--ledger", str(tmp_path / "captured"), "--output", str(tmp_path / "out")]
    assert audit.main([*given, "--whole", "--bodies"]) == 0
    assert capsys.readouterr().out == "All 3,030 messages are accounted for. The broker was not asked.\n"
    assert dead_letters.main(given) == 0
    assert capsys.readouterr().out.startswith("30 messages were dead-lettered, for 5 reasons.")
    groups = pq.read_table(tmp_path / "out" / "poison").to_pylist()
    assert all(row["isOfBody"] for row in groups)
    assert sum(row["messages"] for row in groups) == 30
    assert sum('"text": "<hex>"' in row["masked"] for row in groups) < len(groups)
