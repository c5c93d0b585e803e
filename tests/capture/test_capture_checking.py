"""Sixty planted faults, and what is said of each; sound captures, of which nothing is said."""

import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from broker.cli.all_commands import app
from storage.capture import definitions
from storage.capture.chain import load
from storage.capture.checking import Problem, check
from storage.capture.compaction import compact
from storage.capture.inventory import Expected, Span, inventory, union, without
from storage.capture.manifest import Entry, State, encode
from storage.capture.place import Place
from storage.capture.source import Told
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.capture.journal_server import Journal, JournalServer
from tests.capture.synthetic_rows import EPOCH, batch

NAMESPACE, ID = "sample", "0123456789abcdef" * 2
RESTORED = "00000000000000b2"
TOLD = {(0, EPOCH): 90, (1, EPOCH): 60, (0, RESTORED): 20}
DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Two partitions, an epoch that a restore began, rows that were lost, files that were merged, definitions."""
    folder = tmp_path_factory.mktemp("sound")
    options = CaptureOptions(compact_after_seconds=0)
    with CaptureWriter(Place.of(str(folder)), NAMESPACE, options, namespace_id=ID) as writer:
        for first in (0, 30):
            for partition in (0, 1):
                writer.add(partition, EPOCH, batch(partition, first, first + 30, body_bytes=60))
            writer.roll()
        assert compact(writer, {}) == 4
        definitions.keep(writer.place, {"namespace": NAMESPACE, "entities": []}, 1)
        writer.skip(0, EPOCH, 60, 70)
        writer.add(0, EPOCH, batch(0, 70, 90))
        writer.roll()
        writer.add(0, RESTORED, batch(0, 0, 20, body_bytes=60))
        writer.roll()
    return folder


def said(folder: Path, told: Told | None = None, keep_ms: int = DAY_MS) -> tuple[Counter[Problem], list[str]]:
    found = check(Place.of(str(folder)), told, time.time_ns() // 1_000_000 - keep_ms)
    return Counter(each.problem for each in found.findings), found.notes


# -- what can be planted


def files_of(folder: Path, table: str, which: int = 0) -> Path:
    state = load(Place.of(str(folder)))
    return folder / sorted(file.path for file in state.files.values() if file.table == table)[which]


def flip(path: Path, place: float, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[min(len(content) - 1, int(place * len(content)))] ^= 1 << bit
    path.write_bytes(content)


def entries(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / "manifest").iterdir() if path.name[0] == "0")


def snapshot_of(folder: Path) -> Path:
    """Write one of the newest entry, as a capture does after many."""
    place = Place.of(str(folder))
    state = load(place)
    path = folder / "manifest" / f"snapshot-{state.head}"
    path.write_bytes(encode(state.snapshot()).text)
    return path


def rewritten(which: int, change: Callable[[dict], object]) -> Callable[[Path], object]:
    """An entry with other content, and a checksum that fits to it."""

    def plant(folder: Path) -> None:
        path = entries(folder)[which]
        content = json.loads(path.read_text())["content"]
        change(content)
        path.write_bytes(encode(Entry.model_validate(content)).text)

    return plant


def set_next(content: dict, place: int, name: str, by: int) -> None:
    content["next"][place][name] += by


def set_file(content: dict, name: str, value: object) -> None:
    content["files"][0][name] = value


def set_range(content: dict, name: str, by: int) -> None:
    content["files"][0]["ranges"][0][name] += by


def swap(folder: Path) -> None:
    one, other = files_of(folder, "ledger", 0), files_of(folder, "ledger", 1)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def drop_file(content: dict) -> None:
    content["files"] = [each for each in content["files"] if each["table"] != "ledger"]


def old(path: Path) -> None:
    two_days = time.time() - 2 * 86400
    os.utime(path, (two_days, two_days))


def beside(folder: Path, name: str, content: bytes = b"x") -> Path:
    path = files_of(folder, "ledger").parent / name
    path.write_bytes(content)
    return path


def as_version_1(folder: Path) -> None:
    """The same manifest as an earlier version would have written it."""
    for path in entries(folder):
        content = json.loads(path.read_text())["content"]
        for name in ("namespaceId", "previousChecksum"):
            del content[name]
        content["version"] = 1
        _, checksum = decode_without_checksum(content)
        path.write_text(json.dumps({"checksum": checksum, "content": content}, sort_keys=True, indent=1))


def decode_without_checksum(content: dict) -> tuple[dict, str]:
    from xxhash import xxh3_64_hexdigest

    return content, xxh3_64_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


def remove_all(folder: Path, pattern: str) -> None:
    for path in list(folder.rglob(pattern)):
        path.unlink()


def definition(folder: Path) -> Path:
    return next((folder / "definitions").iterdir())


class Fault(NamedTuple):
    plant: Callable[[Path], object]
    expected: Mapping[Problem, int]
    told: Mapping[tuple[int, str], int] | None = None
    namespace_id: str | None = ID


def nothing(_: Path) -> None: ...


DAMAGED = {Problem.DAMAGED_FILE: 1}
MISSING = {Problem.MISSING_FILE: 1}
ENTRY = {Problem.DAMAGED_MANIFEST: 1}
WRONG = {Problem.WRONG_MANIFEST: 1}
CUT = {Problem.CUT_MANIFEST: 1}

FAULTS: dict[str, Fault] = {
    **{
        f"a bit of {table} at {place}": Fault(
            lambda folder, table=table, place=place: flip(files_of(folder, table), place, int(place * 97) % 8), DAMAGED
        )
        for table in ("ledger", "messages")
        for place in (0, 0.001, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999, 1)
    },
    **{
        f"{what} {table}": Fault(lambda folder, table=table, act=act: act(files_of(folder, table)), expected)
        for table in ("ledger", "messages")
        for what, act, expected in (
            ("an empty file of", lambda path: path.write_bytes(b""), DAMAGED),
            ("a file that was cut off of", lambda path: path.write_bytes(path.read_bytes()[:-100]), DAMAGED),
            ("a file with more bytes of", lambda path: path.write_bytes(path.read_bytes() + b"x"), DAMAGED),
            ("other bytes of the same length of", lambda path: path.write_bytes(bytes(path.stat().st_size)), DAMAGED),
            ("a file that is gone of", lambda path: path.unlink(), MISSING),
        )
    },
    "two files in each other's place": Fault(swap, {Problem.DAMAGED_FILE: 2}),
    "all files are gone": Fault(lambda folder: remove_all(folder, "*.parquet"), {Problem.MISSING_FILE: 5}),
    # The manifest.
    **{
        f"a bit of entry {which} at {place}": Fault(
            lambda folder, which=which, place=place: flip(entries(folder)[which], place, 1), ENTRY
        )
        for which, place in ((0, 0.2), (0, 0.5), (1, 0.3), (2, 0.6), (-1, 0.05), (-1, 0.5), (-1, 0.9))
    },
    "an empty entry": Fault(lambda folder: entries(folder)[-1].write_bytes(b""), ENTRY),
    "an entry that was cut off": Fault(lambda folder: entries(folder)[1].write_bytes(b"{"), ENTRY),
    "the first entry is gone": Fault(lambda folder: entries(folder)[0].unlink(), ENTRY),
    "an entry in the middle is gone": Fault(lambda folder: entries(folder)[2].unlink(), ENTRY),
    "a sound entry in place of another": Fault(
        rewritten(1, lambda content: set_next(content, 0, "offset", 0) or content.update(writtenMs=5)), ENTRY
    ),
    "no entry": Fault(lambda folder: shutil.rmtree(folder / "manifest"), {Problem.NO_MANIFEST: 1}),
    "nothing at all": Fault(
        lambda folder: [shutil.rmtree(each) for each in list(folder.iterdir())], {Problem.NO_MANIFEST: 1}
    ),
    "the newest entry is gone, and there is a snapshot": Fault(
        lambda folder: snapshot_of(folder) and entries(folder)[-1].unlink(), ENTRY
    ),
    "all entries are gone, and there is a snapshot": Fault(
        lambda folder: [snapshot_of(folder), *(path.unlink() for path in entries(folder))], ENTRY
    ),
    "a bit of a snapshot": Fault(lambda folder: flip(snapshot_of(folder), 0.5), ENTRY),
    "a snapshot of the first entry": Fault(
        lambda folder: (folder / "manifest" / f"snapshot-{entries(folder)[0].name}").write_bytes(b"?"), ENTRY
    ),
    "a later version": Fault(rewritten(-1, lambda content: content.update(version=9)), ENTRY),
    "an entry of another namespace id": Fault(
        rewritten(-1, lambda content: content.update(namespaceId="f" * 32)), ENTRY
    ),
    # It is sound, and cannot be true.
    "offsets that no file has": Fault(rewritten(-1, lambda content: set_next(content, 1, "offset", 5)), WRONG),
    "a file that was never named": Fault(rewritten(-1, drop_file), WRONG),
    "a gap of which files have rows": Fault(
        rewritten(-1, lambda content: content.update(gaps=[{"partition": 0, "epoch": EPOCH, "first": 5, "last": 9}])),
        WRONG,
    ),
    "a gap that is forgotten": Fault(
        lambda folder: [
            rewritten(-2, lambda content: content.update(gaps=[]))(folder),
            rewritten(
                -1,
                lambda content: content.update(
                    previousChecksum=json.loads(entries(folder)[-2].read_text())["checksum"]
                ),
            )(folder),
        ],
        WRONG,
    ),
    "an epoch that was not captured": Fault(
        rewritten(-1, lambda content: content["next"].pop(1)), {Problem.WRONG_MANIFEST: 2}
    ),
    "more rows than a file has": Fault(rewritten(-1, lambda content: set_file(content, "rows", 21)), WRONG | DAMAGED),
    "a checksum of another file": Fault(
        rewritten(-1, lambda content: set_file(content, "checksum", "0" * 16)), DAMAGED
    ),
    "rows that the file does not have": Fault(
        rewritten(-1, lambda content: [set_range(content, "last", 3), set_next(content, 1, "offset", 3)]),
        WRONG | DAMAGED,
    ),
    # What only the broker knows.
    "the newest entry is gone": Fault(lambda folder: entries(folder)[-1].unlink(), CUT, TOLD),
    "the two newest entries are gone": Fault(
        lambda folder: [path.unlink() for path in entries(folder)[-2:]], {Problem.CUT_MANIFEST: 2}, TOLD
    ),
    "the broker was told of more": Fault(nothing, CUT, TOLD | {(1, EPOCH): 61}),
    "the broker was told of an epoch": Fault(nothing, CUT, TOLD | {(7, EPOCH): 1}),
    "another broker": Fault(nothing, {Problem.ANOTHER_BROKER: 1}, TOLD, "f" * 32),
    # Definitions.
    "a bit of definitions": Fault(lambda folder: flip(definition(folder), 0.5), {Problem.DAMAGED_DEFINITIONS: 1}),
    "empty definitions": Fault(lambda folder: definition(folder).write_bytes(b""), {Problem.DAMAGED_DEFINITIONS: 1}),
    "definitions of another namespace": Fault(
        lambda folder: definitions.keep(Place.of(str(folder)), {"namespace": "other"}, 2),
        {Problem.DAMAGED_DEFINITIONS: 1},
    ),
}

SOUND: dict[str, Fault] = {
    "as it was written": Fault(nothing, {}),
    "with all that the broker was told": Fault(nothing, {}, TOLD),
    "with more than the broker was told": Fault(nothing, {}, {(0, EPOCH): 10}),
    "a broker of an earlier version": Fault(nothing, {}, TOLD, None),
    "a snapshot": Fault(snapshot_of, {}),
    "a snapshot, and no entry before it": Fault(
        lambda folder: [snapshot_of(folder), *(path.unlink() for path in entries(folder)[:-1])], {}
    ),
    "of an earlier version": Fault(as_version_1, {}, TOLD),
    "replaced files that are gone": Fault(
        lambda folder: [(folder / path).unlink() for path in load(Place.of(str(folder))).removed], {}
    ),
    "replaced files that are old": Fault(
        lambda folder: [old(folder / path) for path in load(Place.of(str(folder))).removed], {}
    ),
    "a file that is being written": Fault(lambda folder: beside(folder, f"{'a' * 32}.parquet.partial"), {}),
    "a file that no entry names yet": Fault(lambda folder: beside(folder, f"{'a' * 32}.parquet"), {}),
    "an entry of a capture that was superseded": Fault(
        lambda folder: (folder / "manifest" / f"{4:020d}-0000000000-{'0' * 16}.json").write_bytes(
            entries(folder)[3].read_bytes()
        ),
        {},
    ),
    "files of others": Fault(lambda folder: [(folder / name).write_bytes(b"") for name in ("README", "x.parquet")], {}),
    "definitions of others": Fault(lambda folder: (folder / "definitions" / "notes.txt").write_bytes(b""), {}),
    "no definitions": Fault(lambda folder: shutil.rmtree(folder / "definitions"), {}),
}


def test_there_are_sixty_faults():
    assert len(FAULTS) >= 60


@pytest.mark.parametrize("name", [*FAULTS, *SOUND])
def test_each_fault_is_named_and_nothing_else_is(sound, tmp_path, name):
    fault = (FAULTS | SOUND)[name]
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)
    fault.plant(folder)
    told = None if fault.told is None else Told(NAMESPACE, fault.namespace_id, fault.told)
    problems, notes = said(folder, told)
    assert problems == fault.expected
    assert notes == []


def test_what_no_entry_names_is_noted_when_it_is_old_and_never_fails(sound, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)
    old(beside(folder, "b.parquet"))
    old(beside(folder, "c.parquet.partial"))
    beside(folder, "young.parquet")
    problems, notes = said(folder)
    assert not problems
    assert [Path(note.partition(":")[0]).name for note in notes] == ["b.parquet", "c.parquet.partial"]
    assert len(said(folder, keep_ms=-DAY_MS)[1]) == 3, "all are older than the day after tomorrow"


def test_a_file_that_a_compaction_replaces_meanwhile_is_not_missing(sound, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)

    def replace(_: int) -> None:
        options = CaptureOptions(compact_after_seconds=0)
        with CaptureWriter(Place.of(str(folder)), NAMESPACE, options, namespace_id=ID) as writer:
            before = set(writer.state.files)
            assert compact(writer, {}) > 0
            for path in before - writer.state.files.keys():
                (folder / path).unlink()

    found = check(Place.of(str(folder)), None, 0, expect=replace)
    assert found.ok, found.findings


def test_the_order_of_epochs_is_that_in_which_they_were_captured(sound):
    state = load(Place.of(str(sound)))
    assert state is not None
    assert inventory(state) == [
        Expected(0, EPOCH, 0, 90, (Span(60, 70),)),
        Expected(1, EPOCH, 0, 60, ()),
        Expected(0, RESTORED, 0, 20, ()),
    ]
    assert [each.rows for each in inventory(state)] == [80, 60, 20]
    assert [each.position for each in inventory(State.of(state.snapshot()))] == [(0, EPOCH), (1, EPOCH), (0, RESTORED)]


spans = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda both: Span(*both)), max_size=8)


@given(spans, spans)
def test_sets_of_offsets(some, others):
    def offsets(of):
        return {offset for each in of for offset in range(each.first, each.end)}

    assert offsets(union(some)) == offsets(some)
    left = without(some, others)
    assert offsets(left) == offsets(some) - offsets(others)
    assert list(left) == sorted(left)
    assert all(one.end < other.first for one, other in zip(union(some), union(some)[1:], strict=False))


# -- the command


def verify(folder: Path, *options: str):
    result = CliRunner().invoke(app, ["verify", "--capture", str(folder), *options])
    return result.exit_code, result.stdout


def test_the_command_says_what_is_there_and_what_is_wrong(sound, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(sound, folder)
    code, text = verify(folder)
    assert code == 0, text
    assert f"namespace {NAMESPACE}, id {ID}: 7 entries of the manifest, the newest " in text
    assert "; the broker was not asked" in text
    assert f"partition 0, epoch {EPOCH}: 80 rows, offsets 0 to 89" in text
    assert "not captured, since they were lost before: the offsets 60 to 69" in text
    assert text.endswith(f"{folder}: ok\n")
    damaged = files_of(folder, "ledger")
    flip(damaged, 0.5)
    old(beside(folder, "b.parquet"))
    code, text = verify(folder)
    assert code == 1
    assert f"damaged-file: {damaged}: the checksum does not match" in text
    assert "b.parquet: no entry of the manifest names it" in text
    assert text.endswith(f"{folder}: 1 problem\n")
    assert "note:" not in verify(folder, "--keep", "3d")[1]


def test_the_command_asks_the_broker_whether_the_newest_entries_are_there(tmp_path):
    journal = Journal(partitions=1, stable=30)
    journal.namespace_id = ID
    with JournalServer(journal) as server:
        for stable in (30, 50):
            journal.stable = [stable]
            captured = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options])
            assert captured.exit_code == 0
        assert (
            "/$journal/consumers/capture",
            {"partitions": [{"partition": 0, "epoch": EPOCH, "offset": 50}]},
        ) in journal.told
        code, text = verify(tmp_path, "--ask-broker", *server.options)
        assert (code, "; the broker was asked whether there were newer ones" in text) == (0, True), text
        for path in entries(tmp_path)[-3:]:  # the last two are of compactions
            path.unlink()
        assert verify(tmp_path)[0] == 0
        code, text = verify(tmp_path, "--ask-broker", *server.options)
        assert code == 1
        assert (
            f"cut-manifest: partition 0, epoch {EPOCH}: captured to offset 49, as the broker was told, and here" in text
        )
        # The name of another consumer, of which the broker knows nothing.
        assert verify(tmp_path, "--ask-broker", "--consumer", "other", *server.options)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["somewhere", "--capture", "x"], "takes the place of DIR"),
        (["--ask-broker"], "--ask-broker: is for --capture"),
        (["somewhere", "--keep", "3d"], "--keep: is for --capture"),
        (["--consumer", "other", "--ca", "ca.pem"], "--consumer, --ca: is for --capture"),
        (["--connection-string", "x"], "--connection-string: is for --capture"),
        (["--capture", "x", "--consumer", "other"], "--consumer: needs --ask-broker"),
        (["--capture", "x", "--http-endpoint", "http://localhost"], "--http-endpoint: needs --ask-broker"),
        (["somewhere", "--data-dir", "other"], "--data-dir: has no effect where DIR is named"),
        (["--capture", "x", "--keep", "soon"], "is no duration"),
        (["--capture", "s3://"], "is no URL of a folder"),
        (["--capture", "x", "--ask-broker"], "give --connection-string"),
    ],
)
def test_wrong_use(arguments, text, monkeypatch):
    monkeypatch.delenv("PEEKLOCK_CONNECTION_STRING", raising=False)
    result = CliRunner().invoke(app, ["verify", *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
