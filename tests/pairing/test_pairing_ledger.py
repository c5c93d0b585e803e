"""The ledger of paired namespaces for a minute; `make pairing-ledger` runs it for half an hour."""

import asyncio
from dataclasses import replace

import pytest

from broker.pairing.options import PairingOptions
from tests.pairing.ledger import Run, Trouble

OPTIONS = PairingOptions(
    backlog_queue_count=3, failover_interval_ms=1000, ping_interval_ms=1000, attempt_timeout_ms=1000, busy_wait_ms=500
)


@pytest.mark.parametrize("by_sidecar", [False, True])
def test_whatever_happens_to_the_primary_and_the_syphon_each_accepted_message_arrives_once(tmp_path, by_sidecar):
    options = replace(OPTIONS, backlog_queue_count=1) if by_sidecar else OPTIONS
    run = Run(tmp_path, 7, options, longest_s=4, rate=200, by_sidecar=by_sidecar)
    breaches = asyncio.run(run.run(45))  # on a busy machine a broker needs many seconds to start
    assert breaches == []
    assert set(run.counts) >= {trouble.value for trouble in Trouble}
    accepted = run.books.accepted
    assert 0 < (run.by_backlog or sum(way.is_in_backlog for way in accepted.values())) < len(accepted)
    assert len(accepted) > 500
