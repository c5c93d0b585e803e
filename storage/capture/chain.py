"""The chain of manifest entries, and how one of several writers wins without conditional writes.

    manifest/claim-<term>-<writer>.json              a writer has begun; `term` is greater than those of all before
    manifest/<sequence>-<term>-<writer>.json         an entry, which names the entry before it
    manifest/snapshot-<sequence>-<term>-<writer>.json  the state after that entry

Claims and entries are ordered by (term, writer). Readers take the newest entry, that is the one of the greatest claim
and then of the greatest sequence, and follow the names of previous entries from there. Entries that are not met on the
way are void, and so are the files that they alone name.

A writer

1. puts its claim down,
2. lists the claims, and gives up if one is greater,
3. lists the entries, and puts an entry of its own (`Kind.OPENED`) behind the newest,
4. and after each entry that it has written, lists the claims: if one is greater, it has been superseded.

Why that is safe, if each list after a write shows it: let writer W find no greater claim in step 4, after its entry
E. Any greater claim V is then put down after W began to list, so V lists the entries (step 3) when E is there already.
The newest entry that V finds is E, or comes behind it: one of W's own, or one of a writer between W and V, to which the
same applies. So V continues behind E, and E stays in the chain for ever. If W does find a greater claim, it does not
know whether E counts, and stops. Readers may have believed an entry that became void a moment later. They have read
nothing wrong: the rows of an offset are the same, whoever captures them, and the files stay for a day.

That holds for any two writers, however slow. Two things are there for peace alone, so that a second capture is refused
instead of ending the first: in a local folder a lock on a file, elsewhere a claim that its writer renews.
"""

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

from storage.capture.errors import AnotherBroker, AnotherNamespace, DamagedManifest, InUse, SourceFailed, Superseded
from storage.capture.manifest import Entry, Kind, Position, Snapshot, State, TableName, decode, does_not_follow, encode
from storage.capture.place import PARTIAL, Place
from storage.file_lock import FileLock, FileLocked

FOLDER: Final = "manifest"
LOCK: Final = "lock"
LEASE_SECONDS: Final = 60.0  # a claim that is not renewed for so long is of a writer that is dead
RENEWALS_PER_LEASE: Final = 4
SNAPSHOT_ENTRIES: Final = 50  # so many entries lie between two snapshots

_WRITER: Final = r"(?P<term>[0-9]{10})-(?P<writer>[0-9a-f]{16})\.json"
_ENTRY: Final = re.compile(rf"(?P<sequence>[0-9]{{20}})-{_WRITER}")
_CLAIM: Final = re.compile(f"claim-{_WRITER}")
_SNAPSHOT: Final = re.compile(rf"snapshot-(?P<entry>[0-9]{{20}}-{_WRITER})")


class Writer(NamedTuple):
    """Writers are ordered as this is."""

    term: int
    id: str

    @property
    def suffix(self) -> str:
        return f"{self.term:010d}-{self.id}.json"


class EntryName(NamedTuple):
    """Entries are ordered as this is."""

    writer: Writer
    sequence: int

    def __str__(self) -> str:
        return f"{self.sequence:020d}-{self.writer.suffix}"


class Names(NamedTuple):
    """The files of the manifest's folder. Snapshots are by the names of their entries."""

    claims: list[Writer]
    entries: list[EntryName]
    snapshots: set[str]


def names(place: Place) -> Names:
    found = Names([], [], set())
    for stored in place.files(FOLDER):
        name = stored.path.removeprefix(f"{FOLDER}/")
        if match := _ENTRY.fullmatch(name):
            found.entries.append(_entry_name(match))
        elif match := _CLAIM.fullmatch(name):
            found.claims.append(_writer(match))
        elif match := _SNAPSHOT.fullmatch(name):
            found.snapshots.add(match["entry"])
    return found


def _writer(match: re.Match[str]) -> Writer:
    return Writer(int(match["term"]), match["writer"])


