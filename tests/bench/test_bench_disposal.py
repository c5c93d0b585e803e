"""Sends beside a disposal are measured, tiny, against the real broker."""

import pytest

from bench import disposal, load
from tests.caller import REQUIRE_INTEROP


def test_a_quantile_is_one_of_the_values():
    values = [float(number) for number in range(100, 0, -1)]
    assert [disposal.quantile(values, share) for share in (0, 0.5, 0.99, 1)] == [1, 51, 100, 100]
    assert disposal.quantile([7.0], 0.99) == 7


def test_sends_are_measured_without_and_beside_a_disposal(capsys):
    try:
        load.build()
    except load.LoadToolMissing as missing:
        pytest.fail(str(missing)) if REQUIRE_INTEROP else pytest.skip(str(missing))
    disposal.main(["--messages", "3000", "--size", "100", "--rounds", "1", "--senders", "2", "--seconds", "0.1"])
    _, alone, beside, took = capsys.readouterr().out.splitlines()
    for line, what in ((alone, "nothing beside"), (beside, "beside the disposal")):
        assert line.startswith(what)
        p50, p99, most = (float(line.split(name)[1].split()[0]) for name in ("p50", "p99", "most"))
        assert 0 < p50 <= p99 <= most
    assert took.startswith("a disposal alone")
