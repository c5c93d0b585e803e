"""One folder has the rows of one broker, and what an earlier version wrote is read and goes on."""

import json

import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from storage.capture.chain import SNAPSHOT_ENTRIES, Chain, load
from storage.capture.errors import AnotherBroker, AnotherNamespace, DamagedManifest, SourceFailed
from storage.capture.manifest import Kind, Next, encode
from storage.capture.place import Place
from tests.capture.journal_server import Journal, JournalServer
from tests.capture.synthetic_rows import EPOCH

NAMESPACE = "sample"
ID, OTHER_ID = "0123456789abcdef" * 2, "fedcba9876543210" * 2
POSITION = (0, EPOCH)
OTHER_EPOCH = "00000000000000b2"

# As version 1 wrote them.
FIRST, SECOND = (f"{number:020d}-0000000001-b0b380cb66e80b0b.json" for number in (1, 2))
_ADDED = """\
  "files": [
   {
    "bytes": 1,
    "capturedMs": 7,
    "checksum": "00",
    "hour": 494542,
    "memoryBytes": 1,
    "path": "table=ledger/date=2026-06-01/hour=22/a.parquet",
    "ranges": [
     {
      "epoch": "00000000000000a1",
      "first": 0,
      "last": 4,
      "partition": 0,
      "rows": 5
     }
    ],
    "rows": 5,
    "table": "ledger"
   }
  ],
  "gaps": [],
"""
_NEXT = """\
  "next": [
   {
    "epoch": "00000000000000a1",
    "first": 0,
    "offset": 5,
    "partition": 0
   }
  ],
"""
VERSION_1 = {
    FIRST: """\
{
 "checksum": "cb54c097dd7b98ef",
 "content": {
  "files": [],
  "gaps": [],
  "kind": "opened",
  "namespace": "sample",
  "next": [],
  "previous": null,
  "removed": [],
  "version": 1,
  "writtenMs": 1796075825106
 }
}
""",
    SECOND: (
        '{\n "checksum": "9dd6dfd8bbb55ddb",\n "content": {\n'
        f'{_ADDED}  "kind": "captured",\n  "namespace": "sample",\n{_NEXT}  "previous": "{FIRST}",\n'
        '  "removed": [],\n  "version": 1,\n  "writtenMs": 7\n }\n}\n'
    ),
}
SNAPSHOT_1 = {
    f"snapshot-{SECOND}": (
        '{\n "checksum": "93b9fa9c47514534",\n "content": {\n'
        f'  "entry": "{SECOND}",\n{_ADDED}  "namespace": "sample",\n{_NEXT}  "removed": [],\n  "version": 1\n }}\n}}\n'
    )
}


def write(folder, files) -> Place:
    place = Place.of(str(folder))
    for name, text in files.items():
        place.write(f"manifest/{name}", text.encode())
    return place


def content(place: Place, name: str) -> dict:
    return json.loads(bytes(place.read(f"manifest/{name}")))["content"]


def captured(chain: Chain, offset: int, epoch: str = EPOCH) -> None:
    new = {"next": (*chain.state.next.values(), Next(partition=0, epoch=epoch, first=0, offset=offset))}
    chain.append(chain.state.following(Kind.CAPTURED, offset).model_copy(update=new))


def test_entries_and_snapshots_say_their_version_so_that_an_older_program_refuses_them(tmp_path):
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE, namespace_id=ID)
    for offset in range(SNAPSHOT_ENTRIES):
        captured(chain, offset)
    chain.tidy(0)
    chain.close()
    stored = [each.path.removeprefix("manifest/") for each in place.files("manifest") if "-" in each.path]
    kinds = {name.partition("-")[0]: content(place, name).get("version") for name in stored if "claim" not in name}
    assert len(kinds) == SNAPSHOT_ENTRIES + 2, "entries, and a snapshot"
    # `decode` of version 1 refuses, with the file's name, whatever has a greater version.
    assert set(kinds.values()) == {2}


@pytest.mark.parametrize("files", [VERSION_1, VERSION_1 | SNAPSHOT_1, {SECOND: VERSION_1[SECOND]} | SNAPSHOT_1])
def test_a_capture_of_version_1_is_read_and_goes_on_with_the_id_of_its_broker(tmp_path, files):
    place = write(tmp_path, files)
    state = load(place)
    assert (state.namespace, state.namespace_id, state.head) == (NAMESPACE, None, SECOND)
    assert state.next[POSITION].offset == 5
    assert [file.rows for file in state.files.values()] == [5]
    chain = Chain(place, NAMESPACE, namespace_id=ID, journal=[POSITION, (1, OTHER_EPOCH)])
    captured(chain, 9)
    chain.close()
    state = load(place)
    assert (state.namespace_id, state.next[POSITION].offset) == (ID, 9)
    for name, text in files.items():
        assert bytes(place.read(f"manifest/{name}")).decode() == text
    # The first new entry has it.
    [path] = [each.path for each in place.files("manifest") if "/00000000000000000003-" in each.path]
    third = content(place, path.removeprefix("manifest/"))
    assert (third["namespaceId"], third["previous"]) == (ID, SECOND)
    assert third["previousChecksum"] == (None if files.keys() & SNAPSHOT_1.keys() else "9dd6dfd8bbb55ddb")