def _entry_name(match: re.Match[str]) -> EntryName:
    return EntryName(_writer(match), int(match["sequence"]))


def load(place: Place) -> State | None:
    """What has been captured; None if there is no manifest. Raises OSError, DamagedManifest."""
    found = names(place)
    if _lost_entry(found) is not None:
        found = names(place)  # a capture may have written it, and the snapshot, while they were listed
    if (lost := _lost_entry(found)) is not None:
        raise DamagedManifest(f"{lost}: is missing, and there is a snapshot of it")
    if not found.entries:
        return None
    entries: list[tuple[str, Entry, str]] = []
    name: str | None = str(max(found.entries))
    state: State | None = None
    while name is not None and state is None:
        if name in found.snapshots:
            state = State.of(_read_snapshot(place, name))
        else:
            entry, checksum = _read_entry(place, name)
            if (entry.previous is None) != (_sequence(name) == 1) or (
                entry.previous is not None and _sequence(entry.previous) != _sequence(name) - 1
            ):
                raise DamagedManifest(f"{name}: {entry.previous} is not the entry before")
            entries.append((name, entry, checksum))
            name = entry.previous
    if state is None:
        state = State(entries[-1][1].namespace)
    for each, entry, checksum in reversed(entries):
        state.apply(each, entry, checksum)
    return state


def load_captured(place: Place) -> State | None:
    """The same; None if nothing was ever captured there. Raises OSError, DamagedManifest."""
    state = load(place)
    if state is not None:
        return state
    stored = next((each for table in TableName for each in place.files(f"table={table}")), None)
    if stored is None:
        return None
    # A writer puts its first entry down before any file.
    if (by_another_writer := load(place)) is not None:
        return by_another_writer
    raise DamagedManifest(
        f"{FOLDER}: has no entry, but {stored.path} is there. Put the entries back, or capture to another URL"
    )


def all_entries(place: Place, damage: list[DamagedManifest]) -> int:
    """Read all entries and snapshots that are there, also those that `load` does not need; the number of entries.

    `damage` gets what is wrong with them. Raises OSError.
    """
    found = names(place)
    checksums: dict[str, str] = {}
    read: list[tuple[str, Entry]] = []
    for name in sorted(map(str, found.entries)):
        with suppress(FileNotFoundError):  # a capture has tidied up; what is needed, `load` has found
            try:
                entry, checksums[name] = decode(name, bytes(place.read(f"{FOLDER}/{name}")), Entry)
                read.append((name, entry))
            except DamagedManifest as error:
                damage.append(error)
    for name, entry in read:
        before = checksums.get(entry.previous or "")
        if entry.version > 1 and None not in (before, entry.previous_checksum) and before != entry.previous_checksum:
            damage.append(does_not_follow(name, entry, before))
    for name in sorted(found.snapshots):
        with suppress(FileNotFoundError):
            try:
                _read_snapshot(place, name)
            except DamagedManifest as error:
                damage.append(error)
    return len(found.entries)


def _lost_entry(found: Names) -> EntryName | None:
    """One that is newer than all that are there, of which there is a snapshot."""
    of_snapshots = (_entry_name(match) for name in found.snapshots if (match := _ENTRY.fullmatch(name)))
    newest = max(of_snapshots, default=None)
    if newest is None or (found.entries and newest <= max(found.entries)):
        return None
    return newest


def _sequence(name: str) -> int:
    """Return the number of an entry; -1 if this is the name of none."""
    match = _ENTRY.fullmatch(name)
    return int(match["sequence"]) if match else -1


def _read_entry(place: Place, name: str) -> tuple[Entry, str]:
    """The entry, and its checksum. Raises DamagedManifest, OSError."""
    try:
        text = bytes(place.read(f"{FOLDER}/{name}"))
    except FileNotFoundError:
        raise DamagedManifest(f"{name}: is missing") from None
    return decode(name, text, Entry)


