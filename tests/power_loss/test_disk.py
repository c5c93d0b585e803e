"""The model of a disk that loses its power, and the shim that tells it what programs did."""

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.power_loss.disk import SECTOR, Deaf, Disk, Metadata, UnknownOperation
from tests.power_loss.record import resolve
from tests.power_loss.trace import SHIM, Kind, Marker, Phase, Record, Trace, packed
from tests.shims import NoCompiler, make_shim

IMAGES = 60


@pytest.fixture(scope="session")
def shim(tmp_path_factory):
    try:
        return make_shim(SHIM, tmp_path_factory.mktemp("shim"))
    except NoCompiler as error:
        pytest.skip(str(error))


class Traced:
    """Code that runs under the shim in a directory, and what is left of it."""

    def __init__(self, folder: Path, shim: Path) -> None:
        self._folder, self._shim = folder, shim
        self.directory = folder / "directory"
        self.directory.mkdir()
        self.disk = Disk.of(self.directory)
        self._told = 0

    def run(self, code: str, until: int | None = None, tell: bool = True) -> None:
        """Run the code in the directory. With `until` the disk is told that many of the records."""
        environment = {
            **os.environ,
            "LD_PRELOAD": str(self._shim),
            "POWER_LOSS_DIRECTORY": str(self.directory.resolve()),
            "POWER_LOSS_TRACE": str(self._folder / "trace"),
        }
        code = f"import os, mmap\nR, W = os.O_RDWR, os.O_RDWR | os.O_CREAT\nhere = os.open('.', os.O_RDONLY)\n{code}"
        subprocess.run([sys.executable, "-c", code], cwd=self.directory, env=environment, check=True)
        if tell:
            self.tell(until)

    @property
    def records(self) -> Trace:
        return Trace(self._folder / "trace")

    def tell(self, until: int | None = None) -> None:
        records = self.records
        end = len(records) if until is None else until
        for at in range(self._told, end):
            self.disk.tell(records[at])
        self._told = end

    def images(self, metadata: Metadata = Metadata.LOOSE, count: int = IMAGES) -> list[dict[str, bytes]]:
        """The files of some losses at this moment."""
        found = []
        for seed in range(count):
            image = self._folder / f"image-{sum(1 for _ in self._folder.iterdir())}"
            self.disk.image(image, random.Random(seed), metadata)
            found.append(files_of(image))
        return found


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(directory)): path.read_bytes() for path in sorted(directory.rglob("*")) if path.is_file()
    }


@pytest.fixture
def traced(tmp_path, shim):
    return Traced(tmp_path, shim)


def test_what_is_synced_with_its_name_is_there(traced):
    traced.run("f = os.open('a', W); os.pwrite(f, b'x' * 5000, 0); os.fdatasync(f); os.fsync(here)")
    assert traced.images() == [{"a": b"x" * 5000}] * IMAGES


def test_without_a_sync_of_the_directory_the_name_may_be_missing(traced):
    traced.run("f = os.open('a', W); os.pwrite(f, b'x', 0); os.fsync(f)")
    assert {"a" in image for image in traced.images()} == {True, False}
    assert {image["a"] for image in traced.images() if image} == {b"x"}


def test_without_a_sync_of_the_file_any_sector_of_a_write_may_be_missing(traced):
    traced.run("f = os.open('a', W); os.fsync(here); os.pwrite(f, b'x' * 4096, 0)")
    found = {image["a"].ljust(4096, b"\0") for image in traced.images()}
    assert {b"x" * 4096, bytes(4096)} < found
    assert len(found) > 10
    for content in found:
        for at in range(0, 4096, SECTOR):
            assert content[at : at + SECTOR] in (b"x" * SECTOR, bytes(SECTOR))


