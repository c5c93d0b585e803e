"""Another receiver: it locks messages until it is told to release them. A process of its own, because the client's
engine is for one event loop in a process.

    python -m tests.pipeline.holding CONNECTION_STRING ADDRESS COUNT
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

from protocol.client.connection import connect_to
from tests.brokers import REPOSITORY, Broker
from tests.patience import PATIENCE_S


@contextlib.contextmanager
def locked(broker: Broker, address: str, count: int) -> Iterator[None]:
    """The first messages there are locked meanwhile."""
    command = [sys.executable, "-m", "tests.pipeline.holding", broker.connection_string, address, str(count)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        try:
            assert holder.stdout.readline() == f"{count}\n"
            yield
        finally:
            holder.stdin.close()
    assert holder.returncode == 0


async def _hold(connection_string: str, address: str, count: int) -> None:
    async with await connect_to(connection_string) as connection:
        receiver = await connection.receiver(address, credit=0)
        held = await receiver.fetch(count, PATIENCE_S)
        print(len(held), flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await receiver.release_all(held)


if __name__ == "__main__":
    asyncio.run(_hold(sys.argv[1], sys.argv[2], int(sys.argv[3])))
