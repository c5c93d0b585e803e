"""The .NET SDK's senders and processors go on over kills: nothing is lost, and nothing that ended comes again."""

import pytest

from tests.interop.sdks import LEDGER
from tests.interop.test_interop import ensure
from tests.sdk_ledger.run import ALL, run

pytestmark = pytest.mark.interop


def test_nothing_is_lost_and_nothing_ends_twice_over_kills(tmp_path):
    """How long calls take is for a machine that has nothing else to do: `make sdk-ledger`."""
    ensure(LEDGER.toolchain)
    report = run(tmp_path, 3, seed=1, victims=["broker.worker", "broker.gateway", ALL])
    assert not report.breaches, str(report)
    assert report.counts["accepted"] > 100, str(report)
