"""What the manifest says: entries, each of which adds files or replaces them, and the state that they add up to.

Entries and snapshots are JSON objects of two members, `checksum` and `content`; the checksum is XXH3 of the content as
JSON with sorted keys and without spaces.

Since version 2, each entry names the one before by its checksum, too, and the namespace by its id. Version 1 is read,
and entries of version 2 may follow it. Its programs refuse them: entries and snapshots say their version.
"""

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final, NamedTuple, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from xxhash import xxh3_64_hexdigest

from storage.capture.errors import DamagedManifest

VERSION: Final = 2
Number = Annotated[int, Field(ge=0)]
NamespaceId = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
_PATH: Final = r"^table=(ledger|messages)/date=\d{4}-\d\d-\d\d/hour=\d\d/[0-9a-z-]+\.parquet$"
Position = tuple[int, str]  # partition, epoch


class TableName(StrEnum):
    LEDGER = "ledger"
    MESSAGES = "messages"


class Kind(StrEnum):
    OPENED = "opened"  # a capture has begun to write here; names no files
    CAPTURED = "captured"
    COMPACTED = "compacted"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True, extra="forbid")


class Range(_Model):
    """Offsets of one partition and epoch: `first` to `last`, of which `rows` are there."""

    partition: Number
    epoch: str
    first: Number
    last: Number
    rows: Number

    @property
    def position(self) -> Position:
        return self.partition, self.epoch

    def with_rows_of(self, other: "Range") -> "Range":
        """Join two ranges of one partition and epoch."""
        first, last = min(self.first, other.first), max(self.last, other.last)
        return self.model_copy(update={"first": first, "last": last, "rows": self.rows + other.rows})


class DataFile(_Model):
    """A Parquet file. `path` is relative to the URL; `memory_bytes` is what its rows take in memory, as Arrow."""

    path: Annotated[str, Field(pattern=_PATH)]
    table: TableName
    hour: Number  # of eventTime: hours since 1970
    bytes: Number
    memory_bytes: Number
    rows: Number
    checksum: str  # XXH3 of the file
    captured_ms: Number  # when its first rows were captured, milliseconds since 1970
    ranges: tuple[Range, ...]

    def overlaps(self, position: Position, first: int, end: int) -> bool:
        return any(each.position == position and each.first < end and first <= each.last for each in self.ranges)


class Next(_Model):
    """`first` is the first offset that was captured, `offset` the next one to capture."""

    partition: Number
    epoch: str
    first: Number
    offset: Number


class Gap(_Model):
    """Offsets that were lost: the journal had dropped them before they were captured, or could not read them."""

    partition: Number
    epoch: str
    first: Number
    last: Number


class Entry(_Model):
    version: int = VERSION
    kind: Kind
    namespace: str
    namespace_id: NamespaceId | None = None  # None: of version 1, or no broker has told it yet
    previous: str | None  # name of the entry before
    previous_checksum: str | None = None  # None: there is none before, or it is not known
    written_ms: Number
    files: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()  # paths of files whose rows are in `files` from now on
    next: tuple[Next, ...] = ()  # of all partitions and epochs
    gaps: tuple[Gap, ...] = ()  # since the entry before


class Snapshot(_Model):
    """The state after an entry, so that readers need not read all entries before it."""

    version: int = VERSION
    entry: str
    entry_checksum: str | None = None
    written_ms: Number = 0  # of the entry; 0: of version 1
    namespace: str
    namespace_id: NamespaceId | None = None
    files: tuple[DataFile, ...]
    removed: tuple[tuple[str, int], ...]
    next: tuple[Next, ...]
    gaps: tuple[Gap, ...]


