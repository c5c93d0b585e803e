"""What may be on a disk after its power was lost: a model of files, names and syncs, which is told a trace.

What is durable
- A write, or a new size, once a sync of its file has returned that began after the write had returned; or at once when
  it returns, if the descriptor has O_DSYNC.
- A name (created, renamed, removed), once a sync of its directory has returned that began after the change had
  returned. The sync of a file says nothing about its name.

What is not durable may have happened or not, for each loss by chance:
- Of each write any of its sectors of 512 bytes; writes in any order. A file may have grown to the end of a write that
  is not there, and reads as zeros there then.
- Of each new size all or nothing. Where a file was made smaller, the writes before come before it.
- Of the names either (ordered) the first some of the changes of each directory, as file systems do that keep a journal
  of their metadata; or (loose) any of them.
- A file that is mapped for writing has any content.

A sync that has not returned made nothing durable, though all of what is under way may have happened.

A sync of a file that has failed made nothing durable, either, and nor does a later one, but for sizes: the kernel takes
what had been written before for written, and every process goes on to read it. Only who writes it again and syncs it
can know that it is on the disk.
"""

import os
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from tests.power_loss.trace import DURABLE, EMPTIES, ZEROS, Kind, Phase, Record

SECTOR = 512
CHUNK = 1 << 16
MOST_PARTS = 512  # that a write is torn into; of larger writes several sectors stay together


class UnknownOperation(Exception):
    """The trace has an operation that this model does not know."""


class Deaf(Enum):
    """Syncs that a disk may be told to ignore, so that tests can see that it is noticed."""

    FILES = "files"  # fsync and fdatasync of files
    DSYNC = "dsync"  # O_DSYNC
    DIRECTORIES = "directories"  # fsync of directories


class Metadata(Enum):
    """The order of changes of names that are not durable; see above."""

    ORDERED = "ordered"
    LOOSE = "loose"


@dataclass(eq=False)
class Change:
    """A write (`data`; None: of zeros) or a new size of a file. `pieces`: what of the write later ones left of it.

    `end` is the size that the file has at least with it, or if it `shrinks`, the new size.
    """

    end: int
    offset: int = 0
    data: Any = None
    pieces: list[tuple[int, int]] = field(default_factory=list)  # offsets in the file: from, to
    resizes: bool = False
    shrinks: bool = False
    ended: bool = False
    given_up: bool = False  # a sync of it has failed, and none will write it any more


