import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import msgpack
import pytest
from prometheus_client.parser import text_string_to_metric_families

from broker.capture.service import snapshot as capture_snapshot
from broker.capture_exposition import families as capture_families
from broker.exposition import PARTITION, families, render
from broker.metrics import EndpointMetrics, GatewayMetrics, Histogram, Scene, WorkerMetrics, process_usage
from broker.pairing.counters import Counters as PairingCounters
from broker.pairing.health import State
from broker.pairing.syphon.counters import Counters, QueueCounters
from broker.pairing.syphon.service import snapshot
from broker.sidecar_exposition import families as sidecar_families
from broker.wire import Outcome
from storage.capture.following import Counters as CaptureCounters
from storage.log.commit_log import LogUsage

OPERATIONS_MD = Path(__file__).parents[2] / "docs" / "operations.md"
LOG_USAGE = LogUsage(
    young_bytes=5,
    log_bytes=100,
    kept_bytes=7,
    lost_segments=1,
    segments=2,
    disk_bytes=16,
    checkpoints=3,
    waited_seconds=0.25,
    checkpointer_starts=1,
    checkpointer_pid=None,
)
QUEUE, OTHER = 7, 8  # entity ids
ONE = ("gateway", "0")
MAIN, DEAD_LETTER, TRANSFER_DEAD_LETTER, TRANSFER = 0, 1, 2, 3  # parts


def scene(gateway=None, workers=None, counts=(), entities=None, forwarding=()):
    gateways = {0: (gateway or GatewayMetrics()).snapshot(0)}
    return Scene(gateways, workers or {}, counts, entities or {}, "1.2.3", EndpointMetrics(), forwarding)


def samples(scene):
    """(name, labels as a sorted tuple) -> value."""
    text = b"".join(render(families(scene))).decode()
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_bound_is_part_of_its_bucket():
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 2, 3):
        histogram.observe(value)
    assert histogram.snapshot() == [[1, 2], [2, 2, 1], 8]


def test_many_equal_observations_count_as_many():
    histogram = Histogram((1,))
    histogram.observe_many(0.5, 3)
    assert histogram.snapshot() == [[1], [3, 0], 1.5]


def test_histogram_buckets_are_cumulative_in_the_exposition():
    gateway = GatewayMetrics()
    gateway.send_latency.observe_many(0.0002, 2)
    gateway.send_latency.observe(0.3)
    gateway.send_latency.observe(99)
    shown = samples(scene(gateway))
    name = "peeklock_server_send_latency_seconds"
    assert shown[f"{name}_bucket", ONE, ("le", "0.0001")] == 0
    assert shown[f"{name}_bucket", ONE, ("le", "0.00025")] == 2
    assert shown[f"{name}_bucket", ONE, ("le", "0.5")] == 3
    assert shown[f"{name}_bucket", ONE, ("le", "+Inf")] == 4
    assert shown[f"{name}_count", ONE] == 4
    assert shown[f"{name}_sum", ONE] == pytest.approx(99.3004)


@pytest.mark.parametrize(
    ("error", "counter"),
    [
        ("InternalError", "server_errors"),
        ("ServerBusy", "throttled_requests"),
        ("LockLost", "user_errors"),
        ("QuotaExceeded", "user_errors"),
    ],
)
def test_a_failed_request_counts_as_one_kind_of_error(error, counter):
    gateway = GatewayMetrics()
    gateway.entity("orders").failed(error, 2)
    kinds = ("server_errors", "throttled_requests", "user_errors", "successful_requests")
    shown = samples(scene(gateway))
    assert {kind: shown[f"peeklock_{kind}_total", ("entity", "orders"), ONE] for kind in kinds} == {
        kind: 2 if kind == counter else 0 for kind in kinds
    }


def test_each_outcome_has_its_counter():
    gateway = GatewayMetrics()
    for outcome in Outcome:
        gateway.entity("orders").settled[outcome] = 10 + outcome
    shown = samples(scene(gateway))
    names = ("complete", "abandon", "defer", "deadletter", "release")
    assert [shown[f"peeklock_{name}_message_total", ("entity", "orders"), ONE] for name in names] == [
        10,
        11,
        12,
        13,
        14,
    ]


def test_counts_of_all_partitions_and_parts_add_up_by_entity():
    counts = [
        {QUEUE << 3 | MAIN: [5, 1, 2, 100, 3], QUEUE << 3 | DEAD_LETTER: [4, 1, 0, 40, 2]},
        {QUEUE << 3 | TRANSFER_DEAD_LETTER: [3, 0, 0, 1, 0], QUEUE << 3 | TRANSFER: [2, 0, 1, 6, 0]},
        {QUEUE << 3 | MAIN: [10, 0, 0, 7, 0], 99 << 3: [1, 1, 1, 1, 1]},  # 99 was deleted meanwhile
    ]
    shown = samples(scene(counts=counts, entities={QUEUE: "orders", OTHER: "idle"}))
    assert {
        name.removeprefix("peeklock_"): value
        for (name, *labels), value in shown.items()
        if labels == [("entity", "orders")]
    } == {
        "messages": 29,
        "active_messages": 16,
        "deadlettered_messages": 5,
        "transfer_messages": 3,
        "transfer_deadlettered_messages": 3,
        "scheduled_messages": 2,
        "deferred_messages": 1,
        "locked_messages": 3,
        "size_bytes": 154,
    }
    assert shown["peeklock_messages", ("entity", "idle")] == 0
    assert not [key for key in shown if ("entity", "99") in key]


