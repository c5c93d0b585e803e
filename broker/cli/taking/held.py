"""Messages that are locked and not handled: their locks are renewed in time, and given back in the end.

A message that is not wanted may lie before one that is. A queue hands out its oldest message first, so it must be
locked until the other one is there. Given back, it has the same delivery count as before; if its lock ended, that
would count as a failed delivery.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Self

from protocol.client.errors import ClientError, RequestFailed
from protocol.client.links import Received, Receiver
from protocol.client.requests import Management
from protocol.client.session_receiver import SessionReceiver

# No entity's locks are shorter than 5 s, so nobody's clock matters.
RENEW_SECONDS: Final = 2.0
GIVE_BACK_SECONDS: Final = 10.0
TOKENS: Final = 1000  # of locks that one request renews


class Held:
    """Use it in `async with`; at its end all that is held is given back."""

    MOST: Final = 20_000  # servers limit what one link may hold; Peeklock's limit is 50,000

    def __init__(self, receiver: Receiver, management: Management) -> None:
        self._receiver = receiver
        self._management = management
        self._messages: dict[bytes, Received] = {}
        self._renewing = asyncio.Lock()  # a request to renew fails if one of its messages is settled meanwhile

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        given_back, self._messages = self._messages, {}
        with suppress(ClientError, TimeoutError):  # the link has ended, and the locks with it, or the peer hangs
            async with asyncio.timeout(GIVE_BACK_SECONDS):
                await asyncio.gather(*map(self._receiver.release, given_back.values()), return_exceptions=True)

    @property
    def room(self) -> int:
        """Return how many more may be held."""
        return self.MOST - len(self._messages)

    def add(self, received: Received) -> None:
        """Hold it. Its content is dropped, so that large messages take no memory."""
        received.payload = b""
        self._messages[received.tag] = received

    async def take(self, messages: Sequence[Received]) -> None:
        """Let the caller have these: he settles them, or adds them again."""
        async with self._renewing:
            for each in messages:
                del self._messages[each.tag]

    async def _keep(self) -> None:
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            async with self._renewing:
                with suppress(ClientError, TimeoutError):  # if it matters, the next call on the link says so
                    await self._renew()

    async def _renew(self) -> None:
        if isinstance(self._receiver, SessionReceiver):
            await self._management.renew_session_lock(self._receiver.session_id)
            return
        messages = list(self._messages.values())
        for start in range(0, len(messages), TOKENS):
            await self._renew_some(messages[start : start + TOKENS])

    async def _renew_some(self, messages: Sequence[Received]) -> None:
        """A lock that has ended makes the request fail for all of them: the others are renewed without it."""
        try:
            await self._management.renew_locks([each.lock_token for each in messages])
        except RequestFailed:
            middle = len(messages) // 2
            for part in (messages[:middle], messages[middle:]):
                if part and middle:
                    await self._renew_some(part)
