"""Links are cut and processes killed while clients use a namespace on several hosts; `make split` for longer."""

from pathlib import Path

import pytest

from tests.caller import REQUIRE_DISKS
from tests.cluster import split
from tests.cluster.hosts import reason_missing


def test_nothing_accepted_is_lost_and_nothing_settled_comes_back_whatever_happens(tmp_path: Path) -> None:
    if reason := reason_missing():
        pytest.fail(reason) if REQUIRE_DISKS else pytest.skip(reason)
    summaries = split.run(tmp_path, 25, seed=3)
    assert set(summaries) == set(split.QUEUES)
    for summary in summaries.values():
        assert split.wrong(summary) == []
        assert summary.accepted > 100
        assert summary.completed > 100
