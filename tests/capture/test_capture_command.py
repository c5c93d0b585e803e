"""`peeklock capture` as a process of its own, reading a journal over HTTP."""

import json
import signal
import urllib.request
from pathlib import Path

import pyarrow as pa
import pytest
from typer.testing import CliRunner

from broker.cli.all_commands import app
from storage.capture.errors import NotCaptured
from storage.capture.reading import CapturedRange, captured
from tests.capture.checks import captured_rows
from tests.capture.journal_server import Journal, JournalServer
from tests.capture.synthetic_rows import EPOCH, row
from tests.pairing.commands import Command
from tests.patience import eventually
from tests.ports import free_ports

NAMESPACE = "sample"
OPTIONS = ["--once", "--connection-string", "Endpoint=sb://localhost", "--http-endpoint", "http://localhost:1"]


def expected(journal: Journal) -> dict[tuple[int, str], list[dict[str, object]]]:
    return {
        (partition, EPOCH): [
            {"namespace": NAMESPACE, "epoch": EPOCH, **row(partition, offset, body_bytes=journal.body_bytes)}
            for offset in range(stable)
        ]
        for partition, stable in enumerate(journal.stable)
    }


def capture(directory: Path, server: JournalServer, *options: object) -> Command:
    return Command(directory / "command", "capture", directory / "captured", *server.options, *options)


def test_once_captures_what_is_there_and_then_what_has_come(tmp_path):
    journal = Journal()
    with JournalServer(journal) as server:
        with capture(tmp_path, server, "--once", "--json") as command:
            assert command.end() == 0, command.err
            assert json.loads(command.out)["rows"] == 4000
        assert captured_rows(tmp_path / "captured") == expected(journal)
        journal.stable = [2600, 2001]
        with capture(tmp_path, server, "--once", "--json") as command:
            assert command.end() == 0, command.err
            assert json.loads(command.out)["rows"] == 601
        assert captured_rows(tmp_path / "captured") == expected(journal)
        with capture(tmp_path, server, "--once") as command:
            assert command.end() == 0, command.err
            assert command.out == "0 rows captured in 0 files of 0 B\n"
    assert captured_rows(tmp_path / "captured") == expected(journal)


def test_standing_it_follows_and_writes_what_waits_when_it_is_stopped(tmp_path):
    journal = Journal(partitions=1, stable=10)
    [ops] = free_ports(1)
    with JournalServer(journal) as server:
        with capture(tmp_path, server, "--roll-time", "100ms", "--ops-port", ops) as command:
            eventually(lambda: len(captured_rows(tmp_path / "captured").get((0, EPOCH), [])) == 10, "the first")
            journal.stable = [700]
            eventually(lambda: len(captured_rows(tmp_path / "captured")[0, EPOCH]) == 700, "the rest")
            with urllib.request.urlopen(f"http://127.0.0.1:{ops}/metrics") as answer:
                metrics = answer.read().decode()
            assert "peeklock_capture_rows_total 700.0" in metrics
            assert "peeklock_capture_up 1.0" in metrics
            assert command.end(signal.SIGTERM) == 0, command.err
        journal.stable = [900]
        with capture(tmp_path, server, "--roll-time", "1h") as command:
            eventually(lambda: any("from=700" in each for each in journal.requests), "it asks for more")
            journal.stable = [901]
            eventually(lambda: any("from=900" in each for each in journal.requests), "it asks for more")
            assert command.end(signal.SIGTERM) == 0, command.err
    rows = captured_rows(tmp_path / "captured")
    journal.stable = [len(rows[0, EPOCH])]
    assert rows == expected(journal)
    assert journal.stable[0] >= 900


