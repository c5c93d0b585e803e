"""Descriptions of queues, topics and subscriptions as XML (management.md 1.7).

Elements are read in any order; unknown and read-only ones are ignored, because clients send back what they have read.
An element that is missing has the default of the service, also in an update. Only what never changes stays as it is.
"""

import base64
import re
import secrets
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Final, NamedTuple
from urllib.parse import unquote
from xml.etree.ElementTree import Element

from pydantic import ValidationError

from broker.atom import xml
from broker.atom.values import (
    NEVER,
    UNLIMITED_MS,
    read_boolean,
    read_duration_ms,
    read_number,
    write_boolean,
    write_duration,
    write_time,
)
from broker.errors import InvalidArgument
from broker.namespace import names
from broker.namespace.durations import format_duration
from broker.namespace.entities import (
    DESCRIPTIONS,
    MINUTE_MS,
    SCHEMES,
    AuthorizationRule,
    Description,
    Right,
    Status,
    SubscriptionDescription,
)

ELEMENT: Final = {"queue": "QueueDescription", "topic": "TopicDescription", "subscription": "SubscriptionDescription"}
"""The element of a description, by kind."""

KIND: Final = {element: kind for kind, element in ELEMENT.items()}

MAX_RULES: Final = 12  # authorization rules of one entity


class Shown(NamedTuple):
    """An entity as it is described to a client. Times are milliseconds since 1970; `accessed_ms` is None for never.

    `counts` are those of `broker.gateway.nodes.entity_counts`. `filters` are the numbers of SQL and of correlation
    filters of a topic's subscriptions. An entity that is not available has some of its counts only, or none.
    `size_factor` is that of a partitioned entity. `message_kb` is the largest message where the entity has no limit of
    its own. Both come back with an update that does not mean them.
    """

    description: Description
    created_ms: int
    updated_ms: int
    accessed_ms: int | None
    counts: Mapping[str, int]
    subscriptions: int = 0
    filters: tuple[int, int] | None = None
    is_available: bool = True
    size_factor: int = 1
    message_kb: int | None = None


class Form(Enum):
    """What the text of an element means."""

    BOOLEAN = "boolean"
    NUMBER = "number"
    DURATION = "duration"
    TEXT = "text"


class _Property(NamedTuple):
    """A property of descriptions that clients set. `default` is the service's where it is not that of the field."""

    field: str
    read: Callable[[str], Any]
    write: Callable[[Any], str]
    default: Any = None


def _read_path(text: str) -> str:
    """The path of an entity that is given as a name or as a URL; its host does not matter."""
    scheme, separator, rest = text.partition("://")
    if separator and scheme.lower() in SCHEMES:
        text = unquote(rest.partition("/")[2])
    return text.strip("/")


def _scheme_of(text: str) -> str:
    """Return the scheme of the URL in which an entity is given."""
    scheme, separator, _ = text.partition("://")
    return scheme.lower() if separator and scheme.lower() in SCHEMES else SCHEMES[0]


def _read_optional_duration(text: str) -> int | None:
    duration_ms = read_duration_ms(text)
    return None if duration_ms >= UNLIMITED_MS else duration_ms


def _read_status(text: str) -> str:
    by_name = {status.value.lower(): status.value for status in Status}
    if text.lower() not in by_name:
        raise ValueError(f"must be one of {', '.join(Status)}")
    return by_name[text.lower()]


_DURATION = (read_duration_ms, write_duration)
_LIMIT = (_read_optional_duration, write_duration)
_BOOLEAN = (read_boolean, write_boolean)
_NUMBER = (read_number, str)


def _read_size(text: str) -> int | None:
    """Java's updates of topics have 0 where there is no limit."""
    return read_number(text) or None


