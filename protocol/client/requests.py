"""Requests to a node and their responses, matched by correlation id; requests to $cbs and $management."""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Final, Protocol
from uuid import UUID

from protocol import addresses, conditions
from protocol.client.connection_string import SharedAccessKey, SharedAccessSignature
from protocol.client.errors import AuthenticationFailed, ClientError, LinkDetached, NeedsPeeklock, RequestFailed
from protocol.client.link_end import LinkConnection, LinkEnd
from protocol.client.links import Sender
from protocol.client.messages import Message, value_section
from protocol.codec import Int, Long, Timestamp, UInt, array
from protocol.engine.deliveries import ACCEPTED, Delivery, forget, settle
from protocol.errors import ProtocolError
from protocol.nodes import cbs, sas_tokens
from protocol.nodes.request_message import text
from protocol.symbols import ACTIVE

RESPONSE_CREDIT = 100
MAX_REQUESTS = 100
# A token is renewed when this share of its lifetime is over.
REFRESH_AT = 0.8
RETRY_SECONDS = 5.0
SESSIONS_PAGE = 100

_SERVER_TIMEOUT: Final = "com.microsoft:server-timeout"
UINT_MAX: Final = (1 << 32) - 1
# Answers that servers give only to an operation that they have: no right, a quota, too late, busy.
_OF_KNOWN_OPERATIONS: Final = (401, 403, 408, 503)
_ALL_SESSIONS_MS: Final = 253_402_300_800_000  # the year 10000: all, and not only those whose state has changed since
_TOKEN_TYPE: Final = "servicebus.windows.net:sastoken"


@dataclass(frozen=True, slots=True)
class Response:
    """`properties` are the application properties, `body` the value."""

    properties: Mapping[str, Any]
    body: Any


