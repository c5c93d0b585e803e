"""A worker that comes back with another volume is served as the docs say, and this is told."""

import json
import shutil
from pathlib import Path

from broker.catalog.catalog import home_partition
from tests.cluster.machines import Cluster, Machine
from tests.end_to_end.raw_peer import RawPeer
from tests.end_to_end.test_catalog_at_run_time import receive, send
from tests.patience import eventually

QUEUE = next(name for name in map("q{}".format, range(99)) if home_partition(name, 4) in (1, 3))
CONFIG = f"""
[[queues]]
name = "{QUEUE}"
"""
TOLD = "the partition has another store than before"


def told(machine: Machine) -> list[int]:
    """The partitions that its log warns of."""
    lines = [line for line in machine.log_file.read_text().splitlines() if TOLD in line]
    assert all('"level": "warning"' in line for line in lines)
    return sorted(json.loads(line)["partition"] for line in lines)


def test_a_new_empty_volume_of_a_worker_is_told_by_it_and_by_the_home(tmp_path: Path) -> None:
    with Cluster(tmp_path, CONFIG, gateways=1) as cluster:
        home, other = cluster.workers
        [gateway] = cluster.gateways
        with RawPeer.connect(gateway.amqp_port) as peer:
            send(peer, QUEUE, b"lost with the volume")
        for machine in (home, other):
            machine.stop()
            machine.start()
        assert told(home) == told(other) == [], "the same stores came back, and the first start is none either"
        other.stop()
        shutil.rmtree(other.data_dir)
        other.start()
        eventually(lambda: told(other) == [1, 3], "it is told")
        assert told(home) == [1, 3]
        with RawPeer.connect(gateway.amqp_port) as peer:
            eventually(lambda: not_refused(peer), "it serves")
            assert receive(peer, QUEUE, 1) == [b"new"]
        other.stop()
        joined = other.log_file.read_text().count("catalog received")
        other.start()
        eventually(lambda: other.log_file.read_text().count("catalog received") > joined, "it has joined")
        assert told(home) == told(other) == [1, 3], "it is told once"


def not_refused(peer: RawPeer) -> bool:
    try:
        send(peer, QUEUE, b"new")
    except AssertionError:
        return False
    return True
