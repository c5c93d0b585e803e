"""The management API: queues, topics, subscriptions and rules by Atom documents (management.md 1).

What is read comes from this gateway's copy of the catalog, and counts from the partitions. A change is the home's
(`broker.worker.home`), except for rules of a plain topic, which its partition has.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol
from urllib.parse import quote
from xml.etree.ElementTree import Element

from aiohttp import web

from broker import requests
from broker.atom import documents, entities, rules, xml
from broker.atom.documents import ENTRY_TYPE, FEED_TYPE, Entry, Page
from broker.atom.entities import Shown
from broker.atom.values import write_duration, write_time
from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import BrokerError, EntityNotFound, InvalidArgument, PreconditionFailed, Unauthorized
from broker.gateway.namespace import Entity, Namespace
from broker.gateway.nodes.entity_counts import accessed_ms, counted_queues, entity_counts, summed
from broker.gateway.router import Router
from broker.gateway.web.access import Access
from broker.gateway.web.endpoint import base_url, body_of
from broker.gateway.web.pace import Pace, Parts
from broker.gateway.web.targets import Resource, Target, is_of_messages, parse
from broker.metrics import GatewayMetrics
from broker.namespace.entities import Right, SubscriptionDescription
from broker.namespace.rule_descriptions import DEFAULT_RULE_NAME, RuleDescription
from broker.namespace.tiers import Sku, size_factor, size_refusal
from broker.settings.config import Settings
from protocol.addresses import Part
from protocol.bounds import MAX_COUNT
from protocol.engine.unfinished import Pool

PAGE = 100  # entities in a list whose client does not say how many
MAX_PAGE = 1000
MAX_BODY_BYTES = 1 << 20
COUNTS_SECONDS = 3.0  # a partition that has not answered by then is shown as not available
# Headers with tokens for the entities that messages are forwarded to.
_SUPPLEMENTARY: Final = {
    "forward_to": "ServiceBusSupplementaryAuthorization",
    "forward_dead_lettered_messages_to": "ServiceBusDlqSupplementaryAuthorization",
}
_OF_QUEUES_AND_TOPICS: Final = (entities.ELEMENT["queue"], entities.ELEMENT["topic"])
_METHODS: Final = {
    Resource.ROOT: ("GET",),
    Resource.NAMESPACE: ("GET",),
    Resource.QUEUES: ("GET",),
    Resource.TOPICS: ("GET",),
    Resource.SUBSCRIPTIONS: ("GET",),
    Resource.RULES: ("GET",),
}
# The service's names of what needs a right, for errors that say that it is missing (management.md 5.4).
_ACTIONS: Final = {"PUT": "Manage,EntityWrite", "DELETE": "Manage,EntityDelete"}
_OPERATIONS: Final = {"GET": "Get", "PUT": "CreateOrUpdate", "DELETE": "Delete"}
_METHODS_OF_ENTITIES: Final = ("GET", "PUT", "DELETE")


class Shared(Protocol):
    """The gateway, as far as management needs it."""

    namespace: Namespace
    settings: Settings
    router: Router
    metrics: GatewayMetrics
    unfinished: Pool


class Management:
    def __init__(self, gateway: Shared, access: Access, started_ms: int) -> None:
        self._gateway = gateway
        self._access = access
        self._started_ms = started_ms
        self._pace = Pace(lambda: gateway.metrics.bytes_in + gateway.metrics.bytes_out)

    async def serve(self, request: web.BaseRequest, path: str) -> web.StreamResponse:
        """Answer a request. Raises BrokerError, ProtocolError, HTTPException, TimeoutError."""
        target = parse(path)
        allowed = _METHODS.get(target.resource, _METHODS_OF_ENTITIES)
        method = "GET" if request.method == "HEAD" else request.method
        if method not in allowed:
            raise web.HTTPMethodNotAllowed(request.method, allowed)
        if target.resource is Resource.ROOT:
            return self._root(request)
        await self._require(request, method, path, target)
        if target.resource in _METHODS:
            return await self._LISTS[target.resource](self, request, target)
        return await self._OF_ENTITY[target.resource is Resource.RULE, method](self, request, target)

    async def _require(self, request: web.BaseRequest, method: str, path: str, target: Target) -> None:
        """Check that the request is allowed. Raises Unauthorized, with the service's text, or a TokenError.

        Raises EntityNotFound instead if there is nothing to read.
        """
        right = None if target.resource is Resource.NAMESPACE else Right.MANAGE
        try:
            self._access.require(request, path, target.entity, right)
        except Unauthorized:
            if method == "GET" and target.resource not in _METHODS:
                found = self._find(target.path)
                if target.resource is Resource.RULE:
                    await self._ask(found, requests.GetRule(target.rule))
            if target.resource is Resource.SUBSCRIPTION:
                url = f"sb://{base_url(request)[1]}/{target.url_path}"
                text = f"Unauthorized access for '{_OPERATIONS[method]}Subscription' operation on endpoint '{url}'."
                raise Unauthorized(f"SubCode=40100: Unauthorized : {text}") from None
            if target.resource is Resource.ENTITY and method in _ACTIONS:
                text = f"Authorization failed for specified action: {_ACTIONS[method]}."
                raise Unauthorized(text) from None
            raise

    # -- the namespace

    def _root(self, request: web.BaseRequest) -> web.Response:
        """What the namespace shows to everybody: nothing."""
        page = Page(self._url(request, Target(Resource.ROOT)), "Publicly Listed Services", self._time(), ())
        return self._feed(page)

    async def _namespace(self, request: web.BaseRequest, target: Target) -> web.Response:
        name, time = self._gateway.namespace.name, self._time()
        content = documents.write_namespace(name, time, time, is_premium=self._gateway.settings.sku is Sku.PREMIUM)
        return self._entry(Entry(self._url(request, target), name, content, time, time), 200, self._started_ms)

    def _time(self) -> str:
        return write_time(self._started_ms)

    # -- lists

    async def _queues(self, request: web.BaseRequest, target: Target) -> web.Response:
        return await self._list(request, target, "Queues", self._gateway.namespace.queues())

    async def _topics(self, request: web.BaseRequest, target: Target) -> web.Response:
        return await self._list(request, target, "Topics", self._gateway.namespace.topics())

    async def _subscriptions(self, request: web.BaseRequest, target: Target) -> web.Response:
        topic = self._find(target.entity, "topic")
        return await self._list(request, target, "Subscriptions", self._gateway.namespace.subscriptions_of(topic.name))

    async def _list(
        self, request: web.BaseRequest, target: Target, title: str, listed: Sequence[Entity]
    ) -> web.Response:
        """`listed` are in the order of their names."""
        skip, top = _paging(request)
        shown = await self._shown(listed[skip : skip + top])
        entries = await self._written(self._entity_entry(request, each) for each in shown)
        return self._feed(self._page(request, target, title, entries, skip, top, skip + top < len(listed)))

    async def _rules(self, request: web.BaseRequest, target: Target) -> web.Response:
        subscription = self._find(target.path, "subscription")
        skip, top = _paging(request)
        found = await self._ask(subscription, requests.EnumerateRules(skip, top + 1))
        entries = await self._written(self._rule_entry(request, target, each) for each in found[:top])
        return self._feed(self._page(request, target, "Rules", entries, skip, top, len(found) > top))

    async def _written(self, entries: Iterable[Entry]) -> list[str]:
        """Write the entries of a list, which may be long: messages go first."""
        author = self._gateway.namespace.name
        parts = Parts(self._pace)
        written = []
        for entry in entries:
            written.append(documents.write_feed_entry(entry, author))
            await parts.pause()
        await parts.pause(is_end=True)
        return written

    def _page(
        self,
        request: web.BaseRequest,
        target: Target,
        title: str,
        entries: Iterable[str],
        skip: int,
        top: int,
        has_more: bool,
    ) -> Page:
        url = self._url(request, target)
        following = f"{url}{'&' if '?' in url else '?'}$skip={skip + top}&$top={top}" if has_more else None
        return Page(url, title, self._time(), entries, following)

    _LISTS: Final[dict[Resource, Callable[["Management", web.BaseRequest, Target], Awaitable[web.Response]]]] = {
        Resource.NAMESPACE: _namespace,
        Resource.QUEUES: _queues,
        Resource.TOPICS: _topics,
        Resource.SUBSCRIPTIONS: _subscriptions,
        Resource.RULES: _rules,
    }

    # -- queues, topics and subscriptions

    async def _get_entity(self, request: web.BaseRequest, target: Target) -> web.Response:
        [shown] = await self._shown([self._find(target.path)])
        return self._entry(self._entity_entry(request, shown), 200, shown.updated_ms)

    async def _put_entity(self, request: web.BaseRequest, target: Target) -> web.Response:
        body = await self._document(request)
        is_subscription = target.resource is Resource.SUBSCRIPTION
        # A queue and a topic have the same URL.
        names = (entities.ELEMENT["subscription"],) if is_subscription else _OF_QUEUES_AND_TOPICS
        element, described = documents.read_description(body, *names)
        kind = entities.KIND[element]
        fields = entities.read(kind, described)
        self._check_lock(fields)
        if "If-Match" in request.headers:
            entity = self._find(target.path, kind)
            _require_match(request, entity.updated_ms)
            fields = entities.as_stored(fields, entity.description, self._size_factor(entity), self._message_kb)
            self._check_size(fields, getattr(entity.description, "max_size_mb", None))
            entities.validated(kind, {**entity.description.model_dump(mode="json"), **fields})
            self._require_destinations(request, fields)
            document = await self._change(changes.Update(entity.name, fields))
            [shown] = await self._shown([Entity.of(document)])
        else:
            if is_of_messages("DELETE", target.entity):
                raise InvalidArgument(
                    "The entity's name ends as the path of a message does, so it could not be deleted."
                )
            self._check_size(fields)
            own = {"name": target.subscription, "topic": target.entity} if is_subscription else {"name": target.entity}
            wanted = entities.validated(kind, fields | own)
            self._require_destinations(request, fields)
            first = _first_rules(described) if is_subscription else None
            properties = wanted.model_dump(mode="json", exclude_unset=True)
            shown = self._new(Entity.of(await self._change(changes.Create(kind, properties, first))))
        return self._entry(
            self._entity_entry(request, shown), 200 if "If-Match" in request.headers else 201, shown.updated_ms
        )

    async def _document(self, request: web.BaseRequest) -> bytes:
        """Return the body of the request. Raises what `body_of` raises, and HTTPUnsupportedMediaType."""
        if request.headers.get("Content-Encoding", "identity").strip().lower() != "identity":
            raise web.HTTPUnsupportedMediaType
        return await body_of(request, MAX_BODY_BYTES, self._gateway.unfinished)

    def _require_destinations(self, request: web.BaseRequest, fields: Mapping[str, Any]) -> None:
        """Check that a client that makes an entity forward may manage the destination, too (management.md 5.4)."""
        for field, header in _SUPPLEMENTARY.items():
            if destination := fields.get(field):
                self._access.require_also(request, header, destination, Right.MANAGE)

    def _check_lock(self, fields: Mapping[str, Any]) -> None:
        """The home checks it, too, and does not know how clients of this API name it. Raises InvalidArgument."""
        most_ms = self._gateway.settings.delivery.max_lock_duration_ms
        if fields.get("lock_duration_ms", 0) > most_ms:
            raise InvalidArgument(f"LockDuration: must be at most {write_duration(most_ms)}.")

    def _check_size(self, fields: Mapping[str, Any], before_mb: int | None = None) -> None:
        """An entity keeps a size that only other ways of creation allow. Raises InvalidArgument."""
        size_mb = fields.get("max_size_mb")
        if size_mb is None or size_mb == before_mb:
            return
        if (refusal := size_refusal(self._gateway.settings.sku, size_mb)) is not None:
            raise InvalidArgument(refusal)

    async def _delete_entity(self, request: web.BaseRequest, target: Target) -> web.Response:
        entity = self._find(target.path)
        if "If-Match" in request.headers:
            _require_match(request, entity.updated_ms)
        await self._change(changes.Delete(entity.name))
        return web.Response(status=200)

    # -- rules

    async def _get_rule(self, request: web.BaseRequest, target: Target) -> web.Response:
        found = await self._ask(self._find(target.path, "subscription"), requests.GetRule(target.rule))
        return self._entry(self._rule_entry(request, target, found), 200, found["created_ms"])

    async def _put_rule(self, request: web.BaseRequest, target: Target) -> web.Response:
        subscription = self._find(target.path, "subscription")
        _, described = documents.read_description(await self._document(request), rules.ELEMENT)
        document = rules.read(target.rule, described).document(0)
        is_update = "If-Match" in request.headers
        if is_update:
            known = await self._ask(subscription, requests.GetRule(target.rule))
            _require_match(request, known["created_ms"])
            document["name"] = known["name"]
        await self._change_rule(
            subscription, requests.ReplaceRule(document) if is_update else requests.AddRule(document)
        )
        made = await self._ask(subscription, requests.GetRule(target.rule))
        return self._entry(self._rule_entry(request, target, made), 200 if is_update else 201, made["created_ms"])

    async def _delete_rule(self, request: web.BaseRequest, target: Target) -> web.Response:
        subscription = self._find(target.path, "subscription")
        if "If-Match" in request.headers:
            known = await self._ask(subscription, requests.GetRule(target.rule))
            _require_match(request, known["created_ms"])
        await self._change_rule(subscription, requests.RemoveRule(target.rule))
        return web.Response(status=200)

    async def _change_rule(
        self, subscription: Entity, change: requests.AddRule | requests.ReplaceRule | requests.RemoveRule
    ) -> None:
        """The rules of a partitioned topic are on several partitions, so the home changes them."""
        if subscription.is_partitioned:
            await self._change(changes.of_partitioned(subscription.name, change))
        else:
            await self._ask(subscription, change)

    _OF_ENTITY: Final[
        dict[tuple[bool, str], Callable[["Management", web.BaseRequest, Target], Awaitable[web.Response]]]
    ] = {
        (False, "GET"): _get_entity,
        (False, "PUT"): _put_entity,
        (False, "DELETE"): _delete_entity,
        (True, "GET"): _get_rule,
        (True, "PUT"): _put_rule,
        (True, "DELETE"): _delete_rule,
    }

    # -- the rest of the broker

    async def _change(self, change: changes.Asked) -> Any:
        try:
            return await self._gateway.router.ask(HOME, 0, changes.request(change))
        except BrokerError as error:
            raise type(error)(entities.with_elements(str(error))) from None

    async def _ask(self, entity: Entity, asked: requests.Rule) -> Any:
        """Ask the entity's partition."""
        return await self._gateway.router.ask(entity.partition, entity.queue(Part.MAIN), asked)

    def _find(self, path: str, kind: str = "") -> Entity:
        """Return the entity at `path`. Raises EntityNotFound, also if one of another kind is there."""
        entity = self._gateway.namespace.at(path)
        if entity is None or (kind and entity.kind != kind):
            raise EntityNotFound(f"The messaging entity '{self._gateway.namespace.name}:{path}' could not be found.")
        return entity

    async def _shown(self, listed: Sequence[Entity]) -> list[Shown]:
        """The entities with their counts; without those of partitions that do not answer."""
        namespace = self._gateway.namespace
        queues: dict[int, list[int]] = defaultdict(list)
        used: dict[int, list[int]] = defaultdict(list)
        topics: dict[int, list[int]] = defaultdict(list)
        for entity in listed:
            for partition in entity.partitions:
                queues[partition] += counted_queues(entity)
                used[partition].append(entity.entity_id)
            if entity.kind == "topic":
                topics[entity.partitions[0]].append(entity.entity_id)  # the rules are the same on all of them
        of_queues, of_used, of_topics = (
            asyncio.gather(*(self._asked(partition, kind(ids)) for partition, ids in asked.items()))
            for kind, asked in (
                (requests.Counts, queues),
                (requests.Accessed, used),
                (requests.FilterCounts, topics),
            )
        )
        answers, uses, filters = await asyncio.gather(of_queues, of_used, of_topics)
        filters_of = {topic: (sql, other) for found in filters if found for topic, (sql, other) in found.items()}
        answered = dict(zip(queues, answers, strict=True))
        counts = summed(each for each in answers if each is not None)
        accesses = dict(zip(used, uses, strict=True))
        return [
            Shown(
                each.description,
                each.created_ms,
                each.updated_ms,
                accessed_ms(each, [accesses[partition] for partition in each.partitions]),
                entity_counts(each, counts),
                len(namespace.subscriptions_of(each.name)) if each.kind == "topic" else 0,
                filters_of.get(each.entity_id),
                is_available=all(answered[partition] is not None for partition in each.partitions),
                size_factor=self._size_factor(each),
                message_kb=self._message_kb,
            )
            for each in listed
        ]

    def _new(self, entity: Entity) -> Shown:
        """Describe a new entity: it is empty, so no partition need be asked."""
        return Shown(
            entity.description,
            entity.created_ms,
            entity.updated_ms,
            entity.created_ms if entity.kind == "subscription" else None,
            {},
            filters=(0, 0) if entity.kind == "topic" else None,
            size_factor=self._size_factor(entity),
            message_kb=self._message_kb,
        )

    def _size_factor(self, entity: Entity) -> int:
        if not getattr(entity.description, "enable_partitioning", False):
            return 1
        return size_factor(self._gateway.settings.sku, len(entity.partitions))

    @property
    def _message_kb(self) -> int:
        """The largest message where an entity has no limit of its own."""
        return self._gateway.settings.amqp.max_message_size_bytes // 1024

    async def _asked(self, partition: int, asked: requests.Request) -> Any:
        """What the partition knows of queues or entities; None if it does not answer."""
        try:
            async with asyncio.timeout(COUNTS_SECONDS):
                return await self._gateway.router.ask(partition, 0, asked)
        except (BrokerError, TimeoutError):
            return None

    # -- answers

    def _entity_entry(self, request: web.BaseRequest, shown: Shown) -> Entry:
        description = shown.description
        if isinstance(description, SubscriptionDescription):
            target = Target(Resource.SUBSCRIPTION, description.topic, description.name)
        else:
            target = Target(Resource.ENTITY, description.name)
        content = entities.write(shown, base_url(request)[1])
        created, updated = write_time(shown.created_ms), write_time(shown.updated_ms)
        return Entry(self._url(request, target), description.name, content, created, updated)

    def _rule_entry(self, request: web.BaseRequest, target: Target, document: Mapping[str, Any]) -> Entry:
        rule, created_ms = RuleDescription.of_document(document), document["created_ms"]
        of = Target(Resource.RULE, target.entity, target.subscription, rule.name)
        time = write_time(created_ms)
        return Entry(self._url(request, of), rule.name, rules.write(rule, created_ms), time, time)

    def _url(self, request: web.BaseRequest, target: Target) -> str:
        scheme, host = base_url(request)
        version = request.query.get("api-version", "")
        query = f"?api-version={quote(version)}" if version else ""
        return f"{scheme}://{host}/{quote(target.url_path, safe='/$')}{query}"

    def _entry(self, entry: Entry, status: int, changed_ms: int) -> web.Response:
        text = documents.write_entry(entry, self._gateway.namespace.name)
        headers = {"Content-Type": ENTRY_TYPE, "ETag": f'"{changed_ms}"'}
        return web.Response(status=status, body=text.encode(), headers=headers)

    def _feed(self, page: Page) -> web.Response:
        text = documents.write_feed(page)
        return web.Response(body=text.encode(), headers={"Content-Type": FEED_TYPE})


