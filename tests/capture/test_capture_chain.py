"""The chain of manifest entries: several writers at once, damage, snapshots."""

import json
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem, _MockFileSystem

from storage.capture.chain import SNAPSHOT_ENTRIES, Chain, load, names
from storage.capture.errors import AnotherNamespace, DamagedManifest, InUse, Superseded
from storage.capture.manifest import Entry, Kind, Next, State, TableName, path_of
from storage.capture.place import Place, Sink, Stored
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.capture.synthetic_rows import EPOCH, batch
from tests.examples import examples

NAMESPACE = "sample"
OPTIONS = CaptureOptions(lease_seconds=0)
ROWS = batch(0, 0, 60)


class Turns:
    """Threads that go on by one operation when they are told to."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._go: dict[int, threading.Semaphore] = {}
        self._threads: dict[int, threading.Thread] = {}

    def start(self, number: int, work) -> None:
        def run() -> None:
            try:
                self._go[number].acquire()
                work()
            finally:
                del self._go[number]
                self._arrived.release()

        self._go[number] = threading.Semaphore(0)
        self._threads[number] = threading.Thread(target=run)
        self._threads[number].start()

    def wait(self, number: int) -> None:
        """Called by the thread before each operation."""
        go = self._go[number]
        self._arrived.release()
        go.acquire()

    @property
    def running(self) -> list[int]:
        return sorted(self._go)

    def step(self, number: int) -> None:
        self._go[number].release()
        self._arrived.acquire()

    def finish(self) -> None:
        while self._go:
            self.step(self.running[0])
        for thread in self._threads.values():
            thread.join()


class StepwisePlace(Place):
    """Whose every operation waits for its turn."""

    def __init__(self, place: Place, turns: Turns, number: int) -> None:
        super().__init__(place._file_system, place._root, place.url)
        self._turns, self._number = turns, number

    @contextmanager
    def writing(self, path: str) -> Iterator[Sink]:
        self._turns.wait(self._number)
        with super().writing(path) as sink:
            yield sink

    def read(self, path: str) -> pa.Buffer:
        self._turns.wait(self._number)
        return super().read(path)

    def files(self, folder: str) -> Iterator[Stored]:
        self._turns.wait(self._number)
        return iter(list(super().files(folder)))


def in_memory() -> Place:
    return Place(_MockFileSystem(), "folder", "memory:folder")


def offsets_of(state: State | None) -> list[int]:
    """All offsets in the files of the ledger; each file has a contiguous part."""
    assert state is not None
    found: list[int] = []
    for file in state.files.values():
        assert file.table is TableName.LEDGER
        for each in file.ranges:
            assert each.rows == each.last - each.first + 1
            found += range(each.first, each.last + 1)
    return sorted(found)


def chain_of(place: Place) -> list[str]:
    """Names of the entries from the newest to the first."""
    state = load(place)
    name = None if state is None else state.head
    found = []
    while name is not None:
        found.append(name)
        name = json.loads(bytes(place.read(f"manifest/{name}")))["content"]["previous"]
    return found


def capture_some(place: Place, confirmed: list[str], ends: list[str]) -> None:
    """One writer: rolls three times if it can. `confirmed` gets the entries that it was told are written."""
    try:
        with CaptureWriter(place, NAMESPACE, OPTIONS, sleep=lambda _: None) as writer:
            for _ in range(3):
                first = writer.next_offset(0, EPOCH) or 0
                writer.add(0, EPOCH, ROWS.slice(first, 3))
                writer.roll()
                assert writer.state.head is not None
                confirmed.append(writer.state.head)
        ends.append("done")
    except (InUse, Superseded) as error:
        ends.append(type(error).__name__)


@settings(max_examples=examples(60))
@given(choices=st.lists(st.integers(0, 2), max_size=120))
def test_however_writers_take_turns_each_offset_is_captured_once_and_nothing_confirmed_is_lost(choices):
    place, turns = in_memory(), Turns()
    confirmed: list[str] = []
    ends: list[str] = []
    for number in range(3):
        stepwise = StepwisePlace(place, turns, number)
        turns.start(number, lambda place=stepwise: capture_some(place, confirmed, ends))
    try:
        for choice in choices:
            if not turns.running:
                break
            turns.step(turns.running[choice % len(turns.running)])
            check(place, confirmed)
    finally:
        turns.finish()
    check(place, confirmed)
    assert len(ends) == 3, "a writer ended with another error"
    assert confirmed or "done" not in ends


def check(place: Place, confirmed: list[str]) -> None:
    state = load(place)
    if state is None:
        assert not confirmed
        return
    offsets = offsets_of(state)
    end = state.next[0, EPOCH].offset if state.next else 0
    assert offsets == list(range(end))
    assert set(confirmed) <= set(chain_of(place))


def test_two_writers_that_begin_at_once_do_not_both_go_on():
    """The schedule that a lease alone would not survive: the first is silent while the second takes over."""
    place = in_memory()
    first = CaptureWriter(place, NAMESPACE, OPTIONS, sleep=lambda _: None)
    first.add(0, EPOCH, ROWS.slice(0, 3))
    with CaptureWriter(place, NAMESPACE, OPTIONS, sleep=lambda _: None) as second:
        second.add(0, EPOCH, ROWS.slice(0, 5))
        second.roll()
        with pytest.raises(Superseded, match="another capture has taken over memory:folder: process"):
            first.roll()
        state = load(place)
        assert offsets_of(state) == [0, 1, 2, 3, 4]
        second.add(0, EPOCH, ROWS.slice(5, 1))
        second.roll()
    assert offsets_of(load(place)) == [0, 1, 2, 3, 4, 5]


def test_a_claim_that_is_renewed_refuses_a_second_writer():
    place = in_memory()
    first = Chain(place, NAMESPACE, lease_seconds=0)

    def sleep(_: float) -> None:
        first.renew_when_due()

    with pytest.raises(InUse, match="is written by another capture: process"):
        Chain(place, NAMESPACE, sleep=sleep)
    first.close()
    Chain(place, NAMESPACE, sleep=lambda _: pytest.fail("there is nothing to wait for")).close()


def test_a_writer_that_died_is_waited_for_as_long_as_its_lease(tmp_path):
    place = in_memory()
    Chain(place, NAMESPACE)  # not closed
    slept = []
    Chain(place, NAMESPACE, lease_seconds=60, sleep=slept.append)
    assert sum(slept) >= 60


def entry(state: State, offset: int) -> Entry:
    new = {"next": (Next(partition=0, epoch=EPOCH, first=0, offset=offset),)}
    return state.following(Kind.CAPTURED, offset).model_copy(update=new)


def test_snapshots_replace_old_entries(tmp_path):
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE)
    for offset in range(3 * SNAPSHOT_ENTRIES):
        chain.append(entry(chain.state, offset))
        chain.tidy(keep_ms=1 << 50)  # nobody is reading
    chain.close()
    found = names(place)
    assert len(found.entries) <= SNAPSHOT_ENTRIES + 1
    assert len(found.snapshots) == 1
    assert load(place).next[0, EPOCH].offset == 3 * SNAPSHOT_ENTRIES - 1
    # Another writer goes on from there, and what readers may still read is not removed.
    chain = Chain(place, NAMESPACE)
    assert chain.state.next[0, EPOCH].offset == 3 * SNAPSHOT_ENTRIES - 1
    chain.tidy(keep_ms=0)
    assert len(names(place).entries) == len(found.entries) + 1
    chain.close()


def test_of_another_namespace_nothing_is_written(tmp_path):
    place = Place.of(str(tmp_path))
    Chain(place, NAMESPACE).close()
    before = load(place).head
    with pytest.raises(AnotherNamespace, match="has rows of the namespace 'sample', not 'other'"):
        Chain(place, "other")
    assert load(place).head == before
    Chain(place, NAMESPACE).close()  # the lock was let go


ENTRY_FILE = re.compile(r"0{19}2-.*")


def two_entries(tmp_path) -> tuple[Place, str]:
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE)
    chain.append(entry(chain.state, 5))
    chain.close()
    return place, f"manifest/{chain.state.head}"


@settings(max_examples=examples(150))
@given(data=st.data())
def test_a_damaged_entry_is_named_and_never_believed(tmp_path_factory, data):
    place, path = two_entries(tmp_path_factory.mktemp("damaged"))
    whole = bytes(place.read(path))
    text = bytearray(whole)
    at = data.draw(st.integers(0, len(text) - 3))  # the last two bytes are a brace and a line feed
    if data.draw(st.booleans()):
        del text[at:]
    else:
        text[at] ^= 1 << data.draw(st.integers(0, 7))
    place.write(path, bytes(text))
    if means_the_same(bytes(text), whole):
        assert load(place).next[0, EPOCH].offset == 5
    else:
        with pytest.raises(DamagedManifest, match=path.removeprefix("manifest/")):
            load(place)


def means_the_same(text: bytes, whole: bytes) -> bool:
    """If a blank has become another one."""
    try:
        return bool(json.loads(text) == json.loads(whole))
    except ValueError:
        return False


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"{}", b"null", b"\xff\xfe", b"[" * 100_000, b'{"checksum": 1, "content": {"version": 1}}'],
)
def test_foreign_entries_are_named(tmp_path, text):
    place, path = two_entries(tmp_path)
    place.write(path, text)
    with pytest.raises(DamagedManifest, match=r"0{19}2-"):
        load(place)


def test_a_missing_entry_is_named(tmp_path):
    place, _ = two_entries(tmp_path)
    [first] = [stored.path for stored in place.files("manifest") if "/00000000000000000001-" in stored.path]
    place.delete(first)
    with pytest.raises(DamagedManifest, match=r"0{19}1-.*: is missing"):
        load(place)


def test_a_manifest_that_is_gone_is_not_begun_anew_beside_files(tmp_path):
    """It would end with the removal of all files that it does not name."""
    place = Place.of(str(tmp_path))
    Chain(place, "here").close()
    for stored in list(place.files("manifest")):
        if "claim" not in stored.path:
            place.delete(stored.path)
    Chain(place, "here").close()  # there is nothing else
    shutil.rmtree(tmp_path / "manifest")
    place.write(path_of(TableName.LEDGER, 500_000, "a"), b"rows")
    for _ in range(2):
        with pytest.raises(DamagedManifest, match=r"has no entry, but table=ledger/date=.*/a\.parquet is there"):
            Chain(place, "here")


def test_an_entry_of_a_later_version_is_refused(tmp_path):
    place, path = two_entries(tmp_path)
    document = json.loads(bytes(place.read(path)))
    document["content"]["version"] = 3
    place.write(path, json.dumps(document).encode())
    with pytest.raises(DamagedManifest, match="is of version 3; this program knows versions up to 2"):
        load(place)


def test_foreign_files_beside_the_entries_are_ignored(tmp_path):
    place, _ = two_entries(tmp_path)
    for name in ("README", "99999999999999999999-0000000001-00000000.json", "claim-x.json", "sub/00.json"):
        place.write(f"manifest/{name}", b"x")
    assert load(place).next[0, EPOCH].offset == 5


def test_a_file_system_without_a_lock(tmp_path):
    place = Place(SubTreeFileSystem(str(tmp_path), LocalFileSystem()), "inner", "other:inner")
    with CaptureWriter(place, NAMESPACE, OPTIONS, sleep=lambda _: None) as writer:
        writer.add(0, EPOCH, ROWS)
        writer.roll()
    assert offsets_of(load(place)) == list(range(60))
