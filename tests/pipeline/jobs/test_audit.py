"""The flow audit's findings, one by one: moves, gaps, epochs, cuts, opening sets, ids, checksums."""

from datetime import timedelta

import pytest

from tests.pipeline import ledgers
from tests.pipeline.ledgers import START, History

pytest.importorskip("pyspark")

from pipeline.jobs.audit import audit
from pipeline.jobs.auditing import checksum, verdicts
from pipeline.jobs.auditing.findings import summary, verdict_text
from pipeline.jobs.auditing.offsets import offsets_of
from pipeline.jobs.auditing.queues import names_of, newest_of
from pipeline.jobs.auditing.verdicts import Snapshot
from pipeline.jobs.ledger import LedgerError, normalized

DEAD = ("orders", "deadletter", 1)  # of a `busy` history


def snapshot_of(spark, history, **options):
    return Snapshot(ledgers.frame(spark, history.snapshot(), ledgers.PRESENT), **options)


def faults(found):
    return {(row.entity, row.subQueue, row.sequenceNumber): row.verdict for row in found.faults.collect()}


def moves(found):
    return sorted(
        (row.kind, row.entity, row.sequenceNumber, row.messageId, row.verdict) for row in found.moves.collect()
    )


def ids(found):
    return {row.messageId: (row.accepted, row.ended, row.waiting, row.verdict) for row in found.ids.collect()}


def without(rows, *unwanted):
    """The rows but those at these indexes, with contiguous offsets."""
    ends: dict[int, int] = {}
    kept = []
    for row in (row for index, row in enumerate(rows) if index not in unwanted):
        kept.append(row | {"journalOffset": ends.get(row["partition"], 0)})
        ends[row["partition"]] = ends.get(row["partition"], 0) + 1
    return kept


def index_of(history, op, entity, sub_queue="active"):
    return next(
        index
        for index, row in enumerate(history.rows)
        if (row["op"], row["entity"], row["subQueue"]) == (op, entity, sub_queue)
    )


def busy(namespace="shop"):
    """A history an hour long, so that nothing in its middle is near an end."""
    history = History(namespace, partitions=2)
    for _ in range(3):
        history.end(history.send("orders"))
        history.end(history.send("bills"))
    history.wait(timedelta(hours=1))
    history.forward(history.send("orders", "forwarded-1"), "bills")
    history.forward(history.send("orders", "forwarded-2"), "bills")
    history.dead_letter(history.send("orders", "dead-1"))
    history.end(history.activate(history.schedule("orders")))
    history.publish("news", ["a", "b"], "news-1")
    history.publish("news", [], "nobody-1")
    waiting = history.send("news", "waited-1")
    history.publish_waiting(waiting, ["a"])
    history.wait(timedelta(hours=1))
    for _ in range(3):
        history.end(history.send("orders"))
        history.end(history.send("bills"))
    return history


def test_a_history_without_faults_has_none(spark):
    history = busy()
    found = audit(ledgers.frame(spark, history.rows), snapshot_of(spark, history), is_whole=True)
    numbers = summary(found)
    assert (faults(found), moves(found), ids(found), numbers.faults, numbers.gaps) == ({}, [], {}, 0, 0)
    assert verdict_text(numbers) == (
        f"All {numbers.messages['ok']} messages are accounted for. The broker was not asked.",
        "good",
    )
    assert numbers.messages["ok"] == 3 * 4 + 2 * 2 + 2 + 2 + 2 + 2