_PROPERTIES: Final = {
    "LockDuration": _Property("lock_duration_ms", *_DURATION, MINUTE_MS),
    "MaxSizeInMegabytes": _Property("max_size_mb", *_NUMBER),
    "RequiresDuplicateDetection": _Property("requires_duplicate_detection", *_BOOLEAN),
    "RequiresSession": _Property("requires_session", *_BOOLEAN),
    "DefaultMessageTimeToLive": _Property("default_message_time_to_live_ms", *_LIMIT),
    "DeadLetteringOnMessageExpiration": _Property("dead_lettering_on_message_expiration", *_BOOLEAN),
    "DeadLetteringOnFilterEvaluationExceptions": _Property("dead_lettering_on_filter_evaluation_exceptions", *_BOOLEAN),
    "DuplicateDetectionHistoryTimeWindow": _Property("duplicate_detection_history_time_window_ms", *_DURATION),
    "MaxDeliveryCount": _Property("max_delivery_count", *_NUMBER),
    "EnableBatchedOperations": _Property("enable_batched_operations", *_BOOLEAN),
    "Status": _Property("status", _read_status, str),
    "ForwardTo": _Property("forward_to", _read_path, str),
    "UserMetadata": _Property("user_metadata", str, str),
    "AutoDeleteOnIdle": _Property("auto_delete_on_idle_ms", *_LIMIT),
    "EnablePartitioning": _Property("enable_partitioning", *_BOOLEAN),
    "ForwardDeadLetteredMessagesTo": _Property("forward_dead_lettered_messages_to", _read_path, str),
    "MaxMessageSizeInKilobytes": _Property("max_message_size_kb", _read_size, str),
    "EnableExpress": _Property("enable_express", *_BOOLEAN),
    "SupportOrdering": _Property("support_ordering", *_BOOLEAN),
}
_FORMS: Final[dict[Any, Form]] = {
    read_duration_ms: Form.DURATION,
    _read_optional_duration: Form.DURATION,
    read_boolean: Form.BOOLEAN,
    read_number: Form.NUMBER,
    _read_size: Form.NUMBER,
}
_OTHER_BOOLEANS: Final = (
    "EnableSubscriptionPartitioning", "FilteringMessagesBeforePublishing", "IsAnonymousAccessible",
)  # fmt: skip
_DURATIONS: Final = {name for name, each in _PROPERTIES.items() if each.write is write_duration}


def form_of(element: str) -> Form:
    """What the text of an element means; that of an unknown element is a text."""
    wanted = _PROPERTIES.get(element)
    if wanted is not None:
        return _FORMS.get(wanted.read, Form.TEXT)
    return Form.BOOLEAN if element in _OTHER_BOOLEANS else Form.TEXT


# Properties that the broker does not have; a client that sets one must not believe that it got it.
_NOT_OFFERED: Final = ("FilteringMessagesBeforePublishing", "EnableSubscriptionPartitioning")

# Elements that are left out if they have no value: an empty one would come back with an update.
_OPTIONAL: Final = ("ForwardTo", "ForwardDeadLetteredMessagesTo", "UserMetadata", "MaxMessageSizeInKilobytes")

_COUNT_NAMES: Final = (
    ("ActiveMessageCount", "active"),
    ("DeadLetterMessageCount", "dead-lettered"),
    ("ScheduledMessageCount", "scheduled"),
    ("TransferMessageCount", "transfer"),
    ("TransferDeadLetterMessageCount", "transfer-dead-lettered"),
)


def _write_counts(shown: Shown, _: str) -> str:
    """Some clients find these by any prefix, others by their namespace; all find this form."""
    counts = "".join(f"<d2p1:{name}>{shown.counts.get(count, 0)}</d2p1:{name}>" for name, count in _COUNT_NAMES)
    return f'<CountDetails xmlns:d2p1="{xml.COUNTS}">{counts}</CountDetails>'


def _write_message_count(shown: Shown, _: str) -> str:
    return f"<MessageCount>{sum(shown.counts.get(count, 0) for _, count in _COUNT_NAMES)}</MessageCount>"


def _write_authorization_rules(shown: Shown, _: str) -> str:
    rules = getattr(shown.description, "authorization_rules", ())
    return f"<AuthorizationRules>{''.join(map(_write_authorization_rule, rules))}</AuthorizationRules>"


