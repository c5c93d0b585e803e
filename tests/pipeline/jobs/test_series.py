"""Audits that go on where the one before ended: together they say what one audit of all says."""

import random
from collections import Counter
from datetime import timedelta

import pyarrow.parquet as pq
import pytest
from hypothesis import given

from tests.pipeline import ledgers
from tests.pipeline.jobs.histories import CASES, MODEL, plantable, planted, renumbered
from tests.pipeline.ledgers import START, History

pytest.importorskip("pyspark")

from pipeline.jobs import audit as job
from pipeline.jobs import running
from pipeline.jobs.audit import audit
from pipeline.jobs.auditing import series
from pipeline.jobs.auditing.findings import summary
from pipeline.jobs.auditing.moves import MOVE_FAULTS
from pipeline.jobs.auditing.verdicts import FAULTS
from pipeline.jobs.ledger import LedgerError
from pipeline.jobs.running import REPORT_NAME

GRACE = timedelta(seconds=20)  # a history is some hundred seconds long


def place_of(row):
    return row["entity"], row["subQueue"], row["sequenceNumber"]


def parts_of(rng, rows, count=3):
    """The rows in so many parts of about the same times; partitions end some seconds apart, as captured ones do."""
    times = sorted(rng.randint(0, 200) for _ in range(count - 1))
    cuts = {
        partition: [START + timedelta(seconds=each + rng.randint(0, 8)) for each in times]
        for partition in {row["partition"] for row in rows}
    }
    parts = [[] for _ in range(count)]
    ends = Counter()
    for row in rows:
        # Times of one partition may go back: it is cut by offsets.
        at = max(ends[row["partition"]], sum(row["eventTime"] >= cut for cut in cuts[row["partition"]]))
        ends[row["partition"]] = at
        parts[at].append(row)
    return parts


def firsts(rows):
    """Of each partition, the first."""
    return {row["partition"]: row for row in reversed(rows)}.values()


class Series:
    """Audits of a growing ledger, as the job does them."""

    def __init__(self, spark, folder, is_whole=True):
        self._spark = spark
        self._folder = folder
        self._is_whole = is_whole
        self._count = 0
        self.rows = []
        self.last = None

    def go_on(self, rows, snapshot=None):
        self.rows = self.rows + rows
        self._count += 1
        found = audit(
            ledgers.frame(self._spark, self.rows), snapshot, grace=GRACE, is_whole=self._is_whole, before=self.last
        )
        summary(found)
        output = str(self._folder / f"{self._count}")
        running.write_tables(output, found.tables(is_of_series=True))
        self.last = series.before(self._spark, output)
        return found


def named(found):
    """Places with faults and moves with faults, by namespace."""
    places = {(row.namespace, row.entity, row.subQueue, row.sequenceNumber) for row in found.faults.collect()}
    moves = {
        (row.namespace, row.entity, row.subQueue, row.sequenceNumber)
        for row in found.moves.collect()
        if row.verdict in MOVE_FAULTS
    }
    return places, moves


@MODEL
@given(CASES)
def test_a_series_of_audits_names_what_was_planted_and_nothing_else(spark, tmp_path_factory, cases):
    parts, expected, present = [[], [], []], set(), set()
    for index, rng in enumerate(cases):
        namespace = f"n{index}"
        history = ledgers.played(rng, 150, namespace, partitions=2)
        rows, there = history.rows, set(history.present)
        victims = plantable(history)
        moved = {place_of(row) for row in rows if row["op"] == "moved"}
        fitting = [each for each in victims if each not in moved]
        if fitting and rng.random() < 0.5:
            place = rng.choice(fitting)
            fault = rng.choice([each for each in FAULTS if each not in ("lost", "left_but_present")])
            rows, there = planted(rows, there, place, fault)
            expected.add((namespace, *place))
        for part, own in zip(parts, parts_of(rng, renumbered(rows)), strict=True):
            part += own
        present |= {(namespace, *place) for place in there}
    audits = Series(spark, tmp_path_factory.mktemp("series"))
    found = set()
    for part in parts:
        last = audits.go_on(part)
        places, moves = named(last)
        found |= places
        assert moves == set()
    assert found == expected
    still = {(row.namespace, row.entity, row.subQueue, row.sequenceNumber) for row in last.open.collect()}
    assert still - expected == present - expected
    assert audits.last.is_whole


@MODEL
@given(CASES)
def test_gaps_make_no_faults_later(spark, tmp_path_factory, cases):
    parts = [[], [], []]
    for index, rng in enumerate(cases):
        history = ledgers.played(rng, 150, f"n{index}", partitions=2)
        for part, own in zip(parts, parts_of(rng, history.rows), strict=True):
            hole = range(start := rng.randint(0, 120), start + rng.choice([0, 1, 5, 64]))
            # The first and the last are there: a gap is seen by what is around it.
            ends = {(row["partition"], row["journalOffset"]) for rows in (own, own[::-1]) for row in firsts(rows)}
            part += [
                row
                for row in own
                if row["journalOffset"] not in hole or (row["partition"], row["journalOffset"]) in ends
            ]
    audits = Series(spark, tmp_path_factory.mktemp("series"), is_whole=random.Random(cases[0].random()).random() < 0.5)
    for part in parts:
        assert named(audits.go_on(part)) == (set(), set())


