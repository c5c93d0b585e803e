"""The flow audit beside a model that replays the rows, and beside histories of which we know what happened.

Each run of Spark judges many histories, each a namespace of its own.
"""

import random
from collections import defaultdict
from datetime import timedelta
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline import ledgers
from tests.pipeline.jobs.histories import CASES, MODEL, plantable, planted, renumbered
from tests.pipeline.jobs.reference import ENTERS, LEAVES, verdicts
from tests.pipeline.ledgers import START

pytest.importorskip("pyspark")

from pipeline.jobs import ledger
from pipeline.jobs.audit import audit
from pipeline.jobs.auditing.moves import MOVE_FAULTS
from pipeline.jobs.auditing.verdicts import FAULTS, Snapshot

HOSTILE_NAMES = ["orders", "bills", "", "a/b", "näme ☃", "o'r\"d%_", "\0", "x" * 260]
NUMBERS = st.one_of(st.integers(1, 3), st.sampled_from([0, (1 << 63) - 1, (1 << 48) + 1, -1]))
OPS = st.sampled_from(
    [*sorted(ENTERS | LEAVES), "enqueued", "delivered", "completed", "returned", "lockLost", "unheardOf"]
)
EVENTS = st.lists(
    st.tuples(
        OPS,
        st.sampled_from(HOSTILE_NAMES[:2]) | st.sampled_from(HOSTILE_NAMES),
        st.sampled_from(["active", "deadletter", "transfer"]),
        NUMBERS | st.none(),
    ),
    max_size=10,
)


def judged(found):
    """Verdicts by namespace and place."""
    by_namespace = defaultdict(dict)
    for row in found.judged.named(found.judged.all()).collect():
        by_namespace[row.namespace][row.entity, row.subQueue, row.sequenceNumber] = row.verdict
    return by_namespace