def test_a_move_whose_other_side_is_missing_is_named(spark):
    cases = {
        ("enqueued", "orders", "deadletter"): ("deadlettered", "orders", 6, None, "not_arrived"),
        ("deadlettered", "orders", "active"): ("deadlettered", "orders", 6, "dead-1", "no_origin"),
        ("forwarded", "orders", "active"): ("forwarded", "orders", 4, "forwarded-1", "no_origin"),
        ("activated", "orders", "active"): ("activated", "orders", 7, "id-10", "no_origin"),
        ("enqueued", "news/subscriptions/b", "active"): ("published", "news", None, "news-1", "not_arrived"),
    }
    rows = []
    for index, missing in enumerate(cases):
        history = busy(f"n{index}")
        rows += without(history.rows, index_of(history, *missing))
    found = audit(ledgers.frame(spark, rows), is_whole=True)
    named = {
        row.namespace: (row.kind, row.entity, row.sequenceNumber, row.messageId, row.verdict)
        for row in found.moves.collect()
    }
    assert named == {f"n{index}": expected for index, expected in enumerate(cases.values())}
    assert found.moves.count() == len(cases)


def test_a_message_that_was_forwarded_and_never_arrived_is_unaccounted_by_its_id(spark):
    history = busy()
    arrival = next(i for i, row in enumerate(history.rows) if row.get("reason") == "forwarded")
    rows = without(history.rows, arrival)
    history.present = {place: name for place, name in history.present.items() if name != "forwarded-1"}
    found = audit(ledgers.frame(spark, rows), snapshot_of(spark, history), is_whole=True)
    assert faults(found) == {}
    assert moves(found) == [("forwarded", "orders", 4, None, "not_arrived")]
    assert ids(found) == {"forwarded-1": (1, 0, 0, "unaccounted")}


def test_a_lost_dead_letter_is_found_by_the_id_that_only_its_first_row_has(spark):
    history = busy()
    rows = [row | ({"messageId": None} if row["subQueue"] == "deadletter" else {}) for row in history.rows]
    del history.present[DEAD]
    found = audit(ledgers.frame(spark, rows), snapshot_of(spark, history), is_whole=True)
    assert faults(found) == {DEAD: "lost"}
    assert ids(found) == {"dead-1": (1, 0, 0, "unaccounted")}


def test_a_message_that_ended_twice_is_accounted_for_all_the_same(spark):
    history = History(partitions=1)
    place = history.send("orders", "twice")
    history.end(place)
    history.rows.append(history.rows[-1] | {"journalOffset": 2})
    found = audit(ledgers.frame(spark, history.rows), is_whole=True)
    assert faults(found) == {place: "left_twice"}
    assert ids(found) == {"twice": (1, 1, 0, "accounted")}


def test_a_move_near_the_end_of_the_ledger_is_undecided(spark):
    """The two partitions are read one after the other."""
    history = History(partitions=2)
    history.send("bills")
    history.forward(history.send("orders"), "bills")
    history.wait(timedelta(hours=1))
    history.forward(history.send("orders"), "bills")
    rows = history.rows[:-1]
    found = audit(ledgers.frame(spark, rows), is_whole=True)
    assert moves(found) == [("forwarded", "orders", 2, None, "undecided")]
    strict = audit(ledgers.frame(spark, rows), grace=timedelta(0), is_whole=True)
    # The last row has the time of the end itself.
    assert moves(strict) == [("forwarded", "orders", 2, None, "undecided")]


def test_gaps_and_truncations_are_named_and_nothing_in_them_is_lost(spark):
    history = History(partitions=1)
    kept, hidden, after = history.send("orders"), history.send("orders"), history.send("orders")
    history.end(hidden)  # offset 3, which is missing
    history.end(kept)
    history._row("truncated", None, "orders", description="the disk was full")  # 5
    history.send("orders")
    del history.present[after]  # it may have gone where the journal was truncated
    rows = [row for row in history.rows if row["journalOffset"] != 3]
    found = audit(ledgers.frame(spark, rows), snapshot_of(spark, history), is_whole=True)
    [log] = found.offsets.logs
    assert [(each.kind, each.from_offset, each.to_offset, each.size, each.description) for each in log.problems] == [
        ("gap", 3, 4, 1, None),
        ("truncated", 5, 5, 0, "the disk was full"),
    ]
    assert faults(found) == {}
    numbers = summary(found)
    assert (numbers.messages["undecided"], numbers.gaps, numbers.faults) == (2, 2, 0)
    assert "called no fault" in verdict_text(numbers)[0]


