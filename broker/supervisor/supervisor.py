"""Starts a broker: prepares its directory, key and entities, then starts its processes and keeps them running."""

import os
import sys
from collections.abc import Callable
from errno import ENOMEM
from pathlib import Path
from typing import Any, NoReturn

from broker import __version__
from broker.child import PERMANENT_FAULT, Instructions
from broker.keys import EMULATOR_KEY, ROOT_KEY_NAME, connection_string, makes_root_key, with_root_key
from broker.logging import configure_logging, get_logger
from broker.settings.config import ConfigurationError, Settings
from broker.supervisor.definitions import bring_in_line
from broker.supervisor.parking import Parking
from broker.supervisor.processes import Processes, Role
from broker.touched_partition import touched_file
from storage.data_dir import ROOT_KEY_FILE, RUN, DataDirectory, DataDirectoryError
from storage.lmdb_store import StoreInUse, UnknownFormat, WrongPartition
from storage.store import StoreError, StoreFull

log = get_logger("supervisor")


def run(settings: Settings) -> int:
    """Serve until SIGTERM, SIGINT or SIGHUP; returns the exit code. If it cannot start, it says why on stderr."""
    configure_logging(settings.log)
    try:
        # It is locked to the end, so that a second broker on the same directory is refused.
        with _opened(settings := _with_absolute_paths(settings)) as directory:
            makes_key = makes_root_key(settings)
            given, settings = settings, _with_key(settings)
            key = shown_key(given, settings, is_new=makes_key)
            parkings = [Parking(settings.data_dir / touched_file(worker)) for worker in range(settings.worker_count)]
            processes = Processes(
                _roles(settings, parkings),
                directory.path,
                settings.shutdown_timeout_ms / 1000,
                settings.worker_stall_timeout_ms / 1000,
            )
            processes.load()
            try:
                for partition, damage in _reconcile(settings).items():
                    parkings[partition % len(parkings)].park(partition, damage)
            except BaseException:
                processes.discard()
                raise
            return processes.run(lambda answers: _announce(settings, answers, key))
    except ConfigurationError as error:
        print(f"peeklock: cannot start: {error}", file=sys.stderr)
        return PERMANENT_FAULT


def _with_absolute_paths(settings: Settings) -> Settings:
    """Make paths absolute, because children run in the data directory."""
    amqp = {
        name: path.absolute()
        for name in ("tls_certificate", "tls_key", "tls_client_ca")
        if isinstance(path := getattr(settings.amqp, name), Path)
    }
    return settings.model_copy(
        update={"data_dir": settings.data_dir.absolute(), "amqp": settings.amqp.model_copy(update=amqp)}
    )


def _opened(settings: Settings) -> DataDirectory:
    try:
        return DataDirectory(settings.data_dir, partitions=settings.partitions)
    except DataDirectoryError as error:
        raise ConfigurationError(str(error)) from error


def _with_key(settings: Settings) -> Settings:
    try:
        return with_root_key(settings)
    except OSError as error:
        raise ConfigurationError(
            f"the root key cannot be read or made: {error.strerror} ({error.filename}). Give user id {os.geteuid()} "
            "the right to, or set PEEKLOCK_SECURITY__ROOT_KEY"
        ) from error


def _reconcile(settings: Settings) -> dict[int, str]:
    """Update the stored definitions. Returns the damage by partition, for partitions with damaged stores."""
    try:
        found = bring_in_line(settings)
    except StoreError as error:
        _refuse(error)
    for deleted in found.reconciled.deleted:
        log.info("entity deleted: nobody used it", entity=deleted)
    for created in found.reconciled.created:
        log.info("entity created", entity=created)
    for update in found.reconciled.updated:
        log.info("entity updated", entity=update.path, properties=update.properties)
    return found.damaged


