"""The jobs over what a real broker has journaled, and over what it then has in its queues: the demo in its short form.

Messages were forwarded, published, dead-lettered, scheduled, deferred, expired and dropped, in sessions, transactions
and partitions; a queue was moved, another one deleted and created again; the broker was killed meanwhile.
"""

import io
from collections import Counter
from contextlib import redirect_stdout
from importlib import import_module

import pyarrow.parquet as pq
import pytest

pytest.importorskip("pyspark")

from pipeline.jobs import JOBS, running
from tests.pipeline import demo
from tests.pipeline.browsing import browsed
from tests.pipeline.demo import SHORT, Commands, Failed
from tests.pipeline.planting import Ledger
from tests.pipeline.traffic import REASONS


class InSession(Commands):
    """Jobs in the session of the tests, whose start would take longer than all of them."""

    def __init__(self, log, spark):
        super().__init__(log)
        self._spark = spark

    def peeklock(self, *arguments):
        if arguments[:2] != ("jobs", "run"):
            return super().peeklock(*arguments)
        said = io.StringIO()
        with redirect_stdout(said):
            code = import_module(JOBS[arguments[2]]).main(arguments[3:])
        if code != 0:
            raise Failed(f"{arguments}: {code}")
        return said.getvalue().strip()

    def browse(self, secret, output):
        browsed(self._spark, secret).coalesce(1).write.parquet(str(output))


@pytest.fixture(scope="module")
def commands(spark, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "session", lambda name: spark)
        yield InSession(tmp_path_factory.mktemp("demo") / "commands.log", spark)


@pytest.fixture(scope="module")
def played(commands, tmp_path_factory):
    return demo.play(tmp_path_factory.mktemp("played"), 7, SHORT, commands, print)


@pytest.fixture(scope="module")
def ledger(played):
    return Ledger(str(played.clean / "ledger"))


@pytest.fixture(scope="module")
def sent(ledger):
    """The rows of what clients have sent."""
    from_clients = [row for row in ledger.rows if row["originEntity"] is None and row["reason"] is None]
    return [
        row
        for row in from_clients
        if row["op"] in ("enqueued", "scheduled", "duplicate")
        or (row["op"] == "published" and row["sequenceNumber"] is None)
    ]


def rows(table):
    return pq.read_table(table).to_pylist()


def test_all_is_accounted_for(commands, played, ledger, sent, tmp_path):
    verdict = demo.audit(commands, played.clean, tmp_path)
    messages = len(ledger.by_message)
    asked = "It was compared with a snapshot; the broker was not asked."
    assert verdict == f"All {messages:,} messages are accounted for. {asked}"
    assert (rows(tmp_path / "moves"), demo.found_in(tmp_path)) == ([], [])
    # It had something of all that can happen.
    told = Counter(row["op"] for row in ledger.rows)
    assert not {
        "enqueued", "scheduled", "completed", "deadlettered", "expired", "purged", "cancelled", "activated",
        "forwarded", "published", "moved", "delivered", "abandoned", "released", "deferred", "duplicate",
    } - set(told)  # fmt: skip
    assert "truncated" not in told
    entities = {(row["entity"], row["entityId"]) for row in ledger.rows}
    assert len([entity for entity, _ in entities if entity == "passing"]) > 1
    assert len({row["partition"] for row in ledger.rows if row["entity"] == "roaming"}) > 1
    # A message that a client sent is told once, however the broker ended.
    stored = sum(row["op"] != "duplicate" for row in sent)
    assert played.sent <= stored <= played.sent + SHORT.size * played.interrupted


def test_the_audit_names_exactly_the_planted_faults(commands, played, tmp_path):
    demo.audit(commands, played.faulty, tmp_path)
    found = demo.found_in(tmp_path)
    assert Counter(fault.verdict for fault in found) == {
        "lost": 3, "left_but_present": 2, "ghost": 1, "left_twice": 2, "entered_twice": 1, "not_arrived": 1, "gap": 1,
        "repeated": 1,
    }  # fmt: skip
    assert demo.differences(played.planted, found) == []
    # The comparison itself sees what is missing, and what is too much.
    assert len(demo.differences(played.planted, found[1:])) == 1
    assert len(demo.differences(played.planted[1:], found)) == 1
    assert len(demo.differences(played.planted, [*found, found[0]])) == 1


def test_dead_letters_are_counted_with_their_bodies(commands, played, ledger, tmp_path):
    commands.peeklock(
        "jobs", "run", "dead-letters", "--ledger", str(played.clean / "ledger"), "--output", str(tmp_path)
    )
    told = Counter(row["reason"] for row in ledger.rows if row["op"] == "deadlettered")
    summed: Counter[str] = Counter()
    for row in rows(tmp_path / "summary"):
        summed[row["reason"]] += row["messages"]
    assert summed == told
    assert set(REASONS) & set(told)
    groups = rows(tmp_path / "poison")
    assert sum(row["messages"] for row in groups) == told.total()
    # The load's bodies differ in digits alone.
    masked = {row["masked"] for row in groups if row["isOfBody"]}
    assert len(masked) == 1
    assert "amount" in masked.pop()
    waiting = {(row["entity"], row["subQueue"]): row["waiting"] for row in rows(tmp_path / "queues")}
    present = Counter((row["entity"], row["subQueue"]) for row in rows(played.clean / "present"))
    assert waiting["brief", "deadletter"] == present["brief", "deadletter"] > 0


def test_latency_counts_what_was_delivered(commands, played, ledger, tmp_path):
    commands.peeklock("jobs", "run", "latency", "--ledger", str(played.clean / "ledger"), "--output", str(tmp_path))
    found = {(row["entity"], row["measure"]): row for row in rows(tmp_path / "latency") if row["hour"] is None}
    completed = {
        key
        for key, each in ledger.by_message.items()
        if key[2] == "active" and each[-1]["op"] == "completed" and key[0] == "orders"
    }
    assert found["orders", "completed"]["messages"] == len(completed) > 0
    for row in found.values():
        assert 0 <= row["p50"] <= row["p95"] <= row["p99"] <= row["longest"] < 600_000


def test_usage_counts_what_clients_have_done(commands, played, ledger, sent, tmp_path):
    commands.peeklock("jobs", "run", "usage", "--ledger", str(played.clean / "ledger"), "--output", str(tmp_path))
    used = rows(tmp_path / "usage")
    assert sum(row["sends"] for row in used) == len(sent)
    delivered = sum(row["op"] == "delivered" for row in ledger.rows)
    assert sum(row["receives"] for row in used) == delivered
    assert rows(tmp_path / "syphon") == []
