"""Finds the copies of a message that the subscriptions of a topic get by their rules, and the differences of each."""

import struct
from functools import partial
from typing import Any, NamedTuple

from broker.partition.messages import header_sizes
from broker.partition.messages.moves import DESCRIPTION, REASON
from broker.partition.state.core import Core
from broker.partition.state.tally import HEADER_SIZE_EXCEEDED
from broker.partition.state.topic import Topic
from broker.rules import RULE_NAME, ActionError, Changes, Duration, FilterError, Instant, Match, MessageView, Rule
from broker.rules.errors import failure_of
from protocol.bounds import LATEST_MS
from protocol.codec import Symbol, Timestamp, encode
from protocol.message.fields import MAX_PROPERTY_BYTES
from protocol.message.intake import MAX_HEADER_BYTES
from storage.queue_ids import Part, queue_id_of
from storage.records import NEVER, Field, Overlay

# Queue id, and the changes of this copy. A queue id may come several times.
Selection = list[tuple[int, Overlay | None]]


class Failure(NamedTuple):
    """Some rules of a subscription failed on a message."""

    entity_id: int
    rules: int
    reason: str | None  # of dead-lettering in the subscription; None if it drops the message


class Selected(NamedTuple):
    """What `select` finds for one message. `tried` is the number of filters that were tried on it."""

    selection: Selection
    failures: list[Failure]
    tried: int


MAX_DESCRIPTION_CHARACTERS = 4096  # amqp.md 13.1

_layout = struct.Struct(
    ">4xIII"
).unpack  # bytes of annotations, properties, application properties: protocol.message.layout

# System properties that are fields of AMQP's properties section (3.2.4)
_FIELDS = {
    "messageid": 0,
    "to": 2,
    "label": 3,
    "subject": 3,
    "replyto": 4,
    "correlationid": 5,
    "contenttype": 6,
    "sessionid": 10,
    "replytosessionid": 12,
}
_CONTENT_TYPE = 6


class PublishedView(MessageView):
    """A message published now, as rules see it; `body` are the bytes stored with `layout`."""

    __slots__ = ("body", "layout")

    def __init__(self, layout: bytes, body: bytes, *sections: Any) -> None:
        super().__init__(*sections)
        self.layout = layout
        self.body = body


def view_of(layout: bytes, body: bytes, number: int, now_ms: int, expires_ms: int) -> PublishedView:
    annotation_bytes, properties_bytes, application_properties_bytes = _layout(layout)
    properties_at = annotation_bytes + properties_bytes
    return PublishedView(
        layout,
        body,
        body[annotation_bytes:properties_at],
        body[properties_at : properties_at + application_properties_bytes],
        body[:annotation_bytes],
        partial(_given, len(body), number, now_ms, expires_ms),
    )


def _given(body_bytes: int, number: int, now_ms: int, expires_ms: int) -> dict[str, Any]:
    given: dict[str, Any] = {"SequenceNumber": number, "EnqueuedTimeUtc": Timestamp(now_ms), "Size": body_bytes}
    if expires_ms != NEVER:
        given["ExpiresAtUtc"] = Timestamp(expires_ms)
        given["TimeToLive"] = Duration.from_ms(expires_ms - now_ms)
    return given


def select(core: Core, topic: Topic, message: PublishedView, now_ms: int, limit_ms: int | None) -> Selected:
    """The copies that rules make (without those for subscriptions that take every message), and the failures.

    `limit_ms` is the longest time to live that an action may set. If rules of a subscription fail on the message, its
    dead-letter queue gets one copy, if the subscription dead-letters on filter errors, besides the copies of the rules
    that match (DL7).
    """
    selection: Selection = []
    failures: list[Failure] = []
    for match in topic.rule_set.match(message):
        if match.is_plain and not match.changed and not match.errors:
            selection.append((queue_id_of(match.subscription), None))  # type: ignore[arg-type] # an entity id
        else:
            _select_of(core, match, message, now_ms, limit_ms, selection, failures)
    return Selected(selection, failures, message.tried)