def test_messages_of_an_entity_that_forwards_are_in_transfer_and_not_active():
    counts = [{QUEUE << 3 | MAIN: [5, 1, 2, 100, 0], QUEUE << 3 | TRANSFER: [2, 0, 0, 6, 0]}]
    shown = samples(scene(counts=counts, entities={QUEUE: "orders"}, forwarding={QUEUE}))
    assert shown["peeklock_active_messages", ("entity", "orders")] == 1
    assert shown["peeklock_transfer_messages", ("entity", "orders")] == 7
    assert shown["peeklock_messages", ("entity", "orders")] == 10


def test_active_connections_are_those_opened_and_not_closed():
    gateway = GatewayMetrics()
    gateway.connections_opened, gateway.connections_closed = 5, 2
    assert samples(scene(gateway))["peeklock_active_connections", ONE] == 3


def test_a_deleted_entity_leaves_no_series():
    gateway = GatewayMetrics()
    gateway.entity("orders").incoming_messages += 1
    gateway.forget("orders")
    gateway.forget("never seen")
    assert not [key for key in samples(scene(gateway)) if ("entity", "orders") in key]


def test_names_of_entities_and_conditions_are_escaped():
    gateway = GatewayMetrics()
    gateway.errors['a"b\\c\nd'] += 1
    assert samples(scene(gateway))["peeklock_errors_total", ("condition", 'a"b\\c\nd'), ONE] == 1


def test_a_worker_that_does_not_answer_is_shown_as_down():
    answered = WorkerMetrics().snapshot(worker=0, restarts=4, partitions={}, log=LOG_USAGE._asdict())
    shown = samples(scene(workers={0: answered, 1: None}))
    assert shown["peeklock_worker_up", ("worker", "0")] == 1
    assert shown["peeklock_worker_up", ("worker", "1")] == 0
    assert shown["peeklock_worker_restarts_total", ("worker", "0")] == 4
    assert ("peeklock_worker_restarts_total", ("worker", "1")) not in shown


def test_each_gateway_has_series_of_its_own_and_partitions_are_shown_once():
    metrics = [GatewayMetrics(), GatewayMetrics()]
    for number, gateway in enumerate(metrics, 1):
        gateway.connections_opened = number
        gateway.receivers = 10 * number
        gateway.errors["amqp:not-found"] += number
        gateway.send_latency.observe_many(0.001, number)
        gateway.entity("orders").incoming_messages += number
        gateway.entity("orders").settled[Outcome.ACCEPTED] += number
    snapshots = {
        number: msgpack.unpackb(msgpack.packb(gateway.snapshot(number))) for number, gateway in enumerate(metrics)
    }
    counts = [{QUEUE << 3 | MAIN: [5, 1, 2, 100, 3]}]
    shown = samples(scene(counts=counts, entities={QUEUE: "orders"})._replace(gateways={**snapshots, 2: None}))

    def of(name, *labels):
        return [shown.get((name, *sorted([*labels, ("gateway", number)]))) for number in "012"]

    assert of("peeklock_gateway_up") == [1, 1, 0]
    assert of("peeklock_gateway_restarts_total") == [0, 1, None]
    assert of("peeklock_active_connections") == [1, 2, None]
    assert of("peeklock_links", ("role", "receiver")) == [10, 20, None]
    assert of("peeklock_errors_total", ("condition", "amqp:not-found")) == [1, 2, None]
    assert of("peeklock_server_send_latency_seconds_count") == [1, 2, None]
    assert of("peeklock_incoming_messages_total", ("entity", "orders")) == [1, 2, None]
    assert of("peeklock_complete_message_total", ("entity", "orders")) == [1, 2, None]
    assert shown["peeklock_messages", ("entity", "orders")] == 8
    resident = "peeklock_process_resident_memory_bytes"
    assert {labels[0][1] for name, *labels in shown if name == resident} == {"gateway", "gateway-1"}


