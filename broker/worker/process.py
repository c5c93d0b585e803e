"""The process of a worker: opens its log and stores, loads its partitions, and serves until it is told to end."""

import os
import select
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from broker.catalog.catalog import home_partition
from broker.catalog.changing import Limits
from broker.child import DAMAGED_STORE, NO_ROOM, PERMANENT_FAULT, Instructions, announce_ready, fail, read_instructions
from broker.cluster.silence import Patience
from broker.cluster.tls import client_context, server_context
from broker.idle_polling import IdlePolling
from broker.logging import configure_logging, get_logger
from broker.partition.partition import Partition
from broker.partition.settings import PartitionSettings
from broker.partition.state.terms import Terms
from broker.settings.config import ConfigurationError, Settings
from broker.starting import Phase, Starting, phase_file
from broker.touched_partition import TouchedPartition, touched_file
from broker.worker.clock import Clock
from broker.worker.dialling import Dialler, TcpDialler, UnixDialler
from broker.worker.heartbeats import Heartbeats
from broker.worker.held_changes import HoldBounds
from broker.worker.listening import TcpListener, UnixListener, WorkerListener
from broker.worker.parked import ParkedPartition
from broker.worker.worker import Worker
from storage.data_dir import JOURNAL, partition_path
from storage.durable import is_full
from storage.liveness import Signs
from storage.lmdb_store import LmdbStore
from storage.log.commit_log import CommitLog, LogLimits
from storage.log.follower import Follower
from storage.log.recovery import keep_log, log_directory
from storage.records import MESSAGE_HEADER_BYTES
from storage.store import Store, StoreDamaged, StoreError, StoreFull

log = get_logger("worker")


class Opened(NamedTuple):
    """What a worker serves: `partitions` and `stores` by partition, parked ones included."""

    partitions: dict[int, Partition]
    stores: dict[int, Store]
    turns: CommitLog


def main(pulse: Signs) -> int:
    """The process of a worker of its own; returns its exit status."""

    instructions = read_instructions()

    def serve(worker: Worker) -> None:
        announce_ready()
        make_turns(worker, IdlePolling(instructions.settings.poll_seconds))

    return run(instructions, serve, pulse)


def make_turns(worker: Worker, polling: IdlePolling) -> None:
    """Make turns until SIGTERM, and commit everything. Raises what turns raise."""
    is_told_to_end = False

    def end(*_: object) -> None:
        nonlocal is_told_to_end
        is_told_to_end = True

    heard, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the supervisor decides
    worker.be_woken_by(heard)
    worker.begin()
    while not is_told_to_end:
        worker.turn(events_of(worker, polling))
    worker.end()


def events_of(worker: Worker, polling: IdlePolling) -> list[tuple[int, int]]:
    """Wait for events, or until the worker has something to do without one."""
    seconds = worker.wait_seconds()
    events = worker.poll()
    if events or seconds <= 0:
        return events
    began = time.monotonic()
    ends = began + min(polling.window, seconds)
    while (now := time.monotonic()) < ends:
        if events := worker.poll():
            break
        os.sched_yield()
    else:
        events = worker.poll(max(0.0, seconds - (now - began)))
    polling.waited(time.monotonic() - began)
    return events


def run(instructions: Instructions, serve: Callable[[Worker], None], pulse: Signs) -> int:
    """Open the worker's stores, let `serve` make its turns, and close them; returns the process's exit status.

    `pulse` tells the supervisor of progress and of turns. `serve` raises StoreError as the turns do, and
    ConfigurationError if it cannot serve as things are.
    """
    settings, number = instructions.settings, instructions.worker
    assert number is not None
    configure_logging(settings.log)
    starting = Starting(Path(phase_file(number)))
    clock = Clock(int(time.time() * 1000), int(time.monotonic() * 1000))
    try:
        touching = TouchedPartition(Path(touched_file(number)))
        partitions, stores, turns = _open(instructions, number, touching, starting, clock.now_ms, pulse)
        listener, dialler = _network(instructions, number)
    except StoreDamaged as error:
        return _damaged(number, error)
    except StoreFull as error:
        fail(str(error), NO_ROOM)
    except (StoreError, ConfigurationError) as error:
        fail(str(error))
    except OSError as error:
        fail(f"{settings.data_dir}: cannot be written: {error}", NO_ROOM if is_full(error) else PERMANENT_FAULT)
    heartbeats = Heartbeats(Patience.of(settings)) if settings.cluster.workers else None
    worker = Worker(
        number,
        instructions.restarts,
        partitions,
        stores,
        listener,
        dialler,
        settings.partitions,
        clock,
        touching,
        turns,
        pulse.beat,
        Limits(
            settings.partitioning,
            settings.delivery.max_lock_duration_ms,
            settings.sku,
            settings.keep_case_of_names,
        ),
        heartbeats,
        HoldBounds(
            settings.worker_restart_wait_ms,
            settings.worker_restart_wait_operations,
            settings.worker_restart_wait_bytes,
        ),
    )
    turns.checkpointer.start()
    if heartbeats is not None:
        heartbeats.begin()
    starting.done()
    try:
        serve(worker)
        turns.close()
    except StoreDamaged as error:
        return _damaged(number, error)
    except StoreError as error:
        log.error("store failed; the process ends, to be restarted from its stores", worker=number, error=str(error))
        return NO_ROOM if isinstance(error, StoreFull) else 1
    except ConfigurationError as error:
        fail(str(error))
    except Exception as error:
        log.error("unforeseen failure; the process ends without a commit", worker=number, exc_info=error)
        return 1
    return 0