def _require_match(request: web.BaseRequest, changed_ms: int) -> None:
    """Check the If-Match header: * is any version. Raises PreconditionFailed."""
    wanted = [each.strip().removeprefix("W/").strip('"') for each in request.headers["If-Match"].split(",")]
    if "*" not in wanted and str(changed_ms) not in wanted:
        raise PreconditionFailed(f'If-Match has {wanted[0][:100]!r}, and the entity\'s ETag is "{changed_ms}".')


def _first_rules(described: Element) -> list[dict[str, Any]] | None:
    """The rule that a new subscription has in the place of the usual one. Raises InvalidArgument."""
    rule = xml.child(described, rules.FIRST)
    if rule is None or xml.is_nil(rule):
        return None
    return [rules.read(rules.read_name(rule) or DEFAULT_RULE_NAME, rule).document(0)]


def _paging(request: web.BaseRequest) -> tuple[int, int]:
    """How many to skip, and how many to list. Raises InvalidArgument."""
    found = []
    for name, default, least, most in (("$skip", 0, 0, MAX_COUNT), ("$top", PAGE, 1, MAX_PAGE)):
        text = request.query.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and len(text) < 12 and least <= int(text) <= most):
            raise InvalidArgument(f"{name}: {text[:100]!r} must be a whole number from {least} to {most}.")
        found.append(int(text))
    return found[0], found[1]