def _read_snapshot(place: Place, name: str) -> Snapshot:
    snapshot, _ = decode(f"snapshot-{name}", bytes(place.read(f"{FOLDER}/snapshot-{name}")), Snapshot)
    if snapshot.entry != name:
        raise DamagedManifest(f"snapshot-{name}: is of {snapshot.entry}")
    return snapshot


class Chain:
    """The writer's end of the chain. `state` is what has been written."""

    def __init__(
        self,
        place: Place,
        namespace: str,
        *,
        namespace_id: str | None = None,
        journal: Collection[Position] = (),
        lease_seconds: float = LEASE_SECONDS,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Claim the place for a broker: `namespace_id` is None if it does not tell it, `journal` are the partitions and
        epochs that its journal has now.

        Raises InUse, Superseded, AnotherNamespace, AnotherBroker, SourceFailed, DamagedManifest, OSError.
        """
        self._place = place
        self._lease_seconds = lease_seconds
        self._renewals = 0
        self._renewed_s = time.monotonic()
        self._writer: Writer | None = None
        self._lock = _locked(place)
        try:
            self._claim(sleep)
            state = load_captured(place) or State(namespace)
            self.state = state
            self.require(namespace, namespace_id, journal)
            self._sequence = 0 if state.head is None else _sequence(state.head)
            self.append(state.following(Kind.OPENED, _now_ms()))
        except BaseException:
            self.close()
            raise

    def require(self, namespace: str, namespace_id: str | None, journal: Collection[Position]) -> None:
        """Check that the capture is of this broker (see `__init__`); the next entry has its id, if that was not known.

        Raises AnotherNamespace, AnotherBroker; SourceFailed if nobody can say now.
        """
        state, url = self.state, self._place.url
        if state.namespace != namespace:
            raise AnotherNamespace(f"{url} has rows of the namespace {state.namespace!r}, not {namespace!r}")
        if state.namespace_id is not None and state.namespace_id == namespace_id:
            return
        # Where an id is missing, epochs are compared: they are random numbers, so one that both have says enough.
        is_known_by_both = state.namespace_id is not None and namespace_id is not None
        is_its_own = not is_known_by_both and (not state.next or not state.next.keys().isdisjoint(journal))
        if state.head is None or is_its_own:
            state.namespace_id = state.namespace_id or namespace_id
        elif namespace_id is not None:
            raise AnotherBroker(
                f"{url} has the rows of another broker of the namespace {namespace!r}: its namespace id is "
                f"{state.namespace_id or 'not known'}, and this broker's is {namespace_id}. Capture to another URL; a "
                "broker that was restored from a capture has a new id, too"
            )
        elif state.namespace_id is not None:
            raise SourceFailed(
                f"the broker does not say its namespace id now, and its journal has no epoch of those in {url}"
            )
        # Else the broker is of an earlier version, and its store may have been restored.

    def _claim(self, sleep: Callable[[float], object]) -> None:
        found = names(self._place)
        if found.claims and self._lock is None:
            self._wait_for_end(max(found.claims), sleep)
        terms = [writer.term for writer in (*found.claims, *(entry.writer for entry in found.entries))]
        self._writer = Writer(1 + max(terms, default=0), secrets.token_hex(8))
        self._put_claim()
        self.check()

    def _wait_for_end(self, other: Writer, sleep: Callable[[float], object]) -> None:
        """Wait until its claim says that it has ended, or was not renewed for the time of a lease. Raises InUse."""
        said = self._claim_of(other)
        for _ in range(RENEWALS_PER_LEASE + 1):
            if said is None or b'"ended": true' in said:
                return
            sleep(self._lease_seconds / RENEWALS_PER_LEASE)
            if self._claim_of(other) != said or max(names(self._place).claims) != other:
                raise InUse(f"{self._place.url} is written by another capture: {_told(said)}")

    def _claim_of(self, writer: Writer) -> bytes | None:
        try:
            return bytes(self._place.read(f"{FOLDER}/claim-{writer.suffix}"))
        except FileNotFoundError:
            return None

    @property
    def _own(self) -> Writer:
        assert self._writer is not None, "nothing was claimed yet"
        return self._writer

    def _put_claim(self, *, ended: bool = False) -> None:
        who = {"host": socket.gethostname(), "pid": os.getpid(), "renewals": self._renewals, "ended": ended}
        self._place.write(f"{FOLDER}/claim-{self._own.suffix}", json.dumps(who).encode())

    def check(self) -> None:
        """Raise Superseded if another writer has taken over."""
        greater = max(names(self._place).claims, default=self._own)
        if greater > self._own:
            raise Superseded(f"another capture has taken over {self._place.url}: {_told(self._claim_of(greater))}")

    def renew_when_due(self) -> None:
        """Renew the claim in time, if called more often than `LEASE_SECONDS / RENEWALS_PER_LEASE`. Raises OSError."""
        now_s = time.monotonic()
        if self._lock is None and now_s - self._renewed_s >= self._lease_seconds / RENEWALS_PER_LEASE / 2:
            self._renewals += 1
            self._put_claim()
            self._renewed_s = now_s

    def append(self, entry: Entry) -> None:
        """Make it the newest. Raises Superseded, OSError; then nobody knows whether it counts: make a new chain."""
        name = EntryName(self._own, self._sequence + 1)
        text, checksum = encode(entry)
        self._place.write(f"{FOLDER}/{name}", text)
        self.check()
        self.state.apply(str(name), entry, checksum)
        self._sequence += 1

    def tidy(self, keep_ms: int) -> None:
        """Write a snapshot if it is time, and remove what readers need no more who have begun since `keep_ms`.

        Raises Superseded, OSError, DamagedManifest.
        """
        found = names(self._place)
        newest = max(map(_sequence, found.snapshots), default=0)
        if self._sequence - newest >= SNAPSHOT_ENTRIES:
            self._place.write(f"{FOLDER}/snapshot-{self.state.head}", encode(self.state.snapshot()).text)
        self.check()
        self._remove_old(keep_ms)
        for claim in found.claims:
            if claim < self._own:
                self._remove(f"claim-{claim.suffix}")

    def _remove_old(self, keep_ms: int) -> None:
        """Remove entries and snapshots before the newest snapshot that was there at `keep_ms`."""
        stored = list(self._place.files(FOLDER))
        old = {each.path.removeprefix(f"{FOLDER}/") for each in stored if each.modified_s * 1000 < keep_ms}
        covered = max((_sequence(match["entry"]) for match in map(_SNAPSHOT.fullmatch, old) if match), default=0)
        for name in old:
            sequence = _sequence(name.removeprefix("snapshot-"))
            if 0 < sequence < covered or name.endswith(PARTIAL):
                self._remove(name)

    def _remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._place.delete(f"{FOLDER}/{name}")

    def close(self) -> None:
        """Let others write here. A claim that cannot be ended is taken for dead after the time of a lease."""
        if self._writer is not None:
            with suppress(OSError):
                self._put_claim(ended=True)
        if self._lock is not None:
            self._lock.release()


def _locked(place: Place) -> FileLock | None:
    """The lock of a local folder. Raises InUse, OSError."""
    if place.local is None:
        return None
    folder: Path = place.local / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    try:
        return FileLock(folder / LOCK)
    except FileLocked as error:
        raise InUse(f"{place.url} is written by another capture: process {error.pid or '(unknown)'}") from None


def _told(claim: bytes | None) -> str:
    try:
        who = json.loads(claim or b"")
        return f"process {int(who['pid'])} on {str(who['host'])!r}"
    except (ValueError, TypeError, KeyError):
        return "an unknown process"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