def test_the_journal_is_told_what_is_captured_and_not_what_waits(tmp_path):
    journal = Journal()

    def told(offset: int) -> tuple[str, object]:
        return "/$journal/consumers/nightly", {
            "partitions": [{"partition": partition, "epoch": EPOCH, "offset": offset} for partition in (0, 1)]
        }

    with JournalServer(journal) as server:
        options = ("--consumer", "nightly", "--json")
        with capture(tmp_path, server, "--once", *options) as command:
            assert command.end() == 0, command.err
        assert journal.told == [told(2000)]
        journal.stable = [2100, 2100]
        with capture(tmp_path, server, "--roll-time", "1h", *options) as command:
            eventually(
                lambda: "/$journal" in journal.requests[-1:] and any("from=2000" in x for x in journal.requests),
                "all is asked for",
            )
            assert journal.told == [told(2000)] * 2
            assert command.end(signal.SIGTERM) == 0, command.err
        assert journal.told == [told(2000), told(2000), told(2100)]
        journal.stable = [2200, 2200]
        journal.answer_to_told = 503
        with capture(tmp_path, server, "--once", *options) as command:
            assert command.end() == 0, command.err
            assert json.loads(command.out)["rows"] == 200, "it is captured, whether the journal hears of it or not"


def test_it_rolls_while_an_answer_is_read(tmp_path):
    journal = Journal(partitions=1, stable=6000, body_bytes=4000)
    journal.answer_rows = 6000
    with JournalServer(journal) as server:
        with capture(tmp_path, server, "--once", "--json", "--file-size", "1MB") as command:
            assert command.end() == 0, command.err
            done = json.loads(command.out)
        assert done["rows"] == 6000
        assert done["files"] > 4
        assert len([path for path in journal.requests if "from=" in path]) == 1
        assert [document["partitions"][0]["offset"] for _, document in journal.told] == [6000]
    assert captured_rows(tmp_path / "captured") == expected(journal)


def test_standing_it_waits_for_a_broker_that_is_away(tmp_path):
    journal = Journal(partitions=1, stable=1200)
    journal.answers = [
        (503, b"{}"),
        (500, b"no JSON"),
        (200, b"{}"),
        (200, b'{"namespace": "sample", "partitions": 7}'),
    ]
    journal.cuts_left, journal.cut_after_bytes = 2, 30_000
    with JournalServer(journal) as server, capture(tmp_path, server, "--roll-time", "100ms") as command:
        eventually(lambda: len(captured_rows(tmp_path / "captured").get((0, EPOCH), [])) == 1200, "all")
        assert command.end(signal.SIGINT) == 0, command.err
    assert journal.cuts_left == 0
    assert "status 503" in command.err
    assert captured_rows(tmp_path / "captured") == expected(journal)


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (lambda journal: journal.answers.append((403, b"no right")), "refuses the journal (status 403): no right"),
        (lambda journal: journal.answers.append((404, b"")), "has no journal; is its setting journal.mode off?"),
        (lambda journal: journal.answers.append((503, b"")), "status 503"),
        (lambda journal: journal.answers.append((200, b"[" * 100_000)), "the answer is no JSON"),
        (lambda journal: journal.answers.append((200, b'{"namespace": "a"}')), "describes no journal"),
        (lambda journal: setattr(journal, "epoch", "../../x"), "is no epoch"),
        (lambda journal: setattr(journal, "low", 1 << 70), "is no offset"),
        (lambda journal: setattr(journal, "low", 5000), "describes no journal"),
        (lambda journal: setattr(journal, "claims_rows", 5000), "which is not within 0 to 2000"),
    ],
)
def test_once_ends_with_what_is_wrong_at_the_broker(tmp_path, spoil, text):
    journal = Journal(partitions=1)
    spoil(journal)
    with JournalServer(journal) as server:
        result = CliRunner().invoke(app, ["capture", str(tmp_path / "captured"), "--once", *server.options])
    assert result.exit_code == 1
    assert text in result.stderr
    assert captured_rows(tmp_path / "captured") == {}