@pytest.mark.parametrize("namespace_id", [ID, None])
def test_a_capture_of_version_1_without_an_epoch_of_the_journal(tmp_path, namespace_id):
    """Of a broker of an earlier version, nobody knows whether it was restored: it goes on as it did."""
    place = write(tmp_path, VERSION_1)
    journal = [(0, OTHER_EPOCH)]
    if namespace_id is None:
        Chain(place, NAMESPACE, journal=journal).close()
        assert load(place).namespace_id is None
        return
    with pytest.raises(AnotherBroker, match=f"namespace id is not known, and this broker's is {ID}. Capture to an"):
        Chain(place, NAMESPACE, namespace_id=namespace_id, journal=journal)
    assert load(place).head == SECOND


def test_a_capture_that_has_no_rows_yet_takes_the_id(tmp_path):
    place = write(tmp_path, {FIRST: VERSION_1[FIRST]})
    Chain(place, NAMESPACE, namespace_id=ID, journal=[POSITION]).close()
    assert load(place).namespace_id == ID


def test_another_broker_is_refused_and_writes_nothing(tmp_path):
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE, namespace_id=ID, journal=[POSITION])
    captured(chain, 5)
    chain.close()
    before = load(place).head
    # A copy of its files may have its epochs, too.
    with pytest.raises(AnotherBroker, match=f"namespace id is {ID}, and this broker's is {OTHER_ID}. Capture to"):
        Chain(place, NAMESPACE, namespace_id=OTHER_ID, journal=[POSITION])
    with pytest.raises(SourceFailed, match="does not say its namespace id now, and its journal has no epoch of those"):
        Chain(place, NAMESPACE, journal=[(0, OTHER_EPOCH)])
    assert load(place).head == before
    # Its own store, restored from a backup: another epoch, the same id.
    chain = Chain(place, NAMESPACE, namespace_id=ID, journal=[(0, OTHER_EPOCH)])
    captured(chain, 3, OTHER_EPOCH)
    chain.close()
    # While its workers are away, the gateway does not know the id.
    Chain(place, NAMESPACE, journal=[(0, OTHER_EPOCH)]).close()
    assert load(place).namespace_id == ID


def test_a_broker_that_takes_the_place_of_another_is_refused_while_a_capture_runs(tmp_path):
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE, journal=[POSITION])
    captured(chain, 5)
    chain.require(NAMESPACE, None, [POSITION])
    chain.require(NAMESPACE, ID, [POSITION])  # it was upgraded
    captured(chain, 6)
    assert load(place).namespace_id == ID
    with pytest.raises(AnotherBroker):
        chain.require(NAMESPACE, OTHER_ID, [POSITION])
    with pytest.raises(AnotherNamespace):
        chain.require("other", ID, [POSITION])
    chain.require(NAMESPACE, ID, [(0, OTHER_EPOCH)])
    chain.close()


def test_each_entry_names_the_one_before_by_its_checksum(tmp_path):
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE, namespace_id=ID)
    for offset in range(3):
        captured(chain, offset)
    chain.close()
    names = sorted(each.path for each in place.files("manifest") if "/0" in each.path)
    documents = [json.loads(bytes(place.read(name))) for name in names]
    assert [each["content"]["previousChecksum"] for each in documents] == [
        None,
        *(each["checksum"] for each in documents[:-1]),
    ]
    # One that is sound, and not the one that was there.
    entry = (
        load(place)
        .following(Kind.CAPTURED, 1)
        .model_copy(
            update={"previous": names[0].removeprefix("manifest/"), "previous_checksum": documents[0]["checksum"]}
        )
    )
    place.write(names[1], encode(entry).text)
    with pytest.raises(DamagedManifest, match=rf"{names[2].removeprefix('manifest/')}: follows an entry with the che"):
        load(place)


def test_a_snapshot_keeps_what_the_next_entry_must_fit_to(tmp_path):
    place = Place.of(str(tmp_path))
    chain = Chain(place, NAMESPACE, namespace_id=ID)
    for offset in range(SNAPSHOT_ENTRIES):
        captured(chain, offset)
    chain.tidy(0)
    checksum, written_ms = chain.state.head_checksum, chain.state.written_ms
    state = load(place)
    assert (state.head_checksum, state.namespace_id, state.written_ms) == (checksum, ID, written_ms)
    captured(chain, SNAPSHOT_ENTRIES)
    chain.close()
    assert load(place).next[POSITION].offset == SNAPSHOT_ENTRIES


def capture(folder, server: JournalServer):
    return CliRunner().invoke(app, ["capture", str(folder), "--once", *server.options])


def test_the_command_captures_one_broker_to_a_folder(tmp_path):
    journal = Journal(partitions=1, stable=30)
    with JournalServer(journal) as server:
        assert capture(tmp_path, server).exit_code == 0  # a broker of an earlier version
        journal.namespace_id, journal.stable = ID, [40]
        assert capture(tmp_path, server).exit_code == 0
        journal.namespace_id = OTHER_ID
        refused = capture(tmp_path, server)
        journal.namespace_id = "no id"
        wrong = capture(tmp_path, server)
    assert refused.exit_code == 1
    told = " ".join(refused.stderr.split())
    assert f"has the rows of another broker of the namespace 'sample': its namespace id is {ID}" in told
    assert "Capture to another URL" in told
    assert wrong.exit_code == 1
    assert "'no id' is no id of a namespace" in wrong.stderr
    state = load(Place.of(str(tmp_path)))
    assert (state.namespace_id, state.next[POSITION].offset) == (ID, 40)