def _write_authorization_rule(rule: AuthorizationRule) -> str:
    # A declared rule may have Manage alone, which implies the others; an update that sends that back would be refused.
    held = set(Right) if Right.MANAGE in rule.rights else set(rule.rights)
    in_order = dict.fromkeys([*rule.rights, *Right])
    rights = "".join(f"<AccessRights>{right}</AccessRights>" for right in in_order if right in held)
    return (
        '<AuthorizationRule i:type="SharedAccessAuthorizationRule">'
        "<ClaimType>SharedAccessKey</ClaimType><ClaimValue>None</ClaimValue>"
        f"<Rights>{rights}</Rights>"
        f"{xml.element('KeyName', rule.key_name)}{xml.element('PrimaryKey', rule.primary_key)}"
        f"{xml.element('SecondaryKey', rule.secondary_key or '')}"
        "</AuthorizationRule>"
    )


def _write_forwarding(name: str) -> Callable[[Shown, str], str]:
    field = _PROPERTIES[name].field

    def write(shown: Shown, host: str) -> str:
        path = getattr(shown.description, field)
        scheme = getattr(shown.description, f"{field}_scheme")
        return xml.element(name, f"{scheme}://{host}/{path}") if path else ""

    return write


def _write_filters(shown: Shown, _: str) -> str:
    if shown.filters is None:
        return ""
    sql, correlation = shown.filters
    return f"<SqlFilterCount>{sql}</SqlFilterCount><CorrelationFilterCount>{correlation}</CorrelationFilterCount>"


def _write_ordering(shown: Shown, _: str) -> str:
    description = shown.description
    assert not isinstance(description, SubscriptionDescription)
    said, is_plain = description.support_ordering, not description.enable_partitioning
    return f"<SupportOrdering>{write_boolean(is_plain if said is None else said)}</SupportOrdering>"


# What is written of an entity besides its properties; each with the host that URLs name.
_FACTS: Final[dict[str, Callable[[Shown, str], str]]] = {
    "SizeInBytes": lambda shown, _: f"<SizeInBytes>{shown.counts.get('size-bytes', 0)}</SizeInBytes>",
    "MessageCount": _write_message_count,
    "FilteringMessagesBeforePublishing": lambda *_: (
        "<FilteringMessagesBeforePublishing>false</FilteringMessagesBeforePublishing>"
    ),
    "IsAnonymousAccessible": lambda *_: "<IsAnonymousAccessible>false</IsAnonymousAccessible>",
    "AuthorizationRules": _write_authorization_rules,
    "ForwardTo": _write_forwarding("ForwardTo"),
    "CreatedAt": lambda shown, _: f"<CreatedAt>{write_time(shown.created_ms)}</CreatedAt>",
    "UpdatedAt": lambda shown, _: f"<UpdatedAt>{write_time(shown.updated_ms)}</UpdatedAt>",
    "AccessedAt": lambda shown, _: (
        f"<AccessedAt>{NEVER if shown.accessed_ms is None else write_time(shown.accessed_ms)}</AccessedAt>"
    ),
    "SupportOrdering": _write_ordering,
    "CountDetails": _write_counts,
    "SubscriptionCount": lambda shown, _: f"<SubscriptionCount>{shown.subscriptions}</SubscriptionCount>",
    "FilterCounts": _write_filters,
    "EntityAvailabilityStatus": lambda shown, _: xml.element(
        "EntityAvailabilityStatus", "Available" if shown.is_available else "Limited"
    ),
    "EnableSubscriptionPartitioning": lambda *_: (
        "<EnableSubscriptionPartitioning>false</EnableSubscriptionPartitioning>"
    ),
    "ForwardDeadLetteredMessagesTo": _write_forwarding("ForwardDeadLetteredMessagesTo"),
}