def test_what_is_lost_behind_the_last_gap_is_named(spark):
    history = History(partitions=1)
    history.send("orders")
    history.send("orders")
    lost = history.send("orders")
    del history.present[lost]
    rows = [row for row in history.rows if row["journalOffset"] != 1]
    found = audit(ledgers.frame(spark, rows), snapshot_of(spark, history), is_whole=True)
    assert faults(found) == {lost: "lost"}


@pytest.mark.parametrize("missing", [1, 63, 64, 65, 128, 1000])
def test_gaps_of_any_size_are_found_at_their_offsets(spark, missing):
    history = History(partitions=1)
    for _ in range(1200):
        history.send("orders")
    rows = [row for row in history.rows if not 100 <= row["journalOffset"] < 100 + missing]
    [log] = offsets_of(normalized(ledgers.frame(spark, rows))).logs
    assert [(each.kind, each.from_offset, each.to_offset) for each in log.problems] == [("gap", 100, 100 + missing)]
    assert (log.low, log.end, log.rows, log.segments) == (0, 1200, 1200 - missing, [0, 100 + missing])


def test_repeated_offsets_are_a_fault_of_the_ledger(spark):
    history = History(partitions=1)
    for _ in range(10):
        history.send("orders")
    found = audit(ledgers.frame(spark, [*history.rows, history.rows[4]]), is_whole=True)
    [problem] = found.offsets.logs[0].problems
    assert (problem.kind, problem.size) == ("repeated", 1)
    assert summary(found).faults == 2  # the row, and its message that entered twice
    assert verdict_text(summary(found))[1] == "bad"


def test_numbers_tell_what_is_older_than_the_ledger(spark):
    history = History(partitions=1)
    old, ghost = history.send("orders"), ("orders", "active", 4)
    history.send("orders")
    history.send("orders")
    history.present[ghost] = "never sent"
    history.end(ghost)
    history.end(old)
    rows = history.rows[2:]  # the third message is the first that the ledger has
    found = audit(ledgers.frame(spark, rows))
    assert faults(found) == {ghost: "ghost"}
    assert summary(found).messages["before"] == 1


def test_epochs_are_never_mixed(spark):
    """A store that was restored from a copy counts offsets from 0 again, and repeats what the copy did not have."""
    first, second = History(partitions=1), History(partitions=1)
    for history in (first, second):
        place = history.send("orders")
        history.end(place)
        history.wait(timedelta(days=1))
    waiting = second.send("orders")
    later = timedelta(days=2)
    rows = [row | {"epoch": "aa"} for row in first.rows]
    rows += [row | {"epoch": "01", "eventTime": row["eventTime"] + later} for row in second.rows]
    found = audit(ledgers.frame(spark, rows), snapshot_of(spark, second), is_whole=True)
    assert [(log.epoch, log.generation, log.problems) for log in found.offsets.logs] == [("aa", 1, ()), ("01", 0, ())]
    assert faults(found) == {}
    assert {row.sequenceNumber for row in found.open.collect()} == {waiting[2]}
    mixed = audit(ledgers.frame(spark, rows, without=["epoch"]))
    assert summary(mixed).problems["repeated"] == 2


def test_verdicts_are_as_of_the_cut(spark):
    history = History(partitions=1)
    place = history.send("orders")
    then = snapshot_of(spark, history)
    history.end(place)
    late = history.send("orders")
    history.end(late)
    ledger = ledgers.frame(spark, history.rows)
    assert faults(audit(ledger, then, cut={(0, None): 1})) == {}
    assert faults(audit(ledger, then)) == {place: "left_but_present"}
    with pytest.raises(LedgerError, match="no offset for partition 0"):
        audit(ledger, then, cut={(1, None): 1})


def test_a_ledger_that_ends_before_the_cut_hides_what_came_then(spark):
    history = History(partitions=1)
    place = history.send("orders")
    history.end(place)
    found = audit(ledgers.frame(spark, history.rows[:1]), snapshot_of(spark, history), cut={(0, None): 2})
    assert faults(found) == {}
    [problem] = found.offsets.logs[0].problems
    assert (problem.kind, problem.from_offset, problem.to_offset) == ("gap", 1, 2)