def test_a_workers_snapshot_survives_the_wire():
    metrics = WorkerMetrics()
    metrics.turns, metrics.commits = 3, 2
    metrics.fsync_seconds.observe(0.001)
    metrics.messages_per_commit.observe_many(64, 2)
    snapshot = metrics.snapshot(1, 0, {3: {"used_bytes": 4096, "locks": 2}}, LOG_USAGE._asdict())
    received = msgpack.unpackb(msgpack.packb(snapshot), strict_map_key=False)
    assert received == snapshot
    shown = samples(scene(workers={1: received}))
    assert shown["peeklock_worker_turns_total", ("worker", "1")] == 3
    assert shown["peeklock_worker_messages_per_commit_count", ("worker", "1")] == 2
    assert shown["peeklock_store_used_bytes", ("partition", "3")] == 4096
    assert ("peeklock_store_capacity_bytes", ("partition", "3")) not in shown
    assert shown["peeklock_process_resident_memory_bytes", ("process", "worker-1")] > 1_000_000
    assert shown["peeklock_log_young_bytes", ("worker", "1")] == 5
    assert shown["peeklock_log_kept_bytes", ("worker", "1")] == 7
    assert shown["peeklock_log_lost_segments_total", ("worker", "1")] == 1
    assert shown["peeklock_log_waited_seconds_total", ("worker", "1")] == 0.25
    assert ("peeklock_process_resident_memory_bytes", ("process", "checkpointer-1")) not in shown


def test_a_worker_in_the_gateways_process_is_shown_as_one_process():
    snapshot = WorkerMetrics().snapshot(0, 0, {}, LOG_USAGE._asdict())
    shown = samples(scene(workers={0: snapshot})._replace(is_one_process=True))
    of_processes = [labels for name, *labels in shown if name.startswith("peeklock_process_")]
    assert of_processes == [[("process", "gateway")]] * 2  # memory and time
    assert shown["peeklock_worker_up", ("worker", "0")] == 1


def test_a_checkpointer_is_shown_with_its_memory_and_its_time():
    with subprocess.Popen(
        [sys.executable, "-c", "sum(range(10**6)); print('ran', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout.readline() == b"ran\n"
        running = WorkerMetrics().snapshot(2, 0, {}, LOG_USAGE._replace(checkpointer_pid=child.pid)._asdict())
        child.communicate(b"\n")
    ended = WorkerMetrics().snapshot(3, 0, {}, LOG_USAGE._replace(checkpointer_pid=child.pid)._asdict())
    shown = samples(scene(workers={2: running, 3: ended}))
    assert 1_000_000 < shown["peeklock_process_resident_memory_bytes", ("process", "checkpointer-2")] < 1_000_000_000
    assert 0 < shown["peeklock_process_cpu_seconds_total", ("process", "checkpointer-2")] < 10
    assert ("peeklock_process_cpu_seconds_total", ("process", "checkpointer-3")) not in shown


def test_every_metric_is_documented_and_every_documented_metric_exists():
    """Each row of a table of metrics in docs/operations.md: | `name{label}` | type | meaning |."""
    gateway = GatewayMetrics()
    gateway.entity("orders")
    gateway.errors["amqp:not-found"] += 1
    gateway.http_requests["management 200"] += 1
    workers = {0: WorkerMetrics().snapshot(0, 0, {0: dict.fromkeys(PARTITION, 1)}, LOG_USAGE._asdict())}
    counters = Counters(dead_lettered=Counter(["SyphonDestinationNotFound"]), queues={"q": QueueCounters(backlog=1)})
    syphon = {**snapshot(counters, is_primary_up=True), "restarts": 0, **process_usage()}
    journal = {
        **dict.fromkeys(("restarts", "rows", "read_bytes", "dropped_files", "dropped_unread_files", "gaps"), 0),
        **dict.fromkeys(("unfounded", "is_full", "readers"), 0),
        **{"turns_behind": {"0": 0}, "seconds_behind": {"0": 0.0}, "consumers_behind": {"capture": 0}},
        "consumers_bytes_behind": {"capture": 0},
        "partitions": {"0": {"low": 0, "stable": 0, "bytes": 0}},
        **process_usage(),
    }
    seen = scene(gateway, workers, entities={QUEUE: "orders"})._replace(syphons={0: syphon}, journals={0: journal})
    sidecar = {
        **dict.fromkeys(("connections", "answered_here", "connections_opened", "connections_refused"), 0),
        **dict.fromkeys(("accept_failures", "held_bytes", "is_away", "has_backlog"), 0),
        "counters": PairingCounters(),
        "entities": {"orders": State.FAILED_OVER},
        "queues": {"q": True},
    }
    capture = capture_snapshot(CaptureCounters(), is_up=True)
    shown_by = (families(seen), sidecar_families(sidecar), capture_families(capture))
    text = b"".join(part for each in shown_by for part in render(each)).decode()
    shown = set()
    for family in text_string_to_metric_families(text):
        sample = family.samples[0]
        labels = ",".join(sorted(set(sample.labels) - {"le"}))
        suffix = "_total" if family.type == "counter" else ""
        shown.add((family.name + suffix, labels, family.type))
    documented = set()
    for name, labels, kind in re.findall(
        r"^\| `(peeklock_\w+)(?:\{(.*?)\})?` \| (\w+) \|", OPERATIONS_MD.read_text(), re.M
    ):
        documented.add((name, labels, kind))
    assert documented == shown
