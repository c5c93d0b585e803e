"""The journal over HTTP, and how far its consumers are: rights are checked here, the journals' processes answer.

The answer is passed on as it comes, so that neither process has more than a piece of it in memory. When the client has
gone, the connection to the journal is closed.
"""

import asyncio
import re
from base64 import b64encode
from contextlib import suppress
from typing import Any, Final, Protocol

import msgpack
from aiohttp import ClientConnectionError, ClientPayloadError, web

from broker import requests
from broker.catalog.catalog import Definition
from broker.errors import BrokerError, EntityNotFound, InternalError, InvalidArgument, ServerBusy
from broker.gateway.namespace import Entity, Namespace
from broker.gateway.rights import entity_of
from broker.gateway.router import Router
from broker.gateway.web.access import Access
from broker.gateway.web.endpoint import body_of
from broker.gateway.web.journals import Journals, Refused
from broker.journal_requests import Consumer, Overview, Range, WrongRequest
from broker.namespace.entities import Right
from broker.settings.config import Settings
from protocol.addresses import Part
from protocol.engine.unfinished import Pool
from protocol.errors import ProtocolError

PATH: Final = "$journal"
ENTITIES: Final = f"{PATH}/entities"
RULES_AT_ONCE: Final = 100
RULES_SECONDS: Final = 5.0  # for the answers of a partition about one subscription
PIECE_BYTES: Final = 256 << 10  # each costs some 0.1 ms
_PASSED_ON: Final = ("Content-Type", "X-Peeklock-Next-Offset", "Retry-After")
_CONSUMERS: Final = f"{PATH}/consumers/"
MAX_DOCUMENT_BYTES: Final = 64 << 10  # of what a consumer tells
_GLOB: Final = re.compile(r"[*?\[\]]")
_ERRORS: Final[dict[int, type[BrokerError]]] = {400: InvalidArgument, 404: EntityNotFound, 503: ServerBusy}


def is_journal(_: web.BaseRequest, path: str) -> bool:
    return path.lower() == PATH or path.lower().startswith(f"{PATH}/")


class Catalog(Protocol):
    """The gateway, as far as the definitions of entities need it."""

    namespace: Namespace
    settings: Settings
    router: Router
    unfinished: Pool


