"""Verifies, backs up and restores a data directory from outside the broker.

Verify and backup read snapshots, so the broker may be running. Each partition is copied as it was at one commit, but
the partitions of a backup are not of the same instant. A backup has the layout of a data directory. It does not have
the root key, which is a secret, nor files that only a running broker needs, nor logs: their changes are in its stores.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from storage.apart import ProcessDied, apart, read_apart
from storage.data_dir import (
    DESCRIPTION_FILE,
    LOCK_FILE,
    MOUNT_TABLE,
    PARTITIONS,
    UNFINISHED,
    DataDirectoryLocked,
    Description,
    partition_path,
    pid_of_user,
    read_description,
    refuse_network_file_system,
)
from storage.durable import sync_directory, sync_file, write_file
from storage.file_lock import FileLock, FileLocked
from storage.findings import PartitionReport, Problem
from storage.lmdb_store import DATA_FILE, OWNER_LOCK_FILE, check_store_pages, renew_store_id
from storage.lmdb_store import LOCK_FILE as TABLES_LOCK_FILE
from storage.log.reading import LogDamaged
from storage.log.snapshot import Snapshot
from storage.store import StoreError
from storage.verification import verify_snapshot
from storage.wording import counted

WORK = "restoring"  # a folder in such a directory, with what is done so far


class MaintenanceError(Exception):
    """The operation cannot be done; the text says why. Nothing was changed."""


class NotADataDirectory(MaintenanceError):
    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is neither a data directory nor a complete backup: it has no {DESCRIPTION_FILE}")
        self.path = path


class TargetNotEmpty(MaintenanceError):
    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} exists and is not an empty directory; choose another, or move it away")
        self.path = path


class BackupDamaged(MaintenanceError):
    """The backup did not pass `verify`; `report` says what is wrong with it."""

    def __init__(self, path: Path, report: "Report") -> None:
        found = counted(report.problem_count, "problem")
        super().__init__(f"{path}: {found} found, not restored; `peeklock verify` lists them")
        self.path, self.report = path, report


@dataclass(frozen=True)
class Report:
    """The findings of `verify` by partition."""

    partitions: tuple[PartitionReport, ...]

    @property
    def ok(self) -> bool:
        return all(partition.ok for partition in self.partitions)

    @property
    def problem_count(self) -> int:
        return sum(partition.problems.total() for partition in self.partitions)

    @property
    def torn(self) -> list[str]:
        """See PartitionReport; several partitions may have the same log."""
        return list(dict.fromkeys(partition.torn for partition in self.partitions if partition.torn))


def verify(path: Path) -> Report:
    """Read all of a data directory or backup and report what is wrong. Changes nothing; the broker may be running.

    Raises NotADataDirectory, UnknownLayout. A store that cannot be read is a finding, and so is a damaged log, for each
    partition whose latest changes are in it.
    """
    description = _description(path)
    report = Report(tuple(verify_partition(path, partition) for partition in description.here))
    if _is_used(path):
        for each in report.partitions:
            each.torn = ""  # it is being written
    return report


def backup(source: Path, target: Path) -> int:
    """Copy the data directory `source` to the new directory `target`; returns the bytes written.

    The broker may be running. `target` appears when it is complete and on disk; a backup that failed leaves nothing.
    Raises NotADataDirectory, UnknownLayout, TargetNotEmpty, StoreError, OSError.
    """
    description = _description(source)
    target = target.absolute()
    _refuse_unless_empty(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial")
    try:
        partial.mkdir(mode=0o700)
    except FileExistsError:
        raise MaintenanceError(f"{partial} exists: another backup is under way, or one was killed; remove it") from None
    try:
        copied_bytes = _copy(source, partial, description)
        partial.rename(target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(target.parent)
    return copied_bytes


def restore(source: Path, data_directory: Path) -> int:
    """Verify the backup `source` and copy it to `data_directory`, missing or empty; returns the bytes written.

    A broker refuses the directory until it is complete. Raises NotADataDirectory, UnknownLayout, TargetNotEmpty,
    BackupDamaged, NetworkFileSystem, StoreError, OSError.
    """
    description = _description(source)
    data_directory = data_directory.absolute()
    _refuse_unless_empty(data_directory)
    refuse_network_file_system(data_directory, MOUNT_TABLE)
    report = verify(source)
    if not report.ok:
        raise BackupDamaged(source, report)
    data_directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    lock = FileLock(data_directory / LOCK_FILE)
    try:
        copied_bytes = _copy(source, data_directory, description)
        sync_directory(data_directory.parent)
    finally:
        lock.release()
    return copied_bytes


@contextmanager
def new_data_directory(path: Path, description: Description) -> Iterator[Path]:
    """Let the block make the stores of its partitions in the directory `path`, missing or empty, which it has locked.

    The block gets a folder for its work, in which it leaves the folder PARTITIONS. If it fails, or the process is
    killed, that folder stays as it is, for the block of the next call. A broker refuses the directory until the block
    has ended. Raises TargetNotEmpty, NetworkFileSystem, DataDirectoryLocked, OSError.
    """
    path = path.absolute()
    marker, work, made = path / UNFINISHED, path / WORK, path / PARTITIONS
    if not marker.exists() or (path / DESCRIPTION_FILE).exists():
        _refuse_unless_empty(path)
    refuse_network_file_system(path, MOUNT_TABLE)
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        lock = FileLock(path / LOCK_FILE)
    except FileLocked as error:
        raise DataDirectoryLocked(path, error.pid) from error
    try:
        write_file(marker, b"")
        work.mkdir(mode=0o700, exist_ok=True)
        if made.exists():  # the process was killed while it wrote what follows below
            shutil.rmtree(work / PARTITIONS, ignore_errors=True)
            made.rename(work / PARTITIONS)
        yield work
        (work / PARTITIONS).rename(made)
        sync_directory(made)
        write_file(path / DESCRIPTION_FILE, replace(description, stores=description.here).to_json())
        _tidy(path)
        sync_directory(path.parent)
    finally:
        lock.release()


def is_made(path: Path) -> bool:
    """Whether a block of `new_data_directory` had ended there, and the process was killed before all was tidy. Then it
    is tidy on return. Raises OSError."""
    if not ((path / UNFINISHED).exists() and (path / DESCRIPTION_FILE).exists()):
        return False
    _tidy(path)
    return True


def _tidy(path: Path) -> None:
    shutil.rmtree(path / WORK, ignore_errors=True)
    (path / UNFINISHED).unlink()
    sync_directory(path)


def _copy(source: Path, target: Path, description: Description) -> int:
    """Copy and sync all partitions, and last the description, without which the copy is no data directory.

    Each store of the copy gets a new id, even in a backup, because somebody may use the backup as a data directory.
    """
    (target / PARTITIONS).mkdir(mode=0o700)
    copied_bytes = 0
    for partition in description.here:
        directory = partition_path(target, partition)
        directory.mkdir(mode=0o700)
        original = partition_path(source, partition)
        read_apart(original, _copy_store, original, directory)
        file = directory / DATA_FILE
        file.chmod(0o600)
        sync_file(file)
        sync_directory(directory)
        copied_bytes += file.stat().st_size
    sync_directory(target / PARTITIONS)
    copied = Description(description.partitions, owned=description.owned, stores=description.here)
    write_file(target / DESCRIPTION_FILE, copied.to_json())
    return copied_bytes


def _copy_store(source: Path, target: Path) -> None:
    with Snapshot(source) as snapshot:
        snapshot.copy(target)
    renew_store_id(target)
    for name in (TABLES_LOCK_FILE, OWNER_LOCK_FILE):  # left when young changes were added
        (target / name).unlink(missing_ok=True)


def verify_partition(path: Path, partition: int) -> PartitionReport:
    """Verify the pages, then the records on them. LMDB takes part in both, so each has a process of its own."""
    directory = partition_path(path, partition)
    report = PartitionReport(partition)
    try:
        damaged = apart(check_store_pages, directory)
    except (StoreError, ProcessDied) as error:
        report.add(Problem.UNREADABLE_STORE, None, b"", _text(directory, error))
        return report
    try:
        report = apart(_verify_contents, directory)
    except LogDamaged as error:
        report.add(Problem.DAMAGED_LOG, None, b"", str(error))
    except Exception as error:  # damaged contents can raise any exception
        report.add(Problem.UNREADABLE_STORE, None, b"", _text(directory, error))
    else:
        if report.partition != partition:
            report.add(Problem.UNREADABLE_STORE, None, b"", f"{directory}: holds partition {report.partition}")
    for table, text in damaged:
        report.add(Problem.DAMAGED_PAGES, table, b"", text)
    return report


def _is_used(path: Path) -> bool:
    """A broker runs with this data directory."""
    return (path / LOCK_FILE).exists() and pid_of_user(path) is not None


def _verify_contents(directory: Path) -> PartitionReport:
    with Snapshot(directory) as snapshot:
        report = verify_snapshot(snapshot)
        report.torn = snapshot.torn
        return report


def _text(directory: Path, error: Exception) -> str:
    if isinstance(error, StoreError):
        return str(error)
    how = f"the process that read it died ({error})" if isinstance(error, ProcessDied) else repr(error)
    return f"{directory}: what it holds makes no sense: {how}"


def _description(path: Path) -> Description:
    description = read_description(path)
    if description is None:
        raise NotADataDirectory(path)
    return description


def _refuse_unless_empty(path: Path) -> None:
    if not (path.exists() or path.is_symlink()):
        return
    # If it is a volume of its own, it may have a lost+found of the file system.
    if not path.is_dir() or any(child.name != "lost+found" for child in path.iterdir()):
        raise TargetNotEmpty(path)
