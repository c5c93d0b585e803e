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

from broker.catalog.catalog import Definition
from broker.errors import BrokerError, EntityNotFound, InvalidArgument, ServerBusy
from broker.gateway.namespace import Entity, Namespace
from broker.gateway.router import Router
from broker.gateway.web.access import Access
from broker.gateway.web.endpoint import body_of
from broker.gateway.web.journals import Journals, Refused
from broker.namespace.entities import Right
from broker.settings.config import Settings
from protocol.addresses import Part
from protocol.engine.unfinished import Pool
from protocol.nodes.sas_tokens import TokenError

PATH: Final = "$journal"
ENTITIES: Final = f"{PATH}/entities"
RULES_AT_ONCE: Final = 100
RULES_SECONDS: Final = 5.0  # for the answers of a partition about one subscription
PIECE_BYTES: Final = 64 << 10
_PASSED_ON: Final = ("Content-Type", "X-Peeklock-Next-Offset", "Retry-After")
_CONSUMERS: Final = f"{PATH}/consumers/"
MAX_DOCUMENT_BYTES: Final = 64 << 10  # of what a consumer tells
_GLOB: Final = re.compile(r"[*?\[\]]")


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
        self._journals = Journals(gateway.settings.cluster, socket)

    async def serve(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """`is_journal` takes the request. Raises BrokerError, TokenError, HTTPException."""
        is_consumer = path.lower().startswith(_CONSUMERS)
        methods = ["PUT", "DELETE"] if is_consumer else ["GET"]
        if request.method not in methods:
            raise web.HTTPMethodNotAllowed(request.method, methods)
        if is_consumer or path.lower() == ENTITIES:
            self._access.require(request, path, "", Right.LISTEN)
        else:
            self._require(request, path)
        if path.lower() == ENTITIES:
            return web.json_response(await self._entities())
        try:
            if is_consumer:
                return await self._consumer(request, path)
            if path.lower() == PATH:
                return web.json_response(await self._journals.overview(request.query))
            return await self._rows(request, path.lower())
        except Refused as error:
            raise _error(error) from None

    async def _consumer(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Raises BrokerError, Refused."""
        path = f"{_CONSUMERS}{path[len(_CONSUMERS) :]}"  # names of consumers have their case
        if request.method == "DELETE":
            await self._journals.forget(path)
        else:
            body = await body_of(request, MAX_DOCUMENT_BYTES, self._gateway.unfinished)
            await self._journals.tell(path, body, self._journal_of)
        return web.json_response({})

    async def _rows(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Pass on the answer as it comes. Raises BrokerError, Refused."""
        text = path.removeprefix(f"{PATH}/")
        partition = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
        async with self._journals.request(self._journal_of(partition), "GET", path, request.query) as answer:
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
        """That which has the partition, or refuses it. Raises ServerBusy while its worker was not reached yet."""
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
                    subscription.partition, "enumerate-rules", queue_id, (len(found), RULES_AT_ONCE)
                ):
                    found += [b64encode(msgpack.packb(each)).decode() for each in documents]
        except TimeoutError:
            raise ServerBusy(f"Partition {subscription.partition} does not answer now. Please try again.") from None
        return found

    def _require(self, request: web.BaseRequest, path: str) -> None:
        """Raises Unauthorized, TokenError."""
        entity = request.query.get("entity", "").lower()
        owner = entity.partition("/subscriptions/")[0]
        if owner and not _GLOB.search(owner):
            with suppress(BrokerError, TokenError):  # else the rights of the namespace decide
                self._access.require(request, owner, owner, Right.LISTEN)
                return
        self._access.require(request, path, "", Right.LISTEN)

    async def close(self) -> None:
        await self._journals.close()


def _without_keys(entity: Entity) -> dict[str, Any]:
    """Who may read everything may not do what keys of entities allow, and captures are kept in many places."""
    definition = Definition(
        entity.entity_id, entity.description, entity.created_ms, entity.updated_ms, entity.partitions
    )
    document = definition.document()
    document.pop("authorization_rules", None)
    return document


def _error(refused: Refused) -> Exception:
    text = refused.text
    if refused.status == 400:
        return InvalidArgument(f"{text[:1].upper()}{text[1:]}.")
    if refused.status == 503:
        return ServerBusy(f"{text}.")
    if refused.status == 404:
        return EntityNotFound(f"{text[:1].upper()}{text[1:]}.")
    return web.HTTPInternalServerError(reason=text)