def _damaged(number: int, error: StoreDamaged) -> int:
    log.error("store is damaged; the process ends, to be restarted", worker=number, error=str(error))
    return DAMAGED_STORE


def _open(
    instructions: Instructions,
    number: int,
    touching: TouchedPartition,
    starting: Starting,
    now_ms: int,
    pulse: Signs,
) -> Opened:
    """Open the partitions. Raises StoreError; `touching` says on which partition."""
    settings = instructions.settings
    partition_settings = PartitionSettings.of(settings)
    stores: dict[int, Store] = {}
    partitions: dict[int, Partition] = {}
    for partition in instructions.parked:
        partitions[partition] = parked = ParkedPartition(partition, partition_settings)
        stores[partition] = parked.store
    starting.enter(Phase.OPENING)
    tables = {}
    for partition in instructions.partitions:
        if partition not in instructions.parked:
            touching.set(partition)
            tables[partition] = LmdbStore(
                partition_path(settings.data_dir, partition),
                partition_id=partition,
                map_size_bytes=settings.store.map_size_bytes,
                create=False,
                attached=True,
                signs=pulse,
            )
    starting.enter(Phase.REPLAYING)
    turns = _replay(instructions, number, tables, touching, pulse)
    stores.update(turns.stores)
    starting.enter(Phase.LOADING)
    known_terms: dict[bytes, Terms] = {}
    for partition, store in tables.items():
        touching.set(partition)
        with store.giving_signs():
            partitions[partition] = Partition(
                partition,
                stores[partition],
                now_ms=now_ms,
                incarnation=os.urandom(6),
                settings=partition_settings,
                home=lambda name: home_partition(name, settings.partitions),
                known_terms=known_terms,
            )
    return Opened(partitions, stores, turns)


def _network(instructions: Instructions, number: int) -> tuple[WorkerListener, Callable[[select.epoll], Dialler]]:
    """Where the worker listens, and what connects it to others. Raises OSError, ConfigurationError."""
    cluster = instructions.settings.cluster
    if not cluster.workers:
        return UnixListener(instructions.sockets[number]), lambda poll: UnixDialler(instructions.sockets)
    assert cluster.listen is not None
    tls = client_context(cluster)
    try:
        listener = TcpListener(cluster.listen, server_context(cluster), cluster.heartbeat_timeout_ms)
    except OSError as error:
        raise ConfigurationError(
            f"cannot listen on {cluster.listen} for gateways and workers: {error.strerror or error}. "
            "Free the port, or set cluster.listen (--listen) to another"
        ) from error
    return listener, lambda poll: TcpDialler(cluster.workers, tls, poll, cluster.heartbeat_timeout_ms)


def _follower(settings: Settings, number: int) -> Follower | None:
    """Who follows the log of this worker. Raises OSError."""
    if not settings.journal.is_on:
        return None
    (settings.data_dir / JOURNAL).mkdir(mode=0o700, exist_ok=True)
    return Follower(settings.data_dir, number, settings.journal.backlog_bytes, settings.store.min_free_disk_bytes)


def _replay(
    instructions: Instructions, number: int, tables: dict[int, LmdbStore], touching: TouchedPartition, pulse: Signs
) -> CommitLog:
    """Open the worker's log, which brings the tables up to date. Raises StoreError."""
    settings = instructions.settings
    directory = log_directory(settings.data_dir, number)
    if directory.exists():
        for partition in instructions.parked:
            keep_log(directory, number, partition, partition_path(settings.data_dir, partition), pulse)
    began = time.monotonic()
    turns = CommitLog(
        directory,
        number,
        tables,
        map_size_bytes=settings.store.map_size_bytes,
        limits=LogLimits.of(settings.log_bytes, settings.store.map_size_bytes),
        largest_record_bytes=settings.amqp.max_message_size_bytes + MESSAGE_HEADER_BYTES,
        works_on=touching.set,
        follower=_follower(settings, number),
        signs=pulse,
        stall_seconds=settings.worker_stall_timeout_ms / 1000,
        on_stall=lambda seconds: log.error(
            "the checkpointer stalled; killing it", worker=number, seconds=round(seconds)
        ),
    )
    if turns.torn:
        log.warning("the log ends with a turn that is torn or damaged", worker=number, found=turns.torn)
    if turns.put_aside:
        log.warning("a damaged log, which no partition needs, was put aside", worker=number, log=turns.put_aside)
    seconds = round(time.monotonic() - began, 3)
    log.info("log replayed", worker=number, turn=turns.lsn, seconds=seconds, without_room=[*turns.behind])
    return turns
