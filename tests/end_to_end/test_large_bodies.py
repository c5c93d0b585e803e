"""Bodies of tens of megabytes come as they were sent, and leave no memory behind."""

import asyncio
from collections.abc import Iterator

import psutil
import pytest

from protocol.client.connection import connect_to
from protocol.client.messages import Message
from tests.brokers import Broker
from tests.patience import PATIENCE_S, eventually

MIB = 1 << 20
BODY_BYTES = 40 * MIB  # more than the C library keeps
MESSAGES = 6
CONFIG = """
amqp.max_message_size_bytes = 104857600
partitions = 1

[[queues]]
name = "large"
"""


@pytest.fixture(scope="module", params=[1, 0], ids=["two processes", "one process"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("large"), CONFIG, workers=request.param) as started:
        yield started
    assert "Traceback" not in started.log_file.read_text(), started.log()


def anonymous_bytes(process: psutil.Process) -> int:
    """Memory that is not of files: tables are mapped."""
    info = process.memory_info()
    return int(info.rss - info.shared)


def test_large_bodies_come_as_they_were_sent_and_are_gone_from_memory(broker: Broker) -> None:
    async def exchange() -> None:
        async with asyncio.timeout(PATIENCE_S), await connect_to(broker.connection_string) as connection:
            sender, receiver = await connection.sender("large"), await connection.receiver("large", credit=1)
            for number in range(MESSAGES):
                body = (number.to_bytes(8, "big") + bytes(range(248))) * (BODY_BYTES // 256)
                await sender.send(Message.of(b"small").encode())
                await sender.send(Message.of(body).encode())
                for sent in (b"small", body):
                    received = await receiver.receive()
                    assert received is not None
                    assert bytes(received.message().content()) == sent
                    await receiver.accept(received)

    asyncio.run(exchange())
    for process in {broker.gateway(), broker.worker()}:
        # Each message that stayed would be there. What is young in the log goes with a checkpoint.
        eventually(lambda: anonymous_bytes(process) < 120 * MIB + 2 * BODY_BYTES, f"{process} without large bodies")  # noqa: B023
