"""Sending and receiving by HTTP requests (management.md 2), over links of the gateway's own (`inside`)."""

import asyncio
import time
from typing import Protocol
from urllib.parse import quote
from uuid import UUID

from aiohttp import web

from broker.errors import InvalidArgument, LockLost, MessageTooLarge
from broker.gateway.connection import Home
from broker.gateway.namespace import Entity, Namespace
from broker.gateway.web import rest_messages
from broker.gateway.web.access import Access
from broker.gateway.web.endpoint import base_url, body_of
from broker.gateway.web.inside import Inside
from broker.gateway.web.statuses import RequestRefused
from broker.gateway.web.targets import is_of_messages
from broker.namespace.entities import Right
from protocol import addresses, conditions, error_texts
from protocol.bounds import MAX_DELAY_MS
from protocol.client.errors import ClientError
from protocol.client.links import Received
from protocol.codec import Long, array
from protocol.symbols import DELAY

BATCH_TYPE = "application/vnd.microsoft.servicebus.json"
DEFAULT_TIMEOUT_S = 60.0
MAX_TIMEOUT_S = 240.0
LOOK_SECONDS = 1.0  # between two looks whether the client still waits
_SETTLING = {"PUT": "abandoned", "DELETE": "completed"}


class Gateway(Home, Protocol):
    namespace: Namespace


def is_runtime(request: web.BaseRequest, path: str) -> bool:
    return is_of_messages(request.method, path)


