"""A flipped bit in a file of a real broker's journal."""

from pathlib import Path

from storage.capture.reading import captured
from tests.brokers import Broker
from tests.capture.checks import captured_rows
from tests.pairing.commands import Command
from tests.patience import PATIENCE_S

CONFIG = """
partitions = 1
[journal]
mode = "bodies"

[[queues]]
name = "orders"
"""


def run(broker: Broker, directory: Path, *arguments: object, code: int = 0) -> str:
    """What the command has printed, and logged."""
    with Command(directory, *arguments, "--connection-string", broker.connection_string) as command:
        assert command.process.wait(PATIENCE_S) == code, command.err
        return command.out + command.err


def capture(broker: Broker, folder: Path, *options: str, code: int = 0) -> str:
    endpoint = f"http://localhost:{broker.http_port}"
    return run(
        broker,
        folder.with_suffix(".command"),
        "capture",
        folder,
        "--once",
        "--http-endpoint",
        endpoint,
        *options,
        code=code,
    )


def flip_a_bit_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


def test_what_a_flipped_bit_takes_is_a_gap_and_nothing_else(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        for _ in range(5):  # each is a frame of its own in the journal
            run(broker, tmp_path / "send", "send", "orders", "--body", "x" * 1000, "--count", 20)
            capture(broker, tmp_path / "before")
        broker.stop()
        [path] = (broker.data_dir / "journal" / "0").glob("*-*")
        flip_a_bit_in_the_middle(path)
        broker.start()
        told = capture(broker, tmp_path / "after", code=1)
        assert "the journal cannot read the offsets " in told
        assert f"{path.name}: byte " in told
        [at] = captured(str(tmp_path / "after")).ranges()  # what comes before
        told = capture(broker, tmp_path / "after", "--skip-lost")
        assert f"{path.name}: byte " in told
        run(broker, tmp_path / "send", "send", "orders", "--body", "y", "--count", 20)
        capture(broker, tmp_path / "after")
    before, after = captured_rows(tmp_path / "before"), captured_rows(tmp_path / "after")
    [(position, complete)] = before.items()
    first, second = captured(str(tmp_path / "after")).ranges()
    assert first == at
    assert 0 < first.end < second.first < len(complete) == second.end - 20
    left = [row for row in complete if not first.end <= row["journalOffset"] < second.first]
    assert after[position][:-20] == left
