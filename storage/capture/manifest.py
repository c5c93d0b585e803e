"""What the manifest says: entries, each of which adds files or replaces them, and the state that they add up to.

Entries and snapshots are JSON objects of two members, `checksum` and `content`; the checksum is XXH3 of the content as
JSON with sorted keys and without spaces.
"""

import json
from datetime import UTC, datetime
from enum import StrEnum
from typing import Annotated, Final, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from xxhash import xxh3_64_hexdigest

from storage.capture.errors import DamagedManifest

VERSION: Final = 1
Number = Annotated[int, Field(ge=0)]
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
    previous: str | None  # name of the entry before
    written_ms: Number
    files: tuple[DataFile, ...] = ()
    removed: tuple[str, ...] = ()  # paths of files whose rows are in `files` from now on
    next: tuple[Next, ...] = ()  # of all partitions and epochs
    gaps: tuple[Gap, ...] = ()  # since the entry before


class Snapshot(_Model):
    """The state after an entry, so that readers need not read all entries before it."""

    version: int = VERSION
    entry: str
    namespace: str
    files: tuple[DataFile, ...]
    removed: tuple[tuple[str, int], ...]
    next: tuple[Next, ...]
    gaps: tuple[Gap, ...]


class State:
    """What the entries up to `head` add up to. `apply` and `forget` change it."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.head: str | None = None
        self.files: dict[str, DataFile] = {}  # by path
        self.removed: dict[str, int] = {}  # path: when it was replaced, milliseconds since 1970
        self.next: dict[Position, Next] = {}
        self.gaps: list[Gap] = []

    def apply(self, name: str, entry: Entry) -> None:
        """Raises DamagedManifest if the entry is not the next one, or is none that a capture writes."""
        if entry.previous != self.head or entry.namespace != self.namespace:
            raise DamagedManifest(f"{name}: does not fit to {self.head}")
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
        self.head = name

    def forget(self, before_ms: int) -> None:
        """Forget the files that were replaced before that time."""
        self.removed = {path: replaced_ms for path, replaced_ms in self.removed.items() if replaced_ms >= before_ms}

    def snapshot(self) -> Snapshot:
        assert self.head is not None, "nothing was written yet"
        return Snapshot(
            entry=self.head,
            namespace=self.namespace,
            files=tuple(self.files.values()),
            removed=tuple(self.removed.items()),
            next=tuple(self.next.values()),
            gaps=tuple(self.gaps),
        )

    @classmethod
    def of(cls, snapshot: Snapshot) -> Self:
        state = cls(snapshot.namespace)
        state.head = snapshot.entry
        state.files = {file.path: file for file in snapshot.files}
        state.removed = dict(snapshot.removed)
        state.next = {(each.partition, each.epoch): each for each in snapshot.next}
        state.gaps = list(snapshot.gaps)
        return state


def path_of(table: TableName, hour: int, name: str) -> str:
    """The path of a file with the rows of an hour, relative to the URL."""
    date = datetime.fromtimestamp(hour * 3600, UTC)
    return f"table={table}/date={date:%Y-%m-%d}/hour={date:%H}/{name}.parquet"


def encode(content: Entry | Snapshot) -> bytes:
    plain = content.model_dump(mode="json", by_alias=True)
    text = json.dumps({"checksum": _checksum(plain), "content": plain}, sort_keys=True, indent=1)
    return f"{text}\n".encode()


_Content = TypeVar("_Content", Entry, Snapshot)


def decode(name: str, text: bytes, kind: type[_Content]) -> _Content:
    """Raises DamagedManifest."""
    try:
        both = json.loads(text)
        version = both["content"]["version"]
        if type(version) is int and version > VERSION:
            raise DamagedManifest(f"{name}: is of version {version}; this program knows versions up to {VERSION}")
        if _checksum(both["content"]) != both["checksum"]:
            raise DamagedManifest(f"{name}: the checksum does not match")
        return kind.model_validate(both["content"])
    except ValidationError as error:
        first = error.errors()[0]
        raise DamagedManifest(f"{name}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise DamagedManifest(f"{name}: is no entry of a manifest: {error}") from None


def _checksum(plain: object) -> str:
    return xxh3_64_hexdigest(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode())
