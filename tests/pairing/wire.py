"""A wire between clients and a broker that can be slowed and cut: a forwarder of TCP connections."""

import asyncio
from contextlib import suppress
from enum import Enum

CHUNK_BYTES = 65_536


class State(Enum):
    WHOLE = "whole"
    SLOW = "slow"
    CUT = "cut"  # nothing passes, and nobody is told; connections that were there go on afterwards


class Wire:
    """Use it in `async with`. `delay_s` is for each direction while it is slow."""

    def __init__(self, port: int, to_port: int) -> None:
        self.port = port
        self._to_port = to_port
        self._state = State.WHOLE
        self._whole = asyncio.Event()
        self._whole.set()
        self.delay_s = 0.3
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> "Wire":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in [*self._tasks]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def become(self, state: State) -> None:
        self._state = state
        if state is State.CUT:
            self._whole.clear()
        else:
            self._whole.set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with suppress(OSError, asyncio.CancelledError):
            await self._whole.wait()
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
            try:
                await asyncio.wait(
                    [asyncio.create_task(self._pass(reader, back)), asyncio.create_task(self._pass(there, writer))],
                    return_when=asyncio.FIRST_COMPLETED,
                )
            finally:
                back.close()
        writer.close()
        self._tasks.discard(task)

    async def _pass(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(CHUNK_BYTES):
                if self._state is State.SLOW:
                    await asyncio.sleep(self.delay_s)
                await self._whole.wait()
                sink.write(data)
                await sink.drain()
