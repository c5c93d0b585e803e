"""Starts a broker: prepares its directory, key and entities, then starts its processes and keeps them running."""

import os
import sys
from collections.abc import Callable, Iterable
from enum import StrEnum
from errno import ENOMEM
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from broker import __version__
from broker.catalog.catalog import CannotReconcile
from broker.child import NO_ROOM, PERMANENT_FAULT
from broker.keys import EMULATOR_KEY, ROOT_KEY_NAME, connection_string, makes_root_key, with_root_key
from broker.listening import unusable
from broker.logging import configure_logging, get_logger
from broker.namespace.entities import Frozen
from broker.ports_file import remove_ports, write_ports
from broker.printable import printable
from broker.settings.config import ConfigurationError, NoRoom, Settings
from broker.settings.hosts import is_loopback
from broker.settings.variables import PURE_VARIABLE
from broker.supervisor import interpreters
from broker.supervisor.definitions import InLine, bring_in_line
from broker.supervisor.parking import Parking
from broker.supervisor.processes import Processes, Role
from broker.supervisor.reloading import Reloading
from broker.supervisor.roles import all_roles, roles_of_gateways, roles_of_worker
from broker.touched_partition import touched_file
from protocol.extension import extension
from storage.data_dir import ROOT_KEY_FILE, RUN, DataDirectory, DataDirectoryError, DataDirectoryFull
from storage.durable import is_full, write_in_place
from storage.lmdb_store import DATA_FILE, StoreInUse, UnknownFormat, WrongPartition
from storage.store import StoreError, StoreFull

if TYPE_CHECKING:
    from broker.settings.sources import Loaded

EMULATORS_LINE = "Emulator Service is Successfully Up!"
"""What the Service Bus emulator says when it is ready. Tools that start it, such as Testcontainers, wait for this."""
MAX_NAMED = 100  # unknown keys of a file
OPS_PORT_FILE = "ops-port"  # in the directory `run`

log = get_logger("supervisor")

FrozenT = TypeVar("FrozenT", bound=Frozen)


class Part(StrEnum):
    """What runs here: everything, or a part of a namespace on several machines."""

    ALL = "serve"
    WORKER = "worker"
    GATEWAY = "gateway"


def run(loaded: "Loaded", part: Part, read_again: Callable[[], Settings]) -> int:
    """Serve until SIGTERM or SIGINT; returns the exit code. If it cannot start, it says why on stderr.

    At SIGHUP `read_again` reads the settings from where they came from. It raises ConfigurationError.
    """
    settings = loaded.settings
    interpreters.end_at_sigterm()  # until the processes run
    configure_logging(settings.log)
    if loaded.ignored:
        places = [printable(place) for place, _ in loaded.ignored]
        log.warning("the file has unknown keys; they have no effect", keys=places[:MAX_NAMED], number=len(places))
    for setting, advice in loaded.going:
        log.warning("the setting is no public one any more", setting=printable(setting), advice=advice)
    if loaded.not_emulator is not None:
        log.warning("not in the emulator's place, although ACCEPT_EULA is set", reason=loaded.not_emulator)
    try:
        _require(settings, part)
        if part is Part.GATEWAY:
            return _run_gateways(_with_absolute_paths(settings), read_again)
        # It is locked to the end, so that a second broker on the same directory is refused.
        with _opened(settings := _with_absolute_paths(settings)) as directory:
            remove_ports(directory.run_path)
            _try_ports(settings, part)
            key = ""
            if part is Part.ALL:
                makes_key = makes_root_key(settings)
                given, settings = settings, _with_key(settings)
                key = shown_key(given, settings, is_new=makes_key)
                if makes_key and not directory.is_new:
                    log.warning(
                        "a new root key was made: there is none in the data directory", path=str(directory.path)
                    )
            parkings = [Parking(settings.data_dir / touched_file(number)) for number in range(settings.workers_here)]
            roles = all_roles(settings, parkings) if part is Part.ALL else roles_of_worker(settings, parkings[0])
            processes = _processes(settings, part, roles, directory.path, read_again)
            processes.load()
            try:
                emptied = _emptied(directory)
                _grow(settings, directory)
                damaged = _reconcile(settings).damaged
                _note_stores(directory, settings.partitions_here)
                for partition in emptied - damaged.keys():
                    log.warning("a new, empty store was made: what the partition had is not here", partition=partition)
                for partition, damage in damaged.items():
                    parkings[partition % len(parkings)].park(partition, damage)
            except BaseException:
                processes.discard()
                raise

            def ready(answers: dict[str, dict[str, Any]]) -> None:
                _write_ports(directory.run_path, answers)
                _announce(settings, part, answers, key)

            return processes.run(ready)
    except ConfigurationError as error:
        text = str(error)
        if isinstance(error, CannotReconcile):
            text = "\n".join(map(loaded.spelled, error.refusals))
        print(f"peeklock: cannot start: {text}", file=sys.stderr)
        return NO_ROOM if isinstance(error, NoRoom) else PERMANENT_FAULT