def test_once_ends_with_a_wrong_key(tmp_path):
    with JournalServer(Journal()) as server:
        options = [each.replace("AccessKey=secret", "AccessKey=wrong") for each in server.options]
        result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *options])
    assert result.exit_code == 1
    assert "refuses the journal (status 401)" in result.stderr


def test_what_came_before_a_cut_is_captured_once(tmp_path):
    journal = Journal(partitions=1, body_bytes=2000)
    journal.cuts_left, journal.cut_after_bytes = 1, 900_000  # within the third of three batches
    with JournalServer(journal) as server:
        result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options])
        assert result.exit_code == 1
        assert "cut off" in result.stderr
        first = len(captured_rows(tmp_path)[0, EPOCH])
        assert 0 < first < 1500
        result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options])
        assert result.exit_code == 0, result.stderr
    assert captured_rows(tmp_path) == expected(journal)


def test_an_answer_with_fewer_rows_than_it_says_is_no_answer(tmp_path):
    journal = Journal(partitions=1)
    journal.claims_rows = 1
    with JournalServer(journal) as server:
        result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options])
    assert result.exit_code == 1
    assert "partition 0: the answer ended before offset 1501, at 1500" in result.stderr
    assert len(captured_rows(tmp_path)[0, EPOCH]) == 1500


def test_rows_that_the_journal_has_dropped_end_it_or_are_named(tmp_path):
    journal = Journal(partitions=1, stable=100)
    arguments = ["capture", str(tmp_path), "--once"]
    with JournalServer(journal) as server:
        assert CliRunner().invoke(app, [*arguments, *server.options]).exit_code == 0
        journal.low, journal.stable = 150, [400]
        result = CliRunner().invoke(app, [*arguments, *server.options])
        assert result.exit_code == 1
        assert "has dropped the offsets 100 to 149 before they were captured" in result.stderr
        result = CliRunner().invoke(app, [*arguments, "--skip-lost", *server.options])
        assert result.exit_code == 0, result.stderr
        assert "250 rows captured" in result.stdout
        assert "50 lost" in result.stdout
    found = captured(str(tmp_path))
    assert found.ranges() == [CapturedRange(0, EPOCH, 0, 100), CapturedRange(0, EPOCH, 150, 400)]
    with pytest.raises(NotCaptured, match="no rows of the offsets 100 to 199"):
        next(found.batches(0, EPOCH, 50, 200))
    assert sum(map(len, found.batches(0, EPOCH, 150, 400))) == 250


@pytest.mark.parametrize("damaged", [range(700, 710), range(1400, 1600), range(5), range(1999, 2000), range(2000)])
def test_rows_that_the_journal_cannot_read_end_it_or_are_named(tmp_path, damaged):
    journal = Journal()
    journal.damaged[1] = damaged
    all_rows = expected(journal)
    rows = all_rows[1, EPOCH]
    with JournalServer(journal) as server:
        arguments = ["capture", str(tmp_path), "--once", *server.options]
        for _ in range(2):
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 1
            assert (
                f"partition 1, epoch {EPOCH}: the journal cannot read the offsets {damaged.start} to " in result.stderr
            )
            assert "file: byte 7: the checksum" in result.stderr
            found = captured_rows(tmp_path)
            assert found.get((1, EPOCH), []) == rows[: damaged.start]
            assert found[0, EPOCH] == all_rows[0, EPOCH], "the partition before is captured"
        result = CliRunner().invoke(app, [*arguments, "--skip-lost", "--json"])
        assert result.exit_code == 0, result.stderr
        told = json.loads(result.stdout)
        assert (told["rows"], told["lost"]) == (2000 - damaged.stop, len(damaged))
    ranges = [
        CapturedRange(1, EPOCH, *each) for each in ((0, damaged.start), (damaged.stop, 2000)) if each[0] < each[1]
    ]
    assert captured(str(tmp_path)).ranges() == [CapturedRange(0, EPOCH, 0, 2000), *ranges]
    for each in ranges:
        assert sum(map(len, captured(str(tmp_path)).batches(1, EPOCH, each.first, each.end))) == each.end - each.first