def test_a_sync_counts_only_for_writes_that_had_returned_before_it_began(traced):
    traced.run(
        "f = os.open('a', W); os.fsync(here); os.pwrite(f, b'1', 0); os.fsync(f); os.pwrite(f, b'2', 0)", tell=False
    )
    records = traced.records
    syncs = [at for at, record in enumerate(records) if record.kind == 2]
    traced.tell(syncs[-1])  # the sync of the file has begun
    assert {image["a"] for image in traced.images()} == {b"", b"1", b"\0"}
    traced.tell(syncs[-1] + 1)
    assert {image["a"] for image in traced.images()} == {b"1"}
    traced.tell()
    assert {image["a"] for image in traced.images()} == {b"1", b"2"}


def test_a_write_through_is_durable_when_it_returns_and_torn_before(traced):
    traced.run(
        "f = os.open('a', W); os.pwrite(f, b'1' * 1024, 0); os.fsync(f); os.fsync(here)\n"
        "g = os.open('a', os.O_RDWR | os.O_DSYNC); os.pwrite(g, b'2' * 1024, 0)",
        tell=False,
    )
    last = len(traced.records) - 1
    traced.tell(last)
    one, two = b"1" * SECTOR, b"2" * SECTOR
    assert {image["a"] for image in traced.images()} == {one + one, one + two, two + one, two + two}
    traced.tell()
    assert {image["a"] for image in traced.images()} == {two + two}


def test_an_asynchronous_write_through_is_durable_when_its_event_was_taken_and_torn_before(traced):
    traced.run(
        "from storage.log.aio import OneWrite\n"
        "f = os.open('a', W); os.pwrite(f, b'1' * 8192, 0); os.fsync(f); os.fsync(here)\n"
        "g = os.open('a', os.O_RDWR | os.O_DIRECT | os.O_DSYNC); one = OneWrite(4096); one.view[:4096] = b'2' * 4096\n"
        "one.begin(g, one.view[:4096], 4096); h = os.open('b', W); assert one.result(wait=True) == 4096",
        tell=False,
    )
    kinds = [(record.kind, record.phase) for record in traced.records]
    began, ended = (max(at for at, kind in enumerate(kinds) if kind == (Kind.WRITE, phase)) for phase in Phase)
    assert (Kind.CREATE, Phase.END) in kinds[began:ended], "other operations go on meanwhile"
    traced.tell(ended)
    found = [image["a"] for image in traced.images()]
    assert {content[:4096] for content in found} == {b"1" * 4096}
    assert len({content[4096:] for content in found}) > 10
    traced.tell(ended + 1)
    assert {image["a"] for image in traced.images()} == {b"1" * 4096 + b"2" * 4096}


def test_a_write_through_is_not_undone_by_earlier_writes_in_its_place(traced):
    traced.run(
        "f = os.open('a', W); os.fsync(here); os.pwrite(f, b'1' * 2048, 0)\n"
        "g = os.open('a', os.O_RDWR | os.O_DSYNC); os.pwrite(g, b'2' * 512, 512)"
    )
    for image in traced.images():
        assert image["a"][512:1024] == b"2" * 512
    assert len({image["a"] for image in traced.images()}) > 3


def test_a_write_through_is_not_undone_by_an_earlier_truncation(traced):
    traced.run(
        "f = os.open('a', W); os.pwrite(f, b'1' * 2048, 0); os.fsync(f); os.fsync(here); os.ftruncate(f, 0)\n"
        "g = os.open('a', os.O_RDWR | os.O_DSYNC); os.pwrite(g, b'2' * 512, 0)"
    )
    assert {image["a"] for image in traced.images()} == {b"2" * 512}


def test_a_truncation_happens_or_not_and_later_writes_come_after_it(traced):
    traced.run("f = os.open('a', W); os.pwrite(f, b'1' * 512, 0); os.fsync(f); os.fsync(here); os.ftruncate(f, 0)")
    assert {image["a"] for image in traced.images()} == {b"1" * 512, b""}
    traced.run("f = os.open('a', R); os.pwrite(f, b'2' * 512, 512); os.fsync(f)")
    assert {image["a"] for image in traced.images()} == {bytes(512) + b"2" * 512}