class Runtime:
    def __init__(self, gateway: Gateway, access: Access) -> None:
        self._gateway = gateway
        self._access = access
        self._inside = Inside(gateway)
        self._takes_delays = gateway.settings.delivery.abandon_delays
        self._max_body_bytes = gateway.settings.amqp.max_message_size_bytes

    async def serve(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """`is_runtime` takes the request. Raises BrokerError, ProtocolError, RequestRefused, HTTPException,
        TimeoutError.
        """
        try:
            if path.lower().endswith("/messages"):
                return await self._send(request, path)
            if path.lower().endswith("/messages/head"):
                return await self._receive(request, path)
            return await self._settle(request, path)
        except ClientError as error:
            raise RequestRefused(error) from None

    def _entity(self, request: web.BaseRequest, path: str, segments: int, right: Right) -> tuple[str, Entity]:
        """The address without the last segments of the path, and its entity. The request has this right there."""
        name = "/".join(path.split("/")[:-segments])
        address = addresses.parse(name)
        if address.node is not addresses.Node.ENTITY:
            raise InvalidArgument("The path names no queue, topic or subscription.")
        self._access.require(request, path, address.owner, right)
        entity = self._gateway.namespace.at(address.path)
        if entity is None:
            text = error_texts.entity_not_found(self._gateway.namespace.name, address.path, "Queue")
            raise RequestRefused(ClientError(conditions.NOT_FOUND, text))
        return name, entity

    # -- sending

    async def _send(self, request: web.BaseRequest, path: str) -> web.Response:
        entity, _ = self._entity(request, path, 1, Right.SEND)
        try:
            body = await body_of(request, self._max_body_bytes, self._gateway.unfinished)
        except web.HTTPRequestEntityTooLarge:
            raise MessageTooLarge(f"A message has at most {self._max_body_bytes} bytes.") from None
        if request.content_type == BATCH_TYPE:
            await self._send_all(entity, [each.encode() for each in rest_messages.read_batch(body)])
        else:
            message = rest_messages.read_message(request.headers.items(), body).encode()
            await (await self._inside.sender(entity)).send(message)
        return web.Response(status=201, headers={"Content-Type": "application/xml; charset=utf-8"})

    async def _send_all(self, entity: str, messages: list[bytes]) -> None:
        """All or none."""
        coordinator = await (await self._inside.connection()).coordinator()
        async with coordinator:
            transaction = await coordinator.declare()
            try:
                sender = await self._inside.sender(entity)
                sent = [await sender.post(message, transaction) for message in messages]
                outcomes = await asyncio.gather(*sent, return_exceptions=True)
                for outcome in outcomes:
                    if isinstance(outcome, BaseException):
                        raise outcome
            except BaseException:
                await coordinator.roll_back(transaction)
                raise
            await coordinator.commit(transaction)

    # -- receiving

    async def _receive(self, request: web.BaseRequest, path: str) -> web.Response:
        entity, found = self._entity(request, path, 2, Right.LISTEN)
        if found.requires_session:
            raise InvalidArgument("The entity requires sessions, which cannot be received from over HTTP.")
        deletes = request.method == "DELETE"
        origin = "" if deletes else "://".join(base_url(request))
        until = time.monotonic() + _timeout(request)
        # Also a message that is deleted is locked first: the client may go while it is on its way.
        receiver = await (await self._inside.connection()).receiver(entity, credit=0)
        async with receiver:
            received: Received | None = None
            while received is None:
                left = until - time.monotonic()
                messages = await receiver.fetch(1, max(0.0, min(LOOK_SECONDS, left)))
                received = messages[0] if messages else None
                is_gone = request.transport is None or request.transport.is_closing()
                if is_gone and received is not None:
                    await receiver.release(received)
                if is_gone:
                    raise ConnectionResetError
                if received is None and left <= 0:
                    return web.Response(status=204)
            message = received.message()
            if deletes:
                await receiver.accept(received)
        headers = rest_messages.write_headers(message, None if deletes else received.lock_token)
        if not deletes:
            place = quote(f"{entity.lower()}/messages/{message.sequence_number}/{received.lock_token}")
            headers["Location"] = f"{origin}/{place}"
        content = message.content()
        if not isinstance(content, bytes):
            content = str(content).encode("utf-8", "replace")
        headers.setdefault("Content-Type", "application/octet-stream")
        return web.Response(status=200 if deletes else 201, body=content, headers=headers)

    # -- settling

    async def _settle(self, request: web.BaseRequest, path: str) -> web.Response:
        entity, _ = self._entity(request, path, 3, Right.LISTEN)
        token = UUID(path.rpartition("/")[2])
        delay_ms = self._delay_ms(request)
        management = await (await self._inside.connection()).management(entity)
        try:
            if request.method == "POST":
                await management.renew_locks([token])
            else:
                body = {"disposition-status": _SETTLING[request.method], "lock-tokens": array(UUID, [token])}
                if delay_ms:
                    body["properties-to-modify"] = {DELAY: Long(delay_ms)}
                await management.request("com.microsoft:update-disposition", body)
        except ClientError as error:
            if error.condition == conditions.MESSAGE_LOCK_LOST:
                raise LockLost(error.description) from None
            raise
        return web.Response(status=200)

    def _delay_ms(self, request: web.BaseRequest) -> int:
        """The cloud knows no delay, so it is refused where it would have no effect. Raises InvalidArgument."""
        text = request.query.get("delay")
        if text is None:
            return 0
        if request.method != "PUT":
            raise InvalidArgument("'delay' is for messages that are unlocked, with PUT.")
        if not self._takes_delays:
            raise InvalidArgument("'delay' has no effect here, because the setting delivery.abandon_delays is off.")
        most = MAX_DELAY_MS // 1000
        if not text.isascii() or not text.isdecimal() or len(text) > len(str(most)) or int(text) > most:
            raise InvalidArgument(f"'delay' is no number of seconds from 0 to {most}.")
        return int(text) * 1000


def _timeout(request: web.BaseRequest) -> float:
    """Seconds. Raises InvalidArgument."""
    text = request.query.get("timeout", "")
    if not text:
        return DEFAULT_TIMEOUT_S
    if not text.isascii() or not text.isdecimal():
        raise InvalidArgument("'timeout' is no number of seconds.")
    return min(MAX_TIMEOUT_S, float(text[:6]))
