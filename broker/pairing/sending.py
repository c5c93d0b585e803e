"""A sender of a pairing: to the primary while that takes messages, else to a backlog queue of the secondary."""

import asyncio
from typing import NamedTuple

from broker.logging import get_logger
from broker.pairing.aliases import batch_to_backlog, to_backlog
from broker.pairing.availability import Availability, Path
from broker.pairing.backlog import Rotation
from broker.pairing.counters import Counters
from broker.pairing.endpoint import Endpoint
from broker.pairing.failures import Verdict, is_of_the_message, verdict
from broker.pairing.options import PairingOptions
from protocol import conditions
from protocol.client.errors import AuthenticationFailed, ClientError, MessageRefused

log = get_logger("pairing")

FIRST_RETRY_SECONDS = 0.1
LONGEST_RETRY_SECONDS = 2.0


class Failed(NamedTuple):
    """A send that may succeed when it is repeated, after `wait_s`; None is a wait that becomes longer each time."""

    error: ClientError | TimeoutError
    wait_s: float | None


class Sent(NamedTuple):
    """Where a message is stored: the entity, or a backlog queue. `is_repeated`: it may be in the primary all the same.

    That is so if an earlier attempt was not answered.
    """

    queue: str
    is_in_backlog: bool
    is_repeated: bool


class Parts(NamedTuple):
    """What all senders of a pairing share."""

    primary: Endpoint
    secondary: Endpoint
    availability: Availability
    rotation: Rotation
    options: PairingOptions
    counters: Counters


class PairedSender:
    """Sends to one entity. Any number of messages may be on their way. Made by `Pairing.sender`."""

    def __init__(self, path: Path, parts: Parts) -> None:
        self._path = path
        self._parts = parts
        self._queue: str | None = None  # the backlog queue that this sender uses (PN7)

    async def send(self, message: bytes, timeout_s: float = 60.0, *, is_batch: bool = False) -> Sent:
        """Send an encoded message, or a batch. Returns when it is stored, in the primary or in a backlog queue.

        Until `timeout_s` have passed, a send that has failed is repeated where it may help. So a message whose answer
        was lost may be stored twice, which duplicate detection notices by its message id.

        Raises the last error of `protocol.client`, also when the time is over; TimeoutError if nothing was answered;
        AliasTaken or ProtocolError for a message that cannot go to the backlog.
        """
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + timeout_s
        retry_s = FIRST_RETRY_SECONDS
        is_repeated = False
        while True:
            path = self._path
            changed = path.changed
            is_to_backlog = path.health.has_failed_over
            send = self._to_backlog if is_to_backlog else self._to_primary
            failed = await send(message, deadline_s, is_batch)
            if failed is None:
                queue = self._queue if is_to_backlog and self._queue is not None else path.name
                return Sent(queue, is_to_backlog, is_repeated)
            is_repeated = is_repeated or not is_to_backlog
            wait_s = failed.wait_s
            if wait_s is None:
                wait_s, retry_s = retry_s, min(2 * retry_s, LONGEST_RETRY_SECONDS)
            if wait_s and not changed.done():  # else there is another place to send to
                await asyncio.wait([changed], timeout=min(wait_s, deadline_s - loop.time()))
            if loop.time() >= deadline_s:
                error = failed.error
                raise error.again() if isinstance(error, ClientError) else TimeoutError(*error.args)

    async def _to_primary(self, message: bytes, deadline_s: float, is_batch: bool) -> Failed | None:
        """Send, and wait for the answer until the entity fails over."""
        path, parts = self._path, self._parts
        began_ms = parts.availability.now_ms()
        sending = asyncio.create_task(self._send(parts.primary, path.name, message, is_batch))
        try:
            if not await self._is_answered(sending, min(deadline_s, began_ms / 1000 + self._attempt_s)):
                parts.primary.retire(began_ms / 1000)
                raise TimeoutError(f"{path.name} has not answered in time")
            await sending
        except (ClientError, TimeoutError) as error:
            meaning = verdict(error)
            if meaning is Verdict.FINAL:
                raise
            if meaning is Verdict.UNAVAILABLE and not path.health.has_failed_over:
                parts.availability.failed(path, began_ms)
            return Failed(error.with_traceback(None), self._busy_s if meaning is Verdict.WAIT else None)
        finally:
            sending.cancel()
            del sending  # it keeps its error, which refers to this call
        parts.counters.sent_to_primary += 1
        parts.availability.succeeded(path)
        return None

    async def _is_answered(self, sending: "asyncio.Task[None]", until_s: float) -> bool:
        """Wait for the end of the send, or until the time is over or the entity has failed over."""
        loop = asyncio.get_running_loop()
        path = self._path
        while not sending.done() and not path.health.has_failed_over and (left_s := until_s - loop.time()) > 0:
            await asyncio.wait([sending, path.changed], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        return sending.done()

    async def _to_backlog(self, message: bytes, deadline_s: float, is_batch: bool) -> Failed | None:
        path, parts = self._path, self._parts
        now_ms = parts.availability.now_ms()
        queue = self._queue = parts.rotation.pick(self._queue, now_ms)
        aliased = (batch_to_backlog if is_batch else to_backlog)(message, path.name)
        try:
            async with asyncio.timeout_at(min(deadline_s, now_ms / 1000 + self._attempt_s)):
                await self._send(parts.secondary, queue, aliased, is_batch)
        except (ClientError, TimeoutError) as error:
            if isinstance(error, AuthenticationFailed) or is_of_the_message(error):
                raise
            if isinstance(error, TimeoutError):
                parts.secondary.retire(now_ms / 1000)
            if verdict(error) is Verdict.WAIT:
                return Failed(error.with_traceback(None), self._busy_s)
            if parts.rotation.pull(queue, parts.availability.now_ms()):
                parts.counters.backlog_queues_pulled += 1
                log.warning("backlog queue pulled from rotation", queue=queue, error=str(error))
            return Failed(error.with_traceback(None), None if parts.rotation.is_exhausted else 0)
        parts.counters.sent_to_backlog += 1
        return None

    @property
    def _busy_s(self) -> float:
        return self._parts.options.busy_wait_ms / 1000

    @property
    def _attempt_s(self) -> float:
        return self._parts.options.attempt_timeout_ms / 1000

    async def _send(self, endpoint: Endpoint, path: str, message: bytes, is_batch: bool) -> None:
        sender = await endpoint.sender(path)
        limit = sender.link.remote_max_message_bytes
        if limit and len(message) > limit:
            raise MessageRefused(
                conditions.LINK_MESSAGE_SIZE_EXCEEDED,
                f"The message has {len(message)} bytes as it goes to {path} of the {endpoint.name}; it takes {limit}.",
            )
        await sender.send(message, is_batch=is_batch)
