"""The instructions per message that were recorded: a change that costs much more must say so, and record them anew."""

import pytest

from bench import instructions, load
from protocol.extension import extension
from tests.caller import REQUIRE_INTEROP

WORKS = (*instructions.WORKS, *instructions.IN_ONE_PROCESS)
RECORDED = {"send": {"gateway": 60_000, "worker": 40_000}}


def missing() -> str | None:
    try:
        load.build()
    except load.LoadToolMissing as problem:
        return str(problem)
    return instructions.reason_missing()


@pytest.mark.skipif(extension is None, reason="the budget is that of brokers with the extension")
def test_no_message_costs_much_more_instructions_than_were_recorded():
    if reason := missing():
        pytest.fail(reason) if REQUIRE_INTEROP else pytest.skip(reason)
    if instructions.recorded_python() != instructions.this_python():
        pytest.skip(f"recorded with Python {instructions.recorded_python()}, this is {instructions.this_python()}")
    counted = instructions.measure(load.build(), works=WORKS, brokers_at_once=2)
    for work in WORKS:
        per_role = counted[work.name]
        if work.workers:
            assert per_role["gateway"] > 1_000
            assert per_role["worker"] > 1_000
        else:
            assert per_role["one_process"] > 2_000
    assert instructions.exceeded(counted, instructions.budget()) == []


def test_a_process_that_grows_by_less_than_another_shrinks_is_within_the_budget():
    assert instructions.exceeded({"send": {"gateway": 30_000, "worker": 50_000, "new": 20_000}}, RECORDED) == []


def test_work_above_the_margin_is_named_with_its_processes():
    assert instructions.exceeded({"send": {"gateway": 60_000, "worker": 55_000}}, RECORDED) == []
    (sentence,) = instructions.exceeded({"send": {"gateway": 60_000, "worker": 55_001}}, RECORDED)
    assert sentence.startswith("send: 115,001 user instructions per message, the limit is 115,000 ")
    assert "worker 55,001" in sentence


def test_a_new_process_counts_as_much_as_the_others():
    assert len(instructions.exceeded({"send": {"gateway": 60_000, "worker": 40_000, "new": 20_000}}, RECORDED)) == 1


def test_each_work_that_is_counted_has_a_budget():
    assert list(instructions.budget()) == [work.name for work in WORKS]