def test_a_row_for_damaged_ones_that_is_not_in_their_place_is_no_answer(tmp_path):
    journal = Journal(partitions=1)
    journal.damaged[0] = range(700, 710)
    readable = journal.readable
    with JournalServer(journal) as server:
        for wrong in (699, 2000, None):
            journal.readable = lambda *wanted, wrong=wrong: [misplaced(each, wrong) for each in readable(*wanted)]
            result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options, "--skip-lost"])
            assert result.exit_code == 1
            assert f"damaged rows end at {wrong}, and begin at 700" in result.stderr
    assert len(captured_rows(tmp_path)[0, EPOCH]) == 700


def misplaced(batch, offset):
    rows = batch.to_pylist()
    next(each for each in rows if each["op"] == "truncated")["journalOffset"] = offset
    return pa.RecordBatch.from_pylist(rows, batch.schema)


def test_a_journal_that_ends_before_what_was_captured_is_another_one(tmp_path):
    journal = Journal(partitions=1, stable=100)
    with JournalServer(journal) as server:
        assert CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options]).exit_code == 0
        journal.stable = [99]
        result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options])
        assert result.exit_code == 1
        assert "captured to offset 99, and the journal ends before 99" in result.stderr
        journal.namespace = "other"
        result = CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options])
    assert result.exit_code == 1
    assert "has rows of the namespace 'sample', not 'other'" in result.stderr


def test_a_restored_partition_begins_anew_beside_what_is_captured(tmp_path):
    journal = Journal(partitions=1, stable=300)
    with JournalServer(journal) as server:
        for epoch in (EPOCH, "00000000000000b2"):
            journal.epoch = epoch
            assert CliRunner().invoke(app, ["capture", str(tmp_path), "--once", *server.options]).exit_code == 0
    rows = captured_rows(tmp_path)
    assert {position: len(found) for position, found in rows.items()} == {
        (0, EPOCH): 300,
        (0, "00000000000000b2"): 300,
    }


def test_a_second_capture_of_a_folder_is_refused(tmp_path):
    journal = Journal(partitions=1, stable=10)
    with JournalServer(journal) as server, capture(tmp_path, server, "--roll-time", "50ms") as command:
        eventually(lambda: captured_rows(tmp_path / "captured"), "the first")
        result = CliRunner().invoke(app, ["capture", str(tmp_path / "captured"), "--once", *server.options])
        assert result.exit_code == 1
        assert f"is written by another capture: process {command.process.pid}" in result.stderr
        journal.stable = [20]
        eventually(lambda: len(captured_rows(tmp_path / "captured")[0, EPOCH]) == 20, "all")
        assert command.end(signal.SIGTERM) == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--memory", "1KB"], "is not from 1MB to 1GB"),
        (["--file-size", "2GB"], "is not from 1MB to 1GB"),
        (["--roll-time", "soon"], "is no duration"),
        (["--consumer", "a/b"], "must have 1 to 100 letters"),
        (["--consumer", ""], "must have 1 to 100 letters"),
        (["--http-endpoint", "nowhere"], "is no address"),
    ],
)
def test_options_that_make_no_sense_are_refused(tmp_path, arguments, text):
    result = CliRunner().invoke(app, ["capture", str(tmp_path / "captured"), *OPTIONS, *arguments])
    assert result.exit_code == 2
    assert text in " ".join(result.stderr.split())
    assert not (tmp_path / "captured").exists()


@pytest.mark.parametrize("url", ["", "nothing://secret:key@bucket/x", "file:///", "s3://"])
def test_urls_that_make_no_sense_are_refused(url):
    result = CliRunner().invoke(app, ["capture", url, *OPTIONS])
    assert result.exit_code == 2
    assert "is no URL of a folder" in result.stderr
    assert "secret" not in result.stderr
