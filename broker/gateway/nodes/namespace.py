"""The management node of the namespace: requests about all entities at once, and changes of entities."""

import time
from collections import defaultdict
from typing import Any

from broker import requests
from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import BrokerError, InternalError
from broker.gateway.conditions import condition_of
from broker.gateway.moving import move
from broker.gateway.nodes.entity_counts import counted_queues, entity_counts, summed
from broker.gateway.nodes.request_links import Answer, RequestLink
from broker.gateway.nodes.rules import described_rule
from broker.logging import get_logger
from broker.namespace.entities import Right
from protocol.nodes import management
from protocol.nodes.request_message import Request

log = get_logger("gateway")

# The codec of a client takes 65,536 values in one answer.
MAX_LISTED = 2000


class NamespaceRequests(RequestLink):
    """Requests to the node, which need the right Manage on the namespace."""

    def handle(self, request: Request, answer: Answer) -> None:
        self.connection.rights.require("", Right.MANAGE, time.time())
        call = management.parse(request)
        match call.arguments:
            case management.ListCounts():
                self._list_counts(request, call.arguments, answer)
            case management.CreateEntity(kind, properties, rules):
                documents = None if rules is None else [described_rule(each) for each in rules]
                self._change(request, answer, changes.Create(kind, properties, documents))
            case management.UpdateEntity(path, properties):
                self._change(request, answer, changes.Update(path, properties))
            case management.DeleteEntity(path):
                self._change(request, answer, changes.Delete(path))
            case management.MoveEntity(path, partition):
                moving = self._move(request, answer, path, partition)
                self.connection.gateway.go_on_with(moving)
            case _:
                raise management.UnknownOperation(f"The operation '{call.operation}' is not offered by the namespace.")

    def _change(self, request: Request, answer: Answer, change: changes.Asked) -> None:
        """See `broker.worker.home`, which makes the change."""

        def reply(definition: dict[str, Any] | None, error: BrokerError | None) -> None:
            if error is not None:
                self.fail(request, error, answer)
            elif definition is None:
                answer(management.encode_success(request))
            else:
                answer(management.encode_entity(request, definition))

        self.request_partition(HOME, 0, changes.request(change), reply)

    async def _move(self, request: Request, answer: Answer, path: str, partition: int) -> None:
        try:
            definition = await move(self.connection.gateway.router, path, partition)
        except Exception as error:
            failure = (
                error
                if isinstance(error, BrokerError)
                else InternalError("The service was unable to process the request.")
            )
            if failure is not error:
                log.error("a move has failed by a bug of the broker", entity=path, exc_info=error)
            self.connection.later(0, lambda: self.fail(request, failure, answer))
        else:
            self.connection.later(0, lambda: answer(management.encode_entity(request, definition)))

    def fail(self, request: Request, error: Exception, answer: Answer) -> None:
        condition = error.condition if isinstance(error, management.ManagementError) else condition_of(error)
        self.connection.gateway.metrics.errors[condition] += 1
        answer(management.encode_failure(request, condition, self.connection.tracked(str(error))))

    def _list_counts(self, request: Request, arguments: management.ListCounts, answer: Answer) -> None:
        gateway = self.connection.gateway
        following = {entity.name: entity for entity in gateway.namespace if entity.name > arguments.after}
        listed = {name: following[name] for name in sorted(following)[: min(arguments.count, MAX_LISTED)]}
        queues: dict[int, list[int]] = defaultdict(list)
        for entity in listed.values():
            for partition in entity.partitions:
                queues[partition] += counted_queues(entity)
        waiting = len(queues)
        answers: list[dict[int, Any]] = []

        def reply(counts: Any, error: BrokerError | None) -> None:
            nonlocal waiting
            if waiting <= 0:
                return  # another partition has failed already
            if error is not None:
                waiting = 0
                self.fail(request, error, answer)
                return
            waiting -= 1
            answers.append(counts)
            if waiting == 0:
                found = summed(answers)
                self._answer(request, answer, {name: entity_counts(entity, found) for name, entity in listed.items()})

        if not queues:
            self._answer(request, answer, {})
        for partition, queue_ids in queues.items():
            self.request_partition(partition, 0, requests.Counts(queue_ids), reply)

    def _answer(self, request: Request, answer: Answer, counts: dict[str, dict[str, int]]) -> None:
        answer(management.encode_counts_of_all(request, counts))
