"""The broker's directory: one per broker, on a disk of this machine, used by one broker at a time.

peeklock.json        format version, the number of partitions, which of them are here (both may only grow), and of
                     which the stores have been made: such a store is never made again when it is missing
lock                 held by the broker that uses the directory; contains its process id
root-key             the key made at first start, mode 0600
partitions/<n>/      one store each, see lmdb_store
logs/<n>/            the commit log of worker n, see storage.log
journal/             the journal, if it was ever on: see storage.journal
run/                 sockets of the running broker; useless when no broker runs
"""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from storage.durable import is_full, sync_directory, write_file
from storage.file_lock import FileLock, FileLocked, holder

LAYOUT_VERSION = 2
WITHOUT_LOG = 1  # a broker of that version would not look into the logs, and miss changes
_KNOWN_VERSIONS = (WITHOUT_LOG, LAYOUT_VERSION)
DESCRIPTION_FILE = "peeklock.json"
LOCK_FILE = "lock"
ROOT_KEY_FILE = "root-key"
PARTITIONS = "partitions"
LOGS = "logs"
RUN = "run"
JOURNAL = "journal"
UNFINISHED = "unfinished"  # a file in a directory that is being made into a data directory

MOUNT_TABLE = Path("/proc/self/mountinfo")  # on Linux; elsewhere there is none, and nothing is refused

# A store is mapped memory plus POSIX locks. On these file systems another machine's writes are not seen, locks may not
# hold, and a sync may return before the data is safe.
# fmt: off
NETWORK_FILE_SYSTEMS = frozenset(
    [
        "9p", "afp", "afs", "beegfs", "ceph", "cifs", "coda", "davfs", "fuse.blobfuse", "fuse.blobfuse2",
        "fuse.ceph", "fuse.davfs2", "fuse.gcsfuse", "fuse.glusterfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs",
        "glusterfs", "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "orangefs", "pvfs2", "smb2", "smb3", "smbfs",
        "webdav",
    ]
)
# fmt: on


class DataDirectoryError(Exception):
    """The data directory cannot be used; the text says why and what to do."""


class DataDirectoryLocked(DataDirectoryError):
    """Another broker uses the directory; `pid` is its process id, if known."""

    def __init__(self, path: Path, pid: int | None) -> None:
        by = f"process {pid}" if pid else "another process"
        super().__init__(
            f"data directory {path} is in use by {by}: stop that broker first, or choose another --data-dir"
        )
        self.path, self.pid = path, pid


class NetworkFileSystem(DataDirectoryError):
    def __init__(self, path: Path, mount_point: str, kind: str) -> None:
        super().__init__(
            f"data directory {path} is on a network file system: {mount_point} is of type {kind}, where neither locks "
            f"nor syncs can be relied on. Choose a --data-dir on a local disk or an attached block volume"
        )
        self.path, self.mount_point, self.kind = path, mount_point, kind


class DataDirectoryUnwritable(DataDirectoryError):
    def __init__(self, path: Path, error: OSError) -> None:
        fix = "Free space on its disk" if is_full(error) else f"Make it writable for user id {os.geteuid()}"
        super().__init__(
            f"data directory {path} cannot be written: {error.strerror} ({error.filename}). {fix}, or choose another "
            "--data-dir"
        )
        self.path = path


class DataDirectoryFull(DataDirectoryUnwritable):
    """The disk has no room."""


def _unwritable(path: Path, error: OSError) -> DataDirectoryUnwritable:
    return (DataDirectoryFull if is_full(error) else DataDirectoryUnwritable)(path, error)


class UnfinishedRestore(DataDirectoryError):
    def __init__(self, path: Path) -> None:
        super().__init__(
            f"data directory {path} is what a restore has made so far: run the same `peeklock restore` again, which "
            "goes on where it was, or remove the directory"
        )


class UnknownLayout(DataDirectoryError):
    """`peeklock.json` has another version, or a content that no broker writes."""


class FewerPartitions(DataDirectoryError):
    def __init__(self, path: Path, found: int, wanted: int) -> None:
        super().__init__(
            f"data directory {path} is of a namespace with {found} partitions, and {wanted} are configured: the number "
            f"may only grow. Set partitions to {found} or more, or choose another --data-dir"
        )


