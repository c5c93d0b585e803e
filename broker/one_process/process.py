"""A gateway and its only worker in one process, for small installations (`workers = 0`).

A message needs no other process to wake up, so one at a time is faster, and there is less in memory. But all work
shares one processor, and while the disk writes a small turn, clients wait that need nothing of it.
"""

import asyncio

from broker.child import Instructions
from broker.gateway.gateway import Gateway
from broker.one_process.embedded import EmbeddedWorker
from broker.worker.worker import Worker


async def serve(instructions: Instructions, worker: Worker) -> None:
    """Serve until SIGTERM. Raises ConfigurationError, StoreError, and whatever else ends a gateway or a worker."""
    embedded = EmbeddedWorker(worker, asyncio.get_running_loop())
    gateway = asyncio.create_task(Gateway(instructions, embedded.connection).run())
    embedded.begin()
    await asyncio.wait((gateway, embedded.failed), return_when=asyncio.FIRST_COMPLETED)
    if embedded.failed.done():
        embedded.failed.result()
    gateway.result()
    embedded.finish()