@MODEL
@given(st.lists(st.tuples(EVENTS, st.integers(0, 1 << 32)), min_size=20, max_size=25))
def test_any_rows_are_judged_as_the_replay_judges_them(spark, cases):
    rows, present, expected = [], [], {}
    for index, (events, seed) in enumerate(cases):
        rng = random.Random(seed)
        namespace = f"n{index}"
        own = [
            {
                "namespace": namespace,
                "partition": 0,
                "journalOffset": offset,
                # Times may stand still, and are no part of the verdicts.
                "eventTime": START + timedelta(seconds=offset // 2),
                "op": op,
                "entity": entity,
                "subQueue": sub_queue,
                "sequenceNumber": number,
            }
            for offset, (op, entity, sub_queue, number) in enumerate(events)
        ]
        places = [
            (row["entity"], row["subQueue"], row["sequenceNumber"]) for row in own if row["sequenceNumber"] is not None
        ]
        there = [place for place in places if rng.random() < 0.5]
        there += [("orders", "active", 7)] if rng.random() < 0.2 else []
        rows += own
        names = ("entity", "subQueue", "sequenceNumber")
        present += [{"namespace": namespace} | dict(zip(names, place, strict=True)) for place in there]
        expected[namespace] = verdicts(own, there)
    snapshot = Snapshot(ledgers.frame(spark, present, ledgers.PRESENT))
    found = audit(ledgers.frame(spark, rows, without=["epoch"]), snapshot, is_whole=True)
    assert judged(found) == {namespace: places for namespace, places in expected.items() if places}
    assert [log.namespace for log in found.offsets.logs if log.problems] == []


def holed(rng, history):
    """Rows of which some are missing: before the beginning, and within, of each partition. The last is there."""
    kept = []
    for partition, end in history.ends.items():
        low = rng.choice([0, rng.randint(0, end)])
        holes = [
            range(start, start + rng.choice([1, 3, 64, 200]))
            for start in rng.sample(range(end + 1), min(end, rng.randint(0, 2)))
        ]
        kept += [
            row
            for row in history.rows
            if row["partition"] == partition
            and (row["journalOffset"] == end - 1 or row["journalOffset"] >= low)
            and (row["journalOffset"] == end - 1 or not any(row["journalOffset"] in hole for hole in holes))
        ]
    return kept


@MODEL
@given(CASES)
def test_nothing_is_a_fault_that_a_missing_part_of_the_ledger_explains(spark, cases):
    rows, present = [], []
    for index, rng in enumerate(cases):
        history = ledgers.played(rng, rng.randint(0, 150), f"n{index}", partitions=rng.randint(1, 3))
        rows += holed(rng, history)
        present += history.snapshot()
    found = audit(ledgers.frame(spark, rows), Snapshot(ledgers.frame(spark, present, ledgers.PRESENT)))
    assert list(found.faults.collect()) == []
    assert [row for row in found.moves.collect() if row.verdict in MOVE_FAULTS] == []


@MODEL
@given(CASES)
def test_a_snapshot_that_was_made_while_messages_moved_makes_no_faults(spark, cases):
    """Each queue is browsed at another time after `began`, and the ledger is read up to when all were."""
    rows, present = [], []
    began = {}
    for index, rng in enumerate(cases):
        history = ledgers.played(rng, rng.randint(1, 80), f"n{index}", partitions=1)
        # All of one partition number: the earliest beginning counts for all of these namespaces.
        began[0] = min(began.get(0, 1 << 62), history.ends[0])
        for entity in ("orders", "bills", "mail", "news", "news/subscriptions/a", "news/subscriptions/b"):
            present += [each for each in history.snapshot() if each["entity"] == entity]
            for _ in range(rng.randint(0, 8)):
                ledgers.play(history, rng)
        rows += history.rows
    snapshot = Snapshot(ledgers.frame(spark, present, ledgers.PRESENT), began=began)
    found = audit(ledgers.frame(spark, rows), snapshot)
    assert list(found.faults.collect()) == []


@MODEL
@given(CASES)
def test_histories_that_use_places_twice_have_no_faults(spark, cases):
    """Of queues that were created again, and of messages that came back after receive-and-delete."""
    rows, present = [], []
    for index, rng in enumerate(cases):
        history = ledgers.played(rng, 100, f"n{index}", is_rare=True)
        rows += history.rows
        present += history.snapshot()
    found = audit(ledgers.frame(spark, rows), Snapshot(ledgers.frame(spark, present, ledgers.PRESENT)), is_whole=True)
    assert {row.verdict for row in found.verdicts.collect()} == {"ok"}
    assert [tuple(row) for row in found.moves.filter(found.moves.verdict.isin(*MOVE_FAULTS)).collect()] == []


@pytest.mark.parametrize("rows_in_python", [ledger.MAX_LOCAL, 0])
@MODEL
@given(CASES)
def test_exactly_the_planted_faults_are_named(spark, rows_in_python, cases):
    rows, present, expected = [], [], defaultdict(dict)
    for index, rng in enumerate(cases):
        namespace = f"n{index}"
        history = ledgers.played(rng, 200, namespace, partitions=2)
        own, there = history.rows, set(history.present)
        victims = plantable(history)
        rng.shuffle(victims)
        moved = {(row["entity"], row["subQueue"], row["sequenceNumber"]) for row in own if row["op"] == "moved"}
        for fault in FAULTS:
            # What came with its entity has entered, as far as its new partition knows.
            fitting = [each for each in victims if fault not in ("entered_twice", "ghost") or each not in moved]
            if not fitting:
                continue
            place = fitting[0]
            victims.remove(place)
            own, there = planted(own, there, place, fault)
            expected[namespace][place] = fault
        rows += renumbered(own)
        names = ("entity", "subQueue", "sequenceNumber")
        present += [{"namespace": namespace} | dict(zip(names, place, strict=True)) for place in there]
    with mock.patch.object(ledger, "MAX_LOCAL", rows_in_python):
        snapshot = Snapshot(ledgers.frame(spark, present, ledgers.PRESENT))
        found = audit(ledgers.frame(spark, rows), snapshot, is_whole=True)
    named = defaultdict(dict)
    for row in found.faults.collect():
        named[row.namespace][row.entity, row.subQueue, row.sequenceNumber] = row.verdict
    assert named == expected
    assert found.moves.collect() == []


def test_histories_have_all_that_can_happen():
    """Else the properties above would say less than they seem to."""
    history = ledgers.played(random.Random(1), 2000)
    seen = {row["op"] for row in history.rows} | {row.get("reason") for row in history.rows if row["op"] == "enqueued"}
    assert seen >= ENTERS | LEAVES - {"quarantined"} | {"moved", "delivered", "ping", "duplicate"}
    assert {row["copies"] for row in history.rows if row["op"] == "published"} == {0, 1, 2}
