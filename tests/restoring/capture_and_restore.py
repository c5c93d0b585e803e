"""What a broker with every kind of message has, captured by the command, and restored by the command."""

import asyncio
import time
from pathlib import Path

from protocol.client.messages import Message
from storage.capture.reading import captured
from tests.brokers import Broker
from tests.pairing.commands import Command
from tests.patience import PATIENCE_S
from tests.restoring.everything import PARTITIONS, mark


def ids_in(url: str) -> set[str | None]:
    found: set[str | None] = set()
    reader = captured(url)
    for each in reader.ranges():
        for batch in reader.batches(*each, records=False):
            found.update(batch.column("messageId").to_pylist())
    return found


def capture(broker: Broker, tmp_path: Path, *options: object) -> Command:
    return Command(
        tmp_path / "capture",
        *("capture", tmp_path / "captured", "--connection-string", broker.connection_string),
        *("--http-endpoint", f"http://localhost:{broker.http_port}", *options),
    )


def capture_all(broker: Broker, tmp_path: Path, name: str) -> None:
    """Until the messages of `mark` are there."""
    asyncio.run(mark(broker, name))
    deadline = time.monotonic() + PATIENCE_S
    wanted = {f"{name}-{fragment}" for fragment in range(PARTITIONS)}
    while not wanted <= ids_in(str(tmp_path / "captured")):
        assert time.monotonic() < deadline
        with capture(broker, tmp_path, "--once") as command:
            assert command.process.wait(PATIENCE_S) == 0, command.err


def restore(broker: Broker, tmp_path: Path, *options: object, code: int = 0) -> str:
    url = tmp_path / "captured"
    arguments = ("restore", "--from-capture", url, "--data-dir", broker.data_dir, *options)
    with Command(tmp_path / "restore", *arguments) as command:
        assert command.process.wait(PATIENCE_S) == code, command.err
        return command.out if code == 0 else command.err


def as_it_was(message: Message) -> object:
    """Without what only a lock adds."""
    annotations = {key: value for key, value in message.annotations.items() if "lock" not in str(key)}
    fields = {name: getattr(message, name) for name in Message.__dataclass_fields__ if name != "annotations"}
    return fields | {"annotations": annotations}