def _require(settings: Settings, part: Part) -> None:
    """Check the settings for this part. Raises ConfigurationError if one is missing, or is for another part."""
    cluster = settings.cluster
    if part is Part.ALL:
        places = ("workers", "owned", "listen", "journals", "journal_listen")
        if given := [f"cluster.{name}" for name in places if getattr(cluster, name)]:
            raise ConfigurationError(
                f"{', '.join(given)}: for `peeklock worker` and `peeklock gateway`; leave out, or run one of these"
            )
        return
    if settings.syphon.primary is not None:
        raise ConfigurationError("syphon.primary is for `peeklock serve`; beside gateways, run `peeklock syphon`")
    if not cluster.workers:
        raise ConfigurationError("cluster.workers (--workers) is missing: name the addresses of all workers")
    if settings.journal.is_on and part is Part.WORKER and cluster.journal_listen is None:
        raise ConfigurationError(
            "cluster.journal_listen (--journal-listen) is missing: journal.mode is not off, so name the address at "
            "which the journal of this worker listens"
        )
    if settings.journal.is_on and part is Part.GATEWAY and not cluster.journals:
        raise ConfigurationError(
            "cluster.journals (--journals) is missing: journal.mode is not off, so name the addresses of all workers' "
            "journals"
        )
    if part is Part.WORKER and not cluster.owned:
        raise ConfigurationError("cluster.owned (--partitions) is missing: name the partitions of this worker")
    if part is Part.WORKER and cluster.listen is None:
        raise ConfigurationError("cluster.listen (--listen) is missing: name the address at which this worker listens")
    if part is Part.GATEWAY and settings.security.root_key is None and not settings.emulator:
        raise ConfigurationError(
            "security.root_key is missing, and a gateway has no data directory to keep one: set it, or "
            "PEEKLOCK_SECURITY__ROOT_KEY, to the same key in all gateways of the namespace"
        )


def _try_ports(settings: Settings, part: Part) -> None:
    """See now if ports are free, since the stores may take long to open. Raises ConfigurationError."""
    for text, _ in unusable(each for each in settings.listeners if part is not Part.WORKER or each[0] == "ops.port"):
        raise ConfigurationError(text)


def _run_gateways(settings: Settings, read_again: Callable[[], Settings]) -> int:
    _try_ports(settings, Part.GATEWAY)
    given, settings = settings, _with_key(settings)
    key = shown_key(given, settings, is_new=False)
    with TemporaryDirectory(prefix="peeklock-gateway-") as directory:
        (Path(directory) / RUN).mkdir()
        processes = _processes(settings, Part.GATEWAY, roles_of_gateways(settings), Path(directory), read_again)
        processes.load()
        return processes.run(lambda answers: _announce(settings, Part.GATEWAY, answers, key))


def _processes(
    settings: Settings, part: Part, roles: list[list[Role]], directory: Path, read_again: Callable[[], Settings]
) -> Processes:
    def complete() -> Settings:
        _require(found := _with_absolute_paths(read_again()), part)
        return found if part is Part.WORKER else _with_key(found)

    reloading = Reloading(settings, directory, complete)
    return Processes(roles, directory, settings.shutdown_timeout_ms / 1000, reloading.reload)


