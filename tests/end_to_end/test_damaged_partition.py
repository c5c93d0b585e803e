"""A partition whose pages kill whoever reads them: it is parked, this is said, and the others are served."""

import json
import struct
from pathlib import Path

from broker.catalog.catalog import home_partition
from storage.data_dir import partition_path
from storage.lmdb_store import DATA_FILE
from storage.pages import check_pages
from tests.brokers import Broker
from tests.end_to_end.health import eventually, metrics, process_of
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, body_of, error_of, message, outcome

PAGE = 4096
LEAF = 0x02
CONFIG = """
partitions = 2
workers = 1
[[queues]]
name = "orders"
[[queues]]
name = "{other}"
"""
OTHER = next(
    name for name in map("queue-{}".format, range(99)) if home_partition(name, 2) != home_partition("orders", 2)
)


def send(broker: Broker, queue: str, count: int) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        handle = peer.attach_sender(queue)
        for number in range(count):
            peer.transfer(message(b"number %d" % number + bytes(500)), handle)
            assert peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED)


def damage_messages(file: Path) -> None:
    """Zeros in place of all leaves with messages: whoever reads one dies of SIGABRT."""
    sound = file.read_bytes()
    leaves = [at for at in range(0, len(sound), PAGE) if struct.unpack_from("<QHH", sound, at) == (at // PAGE, 0, LEAF)]
    data = bytearray(sound)
    for at in leaves:
        tried = bytearray(sound)
        tried[at : at + 8] = b"\xff" * 8
        file.write_bytes(tried)
        if any("MESSAGES: page" in finding.text for finding in check_pages(file)):
            data[at : at + PAGE] = bytes(PAGE)
    file.write_bytes(data)


def worker(broker: Broker) -> int | None:
    found = [process.pid for process in broker.processes() if "broker.worker" in process.cmdline()]
    return found[0] if found else None


def parked(broker: Broker) -> bool:
    return metrics(broker).get(("peeklock_partition_parked", "1")) == 1


def test_a_partition_that_kills_its_worker_is_parked_and_the_others_are_served(tmp_path: Path) -> None:
    assert home_partition("orders", 2) == 1, "the catalog is on the other partition"
    with Broker(tmp_path, CONFIG.format(other=OTHER)) as broker:
        send(broker, "orders", 40)
        send(broker, OTHER, 3)
        broker.stop()
        damage_messages(partition_path(broker.data_dir, 1) / DATA_FILE)
        broker.start()

        for _ in range(2):
            if parked(broker):
                break  # it killed its worker already when that was started
            before = process_of(broker, "broker.worker").pid
            with RawPeer.connect(broker.amqp_port) as peer:
                peer.attach_receiver("orders", credit=10)
                eventually(lambda before=before: worker(broker) not in (None, before), "the worker is started again")
            eventually(lambda: broker.get("/readyz")[0] == 200, "it serves")

        assert parked(broker)
        with RawPeer.connect(broker.amqp_port) as peer:
            peer.attach_receiver(OTHER, credit=10)
            assert [body_of(peer.expect(TRANSFER).payload)[:8] for _ in range(3)] == [
                b"number %d" % n for n in range(3)
            ]
        send(broker, OTHER, 2)
        status, body = broker.get("/readyz")
        assert status == 200
        assert [*json.loads(body)["parked"]] == ["1"]
        assert "damaged" in json.loads(body)["parked"]["1"]
        assert "partition parked" in broker.log_file.read_text()
        with RawPeer.connect(broker.amqp_port) as peer:
            handle = peer.attach_sender("orders")
            peer.transfer(message(b"refused"), handle)
            condition, text = error_of(peer.expect(DISPOSITION))
            assert condition == "amqp:internal-error"
            assert "Partition 1" in text
            assert "out of service" in text
