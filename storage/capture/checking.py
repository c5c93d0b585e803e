"""Checks a folder of a capture: its manifest, each file that counts, and what else lies there.

A *finding* is damage: a reader would fail, or miss rows. A *note* is nothing that anybody must mend: a file that no
entry names and that is old enough to be removed by the next capture. Files that were replaced by compaction, and
unnamed ones that a capture may be writing now, are neither.
"""

import errno
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import chain
from typing import Final, NamedTuple

from storage.capture import definitions, files
from storage.capture.chain import all_entries, load
from storage.capture.errors import AnotherNamespace, DamagedFile, DamagedManifest, MissingFile
from storage.capture.inventory import Expected, behind, contradictions, inventory
from storage.capture.manifest import DataFile, State, TableName
from storage.capture.place import Place, Stored
from storage.capture.source import Told

THREADS: Final = 8  # files that are read at once; of each, three columns are in memory


class Problem(StrEnum):
    NO_MANIFEST = "no-manifest"  # nothing says what counts
    DAMAGED_MANIFEST = "damaged-manifest"  # an entry or a snapshot cannot be read, or does not fit to the one before
    CUT_MANIFEST = "cut-manifest"  # its newest entries are gone: the broker was told of more
    WRONG_MANIFEST = "wrong-manifest"  # its files cannot have what it says was captured
    ANOTHER_BROKER = "another-broker"  # the broker that was asked is not the one that was captured
    MISSING_FILE = "missing-file"
    DAMAGED_FILE = "damaged-file"  # it has other bytes or rows than the manifest says
    DAMAGED_DEFINITIONS = "damaged-definitions"


class Finding(NamedTuple):
    problem: Problem
    text: str


@dataclass
class Checked:
    """What was found, in the order of paths. `state` is None if there is none that can be believed."""

    state: State | None = None
    entries: int = 0
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.findings

    @property
    def expected(self) -> list[Expected]:
        return [] if self.state is None else inventory(self.state)

    def add(self, problem: Problem, error: object) -> None:
        self.findings.append(Finding(problem, str(error)))


def check(
    place: Place,
    told: Told | None,
    unnamed_before_ms: int,
    *,
    threads: int = THREADS,
    expect: Callable[[int], object] = lambda files: None,
    advance: Callable[[], object] = lambda: None,
) -> Checked:
    """`told`: of a broker that was asked before this is called. Files that no entry names are noted if they were
    written before that time. `expect` and `advance` are told of files. A capture may go on meanwhile.

    Raises OSError.
    """
    found = Checked()
    # Before the manifest: who writes a file names it later, and who has removed a name keeps the file for long.
    stored = sorted(chain.from_iterable(place.files(f"table={table}") for table in TableName))
    _check_manifest(place, found, is_empty=not stored)
    if found.state is not None:
        if told is not None:
            _compare(found, found.state, told)
        _check_files(place, found, found.state, threads, expect, advance)
        known = found.state.files.keys() | found.state.removed.keys()
        found.notes += _unnamed(stored, known, unnamed_before_ms)
        _check_definitions(place, found, found.state.namespace)
    return found


def _check_manifest(place: Place, found: Checked, *, is_empty: bool) -> None:
    try:
        found.state = load(place)
        if found.state is None:
            what = "nothing is captured there" if is_empty else "there are files of a capture, and no manifest"
            found.add(Problem.NO_MANIFEST, f"{place.url}: {what}")
        else:
            found.findings += (Finding(Problem.WRONG_MANIFEST, text) for text in contradictions(found.state))
    except DamagedManifest as error:
        found.add(Problem.DAMAGED_MANIFEST, error)
    known = {each.text for each in found.findings}
    damage: list[DamagedManifest] = []
    found.entries = all_entries(place, damage)
    for each in damage:
        if str(each) not in known:
            found.add(Problem.DAMAGED_MANIFEST, each)


def _compare(found: Checked, state: State, told: Told) -> None:
    ids = (state.namespace_id, told.namespace_id)
    if told.namespace != state.namespace or (None not in ids and ids[0] != ids[1]):
        found.add(
            Problem.ANOTHER_BROKER,
            f"the files are of the namespace {state.namespace!r} with the id {ids[0] or 'not known'}, and the broker "
            f"is {told.namespace!r} with the id {ids[1] or 'not known'}",
        )
        return
    found.findings += (Finding(Problem.CUT_MANIFEST, text) for text in behind(state, told.offsets))


def _check_files(
    place: Place,
    found: Checked,
    state: State,
    threads: int,
    expect: Callable[[int], object],
    advance: Callable[[], object],
) -> None:
    named = sorted(state.files.values(), key=lambda file: file.path)
    expect(len(named))
    with ThreadPoolExecutor(threads) as pool:
        try:
            for file, error in zip(named, pool.map(lambda file: _damage(place, file), named), strict=True):
                if isinstance(error, MissingFile):
                    if not _was_replaced(place, file):
                        found.add(Problem.MISSING_FILE, error)
                elif error is not None:
                    found.add(Problem.DAMAGED_FILE, error)
                advance()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _damage(place: Place, file: DataFile) -> DamagedFile | None:
    try:
        files.verify(place, file)
    except DamagedFile as error:
        return error
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return DamagedFile(place.uri(file.path), "cannot be read: the disk reports an error")
    return None


def _was_replaced(place: Place, file: DataFile) -> bool:
    """Return whether a compaction has replaced the file since the manifest was read."""
    try:
        state = load(place)
    except DamagedManifest:
        return False
    return state is not None and file.path not in state.files


def _unnamed(stored: list[Stored], known: set[str], before_ms: int) -> Iterator[str]:
    for each in stored:
        if each.path not in known and each.modified_s * 1000 < before_ms:
            yield f"{each.path}: no entry of the manifest names it; the next capture removes it, if it is its own"


def _check_definitions(place: Place, found: Checked, namespace: str) -> None:
    for each in definitions.kept(place):
        try:
            definitions.read(place, each, namespace)
        except (DamagedFile, AnotherNamespace) as error:
            found.add(Problem.DAMAGED_DEFINITIONS, error)