class OtherPartitions(DataDirectoryError):
    def __init__(self, path: Path, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
        has, configured = (", ".join(map(str, each)) or "all of the namespace" for each in (found, wanted))
        super().__init__(
            f"data directory {path} has the partitions {has}, and {configured} are configured: it can only get "
            "partitions that are new in the namespace. Set cluster.owned (--partitions) to those it has, or give the "
            "worker its own --data-dir"
        )


@dataclass(frozen=True)
class Description:
    """The content of `peeklock.json`. `owned` are the partitions in this directory; empty if all are.

    `stores` are the partitions whose stores have been made; None before the first start has made them, and in
    directories of earlier versions.
    """

    partitions: int
    layout_version: int = LAYOUT_VERSION
    owned: tuple[int, ...] = ()
    stores: tuple[int, ...] | None = None

    @property
    def here(self) -> tuple[int, ...]:
        return self.owned or tuple(range(self.partitions))

    def to_json(self) -> bytes:
        document: dict[str, Any] = {"layout-version": self.layout_version, "partitions": self.partitions}
        if self.owned:
            document["owned"] = list(self.owned)
        if self.stores is not None:
            document["stores"] = list(self.stores)
        return json.dumps(document, indent=2).encode() + b"\n"

    def require_growth(self, path: Path, wanted: "Description") -> None:
        """Raises FewerPartitions and OtherPartitions unless the directory `path` can become as wanted.

        Partitions are added; none goes, and none that the namespace has already comes from another worker.
        """
        if wanted.partitions < self.partitions:
            raise FewerPartitions(path, self.partitions, wanted.partitions)
        added = set(wanted.owned) - set(self.owned)
        if bool(wanted.owned) != bool(self.owned) or not set(self.owned) <= set(wanted.owned):
            raise OtherPartitions(path, self.owned, wanted.owned)
        if any(each < self.partitions for each in added):
            raise OtherPartitions(path, self.owned, wanted.owned)


def read_description(path: Path) -> Description | None:
    """The description of the data directory or backup `path`; None if it has none. Raises UnknownLayout, OSError."""
    file = path / DESCRIPTION_FILE
    try:
        content = file.read_bytes()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(content)
        version, partitions = document["layout-version"], document["partitions"]
    except (ValueError, KeyError, TypeError) as error:
        raise UnknownLayout(f"{file}: not a description of a data directory: {error!r}") from error
    if type(version) is not int or version not in _KNOWN_VERSIONS:
        raise UnknownLayout(
            f"{file}: layout version {version!r} found, {LAYOUT_VERSION} supported; nothing was changed"
        )
    if type(partitions) is not int or partitions < 1:
        raise UnknownLayout(f"{file}: the number of partitions is {partitions!r}")
    owned, stores = document.get("owned", []), document.get("stores", [])
    for numbers in (owned, stores):
        if not isinstance(numbers, list) or any(
            type(each) is not int or not 0 <= each < partitions for each in numbers
        ):
            raise UnknownLayout(f"{file}: the partitions in it are {numbers!r}")
    return Description(partitions, version, tuple(owned), tuple(stores) if "stores" in document else None)


def partition_path(path: Path, partition: int) -> Path:
    return path / PARTITIONS / str(partition)


class DataDirectory:
    """The directory, locked for this process until `close` or the process's end.

    A missing directory is created with mode 0700 for `partitions` partitions. One of an older layout gets the current
    one's number, and older brokers refuse it from then on. One with fewer partitions `grows_from` these until `grow` is
    called. It `is_new` if it had no description. If the directory is refused, nothing in it is changed. Raises a
    DataDirectoryError.
    """

    def __init__(
        self, path: Path, *, partitions: int, owned: tuple[int, ...] = (), mount_table: Path = MOUNT_TABLE
    ) -> None:
        """`owned` are the partitions in it; empty if all are."""
        self.path = path = path.absolute()
        self._wanted = Description(partitions, owned=tuple(sorted(owned)))
        self.grows_from: Description | None = None
        self.is_new = False
        refuse_network_file_system(path, mount_table)
        try:
            if not path.exists():
                path.mkdir(mode=0o700, parents=True, exist_ok=True)
                sync_directory(path.parent)
            self._lock = FileLock(path / LOCK_FILE)
        except FileLocked as error:
            raise DataDirectoryLocked(path, error.pid) from error
        except OSError as error:
            raise _unwritable(path, error) from error
        try:
            self._describe()
            for directory in (path / PARTITIONS, self.run_path):
                directory.mkdir(mode=0o700, exist_ok=True)
            sync_directory(path)
        except OSError as error:
            self.close()
            raise _unwritable(path, error) from error
        except DataDirectoryError:
            self.close()
            raise

    @property
    def run_path(self) -> Path:
        return self.path / RUN

    @property
    def root_key_path(self) -> Path:
        return self.path / ROOT_KEY_FILE

    def partition_path(self, partition: int) -> Path:
        return partition_path(self.path, partition)

    def close(self) -> None:
        self._lock.release()

    def grow(self) -> None:
        """Give the directory the partitions that are wanted. Entities know by now on which partitions they live."""
        self._write(replace(self._wanted, stores=self.described().stores))
        self.grows_from = None

    def note_stores(self, partitions: Iterable[int]) -> None:
        """The stores of these partitions have been made, and are never to be made again.

        Raises DataDirectoryUnwritable; DataDirectoryFull.
        """
        found = self.described()
        stores = tuple(sorted({*(found.stores or ()), *partitions}))
        if stores == found.stores:
            return
        try:  # whoever has made them may have been killed before it did this
            for each in (self.path / PARTITIONS).iterdir():
                sync_directory(each)
            sync_directory(self.path / PARTITIONS)
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self._write(replace(found, stores=stores))

    def described(self) -> Description:
        """Read the description of the directory. Raises UnknownLayout, OSError."""
        found = read_description(self.path)
        assert found is not None
        return found

    def _describe(self) -> None:
        found = read_description(self.path)
        if found is None:
            if (self.path / UNFINISHED).exists():
                raise UnfinishedRestore(self.path)
            # The description is written before anything else, so the number of partitions of stores without one is
            # unknown.
            for name in (PARTITIONS, LOGS):
                if (self.path / name).exists():
                    raise UnknownLayout(f"{self.path}: has {name}/ but no {DESCRIPTION_FILE}; restore that file")
            self.is_new = True
            self._write(self._wanted)
            return
        found.require_growth(self.path, self._wanted)
        if (found.partitions, found.owned) != (self._wanted.partitions, self._wanted.owned):
            self.grows_from = found
        if found.layout_version != LAYOUT_VERSION:
            self._write(replace(found, layout_version=LAYOUT_VERSION))

    def _write(self, description: Description) -> None:
        try:
            write_file(self.path / DESCRIPTION_FILE, description.to_json())
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def pid_of_user(path: Path) -> int | None:
    """The process that has locked the data directory at `path`; None if none has. Raises OSError."""
    return holder(path / LOCK_FILE)


def refuse_network_file_system(path: Path, mount_table: Path = MOUNT_TABLE) -> None:
    """Raise NetworkFileSystem if `path`, or the place where it would be created, is on a network file system."""
    try:
        lines = mount_table.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return
    there = path.resolve()
    best, kind = -1, ""
    mount_point = Path("/")
    for line in lines:
        # 36 35 98:0 /root /mount\040point rw,noatime shared:1 - ext4 /dev/sda1 rw: proc(5)
        before, separator, after = line.partition(" - ")
        if not separator:
            continue
        mounted = Path(_unescape(before.split()[4]))
        # Of equal mount points the later line counts, because it is mounted over the earlier one.
        if there.is_relative_to(mounted) and len(mounted.parts) >= best:
            best, kind, mount_point = len(mounted.parts), after.split()[0], mounted
    if kind in NETWORK_FILE_SYSTEMS:
        raise NetworkFileSystem(path, str(mount_point), kind)


def _unescape(field: str) -> str:
    """The kernel writes space, tab, newline and backslash as three octal digits."""
    for escaped, character in (("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")):
        field = field.replace(escaped, character)
    return field