def _select_of(
    core: Core,
    match: Match,
    message: PublishedView,
    now_ms: int,
    limit_ms: int | None,
    selection: Selection,
    failed: list[Failure],
) -> None:
    entity_id: int = match.subscription  # type: ignore[assignment] # as in `select`
    failures: list[tuple[Rule, FilterError]] = list(match.errors)
    overlay: Overlay
    if match.is_plain:
        selection.append((queue_id_of(entity_id), None))
    for rule in match.changed:
        assert rule.action is not None
        try:
            changed = _changed(core, rule, rule.action.apply(message), now_ms, limit_ms)
        except Exception as error:
            failures.append((rule, failure_of(ActionError, error)))
        else:
            if _is_too_large(message, changed):
                overlay = {
                    Field.PROPERTIES: dict(header_sizes.SAID),
                    Field.DEAD_LETTER_SOURCE: core.entities.terms[entity_id].name,
                }
                selection.append((queue_id_of(entity_id, Part.DEAD_LETTER), overlay))
                failed.append(Failure(entity_id, 0, HEADER_SIZE_EXCEEDED))
            else:
                selection.append((queue_id_of(entity_id), changed))
    if not failures:
        return
    terms = core.entities.terms[entity_id]
    if not terms.dead_letter_failed:
        failed.append(Failure(entity_id, len(failures), None))
        return
    rule, failure = failures[0]
    overlay = {
        Field.PROPERTIES: {
            REASON: failure.reason,
            DESCRIPTION: f"Rule '{rule.name}': {failure}"[:MAX_DESCRIPTION_CHARACTERS],
        },
        Field.DEAD_LETTER_SOURCE: terms.name,
    }
    selection.append((queue_id_of(entity_id, Part.DEAD_LETTER), overlay))
    failed.append(Failure(entity_id, len(failures), failure.reason))


def _changed(core: Core, rule: Rule, changes: Changes, now_ms: int, limit_ms: int | None) -> Overlay:
    """The overlay with the action's changes, which are for this copy alone.

    ENQUEUED_MS and SCHEDULED_MS are the time of the wall clock until which the copy is delayed, if it is: the first
    changes when that time has come. A changed PartitionKey has no
    effect (management.md 3.1). Raises ActionError for changes beyond the limits that senders have, and the errors of
    `encode` for values that AMQP does not have.
    """
    set_of_user = {name: encode(value) for name, value in changes.user.items()}
    for name, encoded in set_of_user.items():
        if len(encoded) > MAX_PROPERTY_BYTES:
            raise ActionError(f"the property '{name[:128]}' has at most {MAX_PROPERTY_BYTES} bytes, not {len(encoded)}")
    properties: dict[str, bytes | str | None] = {**dict.fromkeys(changes.removed), **set_of_user, RULE_NAME: rule.name}
    overlay: Overlay = {Field.PROPERTIES: properties}
    system: dict[int, bytes | None] = {}
    for name, value in changes.system.items():
        lower = name.lower()
        field = _FIELDS.get(lower)
        if field is not None:
            system[field] = None if value is None else _encoded(field, value)
        elif lower == "timetolive":
            assert value is None or isinstance(value, Duration)  # as `actions` has checked
            ttl_ms = _shorter(None if value is None else value.ticks // 10_000, limit_ms)
            overlay[Field.EXPIRES_MS] = NEVER if ttl_ms is None else min(now_ms + ttl_ms, NEVER)
        elif isinstance(value, Instant) and value.ms > core.wall_ms(now_ms):
            overlay[Field.ENQUEUED_MS] = overlay[Field.SCHEDULED_MS] = min(value.ms, LATEST_MS)
    if system:
        overlay[Field.SYSTEM] = system
    return overlay


def _is_too_large(message: PublishedView, changed: Overlay) -> bool:
    """True if the message's properties are too many with the changes of an action."""
    properties, system = changed[Field.PROPERTIES], changed.get(Field.SYSTEM) or {}
    known_bytes = sum(_layout(message.layout)) + header_sizes.most_bytes(properties, system)
    return known_bytes > MAX_HEADER_BYTES and header_sizes.exceed(message.layout, message.body, properties, system)


def _encoded(field: int, value: str | Duration | Instant) -> bytes:
    if field == _CONTENT_TYPE and isinstance(value, str) and value.isascii():
        return encode(Symbol(value))
    return encode(value)


def _shorter(ttl_ms: int | None, limit_ms: int | None) -> int | None:
    if ttl_ms is None or limit_ms is None:
        return limit_ms if ttl_ms is None else ttl_ms
    return min(ttl_ms, limit_ms)