class ResponseLink(LinkEnd):
    """The link on which a node answers."""

    def __init__(self, connection: LinkConnection, node: str) -> None:
        super().__init__(connection, node)
        self.waiting: dict[Any, asyncio.Future[Response]] = {}

    def on_attached(self) -> None:
        self.link.grant(RESPONSE_CREDIT)
        super().on_attached()

    def on_message(self, delivery: Delivery, payload: bytes, settled: bool) -> None:
        if settled:
            forget(delivery)
        else:
            settle(delivery, ACCEPTED)
        self._refill()
        try:
            message = Message.decode(payload)
            waiting = self.waiting.get(message.correlation_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(Response(message.application_properties, message.content()))
        except ProtocolError:
            return  # we do not know whose answer it was: its request will time out

    def on_aborted(self) -> None:
        self._refill()

    def _refill(self) -> None:
        if self.link.credit <= RESPONSE_CREDIT // 2 and self.error is None:
            self.link.grant(RESPONSE_CREDIT - self.link.credit)

    def wake(self, error: ClientError) -> None:
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(error.again())


class Requests:
    """A pair of links to one node. Any number of requests may wait; MAX_REQUESTS are on the wire at once."""

    def __init__(self, sender: Sender, responses: ResponseLink, reply_to: str) -> None:
        self._sender = sender
        self._responses = responses
        self._reply_to = reply_to
        self._count = 0

    @property
    def closed(self) -> bool:
        return self._sender.closed or self._responses.closed

    async def request(self, properties: Mapping[str, Any], body: Any, timeout_s: float | None) -> Response:
        """Send a request, wait for its answer. Raises TimeoutError, MessageRefused, LinkDetached or ConnectionLost."""
        self._count += 1
        message_id = f"{self._reply_to}:{self._count}"
        message = Message(
            value_section(body), message_id=message_id, reply_to=self._reply_to, application_properties=dict(properties)
        ).encode()
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        # If the request cannot be sent because the connection is lost, nobody waits for the answer, which fails, too.
        answer.add_done_callback(lambda each: each.cancelled() or each.exception())
        self._responses.check()
        self._responses.waiting[message_id] = answer
        try:
            async with asyncio.timeout(timeout_s):
                await self._sender.send(message)
                return await answer
        except TimeoutError:
            what = f"'{properties.get('operation')}' at {self._sender.address}"
            raise TimeoutError(f"no answer to {what} within {timeout_s} s") from None
        finally:
            del self._responses.waiting[message_id]
            del answer  # its error has this call, which must not have it

    async def close(self) -> None:
        await asyncio.gather(self._sender.close(), self._responses.close())


class RequestConnection(Protocol):
    """A client's connection as its claims see it."""

    hostname: str
    timeout_s: float

    async def requests(self, node: str) -> Requests:
        """The links to the node. Raises LinkDetached, ConnectionLost or TimeoutError."""


class Claims:
    """The tokens of a connection: put at the first use of an entity, and again before they expire (amqp.md 2)."""

    def __init__(self, connection: RequestConnection, credentials: SharedAccessKey | SharedAccessSignature) -> None:
        self._connection = connection
        self._credentials = credentials
        self._refresh_at: dict[str, float] = {}  # by audience, on the clock of the event loop
        self._putting = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def ensure(self, address: str) -> None:
        """Make sure that there is a token for the entity of `address`.

        Raises AuthenticationFailed, or LinkDetached if there is no such entity.
        """
        audience = f"amqp://{self._connection.hostname}/{addresses.parse_audience(address).path}"
        async with self._putting:
            if audience not in self._refresh_at:
                await self._put(audience)
        if self._refreshing is None and not self._is_stopped and isinstance(self._credentials, SharedAccessKey):
            self._refreshing = asyncio.create_task(self._refresh())

    def stop(self) -> None:
        self._is_stopped = True
        if self._refreshing is not None:
            self._refreshing.cancel()
            self._refreshing = None  # its error has the calls of the task, which have this object

    async def _put(self, audience: str) -> None:
        token, life_s = self._token(audience)
        requests = await self._connection.requests("$cbs")
        properties = {"operation": "put-token", "type": _TOKEN_TYPE, "name": audience}
        response = await requests.request(properties, token, self._connection.timeout_s)
        status = response.properties.get("status-code")
        if not isinstance(status, int) or not 200 <= status < 300:
            description = text(response.properties.get("status-description"))
            description = description or f"token refused: status {status}"
            if status == cbs.NOT_FOUND:  # as an attach without a token would be answered
                raise LinkDetached(conditions.NOT_FOUND, description)
            raise AuthenticationFailed(conditions.UNAUTHORIZED_ACCESS, description)
        self._refresh_at[audience] = asyncio.get_running_loop().time() + REFRESH_AT * life_s

    def _token(self, audience: str) -> tuple[str, float]:
        credentials = self._credentials
        if isinstance(credentials, SharedAccessSignature):
            return credentials.token, float("inf")
        expires_s = ceil(time.time() + credentials.lifetime_s)
        return sas_tokens.generate(audience, credentials.name, credentials.key, expires_s), credentials.lifetime_s

    async def _refresh(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(min(self._refresh_at.values()) - loop.time())
            for audience in [audience for audience, at in self._refresh_at.items() if at <= loop.time()]:
                try:
                    await self._put(audience)
                except (ClientError, TimeoutError):
                    # When the old token ends, the peer detaches the links that need it, with the reason.
                    self._refresh_at[audience] = loop.time() + RETRY_SECONDS


@dataclass(frozen=True, slots=True)
class QueueCounts:
    """Messages of an entity by state. `active` messages are available, locked or deferred.

    `transfer` messages wait to be moved to another entity. `dead_lettered` are in its dead-letter queue,
    `transfer_dead_lettered` in its transfer dead-letter queue; the bytes of all are in `size_bytes`.
    """

    active: int
    locked: int
    deferred: int
    scheduled: int
    dead_lettered: int
    size_bytes: int
    transfer_dead_lettered: int = 0
    transfer: int = 0


class Management:
    """The $management node of an entity, or of its dead-letter queue."""

    def __init__(self, requests: Requests, timeout_s: float) -> None:
        self._requests = requests
        self._timeout_s = timeout_s

    async def request(
        self, operation: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The body of the answer, empty if there is no content. Raises RequestFailed, TimeoutError, ..."""
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        properties: dict[str, Any] = {"operation": operation}
        if timeout_s != float("inf"):
            properties[_SERVER_TIMEOUT] = UInt(min(timeout_s * 1000, UINT_MAX))
        answer = await self._requests.request(
            properties, dict(body or {}), None if timeout_s == float("inf") else timeout_s
        )
        status = answer.properties.get("statusCode")
        if not isinstance(status, int) or not 200 <= status < 300:
            raise RequestFailed(
                text(answer.properties.get("errorCondition")) or "",
                text(answer.properties.get("statusDescription")) or f"'{operation}' failed",
                status if isinstance(status, int) else 500,
            )
        return answer.body if isinstance(answer.body, dict) else {}

    async def request_of_peeklock(
        self, operation: str, body: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """Request, as `request` does, an operation of Peeklock alone. Raises NeedsPeeklock for another server."""
        try:
            return await self.request(operation, body, timeout_s)
        except RequestFailed as error:
            if await self._is_unknown(error):
                raise needs_peeklock(operation, error) from error
            raise

    async def _is_unknown(self, error: RequestFailed) -> bool:
        """True if the peer answers the same to what no server has: servers have many answers to unknown operations."""
        if error.status in _OF_KNOWN_OPERATIONS:
            return False
        try:
            await self.request("peeklock:no-such-operation")
        except RequestFailed as other:
            return (other.status, other.condition) == (error.status, error.condition)
        return True

    async def peek(
        self,
        count: int = 1,
        from_sequence_number: int = 0,
        *,
        session_id: str | None = None,
        omit_body: bool = False,
    ) -> list[bytes]:
        """Encoded messages in any state, in the order of their sequence numbers; perhaps fewer than asked for."""
        body: dict[str, Any] = {"from-sequence-number": Long(from_sequence_number), "message-count": Int(count)}
        if session_id is not None:
            body["session-id"] = session_id
        if omit_body:
            body["omit-message-body"] = True
        answer = await self.request("com.microsoft:peek-message", body)
        return [item["message"] for item in answer.get("messages", [])]

    async def renew_locks(self, lock_tokens: Sequence[UUID]) -> list[int]:
        """The new ends of the locks, in Unix milliseconds."""
        answer = await self.request("com.microsoft:renew-lock", {"lock-tokens": array(UUID, lock_tokens)})
        return [int(until) for until in answer["expirations"]]

    async def renew_session_lock(self, session_id: str) -> int:
        """Renew the lock of a session that this connection has accepted; return its new end in Unix milliseconds."""
        return int((await self.request("com.microsoft:renew-session-lock", {"session-id": session_id}))["expiration"])

    async def schedule(self, messages: Sequence[Message]) -> list[int]:
        """Schedule messages by their annotation x-opt-scheduled-enqueue-time; returns their sequence numbers."""
        items = [{"message-id": message.message_id, "message": message.encode()} for message in messages]
        answer = await self.request("com.microsoft:schedule-message", {"messages": items})
        return [int(number) for number in answer["sequence-numbers"]]

    async def cancel_scheduled(self, sequence_numbers: Sequence[int]) -> None:
        body = {"sequence-numbers": array(Long, sequence_numbers)}
        await self.request("com.microsoft:cancel-scheduled-message", body)

    async def lock_deferred(
        self, sequence_numbers: Sequence[int], session_id: str | None = None, *, active: bool = False
    ) -> list[UUID]:
        """Lock deferred messages; with `active` also active ones, which is an addition of Peeklock.

        Those of a session need its lock: see `Connection.accept_session`. Returns the tokens of their locks. Raises
        RequestFailed if one is not there.
        """
        found = await self.receive_deferred(sequence_numbers, session_id, active=active)
        return [lock_token for lock_token, _ in found]

    async def receive_deferred(
        self, sequence_numbers: Sequence[int], session_id: str | None = None, *, active: bool = False
    ) -> list[tuple[UUID, bytes]]:
        """Lock deferred messages, as `lock_deferred` does; return the lock tokens with the encoded messages."""
        body: dict[str, Any] = {
            "sequence-numbers": array(Long, sequence_numbers),
            "receiver-settle-mode": UInt(1),
        }
        if session_id is not None:
            body["session-id"] = session_id
        if active:
            body[ACTIVE] = True
        answer = await self.request("com.microsoft:receive-by-sequence-number", body)
        return [(item["lock-token"], item["message"]) for item in answer.get("messages", [])]

    async def complete(self, lock_tokens: Sequence[UUID]) -> None:
        """Complete the messages with these locks: all, or none. Raises RequestFailed."""
        await self._settle("completed", lock_tokens)

    async def abandon(self, lock_tokens: Sequence[UUID]) -> None:
        """Give the messages with these locks back, deferred ones as deferred. Raises RequestFailed."""
        await self._settle("abandoned", lock_tokens)

    async def dead_letter(
        self, lock_tokens: Sequence[UUID], reason: str | None, description: str | None, session_id: str | None = None
    ) -> None:
        """Dead-letter the messages with these locks, which may be of a session. Raises RequestFailed."""
        details = {"deadletter-reason": reason, "deadletter-description": description, "session-id": session_id}
        await self._settle("suspended", lock_tokens, {name: each for name, each in details.items() if each is not None})

    async def _settle(self, status: str, lock_tokens: Sequence[UUID], details: Mapping[str, str] | None = None) -> None:
        body = {"disposition-status": status, "lock-tokens": array(UUID, lock_tokens), **(details or {})}
        await self.request("com.microsoft:update-disposition", body)

    async def session_state(self, session_id: str) -> bytes | None:
        """The state of a session whose lock we hold. Raises RequestFailed."""
        state = (await self.request("com.microsoft:get-session-state", {"session-id": session_id})).get("session-state")
        return state if isinstance(state, bytes) else None

    async def set_session_state(self, session_id: str, state: bytes | None) -> None:
        """Set the state of a session whose lock we hold; None clears it. Raises RequestFailed."""
        await self.request("com.microsoft:set-session-state", {"session-id": session_id, "session-state": state})

    async def purge(self, states: Sequence[str] = ()) -> int:
        """Delete the unlocked messages in these states, or all, however long it takes; returns their number.

        States are active, deferred and scheduled. Needs the right Manage.
        """
        body = {"states": ",".join(states)} if states else None
        answer = await self.request_of_peeklock("peeklock:purge", body, timeout_s=float("inf"))
        return int(answer["message-count"])

    async def sessions(self) -> AsyncIterator[str]:
        """The ids of all sessions that have messages or a state, in pages. Raises RequestFailed."""
        skip = 0
        while True:
            body = {"last-updated-time": Timestamp(_ALL_SESSIONS_MS), "skip": Int(skip), "top": Int(SESSIONS_PAGE)}
            answer = await self.request("com.microsoft:get-message-sessions", body)
            found = answer.get("sessions-ids", [])
            for each in found:
                yield each
            skip += len(found)
            if len(found) < SESSIONS_PAGE:
                return

    async def counts(self) -> QueueCounts:
        return queue_counts((await self.request_of_peeklock("peeklock:get-counts"))["counts"])


def needs_peeklock(operation: str, answer: ClientError) -> NeedsPeeklock:
    return NeedsPeeklock("", f"this needs Peeklock; the server does not know {operation} and says: {answer}")


def queue_counts(values: Mapping[str, int]) -> QueueCounts:
    """The counts in the broker's answer, whose names have hyphens."""
    return QueueCounts(**{name: int(values[name.replace("_", "-")]) for name in QueueCounts.__slots__})