# The order in which the service writes the elements of a description, and reads them.
ORDER: Final = {
    "queue": (
        "LockDuration", "MaxSizeInMegabytes", "RequiresDuplicateDetection", "RequiresSession",
        "DefaultMessageTimeToLive", "DeadLetteringOnMessageExpiration", "DuplicateDetectionHistoryTimeWindow",
        "MaxDeliveryCount", "EnableBatchedOperations", "SizeInBytes", "MessageCount", "IsAnonymousAccessible",
        "AuthorizationRules", "Status", "ForwardTo", "UserMetadata", "CreatedAt", "UpdatedAt", "AccessedAt",
        "SupportOrdering", "CountDetails", "AutoDeleteOnIdle", "EnablePartitioning", "EntityAvailabilityStatus",
        "EnableExpress", "ForwardDeadLetteredMessagesTo", "MaxMessageSizeInKilobytes",
    ),
    "topic": (
        "DefaultMessageTimeToLive", "MaxSizeInMegabytes", "RequiresDuplicateDetection",
        "DuplicateDetectionHistoryTimeWindow", "EnableBatchedOperations", "SizeInBytes",
        "FilteringMessagesBeforePublishing", "IsAnonymousAccessible", "AuthorizationRules", "Status", "UserMetadata",
        "CreatedAt", "UpdatedAt", "AccessedAt", "SupportOrdering", "CountDetails", "SubscriptionCount", "FilterCounts",
        "AutoDeleteOnIdle", "EnablePartitioning", "EntityAvailabilityStatus", "EnableSubscriptionPartitioning",
        "EnableExpress", "MaxMessageSizeInKilobytes",
    ),
    "subscription": (
        "LockDuration", "RequiresSession", "DefaultMessageTimeToLive", "DeadLetteringOnMessageExpiration",
        "DeadLetteringOnFilterEvaluationExceptions", "MessageCount", "MaxDeliveryCount", "EnableBatchedOperations",
        "Status", "ForwardTo", "CreatedAt", "UpdatedAt", "AccessedAt", "CountDetails", "ForwardDeadLetteredMessagesTo",
        "AutoDeleteOnIdle", "EntityAvailabilityStatus", "UserMetadata",
    ),
}  # fmt: skip


def write(shown: Shown, host: str) -> str:
    """The description element. `host` is the one by which the client has reached the broker."""
    description = shown.description
    parts = []
    for name in ORDER[description.kind]:
        if (fact := _FACTS.get(name)) is not None:
            parts.append(fact(shown, host))
            continue
        wanted = _PROPERTIES[name]
        value = getattr(description, wanted.field)
        if name == "MaxSizeInMegabytes":
            value *= shown.size_factor
        elif name == "MaxMessageSizeInKilobytes" and value is None:
            value = shown.message_kb
        if name not in _OPTIONAL or (value is not None and value != ""):
            parts.append(xml.element(name, wanted.write(value)))
    return (
        f'<{ELEMENT[description.kind]} xmlns="{xml.SERVICE_BUS}" xmlns:i="{xml.INSTANCE}">'
        f"{''.join(parts)}</{ELEMENT[description.kind]}>"
    )


def read(kind: str, described: Element) -> dict[str, Any]:
    """The properties in a description element, by field: all that can change, and others that it says.

    Raises InvalidArgument, which names the element.
    """
    model = DESCRIPTIONS[kind]
    given = {name: found for name, found in xml.children(described) if not xml.is_nil(found)}
    fields: dict[str, Any] = {}
    for name, wanted in _PROPERTIES.items():
        if wanted.field not in model.model_fields:
            continue
        found = given.get(name)
        text = (found.text or "") if wanted.read is str and found is not None else xml.text_of(found)
        if text:
            try:
                fields[wanted.field] = wanted.read(text)
            except ValueError as error:
                raise InvalidArgument(f"{name}: {text[:100]!r} {error}.") from None
        elif wanted.field not in model.immutable:
            default = model.model_fields[wanted.field].default
            fields[wanted.field] = default if wanted.default is None else wanted.default
    for name in _FORWARDING:
        field = f"{_PROPERTIES[name].field}_scheme"
        if field in model.model_fields:
            fields[field] = _scheme_of(xml.text_of(given.get(name)))
    for name in _NOT_OFFERED:
        if xml.text_of(given.get(name)).lower() in ("true", "1"):
            raise InvalidArgument(f"{name}: is not supported; it must be false.")
    if "authorization_rules" in model.model_fields:
        rules = given.get("AuthorizationRules")
        fields["authorization_rules"] = [] if rules is None else _read_authorization_rules(rules)
    return fields


def as_stored(fields: Mapping[str, Any], description: Description, size_factor: int, message_kb: int) -> dict[str, Any]:
    """The properties in an update of the entity, in which what was shown and not changed means what is stored."""
    stored = dict(fields)
    if isinstance(description, SubscriptionDescription):
        return stored
    if fields.get("max_size_mb") == description.max_size_mb * size_factor:
        stored["max_size_mb"] = description.max_size_mb
    if description.max_message_size_kb is None and fields.get("max_message_size_kb") == message_kb:
        stored["max_message_size_kb"] = None
    return stored