class Journal:
    def __init__(self, access: Access, socket: str, gateway: Catalog) -> None:
        """`socket` is the path of that on which the journal of this machine listens."""
        self._access = access
        self._gateway = gateway
        self._journals = Journals(gateway.settings, socket)

    async def serve(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """`is_journal` takes the request. Raises BrokerError, TokenError, HTTPException."""
        lower = path.lower()
        is_consumer = lower.startswith(_CONSUMERS)
        methods = ["PUT", "DELETE"] if is_consumer else ["GET"]
        if request.method not in methods:
            raise web.HTTPMethodNotAllowed(request.method, methods)
        try:
            if is_consumer:
                return await self._consumer(request, path)
            if lower == ENTITIES:
                self._access.require(request, path, "", Right.LISTEN)
                return web.json_response(await self._entities())
            if lower == PATH:
                self._access.require(request, path, "", Right.LISTEN)
                return web.json_response(await self._overview(Overview.read(request.query.items())))
            return await self._rows(request, path, Range.read(lower.removeprefix(f"{PATH}/"), request.query.items()))
        except (Refused, WrongRequest) as error:
            raise _error(error.status, error.text) from None

    async def _overview(self, wanted: Overview) -> dict[str, Any]:
        """Describe the journals of all workers, with the namespace id if it is known. Raises Refused, ServerBusy."""
        found = await self._journals.overview(wanted)
        # Without a worker the journal can still be read, and somebody may need to.
        namespace_id = self._gateway.router.namespace_id
        return {**found, "namespaceId": namespace_id.hex()} if namespace_id else found

    async def _consumer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Serve a request about a consumer. Raises BrokerError, TokenError, Refused, WrongRequest."""
        is_forgotten = request.method == "DELETE"
        # Rows may be deleted when a consumer is forgotten that they were kept for.
        self._access.require(request, path, "", Right.MANAGE if is_forgotten else Right.LISTEN)
        consumer = Consumer.read(path[len(_CONSUMERS) :])  # names of consumers have their case
        if is_forgotten:
            await self._journals.forget(consumer)
        else:
            body = await body_of(request, MAX_DOCUMENT_BYTES, self._gateway.unfinished)
            await self._journals.tell(consumer, body, self._journal_of)
        return web.json_response({})

    async def _rows(self, request: web.BaseRequest, path: str, asked: Range) -> web.StreamResponse:
        """Pass on the answer as it comes. Raises BrokerError, TokenError, Refused."""
        asked = asked._replace(owner=self._required(request, path, asked.pattern))
        async with self._journals.rows(self._journal_of(asked.partition), asked) as answer:
            headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
            response = web.StreamResponse(status=answer.status, headers=headers)
            await response.prepare(request)
            try:
                async for piece in answer.content.iter_chunked(PIECE_BYTES):
                    await response.write(piece)
            except (ClientPayloadError, ClientConnectionError, TimeoutError):
                # The client must not take what it has for the whole.
                if request.transport is not None:
                    request.transport.abort()
                raise ConnectionResetError from None
            await response.write_eof()
            return response

    def _journal_of(self, partition: int) -> int:
        """Return the journal that has, or refuses, the partition. Raises ServerBusy until its worker was reached."""
        if self._journals.count == 1 or not 0 <= partition < self._gateway.settings.partitions:
            return 0
        number = self._gateway.router.number_of_worker(partition)
        if number is None:
            raise ServerBusy(f"The worker of partition {partition} has not been reached yet. Please try again.")
        return number

    async def _entities(self) -> dict[str, Any]:
        """What a capture keeps, so that partitions can be rebuilt: all definitions without keys, and all rules.

        Raises BrokerError.
        """
        namespace = self._gateway.namespace
        found = sorted(namespace, key=lambda each: each.entity_id)
        rules = {each.name: await self._rules(each) for each in found if each.kind == "subscription"}
        return {
            "namespace": namespace.name,
            "partitions": self._gateway.settings.partitions,
            "entities": [_without_keys(each) for each in found],
            "rules": rules,
        }

    async def _rules(self, subscription: Entity) -> list[str]:
        """Rule documents (`broker.namespace.rule_descriptions`), each as msgpack in base64. Raises BrokerError."""
        found: list[str] = []
        queue_id = subscription.queue(Part.MAIN)
        try:
            async with asyncio.timeout(RULES_SECONDS):
                while documents := await self._gateway.router.ask(
                    subscription.partition, queue_id, requests.EnumerateRules(len(found), RULES_AT_ONCE)
                ):
                    found += [b64encode(msgpack.packb(each)).decode() for each in documents]
        except TimeoutError:
            raise ServerBusy(f"Partition {subscription.partition} does not answer now. Please try again.") from None
        return found

    def _required(self, request: web.BaseRequest, path: str, pattern: str | None) -> str | None:
        """The queue or topic whose rows, and those of whose subscriptions, the request has a right to; None is all.

        Raises Unauthorized, TokenError.
        """
        with suppress(BrokerError, ProtocolError):  # else the rights of the namespace decide
            owner = entity_of(pattern or "")
            if owner is not None and not _GLOB.search(owner):
                self._access.require(request, owner.lower(), owner.lower(), Right.LISTEN)
                return owner.lower()
        self._access.require(request, path, "", Right.LISTEN)
        return None

    async def close(self) -> None:
        await self._journals.close()


def _without_keys(entity: Entity) -> dict[str, Any]:
    """Describe the entity without its keys, which readers of everything may not use; captures lie in many places."""
    definition = Definition(
        entity.entity_id, entity.description, entity.created_ms, entity.updated_ms, entity.partitions
    )
    document = definition.document()
    document.pop("authorization_rules", None)
    return document


def _error(status: int, text: str) -> BrokerError:
    text = f"{text[:1].upper()}{text[1:]}."
    return _ERRORS.get(status, InternalError)(text)