SEGMENT = """
zeros, page = mmap.mmap(-1, 1 << 20), mmap.mmap(-1, 4096)
page.write(b"1" * 4096)
f = os.open("segment", W)
for at in range(0, 16 << 20, 1 << 20):
    os.pwrite(f, zeros, at)
{sync}
os.fsync(here)
try:
    g = os.open("segment", os.O_RDWR | os.O_DIRECT | os.O_DSYNC)
except OSError:  # a file system that has no O_DIRECT
    g = os.open("segment", os.O_RDWR | os.O_DSYNC)
for at in (0, 4096, 1 << 20):
    os.pwrite(g, page, at)
"""


@pytest.mark.parametrize("sync", ["os.fdatasync(f)", ""])
def test_what_is_written_through_to_a_preallocated_file_is_there_whether_its_zeros_are_or_not(traced, sync):
    traced.run(SEGMENT.format(sync=sync))
    sizes = set()
    for image in traced.images(count=8):
        content = image["segment"]
        sizes.add(len(content))
        assert content[: 1 << 20] == b"1" * 8192 + bytes((1 << 20) - 8192)
        assert content[1 << 20 : (1 << 20) + 4096] == b"1" * 4096
        assert not content[(1 << 20) + 4096 :].strip(b"\0")
    assert sizes == {16 << 20} if sync else len(sizes) > 2


def test_a_rename_replaces_in_one_step(traced):
    traced.run(
        "f = os.open('a', W); os.pwrite(f, b'old', 0); os.fsync(f); os.fsync(here)\n"
        "g = os.open('a.partial', W); os.pwrite(g, b'new', 0); os.fsync(g); os.rename('a.partial', 'a')"
    )
    assert {image["a"] for image in traced.images()} == {b"old", b"new"}
    traced.run("os.fsync(here)")
    assert traced.images() == [{"a": b"new"}] * IMAGES


def test_a_rename_of_a_file_that_was_not_synced_may_leave_an_empty_one(traced):
    traced.run("g = os.open('b', W); os.pwrite(g, b'new', 0); os.rename('b', 'a'); os.fsync(here)")
    assert {image["a"] for image in traced.images()} == {b"", b"new", b"\0\0\0"}


def test_a_removed_file_may_be_back_until_the_directory_is_synced(traced):
    traced.run("f = os.open('a', W); os.pwrite(f, b'1', 0); os.fsync(f); os.fsync(here); os.unlink('a')")
    assert {image.get("a") for image in traced.images()} == {None, b"1"}
    traced.run("os.fsync(here)")
    assert traced.images() == [{}] * IMAGES


@pytest.mark.parametrize("metadata", list(Metadata))
def test_names_appear_in_order_or_in_any(traced, metadata):
    traced.run("for name in 'abc': os.close(os.open(name, W))")
    found = {tuple(image) for image in traced.images(metadata)}
    prefixes = {(), ("a",), ("a", "b"), ("a", "b", "c")}
    assert found == prefixes if metadata is Metadata.ORDERED else found > prefixes


def test_a_directory_is_made_after_a_failure_for_want_of_its_parent(traced):
    traced.run("import pathlib; pathlib.Path('a/b/c').mkdir(parents=True); f = os.open('a/b/c/d', W)")
    traced.disk.finish()
    assert traced.images() == [{"a/b/c/d": b""}] * IMAGES


def test_names_in_a_directory_whose_making_is_told_late(tmp_path):
    disk = Disk()

    def tell(operation, kind, phase, path, inode=0, result=0):
        disk.tell(Record(kind, phase, 0, operation, inode, 0, 0, result, path, "", b""))

    tell(1, Kind.MKDIR, Phase.BEGIN, "a/b")
    tell(2, Kind.MKDIR, Phase.BEGIN, "a")  # of another process; it has returned, but has not been told to have
    tell(1, Kind.MKDIR, Phase.END, "", inode=11)
    tell(3, Kind.RENAME, Phase.BEGIN, "c/d")
    tell(3, Kind.RENAME, Phase.END, "", result=-2)
    tell(2, Kind.MKDIR, Phase.END, "", inode=12)
    disk.finish()
    disk.image(tmp_path / "image", random.Random(), Metadata.ORDERED)
    assert (tmp_path / "image" / "a" / "b").is_dir()
    tell(4, Kind.MKDIR, Phase.BEGIN, "c/d")
    with pytest.raises(UnknownOperation, match="succeeded in a directory that nobody made"):
        tell(4, Kind.MKDIR, Phase.END, "", inode=13)