class Content:
    """The bytes of a file, without chunks that were never written: much of a log's files is zeros."""

    def __init__(self) -> None:
        self.size = 0
        self._chunks: dict[int, bytearray] = {}

    def write(self, offset: int, data: Any) -> None:
        self.size = max(self.size, offset + len(data))
        at = 0
        while at < len(data):
            number, within = divmod(offset + at, CHUNK)
            part = data[at : at + CHUNK - within]
            chunk = self._chunks.get(number)
            if chunk is None:
                chunk = self._chunks[number] = bytearray(CHUNK)
            chunk[within : within + len(part)] = part
            at += len(part)

    def write_zeros(self, offset: int, end: int) -> None:
        self.size = max(self.size, end)
        for number in range(offset // CHUNK, -(-end // CHUNK)):
            if number in self._chunks:
                start, stop = max(offset, number * CHUNK), min(end, (number + 1) * CHUNK)
                self.write(start, bytes(stop - start))

    def resize(self, size: int) -> None:
        if size < self.size:
            self.write_zeros(size, self.size)
        self.size = size

    def parts(self) -> Iterator[tuple[int, memoryview]]:
        """What is not known to be zeros, with its offset."""
        for number, chunk in self._chunks.items():
            at = number * CHUNK
            if at < self.size:
                yield at, memoryview(chunk)[: self.size - at]


@dataclass(eq=False)
class File:
    number: int
    content: Content = field(default_factory=Content)  # what is durable
    pending: list[Change] = field(default_factory=list)  # in the order in which they began
    mapped: bool = False
    live_bytes: int = 0  # the size that programs see


@dataclass(eq=False)
class Directory:
    number: int
    names: "dict[str, File | Directory]" = field(default_factory=dict)  # those that are durable
    live: "dict[str, File | Directory]" = field(default_factory=dict)  # those that programs see


Node = File | Directory


@dataclass(eq=False)
class Naming:
    """A change of names, in one step: removals, then a new name. `within` are the directories it is in."""

    operation: int
    removed: list[tuple[Directory, str, Node]]
    added: list[tuple[Directory, str, Node]]
    ended: bool = False

    @property
    def within(self) -> set[Directory]:
        return {directory for directory, _, _ in [*self.removed, *self.added]}

    def apply(self, names: dict[Directory, dict[str, Node]]) -> None:
        for directory, name, node in self.removed:
            if names[directory].get(name) is node:
                del names[directory][name]
        for directory, name, node in self.added:
            names[directory][name] = node


class Disk:
    """Told the records of a trace in their order; `image` writes a directory as a loss at this moment may leave it."""

    def __init__(self) -> None:
        self._deaf: frozenset[Deaf] = frozenset()
        self._numbers = 0
        self._root = Directory(0)
        self._directories = [self._root]
        self._by_inode: dict[int, Node] = {}
        self._namings: list[Naming] = []
        self._begun: dict[int, Change | Naming] = {}
        self._homeless: dict[int, Record] = {}  # changes of names that have begun where there is no directory
        self._syncs: dict[int, tuple[Node | None, list[Any]]] = {}  # what was complete when each began

    @classmethod
    def of(cls, path: Path) -> "Disk":
        """All that is in the directory is durable."""
        disk = cls()
        disk.set_root(path.stat().st_ino)
        disk._load(path, disk._root)
        return disk

    def _load(self, path: Path, directory: Directory) -> None:
        for entry in sorted(path.iterdir()):
            node: Node
            if entry.is_dir():
                node = self._new_directory()
                self._load(entry, node)
            elif entry.is_file():
                node = self._new_file()
                _read(entry, node.content)
                node.live_bytes = node.content.size
            else:
                continue
            directory.names[entry.name] = directory.live[entry.name] = node
            self._by_inode[entry.stat().st_ino] = node

    def go_deaf(self, deaf: Iterable[Deaf]) -> None:
        """From now on these syncs make nothing durable."""
        self._deaf |= frozenset(deaf)

    def set_root(self, inode: int) -> None:
        """The directory itself, which is there from the beginning."""
        self._by_inode[inode] = self._root

    # -- the trace

    def tell(self, record: Record) -> None:
        """Raises UnknownOperation."""
        if record.kind == Kind.MARK:
            return
        if record.kind == Kind.UNKNOWN:
            if record.phase == Phase.BEGIN:
                raise UnknownOperation(f"{record.path} {record.target}: changed in a way that is not modelled")
            return
        if record.phase == Phase.BEGIN:
            self._begin(record)
        else:
            self._end(record)

    def _begin(self, record: Record) -> None:
        match record.kind:
            case Kind.WRITE:
                end = record.offset + record.size
                data = None if record.flags & ZEROS else record.data
                change = Change(end, record.offset, data, [(record.offset, end)])
                self._pend(record, change)
            case Kind.TRUNCATE:
                self._pend(record, Change(record.size, resizes=True))
            case Kind.SYNC:
                self._begin_sync(record)
            case Kind.MAPPED:
                node = self._by_inode.get(record.inode)
                if isinstance(node, File):
                    node.mapped = True
            case _:
                self._begin_naming(record)

    def _pend(self, record: Record, change: Change) -> None:
        node = self._by_inode.get(record.inode)
        assert isinstance(node, File), f"a write to inode {record.inode}, which nobody created"
        change.shrinks = change.resizes and change.end < node.live_bytes
        if record.flags & DURABLE and Deaf.DSYNC not in self._deaf:
            done = [each for each in node.pending if each.ended]
            self._syncs[record.operation] = node, done
        node.pending.append(change)
        self._begun[record.operation] = change

    def _begin_sync(self, record: Record) -> None:
        node = self._by_inode.get(record.inode)
        done: list[Any] = []
        if isinstance(node, File) and Deaf.FILES not in self._deaf:
            done = [change for change in node.pending if change.ended and not change.given_up]
        elif isinstance(node, Directory) and Deaf.DIRECTORIES not in self._deaf:
            done = [naming for naming in self._namings if naming.ended and node in naming.within]
        self._syncs[record.operation] = node, done

    def _begin_naming(self, record: Record) -> None:
        place = self._place(record.path)
        if place is None:
            self._homeless[record.operation] = record
            return
        parent, name = place
        naming = Naming(record.operation, [], [])
        found = parent.live.get(name)
        match record.kind:
            case Kind.CREATE:
                if isinstance(found, File):
                    if record.flags & EMPTIES:
                        change = Change(0, resizes=True, shrinks=found.live_bytes > 0)
                        self._begun[record.operation] = change
                        found.pending.append(change)
                    return
                if found is None:
                    naming.added.append((parent, name, self._new_file()))
            case Kind.MKDIR:
                if found is None:
                    naming.added.append((parent, name, self._new_directory()))
            case Kind.UNLINK | Kind.RMDIR:
                if found is not None:
                    naming.removed.append((parent, name, found))
            case Kind.RENAME:
                target = self._place(record.target)
                if found is not None and target is not None:
                    to, new_name = target
                    naming.removed.append((parent, name, found))
                    naming.added.append((to, new_name, found))
        if naming.within:
            self._namings.append(naming)
            self._begun[record.operation] = naming

    def _end(self, record: Record) -> None:
        if record.kind == Kind.SYNC:
            node, done = self._syncs.pop(record.operation)
            if record.result == 0:
                self._make_durable(node, done)
            elif isinstance(node, File):
                for change in done:
                    change.given_up = not change.resizes
            return
        homeless = self._homeless.pop(record.operation, None)
        if homeless is not None and record.result >= 0:
            # Its directory was made, but the call that made it had not been told to have ended.
            self._begin_naming(homeless)
            if record.operation in self._homeless:
                raise UnknownOperation(f"{homeless.path}: succeeded in a directory that nobody made")
        begun = self._begun.pop(record.operation, None)
        if isinstance(begun, Naming):
            self._end_naming(begun, record)
        elif begun is not None:
            self._end_change(begun, record)

    def _end_change(self, change: Change, record: Record) -> None:
        if record.kind == Kind.CREATE:
            node = next(each for each in self._all() if isinstance(each, File) and change in each.pending)
        else:
            found = self._by_inode[record.inode]
            assert isinstance(found, File)
            node = found
        _, earlier = self._syncs.pop(record.operation, (None, None))
        if record.result < 0:
            node.pending.remove(change)
            return
        if record.kind == Kind.WRITE and record.result < record.size:  # a short write
            change.end = change.offset + record.result
            change.pieces = [(change.offset, change.end)]
        change.ended = True
        node.live_bytes = change.end if change.shrinks else max(node.live_bytes, change.end)
        if earlier is None:
            return
        # Written through: in its place nothing earlier may appear any more, and the file was made smaller before.
        self._make_durable(node, [each for each in earlier if each.shrinks])
        for each in earlier:
            each.pieces = [rest for piece in each.pieces for rest in _without(piece, change.offset, change.end)]
        self._make_durable(node, [change])

    def _end_naming(self, naming: Naming, record: Record) -> None:
        if record.result < 0:
            self._namings.remove(naming)
            return
        if len(naming.added) == 1 and not naming.removed:
            [(directory, name, _)] = naming.added
            if name in directory.live and directory.live[name] is self._by_inode.get(record.inode):
                self._namings.remove(naming)  # another process was faster
                return
        naming.ended = True
        if naming.added and naming.removed == []:
            [(_, _, node)] = naming.added
            self._by_inode[record.inode] = node
        naming.apply({directory: directory.live for directory in naming.within})

    def _make_durable(self, node: Node | None, done: list[Any]) -> None:
        if isinstance(node, File):
            for change in done:
                if change in node.pending:
                    self._settle(node, change)
                    node.pending.remove(change)
            node.content.resize(max([node.content.size, *(each.end for each in node.pending if each.given_up)]))
        elif isinstance(node, Directory):
            for naming in done:
                if naming in self._namings:
                    self._namings.remove(naming)
                    naming.apply({directory: directory.names for directory in naming.within})

    def _settle(self, node: File, change: Change) -> None:
        if change.shrinks:
            # What earlier writes had put behind the new end is gone. What later ones put there stays.
            for each in node.pending[: node.pending.index(change)]:
                each.pieces = [(a, min(b, change.end)) for a, b in each.pieces if a < change.end]
                each.end = min(each.end, change.end)
            node.content.resize(change.end)
        for start, end in change.pieces:
            for each in node.pending[: node.pending.index(change)]:
                if each.given_up:
                    each.pieces = [rest for piece in each.pieces for rest in _without(piece, start, end)]
            if change.data is None:
                node.content.write_zeros(start, end)
            else:
                node.content.write(start, _slice(change, start, end))
        node.content.resize(max(node.content.size, change.end))

    # -- names

    def _place(self, path: str) -> tuple[Directory, str] | None:
        """The directory that programs see at the path's parent, and the last name; None if it is not there."""
        *parents, name = path.split("/")
        directory = self._root
        for each in parents:
            node = directory.live.get(each) or self._being_added(directory, each)
            if node is None:
                return None
            assert isinstance(node, Directory), path
            directory = node
        return directory, name

    def _being_added(self, directory: Directory, name: str) -> Node | None:
        for naming in self._namings:
            for within, added, node in naming.added:
                if not naming.ended and within is directory and added == name:
                    return node
        return None

    def _new_file(self) -> File:
        self._numbers += 1
        return File(self._numbers)

    def _new_directory(self) -> Directory:
        self._numbers += 1
        directory = Directory(self._numbers)
        self._directories.append(directory)
        return directory

    def _all(self) -> Iterator[Node]:
        """Everything that a program sees or that is durable."""
        for directory in self._directories:
            yield from directory.live.values()
            yield from directory.names.values()

    # -- losses

    @property
    def busy(self) -> bool:
        """True if a write, a sync or a change of names has begun and not returned."""
        return bool(self._begun or self._syncs)

    def finish(self) -> None:
        """All that has begun happens, in its order, and is durable."""
        for naming in self._namings:
            naming.apply({directory: directory.names for directory in naming.within})
        self._namings.clear()
        for file in [each for each in self._all() if isinstance(each, File)]:
            for change in list(file.pending):
                self._make_durable(file, [change])

    def image(self, path: Path, chance: random.Random, metadata: Metadata) -> None:
        """Write the files as they may be after a loss at this moment into the new directory `path`."""
        names: dict[Directory, dict[str, Node]] = {each: dict(each.names) for each in self._directories}
        for naming in self._survivors(chance, metadata):
            naming.apply(names)
        share = chance.choice((0.0, 0.1, 0.5, 0.9, 1.0))  # of the changes that happened
        self._write(path, self._root, names, chance, share)

    def _survivors(self, chance: random.Random, metadata: Metadata) -> list[Naming]:
        if metadata is Metadata.LOOSE:
            return [naming for naming in self._namings if chance.random() < 0.5]
        by_directory: dict[Directory, list[Naming]] = {}
        for naming in self._namings:
            directory = (naming.added or naming.removed)[0][0]
            by_directory.setdefault(directory, []).append(naming)
        kept = {naming for namings in by_directory.values() for naming in namings[: chance.randint(0, len(namings))]}
        return [naming for naming in self._namings if naming in kept]

    def _write(
        self,
        path: Path,
        directory: Directory,
        names: dict[Directory, dict[str, Node]],
        chance: random.Random,
        share: float,
    ) -> None:
        path.mkdir(mode=0o700)
        for name, node in names[directory].items():
            if isinstance(node, Directory):
                self._write(path / name, node, names, chance, share)
            else:
                _write_file(path / name, node, chance, share)


def _write_file(path: Path, file: File, chance: random.Random, share: float) -> None:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.ftruncate(descriptor, file.content.size)
        for at, part in file.content.parts():
            os.pwrite(descriptor, part, at)
        for group in _groups(file.pending):
            chance.shuffle(group)
            for change in group:
                _write_change(descriptor, change, chance, share)
        if file.mapped:
            os.pwrite(descriptor, chance.randbytes(os.fstat(descriptor).st_size), 0)
    finally:
        os.close(descriptor)


def _groups(pending: list[Change]) -> Iterator[list[Change]]:
    """The changes; those of one group may come in any order. A smaller size is a group of its own."""
    group: list[Change] = []
    for change in pending:
        if change.shrinks:
            yield group
            yield [change]
            group = []
        else:
            group.append(change)
    yield group


def _write_change(descriptor: int, change: Change, chance: random.Random, share: float) -> None:
    size = os.fstat(descriptor).st_size
    if change.resizes:
        if chance.random() < share:
            os.ftruncate(descriptor, change.end if change.shrinks else max(size, change.end))
        return
    for start, end in change.pieces:
        for a, b in _torn(start, end, chance, share):
            if change.data is None:
                _write_zeros(descriptor, a, b)
            else:
                os.pwrite(descriptor, _slice(change, a, b), a)
    if chance.random() < share / 2 and change.end > size:
        os.ftruncate(descriptor, max(os.fstat(descriptor).st_size, change.end))


def _torn(start: int, end: int, chance: random.Random, share: float) -> Iterator[tuple[int, int]]:
    """The parts of a write that got to the disk."""
    whole = chance.random()
    if whole < share / 2 or share == 1.0:
        yield start, end
        return
    if whole < 0.5 or share == 0.0:
        return
    unit = SECTOR * (1 + (end - start) // (SECTOR * MOST_PARTS))
    parts = [(max(at, start), min(at + unit, end)) for at in range(start - start % SECTOR, end, unit)]
    match chance.randrange(4):
        case 0:
            yield start, parts[chance.randrange(len(parts))][0]
        case 1:
            yield parts[chance.randrange(len(parts))][0], end
        case 2:
            yield from parts[chance.randrange(2) :: 2]
        case _:
            yield from (part for part in parts if chance.random() < share)


def _without(piece: tuple[int, int], start: int, end: int) -> Iterator[tuple[int, int]]:
    first, last = piece
    if first < min(last, start):
        yield first, min(last, start)
    if max(first, end) < last:
        yield max(first, end), last


def _slice(change: Change, start: int, end: int) -> Any:
    return change.data[start - change.offset : end - change.offset]


def _write_zeros(descriptor: int, start: int, end: int) -> None:
    """As little of them as is not zeros already."""
    size = os.fstat(descriptor).st_size
    if start < size:
        os.pwrite(descriptor, bytes(min(size, end) - start), start)
    if size < end:
        os.ftruncate(descriptor, end)


def _read(path: Path, content: Content) -> None:
    """Holes are passed over."""
    with path.open("rb", buffering=0) as file:
        at, size = 0, path.stat().st_size
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:  # ENXIO: no data any more
                break
            data = os.pread(file.fileno(), CHUNK - at % CHUNK, at)
            content.write(at, data)
            at += len(data)
        content.resize(size)
