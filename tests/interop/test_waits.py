"""What `waits.py` makes of the calls that users report, and that a program of an SDK reports them."""

from pathlib import Path

import pytest

from tests.caller import REQUIRE_INTEROP
from tests.interop.sdks import WAITS
from tests.interop.waits import Call, Cell, Limits, is_served, measure, measured, render, section, written
from tests.patience import PATIENCE_S

KILLED, READY, UNTIL = 100.0, 101.0, 105.0


def test_each_user_waits_as_long_as_its_longest_call_from_the_kill_on() -> None:
    calls = {
        ("send", 0): [Call(98.0, 1.0, ""), Call(99.9, 1.5, ""), Call(103.0, 0.1, "")],
        ("send", 1): [Call(100.5, 0.5, "Busy"), Call(101.5, 0.1, "")],
        ("send", 2): [Call(90.0, 9.0, ""), Call(106.0, 9.0, "")],  # none that is concerned: it waits all the time
    }
    cell = measured(calls, [("send", 2)], KILLED, UNTIL)["send"]
    assert cell == Cell((1.5, 0.5, 5.0), 1, {"Busy": 1})
    assert str(cell) == "1.5 s, 5.0 s, 1 not served; 1 `Busy`"


@pytest.mark.parametrize(
    ("last", "served"),
    [
        (Call(102.0, 0.1, ""), True),
        (Call(102.0, 0.1, "Busy"), False),
        (Call(102.0, 3.0, ""), False),
        (Call(100.5, 0.1, ""), False),
    ],
)
def test_a_user_is_served_again_who_has_had_two_fast_answers(last: Call, served: bool) -> None:
    assert is_served([Call(101.5, 0.1, ""), last], READY, 1.0) is served
    assert not is_served([last], READY, 1.0)


def test_the_tables_take_the_place_of_those_before() -> None:
    cell = Cell((0.5, 1.0))
    first = render({"Go": {"worker": {"send": cell}}})
    second = render({"Go": {"worker": {"send": cell}, "gateway": {"send": Cell((2.0,))}}})
    assert "| Go | 0.8 s, 1.0 s |" in first
    page = "# Title\n\n| a | b |\n"
    once = written(page, first)
    assert once.startswith(page)
    assert section(once) == first
    assert written(once, second) == written(page, second)


def test_users_of_a_killed_worker_are_served_again(tmp_path: Path) -> None:
    toolchain = WAITS["Python"].toolchain
    if not toolchain.installed():
        if not REQUIRE_INTEROP:
            pytest.skip("azure-servicebus is not installed")
        toolchain.ensure()
    operations = ("send", "receive", "complete", "renew", "accept", "administer")
    said: list[str] = []
    patient = Limits(settled=10, most=4 * PATIENCE_S, begins=4 * PATIENCE_S)
    rows = measure("Python", tmp_path, ["worker"], operations, said.append, patient)
    assert rows["worker"].keys() == {*operations}
    for cell in rows["worker"].values():
        assert cell.unserved == 0
        assert max(cell.waits) > 0
    assert len(said) == 1