def test_a_file_in_a_directory_whose_name_is_not_synced_may_be_lost_with_it(traced):
    traced.run(
        "os.mkdir('d'); f = os.open('d/a', W); os.pwrite(f, b'1', 0); os.fsync(f); os.fsync(os.open('d', os.O_RDONLY))"
    )
    assert {"d/a" in image for image in traced.images()} == {True, False}
    traced.run("os.fsync(here)")
    assert traced.images() == [{"d/a": b"1"}] * IMAGES


def test_a_file_that_is_mapped_for_writing_has_any_content(traced):
    traced.run("f = os.open('a', W); os.ftruncate(f, 4096); os.fsync(f); os.fsync(here); mmap.mmap(f, 4096)")
    assert len({image["a"] for image in traced.images()}) == IMAGES


@pytest.mark.parametrize(
    ("deaf", "code"),
    [
        (Deaf.FILES, "f = os.open('a', W); os.fsync(here); os.pwrite(f, b'1', 0); os.fsync(f)"),
        (Deaf.DSYNC, "f = os.open('a', W | os.O_DSYNC); os.fsync(here); os.pwrite(f, b'1', 0)"),
        (Deaf.DIRECTORIES, "f = os.open('a', W | os.O_DSYNC); os.pwrite(f, b'1', 0); os.fsync(here)"),
    ],
)
def test_a_deaf_disk_ignores_a_sync(traced, deaf, code):
    traced.disk.go_deaf([deaf])
    traced.run(code)
    assert len({image.get("a") for image in traced.images()}) > 1


FAILING = "f = os.open('a', W); os.fsync(here); os.pwrite(f, b'1' * 8192, 0); os.fsync(f)"


def test_what_was_written_before_a_sync_that_failed_is_not_made_durable_by_a_later_one(traced, monkeypatch):
    monkeypatch.setenv("POWER_LOSS_FAIL", "2:directory/a")
    again = "os.pwrite(f, b'2' * 4096, 4096)\ntry: os.fsync(f)\nexcept OSError: os.fsync(f)"
    traced.run(f"{FAILING}; {again}")
    assert traced.directory.joinpath("a").read_bytes() == b"1" * 4096 + b"2" * 4096, "every process reads it"
    found = {image["a"] for image in traced.images()}
    assert {content[:4096] for content in found} == {b"1" * 4096}
    assert {b"1" * 4096, b"2" * 4096} < {content[4096:] for content in found}
    assert all(len(content) == 8192 for content in found)


def test_what_is_written_again_after_a_sync_that_failed_is_durable(traced, monkeypatch):
    monkeypatch.setenv("POWER_LOSS_FAIL", "2:directory/a")
    again = "os.pwrite(f, b'2' * 4096, 4096)\ntry: os.fsync(f)\nexcept OSError: os.pwrite(f, b'2' * 4000, 4096)"
    traced.run(f"{FAILING}; {again}\nos.fsync(f)")
    found = {image["a"] for image in traced.images()}
    assert {content[: 4096 + 4000] for content in found} == {b"1" * 4096 + b"2" * 4000}
    assert {b"1" * 96, b"2" * 96} <= {content[-96:] for content in found}


def test_what_is_not_modelled_is_not_passed_over(traced):
    with pytest.raises(UnknownOperation):
        traced.run("os.close(os.open('a', W)); os.link('a', 'b')")