def test_a_move_that_is_cut_is_judged_when_the_other_side_has_had_its_time(spark, tmp_path):
    history = History(partitions=2)
    late, lost = history.send("orders"), history.send("orders")
    history.send("bills")  # on the other partition
    history.forward(late, "bills")
    history.forward(lost, "bills")
    late_arrival, lost_arrival = (row for row in history.rows if row.get("reason") == "forwarded")
    audits = Series(spark, tmp_path)

    def moves(rows):
        return {(row.verdict, row.sequenceNumber) for row in audits.go_on(rows).moves.collect()}

    first = [row for row in history.rows if row not in (late_arrival, lost_arrival)]
    assert moves(first) == {("undecided", late[2]), ("undecided", lost[2])}
    assert moves([late_arrival]) == {("undecided", lost[2])}
    history.wait(GRACE)
    history.send("orders")
    assert moves(history.rows[-1:]) == {("not_arrived", lost[2])}
    history.wait(GRACE)
    history.send("orders")
    assert moves(history.rows[-1:]) == set()  # it was told


def test_a_restored_partition_and_another_namespace_are_refused(spark, tmp_path):
    history = History(partitions=1)
    history.send("orders")
    audits = Series(spark, tmp_path)
    rows = [row | {"epoch": "a"} for row in history.rows]
    audits.go_on(rows)
    with pytest.raises(LedgerError, match="partition 0 was restored since the audit before"):
        audits.go_on([rows[0] | {"epoch": "b"}])
    audits.rows = []
    with pytest.raises(LedgerError, match="namespace other"):
        audits.go_on([rows[0] | {"namespace": "other"}])


def test_a_series_may_begin_after_a_restore(spark, tmp_path):
    """The ledger has the epoch before the restore as well; that of partition 1 was not restored."""
    old, history = History(partitions=1), History(partitions=2)
    old.end(old.send("orders"))
    old.send("orders")
    history.wait(timedelta(days=1))
    late = history.send("orders")
    history.send("bills")  # on the other partition
    audits = Series(spark, tmp_path)

    def in_its_epoch(rows):
        return [row | {"epoch": "b"} for row in rows]

    audits.go_on([row | {"epoch": "a"} for row in old.rows] + in_its_epoch(history.rows))
    for step in range(3):  # the third has what the second has left
        before = len(history.rows)
        history.end(history.send("orders"))
        history.forward(history.send("orders"), "bills")
        if step == 1:
            history.end(late)
        found = audits.go_on(in_its_epoch(history.rows[before:]))
        assert named(found) == (set(), set())
        assert [(log.partition, log.epoch, log.generation) for log in found.offsets.logs] == [(0, "b", 0), (1, "b", 0)]
    found = audits.go_on([])
    assert {log.rows for log in found.offsets.logs} == {0}
    rows = [row | {"epoch": "c"} for row in history.rows]
    with pytest.raises(LedgerError, match="restored since the audit before, which ended in its epoch b"):
        audits.go_on(rows)


def test_nothing_new_is_no_fault(spark, tmp_path):
    history = History(partitions=2)
    history.send("orders")
    history.end(history.send("bills"))
    audits = Series(spark, tmp_path)
    audits.go_on(history.rows)
    found = audits.go_on([])
    assert summary(found).messages == {"ok": 1}
    assert [(log.partition, log.low, log.end, log.rows) for log in found.offsets.logs] == [(0, 1, 1, 0), (1, 2, 2, 0)]
    history.send("orders")
    assert summary(audits.go_on(history.rows[3:])).messages == {"ok": 2}


def test_the_job_goes_on_behind_the_last_audit_that_was_finished(spark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(running, "session", lambda name: spark)
    history = History(partitions=1)
    stays = history.send("orders")
    options = ["--ledger", str(tmp_path / "ledger"), "--output", str(tmp_path / "audits"), "--series", "--whole"]

    def audited(hour):
        monkeypatch.setattr(series, "folder_for", lambda folder, begin: f"{folder}/20260131T{hour:02}0000Z")
        ledgers.write(tmp_path / "ledger", history.rows)
        assert job.main(options) == 0
        return capsys.readouterr()

    assert "All 1 message is" in audited(7).out
    for _ in range(5):
        history.end(history.send("orders"))
    said = audited(8)
    assert "All 6 messages" in said.out
    assert f"going on where {tmp_path}/audits/20260131T070000Z ended" in said.err
    (tmp_path / "audits" / "20260131T090000Z").mkdir()  # of one that was killed
    (tmp_path / "audits" / "20260131T080000Z.old" / REPORT_NAME).parent.mkdir()
    said = audited(10)
    assert f"going on where {tmp_path}/audits/20260131T080000Z ended" in said.err
    assert "All 1 message is" in said.out
    opened = pq.read_table(tmp_path / "audits" / "20260131T100000Z" / "open").to_pylist()
    assert [row["sequenceNumber"] for row in opened] == [stays[2]]


def test_names_of_folders_are_in_the_order_of_time():
    folders = [series.folder_for("/audits/", START + timedelta(hours=each)) for each in (0, 5, 24 * 400)]
    assert folders == sorted(folders)
    assert folders[0] == f"/audits/{START:%Y%m%dT%H%M%SZ}"