def _read_authorization_rules(rules: Element) -> list[dict[str, Any]]:
    read = [_read_authorization_rule(each) for name, each in xml.children(rules) if name == "AuthorizationRule"]
    if len(read) > MAX_RULES:
        raise InvalidArgument(f"AuthorizationRules: an entity has at most {MAX_RULES}, not {len(read)}.")
    names = [each["key_name"] for each in read]
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidArgument(f"AuthorizationRules: two rules have the KeyName {twice[0][:100]!r}.")
    return read


def _read_authorization_rule(rule: Element) -> dict[str, Any]:
    given = dict(xml.children(rule))
    by_name = {right.value.lower(): right for right in Right}
    rights = []
    for _, right in xml.children(given["Rights"]) if "Rights" in given else ():
        if (text := xml.text_of(right)).lower() not in by_name:
            raise InvalidArgument(f"AccessRights: {text[:100]!r} must be one of {', '.join(Right)}.")
        rights.append(by_name[text.lower()])
    key_name = xml.text_of(given.get("KeyName"))
    if not key_name:
        raise InvalidArgument("AuthorizationRule: the KeyName is missing.")
    if not rights:
        raise InvalidArgument(
            f"AuthorizationRule {key_name[:100]!r}: Rights must have at least one of {', '.join(Right)}."
        )
    if Right.MANAGE in rights and set(rights) != set(Right):
        raise InvalidArgument(f"AuthorizationRule {key_name[:100]!r}: Manage needs Send and Listen, too.")
    return {
        "key_name": key_name,
        "primary_key": xml.text_of(given.get("PrimaryKey")) or new_key(),
        "secondary_key": xml.text_of(given.get("SecondaryKey")) or new_key(),
        "rights": list(dict.fromkeys(rights)),
    }


def new_key() -> str:
    """A random key in the form of those of Service Bus: base64 of 32 bytes."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


def validated(kind: str, fields: Mapping[str, Any]) -> Description:
    """Make a description of these fields. Raises InvalidArgument, which names the wrong elements and their limits."""
    try:
        return DESCRIPTIONS[kind].model_validate(dict(fields))
    except ValidationError as error:
        problems = [_problem(kind, each) for each in error.errors(include_url=False, include_input=False)]
        raise InvalidArgument(" ".join(problems[:10])) from None


_ELEMENT_OF: Final = {each.field: name for name, each in _PROPERTIES.items()} | {
    "key_name": "KeyName", "primary_key": "PrimaryKey", "secondary_key": "SecondaryKey",
}  # fmt: skip
_FIELD: Final = re.compile(rf"\b({'|'.join(field for field in _ELEMENT_OF if '_' in field)})\b")
_LITERAL: Final = re.compile(r"'(\w+)'")
_FORWARDING: Final = ("ForwardTo", "ForwardDeadLetteredMessagesTo")


def with_elements(text: str) -> str:
    """A text of the broker about properties, with the names that they have here."""
    return _FIELD.sub(lambda field: _ELEMENT_OF[field[0]], text)


def _problem(kind: str, error: Any) -> str:
    place, *rest = error["loc"] or ("",)
    if place in ("name", "topic"):
        named = "topic" if place == "topic" else kind
        return names.refusal(named, error)
    name = _ELEMENT_OF.get(place, "AuthorizationRule" if place == "authorization_rules" else str(place))
    if rest:
        name += f" {_ELEMENT_OF.get(rest[-1], rest[-1])}"
    context = error.get("ctx", {})
    if "expected" in context:
        return f"{name}: must be one of {', '.join(_LITERAL.findall(context['expected']))}."
    if name in _FORWARDING:
        return f"{name}: must be the name of a queue or topic, or a URL like sb://host/name."
    for limit, words in (("ge", "at least"), ("le", "at most"), ("max_length", "at most")):
        if limit in context:
            bound = format_duration(context[limit]) if name in _DURATIONS else str(context[limit])
            unit = " characters" if limit == "max_length" else ""
            return f"{name}: must be {words} {bound}{unit}."
    return f"{name}: {error['msg']}."