def test_what_was_not_browsed_is_not_lost(spark):
    history = History(partitions=1)
    history.send("orders")
    history.send("bills")
    history._enter("enqueued", ("orders", "transfer"), "x")
    nothing = ledgers.frame(spark, [], ledgers.PRESENT)
    found = audit(ledgers.frame(spark, history.rows), Snapshot(nothing, covers=["bill%"]), is_whole=True)
    assert faults(found) == {("bills", "active", 1): "lost"}
    found = audit(ledgers.frame(spark, history.rows), Snapshot(nothing), is_whole=True)
    assert set(faults(found)) == {("bills", "active", 1), ("orders", "active", 1)}


def test_the_open_set_of_one_day_begins_the_next(spark):
    history = History(partitions=1)
    stays, ends, lost = history.send("orders"), history.send("orders"), history.send("orders")
    yesterday = list(history.rows)
    first = audit(ledgers.frame(spark, yesterday), is_whole=True)
    opening = first.open
    assert {row.sequenceNumber for row in opening.collect()} == {1, 2, 3}
    history.end(ends)
    ghost = history.send("orders")
    history.end(ghost)
    today = [row for row in history.rows[3:] if (row["op"], row["sequenceNumber"]) != ("enqueued", 4)]
    today = [row | {"journalOffset": 3 + index} for index, row in enumerate(today)]
    del history.present[lost]
    found = audit(ledgers.frame(spark, today), snapshot_of(spark, history), opening=opening)
    assert faults(found) == {ghost: "ghost", lost: "lost"}
    assert summary(found).messages["ok"] == 2
    assert stays in history.present


def test_checksums_flag_the_queues_with_faults_and_the_audit_of_these_finds_them(spark):
    history = History(partitions=2)
    queues = [f"q{index}" for index in range(8)]
    places = {queue: [history.send(queue) for _ in range(4)] for queue in queues}
    for queue in queues:
        history.end(places[queue][0])
    wrong = {"q1": "lost", "q4": "left_but_present", "q6": "left_twice"}
    del history.present[places["q1"][1]]
    history.present[places["q4"][0]] = "back"
    history.rows.append(next(row for row in history.rows if (row["op"], row["entity"]) == ("completed", "q6")))
    rows = without(history.rows)
    ledger, snapshot = ledgers.frame(spark, rows), snapshot_of(spark, history)
    offsets = offsets_of(normalized(ledger))
    present = verdicts.keyed(snapshot.messages, "the snapshot", newest=newest_of(names_of(offsets.rows)))
    balances = checksum.balances(offsets.rows, present)
    flagged = {row.entity for row in checksum.flagged(offsets.rows, balances).collect()}
    assert flagged == set(wrong)
    found = audit(ledger, snapshot, is_whole=True, flagged_only=True)
    assert {place[0]: verdict for place, verdict in faults(found).items()} == wrong
    assert summary(found).messages.total() == 3 * 4
    with pytest.raises(LedgerError, match="snapshot"):
        audit(ledger, flagged_only=True)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda frame: frame.drop("sequenceNumber"), "has no column sequenceNumber"),
        (lambda frame: frame.withColumn("journalOffset", frame.journalOffset.cast("string")), "column journalOffset"),
        (lambda frame: frame.withColumn("eventTime", frame.journalOffset), "column eventTime"),
    ],
)
def test_what_is_no_ledger_is_refused_with_the_column(spark, change, told):
    history = History()
    history.send("orders")
    with pytest.raises(LedgerError, match=told):
        audit(change(ledgers.frame(spark, history.rows)))


def test_an_empty_ledger_has_no_faults(spark):
    found = audit(ledgers.frame(spark, []))
    assert (summary(found).messages.total(), found.offsets.logs) == (0, [])


