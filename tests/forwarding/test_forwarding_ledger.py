"""What was accepted arrives at the end of a chain of queues once and in order, whichever process is killed."""

from broker.catalog.catalog import home_partition
from tests.forwarding.run import CHAIN, PARTITIONS, run


def test_the_chain_takes_every_kind_of_way():
    assert [home_partition(name, PARTITIONS) for name in CHAIN] == [*CHAIN.values()]


def test_nothing_forwarded_is_lost_or_doubled_over_kills(tmp_path):
    result = run(tmp_path, 4, seed=5, longest_gap_s=0.6)
    assert result.problems == [], str(result)
    assert result.accepted > 1000