def _with_absolute_paths(settings: Settings) -> Settings:
    """Make paths absolute, because children run in the data directory."""
    return settings.model_copy(
        update={
            "data_dir": settings.data_dir.absolute(),
            "tls": _absolute(settings.tls),
            "cluster": _absolute(settings.cluster),
            "syphon": _absolute(settings.syphon),
        }
    )


def _absolute(section: FrozenT) -> FrozenT:
    paths = {name: value.absolute() for name, value in section if isinstance(value, Path)}
    return section.model_copy(update=paths)


def _opened(settings: Settings) -> DataDirectory:
    try:
        return DataDirectory(settings.data_dir, partitions=settings.partitions, owned=settings.cluster.owned)
    except DataDirectoryError as error:
        raise _unusable(error) from error


def _unusable(error: DataDirectoryError) -> ConfigurationError:
    return (NoRoom if isinstance(error, DataDirectoryFull) else ConfigurationError)(str(error))


def _with_key(settings: Settings) -> Settings:
    try:
        return with_root_key(settings)
    except OSError as error:
        fix = "Free space on the disk" if is_full(error) else f"Give user id {os.geteuid()} the right to"
        raise (NoRoom if is_full(error) else ConfigurationError)(
            f"the root key cannot be read or made: {error.strerror} ({error.filename}). {fix}, or set "
            "PEEKLOCK_SECURITY__ROOT_KEY"
        ) from error


def _grow(settings: Settings, directory: DataDirectory) -> None:
    """Add the partitions that are configured and were not there before.

    First every definition gets the partitions that its entity lives on, because those of earlier versions depend on the
    number that there was. Raises ConfigurationError.
    """
    before = directory.grows_from
    if before is None:
        return
    cluster = settings.cluster.model_copy(update={"owned": before.owned})
    as_before = {"partitions": before.partitions, "cluster": cluster, "queues": (), "topics": ()}
    found = _reconcile(settings.model_copy(update=as_before))
    if found.no_room:
        raise NoRoom(f"partitions cannot be added: {found.no_room}. Free space on the disk")
    try:
        directory.grow()
    except DataDirectoryError as error:
        raise _unusable(error) from error
    log.info("partitions were added", before=before.partitions, now=settings.partitions)


def _emptied(directory: DataDirectory) -> set[int]:
    """Partitions that had a store: somebody has removed it, and has let the description say that it was never made."""
    found = directory.described()
    if directory.is_new or found.stores is None:
        return set()
    paths = {each: directory.partition_path(each) for each in found.here if each not in found.stores}
    return {each for each, path in paths.items() if not (path / DATA_FILE).exists()}


def _note_stores(directory: DataDirectory, partitions: Iterable[int]) -> None:
    """Note the stores that there are: from now on, one that is missing is damage. Raises ConfigurationError.

    A directory of an earlier version on a full disk is used all the same.
    """
    try:
        directory.note_stores(partitions)
    except DataDirectoryFull as error:
        log.warning("the next start would not notice if a store were missing: the disk is full", reason=str(error))
    except DataDirectoryError as error:
        raise _unusable(error) from error


def _reconcile(settings: Settings) -> InLine:
    """Update the stored definitions, if there is room for that."""
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
    for warning in found.reconciled.warnings:
        log.warning("a declared entity is kept as it is stored, and would be refused today", problem=warning)
    if found.no_room:
        log.error(
            "entities stay as they are stored, and are not all as declared: there is no room to change them",
            reason=found.no_room,
            fix="make room, and start again",
        )
    return found


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
    raise (NoRoom if isinstance(error, StoreFull) else ConfigurationError)(f"{error}. {fix}") from error