def test_times_and_numbers_at_the_ends_of_their_ranges(spark):
    history = History(partitions=1)
    history._next_number["orders", "active"] = (1 << 63) - 3
    history.end(history.send("orders"))
    history.wait(timedelta(days=365 * 7900))
    history.end(history.send("orders"))
    rows = [row | {"journalOffset": row["journalOffset"] + (1 << 62)} for row in history.rows]
    rows[0]["eventTime"] = START.replace(year=1)
    found = audit(ledgers.frame(spark, rows), snapshot_of(spark, history))
    assert (faults(found), summary(found).messages["ok"]) == ({}, 2)


def test_a_queue_that_was_deleted_and_created_again_is_another_one(spark):
    history = History(partitions=1)
    for _ in range(3):
        history.send("orders")
    history.recreate("orders")
    again = history.send("orders")
    history.end(history.send("bills"))
    present = snapshot_of(spark, history)
    found = audit(ledgers.frame(spark, history.rows), present, is_whole=True)
    assert (faults(found), summary(found).messages["ok"]) == ({}, 3 + 2 + 1)
    assert {row.sequenceNumber: row.entityId for row in found.open.collect()} == {1: 2, 2: 2}
    # What is carried forward is that of the new one.
    further = len(history.rows)
    history.end(again)
    rows = ledgers.frame(spark, history.rows[further:])
    following = audit(rows, snapshot_of(spark, history), opening=found.open)
    assert (faults(following), summary(following).messages["ok"]) == ({}, 2)
    # Without the column the two cannot be told apart.
    nameless = ledgers.frame(spark, history.rows, without=["entityId", "originEntityId"])
    assert set(faults(audit(nameless, is_whole=True)).values()) == {"entered_twice"}


def test_a_message_that_came_back_after_receive_and_delete_has_entered_once(spark):
    history = History(partitions=1)
    kept, taken, lost = (history.send("orders", name) for name in ("kept", "taken", "lost"))
    for place in (kept, taken, lost):
        history.restore(place)
    history.end(taken)
    del history.present[lost]
    found = audit(ledgers.frame(spark, history.rows), snapshot_of(spark, history), is_whole=True)
    assert faults(found) == {lost: "lost"}
    assert ids(found) == {"lost": (1, 0, 0, "unaccounted")}
    # It had left before the ledger begins.
    partial = audit(ledgers.frame(spark, history.rows[4:]), snapshot_of(spark, history))
    assert faults(partial) == {lost: "lost"}


def test_what_a_topic_publishes_or_a_queue_drops_of_forwarded_messages_has_arrived(spark):
    history = busy()
    rows = []
    for row in history.rows:
        if row.get("reason") == "forwarded" and row["messageId"] == "forwarded-1":
            row = row | {"op": "duplicate", "sequenceNumber": None, "reason": None}
        elif row.get("reason") == "forwarded":
            row = row | {"op": "published", "sequenceNumber": None, "reason": None, "entity": "news", "copies": 0}
        rows.append(row)
    found = audit(ledgers.frame(spark, rows), is_whole=True)
    assert (faults(found), moves(found)) == ({}, [])
    arrival = next(i for i, row in enumerate(rows) if row["op"] == "duplicate")
    [missing] = audit(ledgers.frame(spark, without(rows, arrival)), is_whole=True).moves.collect()
    assert (missing.kind, missing.entity, missing.verdict) == ("forwarded", "orders", "not_arrived")


def test_names_are_the_same_in_whatever_case_and_one_namespace_is_that_of_the_snapshot(spark):
    history = History("shop", partitions=1)
    history.send("Orders/Subscriptions/A")
    ledger = ledgers.frame(spark, history.rows)
    browsed = [
        {"namespace": "shop.example.org", "entity": "orders/subscriptions/a", "subQueue": "active", "sequenceNumber": 1}
    ]
    found = audit(ledger, Snapshot(ledgers.frame(spark, browsed, ledgers.PRESENT)), is_whole=True)
    assert (faults(found), summary(found).messages["ok"]) == ({}, 1)
