"""The $management node of an entity: translates its requests to requests of the partition, and back (amqp.md 8.4)."""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from broker import requests
from broker.catalog import changes
from broker.catalog.catalog import HOME
from broker.errors import (
    BrokerError,
    MessageNotFound,
    MessageTooLarge,
    NotAllowed,
    PartitionParked,
    QuotaExceeded,
    ServerBusy,
    SessionLockLost,
)
from broker.gateway.conditions import condition_of
from broker.gateway.host import Host, SessionHolder
from broker.gateway.links.delivery import embed
from broker.gateway.links.properties import DEAD_LETTER_DESCRIPTION, DEAD_LETTER_REASON
from broker.gateway.namespace import Entity
from broker.gateway.nodes.entity_counts import counted_queues, entity_counts, summed
from broker.gateway.nodes.parts import Parts
from broker.gateway.nodes.request_links import Answer, RequestLink
from broker.gateway.nodes.rules import rule_document, rule_of_document
from broker.namespace.entities import Right
from broker.namespace.fragments import fragment_of, key_of
from broker.wire import ENTRY, Extra, Outcome
from protocol import error_texts
from protocol.addresses import Address, Part
from protocol.bounds import MAX_COUNT
from protocol.engine.links import Link
from protocol.engine.rejections import MAX_REASON_CHARACTERS
from protocol.errors import ProtocolError
from protocol.lock_tokens import token_of, uuid_of
from protocol.message.intake import take_apart
from protocol.nodes import management
from protocol.nodes.request_message import Request
from storage.records import Place

# The limit of one answer to peek, so that it fits any client's buffers: 256 KB with its frames (PE11). Only one message
# alone may have more, and no limit holds for it: else a message that could be sent could not be peeked.
MAX_PEEK_BYTES = 255 * 1024
MAX_PEEK_MESSAGES = 1000
MAX_DELETE_MESSAGES = 4000
# What a request may have besides messages or a state as large as the entity takes them. Beside each of 4,000 scheduled
# messages are some keys, its id and its session id.
ENVELOPE_BYTES = 1 << 20
MIN_RULE_BYTES = 64  # the least size of a rule in the answer to enumerate-rules

# Operations whose answers have messages, or what clients have stored. All others have short answers.
_LARGE = {
    "com.microsoft:peek-message",
    "com.microsoft:receive-by-sequence-number",
    "com.microsoft:enumerate-rules",
    "com.microsoft:get-session-state",
    "com.microsoft:get-message-sessions",
}

_PLACES = {
    management.MessageState.ACTIVE: Place.AVAILABLE,
    management.MessageState.DEFERRED: Place.DEFERRED,
    management.MessageState.SCHEDULED: Place.SCHEDULED,
}


# Requests to partitions one after the other: partition, queue and request. The result of each comes back, or its error
# is raised. The value at the end makes the answer.
Steps = Generator[tuple[int, int, requests.Request], Any, Callable[[], bytes]]