def _write_ports(directory: Path, answers: dict[str, dict[str, Any]]) -> None:
    """Write the ports for `peeklock connection-string`, and that for operations, or "off", for deploy/healthcheck."""
    ports = (answer["ops_port"] for answer in answers.values() if answer.get("ops_port") is not None)
    try:
        write_in_place(directory / OPS_PORT_FILE, f"{next(ports, 'off')}\n".encode())
        write_ports(directory, answers)
    except OSError as error:
        log.warning("the health check will fail: the file with the ports cannot be written", reason=error.strerror)


def _announce(settings: Settings, part: Part, answers: dict[str, dict[str, Any]], key: str) -> None:
    if part is Part.WORKER:
        log.info("ready", partitions=settings.partitions_here, listen=settings.cluster.listen)
        print(worker_text(settings, answers.get("observer", {})), flush=True)
        return
    workers = settings.worker_count if part is Part.ALL else len(settings.cluster.workers)
    if extension is None and os.environ.get(PURE_VARIABLE) != "1":
        log.warning("the extension in C is not built: messages cost several times as much", fix="install peeklock anew")
    log.info("ready", partitions=settings.partitions, workers=workers)
    if (host := opened_by_known_key(settings)) is not None:
        log.warning(
            "everybody who reaches this host has all rights, by the emulator's well-known key",
            host=host,
            fix="set security.root_key, or amqp.host and http.host to 127.0.0.1",
        )
    answer = answers["gateway"] | answers.get("observer", {})
    print(start_text(settings, answer, key, with_data=part is Part.ALL), flush=True)


def opened_by_known_key(settings: Settings) -> str | None:
    """The host beyond this machine where the emulator's key has all rights, if there is one."""
    if settings.security.root_key != EMULATOR_KEY:
        return None
    return next((host for host in (settings.amqp.host, settings.http.host) if not is_loopback(host)), None)


def worker_text(settings: Settings, answer: dict[str, Any]) -> str:
    """The text for the user when a worker serves; `answer` is that of the process with its operations endpoint."""
    lines = [f"Peeklock {__version__}: a worker is ready.", ""]
    lines.append(f"  Partitions  {', '.join(map(str, settings.partitions_here))} of {settings.partitions}")
    lines.append(f"  Listens     {settings.cluster.listen}")
    if (ops := answer.get("ops_port")) is not None:
        lines.append(f"  Operations  http://{_address(settings.ops.host, ops)}/metrics, /readyz")
    return "\n".join([*lines, f"  Data        {settings.data_dir}", ""])


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


def _certified(settings: Settings) -> str:
    """The host that clients with TLS connect to; where the broker listens if the certificate does not say."""
    from broker.certified_host import certified_host  # a broker without TLS does not need it

    try:
        return certified_host(settings)
    except ConfigurationError:
        return "localhost" if is_loopback(settings.amqp.host) else settings.amqp.host


def start_text(settings: Settings, answer: dict[str, Any], key: str, *, with_data: bool = True) -> str:
    """The text for the user when the broker serves; `answer` is the gateway's, with its ports."""
    plain, tls, ops = (answer.get(name) for name in ("amqp_port", "amqps_port", "ops_port"))
    lines = [f"Peeklock {__version__} is ready.", ""]
    if plain is not None:
        lines.append(f"  AMQP        amqp://{_address(settings.amqp.host, plain)}")
    if tls is not None:
        lines.append(f"  AMQP, TLS   amqps://{_address(settings.amqp.host, tls)}")
    for scheme, port in (("http", answer.get("http_port")), ("https", answer.get("https_port"))):
        if port is not None:
            lines.append(f"  Management  {scheme}://{_address(settings.http.host, port)}")
    if ops is not None:
        lines.append(f"  Operations  http://{_address(settings.ops.host, ops)}/metrics, /readyz")
    if with_data:
        lines.append(f"  Data        {settings.data_dir}")
    lines += ["", "  Connection string for the Service Bus SDKs:"]
    port = plain if plain is not None else tls
    assert port is not None
    host = settings.amqp.host if plain is not None else _certified(settings)
    lines += ["  " + connection_string(host, port, ROOT_KEY_NAME, key, tls=plain is None), ""]
    if settings.emulator:
        lines += [EMULATORS_LINE, ""]
    return "\n".join(lines)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
