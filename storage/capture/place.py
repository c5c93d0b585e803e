"""A folder under a URL: complete files in, files out, by any of pyarrow's file systems.

What is asked of a file system is little: a file is there completely or not at all, and who lists or reads after a write
has ended sees it. S3, Google Cloud Storage and Azure Blob Storage promise that of each object. In a local folder files
are written under another name, synced and renamed. No file system is asked for a conditional write, because pyarrow has
none; `storage.capture.chain` says how one of two writers wins without it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, Final, NamedTuple, Protocol, Self

import pyarrow as pa
from pyarrow import fs
from xxhash import xxh3_64

from storage.capture.errors import InvalidPlace
from storage.durable import sync_directory

FILE_MODE: Final = 0o640
PARTIAL: Final = ".partial"  # the end of the names of files that are being written
_OBJECT_STORES: Final = ("s3", "gcs", "abfs")  # they have no folders to make
_PIECE_BYTES: Final = 4 << 20
_CREDENTIALS: Final = re.compile(r"//[^/@]*@")


class Stored(NamedTuple):
    """`path` is relative to the place, with slashes."""

    path: str
    size_bytes: int
    modified_s: float


class Writable(Protocol):
    def write(self, content: Any, /) -> object: ...


class Sink:
    """A file being written: it counts the bytes and makes their checksum on the way. pyarrow writes to it, too."""

    closed = False

    def __init__(self, file: Writable) -> None:
        self._file = file
        self._digest = xxh3_64()
        self.size_bytes = 0

    def write(self, content: bytes) -> int:
        self._file.write(content)
        self._digest.update(content)
        self.size_bytes += len(content)
        return len(content)

    @property
    def checksum(self) -> str:
        """XXH3 of what was written."""
        return self._digest.hexdigest()

    def flush(self) -> None: ...

    def close(self) -> None: ...


class Place:
    def __init__(self, file_system: fs.FileSystem, root: str, url: str) -> None:
        self._file_system = file_system
        self._root = root.rstrip("/")
        self.url = _CREDENTIALS.sub("//", url)  # to be shown

    @classmethod
    def of(cls, url: str) -> Self:
        """Make a place of a URL, or of a plain path. Raises InvalidPlace."""
        try:
            if "://" not in url:
                if not url.strip():
                    raise ValueError("is empty")
                return cls(fs.LocalFileSystem(), str(Path(url).absolute()), url)
            file_system, root = fs.FileSystem.from_uri(url)
            if not root.strip("/"):
                raise ValueError("names no folder")
        except (ValueError, TypeError, NotImplementedError, ImportError, OSError) as error:
            text = f"{url!r} is no URL of a folder, such as s3://bucket/folder: {error}"
            raise InvalidPlace(_CREDENTIALS.sub("//", text)) from None
        return cls(file_system, root, url)

    @property
    def local(self) -> Path | None:
        """The folder, if it is one of this machine."""
        return Path(self._root) if isinstance(self._file_system, fs.LocalFileSystem) else None

    def write(self, path: str, content: bytes) -> None:
        """Write or replace a file. It is durable on return, and never seen in part. Raises OSError."""
        with self.writing(path) as sink:
            sink.write(content)

    @contextmanager
    def writing(self, path: str) -> "Iterator[Sink]":
        """The same, piece by piece. If the block fails, part of the file may be left, under this name or another."""
        where = PurePosixPath(self._at(path))
        if self.local is not None:
            with _writing_locally(Path(where)) as file:
                yield Sink(file)
            return
        if self._file_system.type_name in _OBJECT_STORES:
            with self._file_system.open_output_stream(str(where)) as stream:
                yield Sink(stream)
            return
        self._file_system.create_dir(str(where.parent), recursive=True)
        with self._file_system.open_output_stream(f"{where}{PARTIAL}") as stream:
            yield Sink(stream)
        self._file_system.move(f"{where}{PARTIAL}", str(where))

    def read(self, path: str) -> pa.Buffer:
        """Read a file. Raises OSError; FileNotFoundError if it is not there."""
        with self._file_system.open_input_stream(self._at(path)) as stream:
            return stream.read_buffer()

    def measure(self, path: str) -> tuple[int, str]:
        """The bytes of a file, and their XXH3; a piece of it is in memory at a time.

        Raises OSError; FileNotFoundError if it is not there.
        """
        digest, size_bytes = xxh3_64(), 0
        with self._file_system.open_input_stream(self._at(path)) as stream:
            while piece := stream.read(_PIECE_BYTES):
                digest.update(piece)
                size_bytes += len(piece)
        return size_bytes, digest.hexdigest()

    def open(self, path: str) -> pa.NativeFile:
        """Open a file to read any part of it. Raises OSError; FileNotFoundError if it is not there."""
        return self._file_system.open_input_file(self._at(path))

    def files(self, folder: str) -> Iterator[Stored]:
        """Yield the files in the folder and below it, in no order; none if there is no such folder. Raises OSError."""
        selector = fs.FileSelector(self._at(folder), recursive=True, allow_not_found=True)
        for info in self._file_system.get_file_info(selector):
            if info.type is fs.FileType.File:
                yield Stored(info.path[len(self._root) + 1 :], info.size, info.mtime_ns / 1e9)

    def delete(self, path: str) -> None:
        """Delete a file. Raises OSError; FileNotFoundError if it is not there."""
        self._file_system.delete_file(self._at(path))

    def uri(self, path: str) -> str:
        """Where a file is, for other programs: a path or URL without credentials and options."""
        if self.local is not None:
            return self._at(path)
        return f"{self.url.partition('?')[0].rstrip('/')}/{path}"

    def _at(self, path: str) -> str:
        return f"{self._root}/{path}"


@contextmanager
def _writing_locally(path: Path) -> Iterator[BinaryIO]:
    _make_folder(path.parent)
    partial = path.with_name(path.name + PARTIAL)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)
    partial.rename(path)
    sync_directory(path.parent)


def _make_folder(folder: Path) -> None:
    """Make the folder and those above it; each survives a power cut."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync_directory(folder.parent)
