"""The ledger of paired namespaces for a minute; `make pairing-ledger` runs it for half an hour."""

import asyncio

import pytest

from broker.pairing.options import PairingOptions
from tests.pairing.ledger import Run, Trouble

OPTIONS = PairingOptions(
    backlog_queue_count=3, failover_interval_ms=1000, ping_interval_ms=1000, attempt_timeout_ms=1000, busy_wait_ms=500
)


@pytest.mark.slow
def test_whatever_happens_to_the_primary_and_the_syphon_each_accepted_message_arrives_once(tmp_path):
    run = Run(tmp_path, 7, OPTIONS, longest_s=4, rate=200)
    breaches = asyncio.run(run.run(30))
    assert breaches == []
    assert set(run.counts) >= {trouble.value for trouble in Trouble}
    assert any(way.is_in_backlog for way in run.books.accepted.values())
    assert any(not way.is_in_backlog for way in run.books.accepted.values())
    assert len(run.books.accepted) > 500