class State:
    """What the entries up to `head` add up to. `apply` and `forget` change it."""

    def __init__(self, namespace: str, namespace_id: str | None = None) -> None:
        self.namespace = namespace
        self.namespace_id = namespace_id  # None: not known yet, so that the next entry may have it
        self.head: str | None = None
        self.head_checksum: str | None = None  # None: there is no entry, or a snapshot of version 1 did not say
        self.written_ms = 0  # of the head, milliseconds since 1970; 0 if a snapshot of version 1 did not say
        self.files: dict[str, DataFile] = {}  # by path
        self.removed: dict[str, int] = {}  # path: when it was replaced, milliseconds since 1970
        self.next: dict[Position, Next] = {}
        self.gaps: list[Gap] = []

    def following(self, kind: Kind, written_ms: int) -> Entry:
        """The next entry, without anything new in it yet."""
        return Entry(
            kind=kind,
            namespace=self.namespace,
            namespace_id=self.namespace_id,
            previous=self.head,
            previous_checksum=self.head_checksum,
            written_ms=written_ms,
        )

    def apply(self, name: str, entry: Entry, checksum: str) -> None:
        """`checksum` is that of the entry. Raises DamagedManifest if the entry is not the next one, or is none that a
        capture writes."""
        if entry.previous != self.head or entry.namespace != self.namespace:
            raise DamagedManifest(f"{name}: does not fit to {self.head}")
        if self.namespace_id not in (None, entry.namespace_id):
            raise DamagedManifest(f"{name}: is of namespace id {entry.namespace_id}, not {self.namespace_id}")
        if entry.version > 1 and self.head_checksum not in (None, entry.previous_checksum):
            raise does_not_follow(name, entry, self.head_checksum)
        for path in entry.removed:
            if self.files.pop(path, None) is None:
                raise DamagedManifest(f"{name}: removes {path}, which is not there")
            self.removed[path] = entry.written_ms
        for file in entry.files:
            if file.path in self.files:
                raise DamagedManifest(f"{name}: adds {file.path} again")
            self.files[file.path] = file
        for each in entry.next:
            before = self.next.get((each.partition, each.epoch))
            if before is not None and (each.offset < before.offset or each.first != before.first):
                raise DamagedManifest(f"{name}: partition {each.partition} goes back to offset {each.offset}")
            self.next[each.partition, each.epoch] = each
        self.gaps += entry.gaps
        self.namespace_id = entry.namespace_id
        self.head, self.head_checksum, self.written_ms = name, checksum, entry.written_ms

    def forget(self, before_ms: int) -> None:
        """Forget the files that were replaced before that time."""
        self.removed = {path: replaced_ms for path, replaced_ms in self.removed.items() if replaced_ms >= before_ms}

    def snapshot(self) -> Snapshot:
        assert self.head is not None, "nothing was written yet"
        return Snapshot(
            entry=self.head,
            entry_checksum=self.head_checksum,
            written_ms=self.written_ms,
            namespace=self.namespace,
            namespace_id=self.namespace_id,
            files=tuple(self.files.values()),
            removed=tuple(self.removed.items()),
            next=tuple(self.next.values()),
            gaps=tuple(self.gaps),
        )

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        state = cls(snapshot.namespace, snapshot.namespace_id)
        state.head, state.head_checksum = snapshot.entry, snapshot.entry_checksum
        state.written_ms = snapshot.written_ms
        state.files = {file.path: file for file in snapshot.files}
        state.removed = dict(snapshot.removed)
        state.next = {(each.partition, each.epoch): each for each in snapshot.next}
        state.gaps = list(snapshot.gaps)
        return state


def path_of(table: TableName, hour: int, name: str) -> str:
    """The path of a file with the rows of an hour, relative to the URL."""
    date = datetime.fromtimestamp(hour * 3600, UTC)
    return f"table={table}/date={date:%Y-%m-%d}/hour={date:%H}/{name}.parquet"


def does_not_follow(name: str, entry: Entry, checksum: str | None) -> DamagedManifest:
    """`checksum` is that of the entry that has the name of the one before."""
    told = entry.previous_checksum
    return DamagedManifest(
        f"{name}: follows an entry with the checksum {told}, and that of {entry.previous} is {checksum}"
    )


class Encoded(NamedTuple):
    text: bytes
    checksum: str


def encode(content: Entry | Snapshot) -> Encoded:
    plain = content.model_dump(mode="json", by_alias=True)
    checksum = _checksum(plain)
    text = json.dumps({"checksum": checksum, "content": plain}, sort_keys=True, indent=1)
    return Encoded(f"{text}\n".encode(), checksum)


_Content = TypeVar("_Content", Entry, Snapshot)


def decode(name: str, text: bytes, kind: type[_Content]) -> tuple[_Content, str]:
    """The content, and its checksum. Raises DamagedManifest."""
    try:
        both = json.loads(text)
        version = both["content"]["version"]
        if type(version) is int and version > VERSION:
            raise DamagedManifest(f"{name}: is of version {version}; this program knows versions up to {VERSION}")
        checksum = _checksum(both["content"])
        if checksum != both["checksum"]:
            raise DamagedManifest(f"{name}: the checksum does not match")
        return kind.model_validate(both["content"]), checksum
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedManifest(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedManifest(f"{name}: is no entry of a manifest: {error}") from None


def _checksum(plain: object) -> str:
    return xxh3_64_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