def _refuse(error: StoreError) -> NoReturn:
    match error:
        case UnknownFormat():
            fix = "Run the version that wrote it, or restore a backup with: peeklock restore"
        case StoreInUse():
            fix = "Wait until that process has ended, or end it"
        case StoreFull():
            fix = "Free space on the disk, or set store.map_size_bytes higher"
        case WrongPartition():
            fix = "Put the partitions' directories back under their own numbers"
        case _ if os.strerror(ENOMEM) in str(error):
            fix = "Set store.map_size_bytes lower: it is address space, which is limited here (ulimit -v)"
        case _:
            fix = "The files were left as they are. Restore a backup with: peeklock restore"
    raise ConfigurationError(f"{error}. {fix}") from error


def _roles(settings: Settings, parkings: list[Parking]) -> list[list[Role]]:
    """Groups of processes in the order of their stop: gateways first, so that clients are told before workers end."""
    for_children = settings.model_copy(update={"queues": (), "topics": ()})
    workers = settings.worker_count
    sockets = tuple(f"{RUN}/worker-{worker}.sock" for worker in range(workers))

    def instructions(gateway: int | None, worker: int | None) -> Callable[[int], Instructions]:
        def after(restarts: int) -> Instructions:
            return Instructions(
                settings=for_children,
                supervisor=os.getpid(),
                gateway=gateway,
                worker=worker,
                partitions=() if worker is None else tuple(range(worker, settings.partitions, workers)),
                sockets=sockets,
                restarts=restarts,
                parked=() if worker is None else parkings[worker].parked,
            )

        return after

    def gateway(number: int) -> Role:
        name = "gateway" if number == 0 else f"gateway-{number}"
        return Role(name, "broker.gateway", instructions(number, None))

    def worker(number: int) -> Role:
        crashed = parkings[number].crashed
        return Role(f"worker-{number}", "broker.worker", instructions(None, number), has_pulse=True, crashed=crashed)

    if settings.is_one_process:
        both = instructions(0, 0)
        return [[Role("gateway", "broker.one_process", both, has_pulse=True, crashed=parkings[0].crashed)]]
    return [list(map(gateway, range(settings.gateways))), list(map(worker, range(workers)))]


def _announce(settings: Settings, answers: dict[str, dict[str, Any]], key: str) -> None:
    answer = answers["gateway"]
    log.info("ready", partitions=settings.partitions, workers=settings.worker_count)
    print(start_text(settings, answer, key), flush=True)


def shown_key(given: Settings, settings: Settings, *, is_new: bool) -> str:
    """The key in the start text, or where it is; `given` are the settings before the root key was added to them.

    Output is often collected in logs. So the text shows only a key that this start has made, and the emulator's, which
    is no secret. For any other key it says where the key is.
    """
    key = settings.security.root_key
    assert key is not None
    if is_new or key == EMULATOR_KEY:
        return key
    if given.security.root_key is not None:
        return "<the key in security.root_key>"
    return f"<the key in {settings.data_dir / ROOT_KEY_FILE}>"


def start_text(settings: Settings, answer: dict[str, Any], key: str) -> str:
    """The text for the user when the broker serves; `answer` is the gateway's, with its ports."""
    plain, tls, ops = (answer.get(name) for name in ("amqp_port", "amqps_port", "ops_port"))
    lines = [f"Peeklock {__version__} is ready.", ""]
    if plain is not None:
        lines.append(f"  AMQP        amqp://{_address(settings.amqp.host, plain)}")
    if tls is not None:
        lines.append(f"  AMQP, TLS   amqps://{_address(settings.amqp.host, tls)}")
    if ops is not None:
        lines.append(f"  Operations  http://{_address(settings.ops.host, ops)}/metrics, /readyz")
    lines.append(f"  Data        {settings.data_dir}")
    lines += ["", "  Connection string for the Service Bus SDKs:"]
    port = plain if plain is not None else tls
    assert port is not None
    return "\n".join(
        [*lines, "  " + connection_string(settings.amqp.host, port, ROOT_KEY_NAME, key, tls=plain is None), ""]
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