CHANGES = """
import random
chance = random.Random({seed})
for number in range(60):
    name = chance.choice("abcd")
    match chance.randrange(10):
        case 0:
            f = os.open(name, W | chance.choice((0, os.O_TRUNC, os.O_DSYNC, os.O_APPEND)))
            os.write(f, chance.randbytes(chance.randrange(3000)))
            os.close(f)
        case 1 if os.path.exists(name):
            f = os.open(name, R); os.ftruncate(f, chance.randrange(5000)); os.close(f)
        case 2 if os.path.exists(name):
            f = os.open(name, R); os.posix_fallocate(f, chance.randrange(3000), 1000); os.close(f)
        case 3 if os.path.exists(name):
            os.rename(name, chance.choice("abcd"))
        case 4 if os.path.exists(name):
            os.unlink(name)
        case 5 if os.path.exists(name):
            f = os.open(name, R); os.fsync(f); os.close(f)
        case 6:
            os.fsync(here)
        case 7 if os.path.exists(name):
            f = os.dup(g := os.open(name, R)); os.close(g); os.lseek(f, 700, 0)
            os.writev(f, [b"one", chance.randbytes(900)]); os.pwritev(f, [bytes(600), b"two"], 50); os.close(f)
        case 8:
            with open(name, "ab") as file:
                file.write(chance.randbytes(100))
        case 9 if os.path.exists(name):
            os.truncate(name, chance.randrange(5000))
"""


@pytest.mark.parametrize("seed", range(16))
def test_the_trace_says_all_that_programs_do(traced, seed):
    traced.run(CHANGES.format(seed=seed))
    traced.disk.finish()
    assert traced.images(count=1) == [files_of(traced.directory)]


def test_a_record_that_a_killed_process_did_not_finish_is_passed_over(tmp_path):
    def said(operation: int, data: bytes) -> bytes:
        return packed(Record(Kind.WRITE, Phase.BEGIN, 0, operation, 1, 0, len(data), 0, "", "", data))

    whole = [said(number, b"x" * 100 * number) for number in range(1, 6)]
    for at in range(5):
        for left in (3, 50, len(whole[at]) - 1):
            cut = [*whole[:at], whole[at][:left], *whole[at + 1 :]]
            (tmp_path / "trace").write_bytes(b"".join(cut))
            found = [(record.operation, bytes(record.data)) for record in Trace(tmp_path / "trace")]
            assert found == [(number, b"x" * 100 * number) for number in range(1, 6) if number != at + 1]


@pytest.mark.parametrize(
    "code",
    [
        "os.pwrite(f, b'2' * 700, 300)",
        "os.ftruncate(f, 5)",
        "os.ftruncate(f, 5000)",
        "os.rename('a', 'b')",
        "os.unlink('a')",
        "os.mkdir('d')",
        "os.close(os.open('c', W))",
        "os.fsync(f)",
    ],
)
@pytest.mark.parametrize("done", [True, False])
def test_the_last_operation_of_a_killed_process_ends_as_the_files_say(traced, code, done):
    begin = "f = os.open('a', W); os.pwrite(f, b'1' * 700, 0); os.fsync(f); os.fsync(here)"
    traced.run(f"{begin}; {code}", tell=False)
    trace = traced.directory.parent / "cut"
    marker = Marker(trace)
    for record in [*traced.records][:-1]:
        marker.add(record._replace(data=bytes(record.data)))
    if not done:  # the call was not made: the files are as before
        for path in traced.directory.iterdir():
            path.rmdir() if path.is_dir() else path.unlink() if path.name == "c" else path.rename(path.with_name("a"))
        with (traced.directory / "a").open("r+b" if (traced.directory / "a").exists() else "w+b") as file:
            file.write(b"1" * 700)
            file.truncate(700)
    resolve(trace, traced.directory, marker)
    marker.close()
    disk = Disk()
    disk.set_root(traced.directory.stat().st_ino)
    for record in Trace(trace):
        disk.tell(record)
    disk.finish()
    image = traced.directory.parent / "image"
    disk.image(image, random.Random(), Metadata.ORDERED)
    assert files_of(image) == files_of(traced.directory)
    assert {path.name for path in image.iterdir()} == {path.name for path in traced.directory.iterdir()}