class ManagementRequests(RequestLink):
    """The $management node of one entity or of its dead-letter queue."""

    def __init__(self, connection: Host, link: Link, entity: Entity, address: Address) -> None:
        super().__init__(connection, link, address)
        self.entity = entity
        self.path = address.resource
        self.queue = entity.queue(address.part)
        self._part = address.part
        self._metrics = connection.gateway.metrics.entity(entity.name)
        # Where the last page of sessions ended, where clients mostly go on: what `_get_message_sessions` was asked for
        # and skips on the next page; the partitions left, and the number of sessions passed on the first of these.
        self._page_end: tuple[int | None, int, list[int], int] | None = None

    def max_request_bytes(self) -> int:
        """Return the limit for the messages or the state in a request; what is around them does not count."""
        most_bytes = self.max_response_bytes()
        return max(most_bytes, self.entity.max_message_bytes(most_bytes))

    def is_large(self, request: Request) -> bool:
        return (management.operation_of(request) or "").lower() in _LARGE

    def handle(self, request: Request, answer: Answer) -> None:
        self._metrics.incoming_requests += 1
        call = management.parse(request)
        operation = _OPERATIONS.get(type(call.arguments))
        if operation is None:
            raise management.UnknownOperation(f"The operation '{call.operation}' is not offered by an entity.")
        self.connection.rights.require(self.path, _RIGHT.get(type(call.arguments), Right.LISTEN), time.time())
        self.connection.post_gathered()  # the request may be about a message that the client has just deferred
        operation(self, request, self._in_its_session(call), answer)

    def _in_its_session(self, call: management.Call) -> Any:
        """The arguments; if they have no session id, with that of the receiver that the request names.

        In requests for a session some clients name only the link (amqp.md 8.2). Raises SessionLockLost if another link
        of this connection has taken the session over from the one that is named.
        """
        arguments, link_name = call.arguments, call.associated_link_name
        if isinstance(arguments, _OF_HOLDER) and link_name is not None:
            holder = self._holder(arguments.session_id)
            if holder is not None and not holder.is_exclusive and holder.link.name != link_name:
                raise SessionLockLost(error_texts.SESSION_LOCK_LOST)
        if isinstance(arguments, _OF_SOME_SESSION) and arguments.session_id is None and link_name is not None:
            for (queue, session_id), receiver in self.connection.sessions.items():
                if queue == self.queue and receiver.link.name == link_name:
                    return replace(arguments, session_id=session_id)
        return arguments

    def fail(self, request: Request, error: Exception, answer: Answer) -> None:
        self._metrics.failed(type(error).__name__)
        condition = error.condition if isinstance(error, management.ManagementError) else condition_of(error)
        answer(management.encode_failure(request, condition, self.connection.tracked(str(error))))

    def _succeed(self, request: Request, answer: Answer, encode: Callable[[], bytes]) -> None:
        """Answer a request that the partitions have done; with an error if what they sent cannot be encoded."""
        try:
            response = encode()
        except (BrokerError, ProtocolError) as error:
            self.fail(request, error, answer)
        else:
            self._metrics.successful_requests += 1
            answer(response)

    def _ask(
        self,
        request: Request,
        answer: Answer,
        encode: Callable[[Any], bytes],
        asked: requests.Request,
        partition: int | None = None,
    ) -> None:
        """Ask one partition: this one, or the first of the entity's."""
        if partition is None:
            partition = self.entity.partition

        def reply(result: Any, error: BrokerError | None) -> None:
            if error is None:
                self._succeed(request, answer, lambda: encode(result))
            else:
                self.fail(request, error, answer)

        # Others are done at once: a lock must not end because its renewal waits for the commit.
        if self.transaction is not None and isinstance(asked, requests.IN_TRANSACTIONS):
            self.transaction.request(self.entity, partition, self.queue, asked, reply)
        else:
            self.request_partition(partition, self.queue, asked, reply)

    def _do_steps(self, request: Request, answer: Answer, steps: Steps) -> None:
        self._step(request, answer, steps, None, None)

    def _step(self, request: Request, answer: Answer, steps: Steps, result: Any, error: BrokerError | None) -> None:
        """Take the result of the last step, and ask for the next."""
        try:
            partition, queue, asked = steps.send(result) if error is None else steps.throw(error)
        except StopIteration as end:
            self._succeed(request, answer, end.value)
        except BrokerError as failure:
            # Its traceback refers to this call, which refers to it.
            self.fail(request, failure.with_traceback(None), answer)
        else:
            self.request_partition(partition, queue, asked, partial(self._step, request, answer, steps))

    def _ask_each(
        self,
        request: Request,
        answer: Answer,
        encode: Callable[[dict[int, Any]], bytes],
        asked: Mapping[int, requests.Request],
    ) -> None:
        """Ask several partitions at once. `asked` is by partition, and `encode` gets the results in this form.

        Each does its part wholly or not at all. If one fails, the client is told its error.
        """
        if len(asked) == 1:
            ((partition, only),) = asked.items()
            self._ask(request, answer, lambda result: encode({partition: result}), only, partition)
            return
        if self.transaction is not None and any(isinstance(each, requests.IN_TRANSACTIONS) for each in asked.values()):
            raise NotAllowed(error_texts.SEVERAL_ENTITIES)
        results: dict[int, Any] = {}
        errors: list[BrokerError] = []

        def reply(partition: int, result: Any, error: BrokerError | None) -> None:
            results[partition] = result
            if error is not None:
                errors.append(error)
            if len(results) < len(asked):
                return
            if errors:
                self.fail(request, errors[0], answer)
            else:
                self._succeed(request, answer, lambda: encode(results))

        for partition, each in asked.items():
            self.request_partition(partition, self.queue, each, partial(reply, partition))

    def _of_session(self, session_id: str | None) -> int:
        """The partition of the session; the first of the entity's if there is none."""
        return self.entity.partition if session_id is None else self.entity.partition_of_session(session_id)

    # -- operations (amqp.md 8.4)

    def _renew_locks(self, request: Request, arguments: management.RenewLocks, answer: Answer) -> None:
        parts = Parts([token_of(token) for token in arguments.lock_tokens], self.entity.partition_of_token)

        def encode(ends: dict[int, list[int]]) -> bytes:
            return management.encode_expirations(request, parts.joined(ends))

        self._ask_each(request, answer, encode, {at: requests.RenewLocks(tokens) for at, tokens in parts.items()})

    def _peek(self, request: Request, arguments: management.PeekMessages, answer: Answer) -> None:
        """Messages in the order of their sequence numbers, which is that of the entity's partitions."""
        most_bytes = min(MAX_PEEK_BYTES, self.max_response_bytes())
        most = min(arguments.message_count, MAX_PEEK_MESSAGES)
        start, session_id = arguments.from_sequence_number, arguments.session_id
        rows: list[list[Any]] = []
        lock_ends: dict[int, int] = {}
        if session_id is not None:
            left = [self.entity.partition_of_session(session_id)]
        else:
            left = [at for at in self.entity.partitions if at >= self.entity.partition_of_number(start)]

        def steps(start: int) -> Steps:
            used_bytes = 0
            while left and len(rows) < most and used_bytes < most_bytes:
                worker = self.connection.gateway.router.worker(left[0])
                if rows and not worker.is_usable:
                    del left[0]  # those of the others are shown at once
                    continue
                with_ends = worker.tells_lock_ends
                asked = requests.Peek(start, most - len(rows), most_bytes - used_bytes, with_ends)
                try:
                    result = yield (
                        left[0],
                        self.queue,
                        asked if session_id is None else requests.PeekSession(session_id, *asked),
                    )
                except BrokerError as error:
                    if not rows and not (isinstance(error, PartitionParked) and left[1:]):
                        raise
                    result, with_ends = [], False
                if with_ends:
                    result, ends = result
                    lock_ends.update(ends)
                found = _rows(result)
                rows.extend(found)
                used_bytes = sum(len(row[3]) for row in rows)
                if found and len(left) > 1:
                    # Perhaps its next one was too large for this answer: then those of the next partition come too
                    # early, and a client that goes on behind them would never see it.
                    start = found[-1][1] + 1
                else:
                    del left[0]
            return encode

        embedded = self._embedding()

        def encode() -> bytes:
            messages = [
                embedded(
                    record, number, count, lock_ends.get(number), overlay, place=place, omit_body=arguments.omit_body
                )
                for place, number, count, record, overlay in rows
            ]
            fitting = management.peeked_that_fit(request, messages, most_bytes)
            self._metrics.outgoing_messages += len(fitting)
            return management.encode_peeked(request, fitting)

        self._do_steps(request, answer, steps(start))

    def _embedding(self) -> Callable[..., bytes]:
        """`embed` for messages of this entity."""
        keys = self.connection.gateway.namespace.keys_of(self.entity)
        return partial(embed, keys=keys, is_copy=self.entity.kind == "subscription")

    def _schedule(self, request: Request, arguments: management.ScheduleMessages, answer: Answer) -> None:
        self.entity.require_send()
        if self._part is not Part.MAIN:
            raise NotAllowed("Messages cannot be sent to a dead-letter queue; only dead-lettering puts messages there.")
        limit = self.entity.max_message_bytes(self.max_response_bytes())
        largest, total = max(sizes := [len(item.message) for item in arguments.messages]), sum(sizes)
        if largest > limit:
            raise MessageTooLarge(error_texts.message_too_large(0, largest, limit))
        if total > (most := self.max_request_bytes()):
            raise MessageTooLarge(error_texts.message_too_large(0, total, most))
        new_id = self.connection.gateway.new_message_id
        messages = [take_apart(item.message, self.entity.detects_duplicates, new_id) for item in arguments.messages]
        has_session = [extra and Extra.SESSION_ID in extra for _, _, _, extra in messages]
        if self.entity.requires_session and not all(has_session):
            raise NotAllowed(error_texts.session_id_missing(self.entity.name))
        self._metrics.incoming_messages += len(messages)
        if self.transaction is None and not any(key_of(extra) for _, _, _, extra in messages):
            self._schedule_anywhere(request, messages, answer, self.entity.partitions)
            return
        anywhere = self.connection.gateway.router.any_of(self.entity.partitions)
        parts = Parts(messages, partial(self._partition_for, anywhere))

        def encode(numbers: dict[int, list[int]]) -> bytes:
            return management.encode_sequence_numbers(request, parts.joined(numbers))

        self._ask_each(request, answer, encode, {at: requests.Schedule(part) for at, part in parts.items()})

    def _schedule_anywhere(
        self, request: Request, messages: Sequence[Any], answer: Answer, partitions: Sequence[int]
    ) -> None:
        """The messages have no keys: one of these partitions takes them all (PE4 of Service Bus)."""
        partition = self.connection.gateway.router.any_of(partitions)
        others = [each for each in partitions if each != partition]

        def reply(numbers: list[int], error: BrokerError | None) -> None:
            passing = isinstance(error, ServerBusy | QuotaExceeded | PartitionParked)
            if others and passing and not self.link.closed:
                self._schedule_anywhere(request, messages, answer, others)
            elif error is not None:
                self.fail(request, error, answer)
            else:
                self._succeed(request, answer, lambda: management.encode_sequence_numbers(request, numbers))

        self.request_partition(partition, self.queue, requests.Schedule(messages), reply)

    def _partition_for(self, anywhere: int, message: Any) -> int:
        """The partition that takes this message; `anywhere` if it has no key."""
        if self.transaction is not None:
            return self.transaction.partition_of(self.entity, [message])
        key = key_of(message[3])
        return anywhere if key is None else fragment_of(key, self.entity.partitions)

    def _cancel_scheduled(self, request: Request, arguments: management.CancelScheduled, answer: Answer) -> None:
        parts = Parts(arguments.sequence_numbers, self.entity.partition_of_number)
        wanted = {at: requests.CancelScheduled(numbers) for at, numbers in parts.items()}
        self._ask_each(request, answer, lambda _: management.encode_success(request), wanted)

    def _receive_deferred(self, request: Request, arguments: management.ReceiveDeferred, answer: Answer) -> None:
        self.entity.require_receive(self._part)
        session_id = arguments.session_id
        holder = self._channel_of(session_id)
        by_default = self.connection.gateway.settings.delivery.receive_active_by_number
        if session_id is not None and not holder:
            by_default = False  # active messages of a session are only for its holder
        active = by_default if arguments.active is None else arguments.active
        embedded = self._embedding()

        def encode(results: dict[int, list[Any]]) -> bytes:
            messages = []
            for locked_until_ms, entries, *rest in results.values():
                early: frozenset[int] = frozenset(*rest)  # numbers of active ones
                for token, number, count, record, overlay in _rows(entries):
                    until = None if arguments.receive_and_delete else locked_until_ms
                    uuid = None if arguments.receive_and_delete else uuid_of(token)
                    lock_token = uuid.bytes if uuid else None
                    place = None if number in early else Place.DEFERRED
                    message = embedded(record, number, count, until, overlay, place=place, lock_token=lock_token)
                    messages.append((uuid, message))
            if not messages:
                raise MessageNotFound("None of the messages could be found.")
            self._metrics.outgoing_messages += len(messages)
            return management.encode_deferred(request, messages, 0)

        settles = arguments.receive_and_delete
        if session_id is None:
            parts = Parts(arguments.sequence_numbers, self.entity.partition_of_number)
            asked = {at: requests.ReceiveDeferred(numbers, settles, active) for at, numbers in parts.items()}
            self._ask_each(request, answer, encode, asked)
        else:
            named = requests.ReceiveSessionDeferred(holder, session_id, arguments.sequence_numbers, settles, active)
            self._ask_each(request, answer, encode, {self.entity.partition_of_session(session_id): named})

    def _update_disposition(self, request: Request, arguments: management.UpdateDisposition, answer: Answer) -> None:
        outcome = _OUTCOME[arguments.disposition]
        properties: dict[str, Any] = dict(arguments.properties_to_modify)
        if outcome is Outcome.DEAD_LETTERED:
            for name, text in (
                (DEAD_LETTER_REASON, arguments.dead_letter_reason),
                (DEAD_LETTER_DESCRIPTION, arguments.dead_letter_description),
            ):
                if text is not None:
                    properties[name] = text[:MAX_REASON_CHARACTERS]
        parts = Parts([token_of(token) for token in arguments.lock_tokens], self.entity.partition_of_token)

        def encode(_: Any) -> bytes:
            self._metrics.settled[outcome] += len(arguments.lock_tokens)
            if (holder := self._holder(arguments.session_id)) is not None:
                holder.has_settled([token_of(token) for token in arguments.lock_tokens], outcome)
            return management.encode_success(request)

        # If a token is unknown, the answer says whether the lock of the session is lost.
        channel = requests.ANYONE if arguments.session_id is None else self._channel_of(arguments.session_id)
        wanted = {at: requests.Settle(tokens, outcome, properties or None, channel) for at, tokens in parts.items()}
        self._ask_each(request, answer, encode, wanted)

    def _delete(self, request: Request, arguments: management.DeleteMessages, answer: Answer) -> None:
        """One partition after the other, until so many are deleted."""
        most = min(arguments.message_count, MAX_DELETE_MESSAGES)
        before_ms, session_id = arguments.enqueued_before_ms, arguments.session_id
        left = [*self.entity.partitions] if session_id is None else [self.entity.partition_of_session(session_id)]

        def steps() -> Steps:
            deleted = 0
            while left and deleted < most:
                deleted += yield left.pop(0), self.queue, requests.DeleteBatch(most - deleted, before_ms, session_id)
            return lambda: management.encode_deleted(request, deleted)

        self._do_steps(request, answer, steps())

    def _holder(self, session_id: str | None) -> SessionHolder | None:
        """The link on this connection that has the lock of the session."""
        return None if session_id is None else self.connection.sessions.get((self.queue, session_id))

    def _channel_of(self, session_id: str | None) -> int:
        """The channel of the link on this connection that has the lock of the session; 0 if none has."""
        holder = self._holder(session_id)
        return 0 if holder is None else holder.channel

    def _renew_session_lock(self, request: Request, arguments: management.RenewSessionLock, answer: Answer) -> None:
        def encode(locked_until_ms: int) -> bytes:
            return management.encode_session_renewed(request, locked_until_ms)

        session_id = arguments.session_id
        asked = requests.RenewSessionLock(self._channel_of(session_id), session_id)
        self._ask(request, answer, encode, asked, self._of_session(session_id))

    def _get_session_state(self, request: Request, arguments: management.GetSessionState, answer: Answer) -> None:
        def encode(state: bytes | None) -> bytes:
            return management.encode_session_state(request, state)

        session_id = arguments.session_id
        asked = requests.GetSessionState(self._channel_of(session_id), session_id)
        self._ask(request, answer, encode, asked, self._of_session(session_id))

    def _set_session_state(self, request: Request, arguments: management.SetSessionState, answer: Answer) -> None:
        session_id, state = arguments.session_id, arguments.state
        limit = self.entity.max_message_bytes(self.max_response_bytes())
        if state is not None and len(state) > limit:
            raise MessageTooLarge(
                f"The state of the session '{session_id}' has {len(state)} bytes; the limit is {limit} bytes."
            )
        asked = requests.SetSessionState(self._channel_of(session_id), session_id, state)
        self._ask(request, answer, lambda _: management.encode_success(request), asked, self._of_session(session_id))

    def _get_message_sessions(self, request: Request, arguments: management.GetMessageSessions, answer: Answer) -> None:
        """One partition after the other, until the page is full."""
        after_ms, skip, top = arguments.updated_after_ms, arguments.skip, arguments.top

        def encode(session_ids: Sequence[str]) -> bytes:
            # The first Java SDK asks for the next page with this number.
            following = min(skip + len(session_ids), MAX_COUNT)
            return management.encode_sessions(request, following, session_ids, self.max_response_bytes())

        if arguments.behind is not None:
            self._do_steps(request, answer, self._sessions_behind(arguments.behind, after_ms, top, encode))
            return
        if not self.entity.is_partitioned:
            self._ask(request, answer, encode, requests.GetMessageSessions(after_ms, skip, top))
            return
        left, to_skip = list(self.entity.partitions), skip
        if self._page_end is not None and self._page_end[:2] == (after_ms, skip):
            _, _, left, to_skip = self._page_end

        def steps(left: list[int], to_skip: int) -> Steps:
            found: list[str] = []
            while True:
                asked = requests.PageMessageSessions(after_ms, to_skip, top - len(found))
                skipped, session_ids = yield left[0], self.queue, asked
                found.extend(session_ids)
                if len(found) >= top or len(left) == 1:
                    break
                left, to_skip = left[1:], to_skip - skipped
            self._page_end = (after_ms, skip + len(found), left, skipped + len(session_ids)) if found else None
            return lambda: encode(found)

        self._do_steps(request, answer, steps(left, to_skip))

    def _sessions_behind(
        self, session_id: str, after_ms: int | None, top: int, encode: Callable[[Sequence[str]], bytes]
    ) -> Steps:
        """The page of sessions behind this one: on its partition, and on those that follow."""
        partitions = self.entity.partitions
        first = self.entity.partition_of_session(session_id)
        found: list[str] = yield first, self.queue, requests.MessageSessionsBehind(after_ms, session_id, top)
        for partition in partitions[partitions.index(first) + 1 :]:
            if len(found) >= top:
                break
            asked = requests.GetMessageSessions(after_ms, 0, top - len(found))
            found = [*found, *(yield partition, self.queue, asked)]
        return lambda: encode(found)

    # The rule operations need Listen, as in the cloud (management.md 5.4); over HTTP it is Manage.

    def _add_rule(self, request: Request, arguments: management.AddRule, answer: Answer) -> None:
        self._change_rules(request, answer, requests.AddRule(rule_document(arguments.rule)))

    def _remove_rule(self, request: Request, arguments: management.RemoveRule, answer: Answer) -> None:
        self._change_rules(request, answer, requests.RemoveRule(arguments.name))

    def _change_rules(self, request: Request, answer: Answer, change: requests.AddRule | requests.RemoveRule) -> None:
        """The rules of a partitioned topic are on all its partitions: each evaluates them for its messages."""

        def encode(_: Any) -> bytes:
            return management.encode_success(request)

        if self.entity.is_partitioned:
            of_all = changes.of_partitioned(self.entity.name, change)
            self._ask(request, answer, encode, changes.request(of_all), HOME)
        else:
            self._ask(request, answer, encode, change)

    def _enumerate_rules(self, request: Request, arguments: management.EnumerateRules, answer: Answer) -> None:
        limit = self.max_response_bytes()

        def encode(documents: list[Any]) -> bytes:
            return management.encode_rules(request, [rule_of_document(each) for each in documents], limit)

        # Some clients ask for 2^31 rules. One more than fits is enough to notice that they do not fit.
        count = min(arguments.top, limit // MIN_RULE_BYTES + 1)
        self._ask(request, answer, encode, requests.EnumerateRules(arguments.skip, count))

    def _purge(self, request: Request, arguments: management.Purge, answer: Answer) -> None:
        """Delete step by step, so that others are served, until nothing is left or as many are deleted as there were.

        So messages that come in meanwhile cannot keep it going. It also ends with the link. Partitions come one after
        the other.
        """
        queue = self.queue
        places = [_PLACES[state] for state in arguments.states]

        def steps() -> Steps:
            deleted = 0
            for partition in self.entity.partitions:
                at_first = sum((yield partition, 0, requests.Counts([queue])).get(queue, ())[:3])
                before, count = deleted, 1
                while True:
                    count = yield partition, queue, requests.Purge(places)
                    deleted += count
                    if not count or deleted - before >= at_first or self.link.closed:
                        break
                if self.link.closed:
                    break
            return lambda: management.encode_purged(request, deleted)

        self._do_steps(request, answer, steps())

    def _get_counts(self, request: Request, _: management.GetCounts, answer: Answer) -> None:
        def encode(counts: dict[int, dict[int, list[int]]]) -> bytes:
            return management.encode_counts(request, entity_counts(self.entity, summed(counts.values())))

        wanted = dict.fromkeys(self.entity.partitions, requests.Counts(counted_queues(self.entity)))
        self._ask_each(request, answer, encode, wanted)


# Requests that may name a session.
_OF_SOME_SESSION = (
    management.PeekMessages,
    management.ReceiveDeferred,
    management.UpdateDisposition,
    management.DeleteMessages,
)

# Requests that are only for the holder of the session, if they name one.
_OF_HOLDER = (
    management.ReceiveDeferred,
    management.UpdateDisposition,
    management.RenewSessionLock,
    management.GetSessionState,
    management.SetSessionState,
)

_RIGHT = {
    management.ScheduleMessages: Right.SEND,
    management.CancelScheduled: Right.SEND,
    management.Purge: Right.MANAGE,
}
_OUTCOME = {
    management.Disposition.COMPLETED: Outcome.ACCEPTED,
    management.Disposition.ABANDONED: Outcome.ABANDONED,
    management.Disposition.DEAD_LETTERED: Outcome.DEAD_LETTERED,
    management.Disposition.DEFERRED: Outcome.DEFERRED,
}


def _rows(entries: list[Any]) -> list[list[Any]]:
    return [entries[at : at + ENTRY] for at in range(0, len(entries), ENTRY)]


_OPERATIONS: Final[Mapping[type, Callable[[ManagementRequests, Request, Any, Answer], None]]] = {
    management.RenewLocks: ManagementRequests._renew_locks,
    management.PeekMessages: ManagementRequests._peek,
    management.ScheduleMessages: ManagementRequests._schedule,
    management.CancelScheduled: ManagementRequests._cancel_scheduled,
    management.ReceiveDeferred: ManagementRequests._receive_deferred,
    management.UpdateDisposition: ManagementRequests._update_disposition,
    management.DeleteMessages: ManagementRequests._delete,
    management.AddRule: ManagementRequests._add_rule,
    management.RemoveRule: ManagementRequests._remove_rule,
    management.EnumerateRules: ManagementRequests._enumerate_rules,
    management.Purge: ManagementRequests._purge,
    management.GetCounts: ManagementRequests._get_counts,
    management.RenewSessionLock: ManagementRequests._renew_session_lock,
    management.GetSessionState: ManagementRequests._get_session_state,
    management.SetSessionState: ManagementRequests._set_session_state,
    management.GetMessageSessions: ManagementRequests._get_message_sessions,
}
