"""The Service Bus emulator's Config.json, read as settings of ours.

Schema: {"UserConfig": {"Namespaces": [{"Name", "Queues", "Topics"}], "Logging": {"Type"}}}. A queue has Name and
Properties, a topic also Subscriptions, each of which has Name, Properties and Rules; a rule has Name and Properties:
FilterType, CorrelationFilter or SqlFilter, and Action. As in the emulator, the file may hold // comments and commas
behind the last member, the case of a key does not matter, a number or boolean may be written as a string, and an empty
string or null means the property is absent. An absent property has the emulator's default; a subscription without rules
takes every message.

The emulator ignores keys that it does not know. So do we, with a warning, unless entities or rules might be lost.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from broker.namespace.durations import parse_duration
from broker.namespace.entities import Status
from broker.settings.config import Origin, Place, Problem

UNLIMITED_MS = 10_675_199 * 86_400_000
"""From here on a time is unlimited: the longest .NET TimeSpan, which tools write for "never"."""


_ENTITIES = frozenset({"queues", "topics", "subscriptions", "rules"})


class Reading(NamedTuple):
    """The content of a Config.json: its settings, where each is written, what is wrong, and what has no effect."""

    settings: dict[str, Any]
    origins: dict[Place, Origin]
    problems: list[Problem]
    ignored: list[Problem]


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    raise ValueError("must be true or false")


def _whole_number(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    raise ValueError("must be a whole number")


def _duration_ms(value: Any) -> int:
    return parse_duration(_text(value))


def _optional_duration_ms(value: Any) -> int | None:
    duration_ms = _duration_ms(value)
    return duration_ms if duration_ms < UNLIMITED_MS else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("must be a string")


def _status(value: Any) -> str:
    text = _text(value)
    return next((status.value for status in Status if status.value.lower() == text.lower()), text)


UNSAID = object()


class _Property(NamedTuple):
    name: str  # as the emulator documents it
    field: str  # of the entity's description
    read: Callable[[Any], Any]
    default: Any  # the emulator's; UNSAID leaves it to our settings


_LOCK_DURATION = _Property("LockDuration", "lock_duration_ms", _duration_ms, 60_000)
_MAX_DELIVERY_COUNT = _Property("MaxDeliveryCount", "max_delivery_count", _whole_number, 3)
_TIME_TO_LIVE = _Property(
    "DefaultMessageTimeToLive", "default_message_time_to_live_ms", _optional_duration_ms, 3_600_000
)
_DEAD_LETTERING = _Property("DeadLetteringOnMessageExpiration", "dead_lettering_on_message_expiration", _boolean, False)
_SESSION = _Property("RequiresSession", "requires_session", _boolean, False)
_DUPLICATES = (
    _Property("RequiresDuplicateDetection", "requires_duplicate_detection", _boolean, False),
    _Property(
        "DuplicateDetectionHistoryTimeWindow", "duplicate_detection_history_time_window_ms", _duration_ms, 20_000
    ),
)
_FORWARDING = (
    _Property("ForwardTo", "forward_to", _text, None),
    _Property("ForwardDeadLetteredMessagesTo", "forward_dead_lettered_messages_to", _text, None),
)

# What the emulator ignores, and Azure Service Bus knows by these names.
_PARTITIONING = _Property("EnablePartitioning", "enable_partitioning", _boolean, UNSAID)
_SIZES = (
    _Property("MaxSizeInMegabytes", "max_size_mb", _whole_number, UNSAID),
    _Property("MaxMessageSizeInKilobytes", "max_message_size_kb", _whole_number, UNSAID),
)
_OF_ALL = (
    _Property("EnableBatchedOperations", "enable_batched_operations", _boolean, UNSAID),
    _Property("AutoDeleteOnIdle", "auto_delete_on_idle_ms", _optional_duration_ms, UNSAID),
    _Property("Status", "status", _status, UNSAID),
    _Property("UserMetadata", "user_metadata", _text, UNSAID),
)
_FILTER_FAILURES = _Property(
    "DeadLetteringOnFilterEvaluationExceptions", "dead_lettering_on_filter_evaluation_exceptions", _boolean, UNSAID
)

SUBSCRIPTION_PROPERTIES = (
    _LOCK_DURATION,
    _MAX_DELIVERY_COUNT,
    _TIME_TO_LIVE,
    _DEAD_LETTERING,
    _FILTER_FAILURES,
    _SESSION,
    *_FORWARDING,
    *_OF_ALL,
)
TOPIC_PROPERTIES = (_TIME_TO_LIVE, *_DUPLICATES, _PARTITIONING, *_SIZES, *_OF_ALL)
QUEUE_PROPERTIES = (
    _LOCK_DURATION,
    _MAX_DELIVERY_COUNT,
    _TIME_TO_LIVE,
    _DEAD_LETTERING,
    _SESSION,
    *_DUPLICATES,
    _PARTITIONING,
    *_FORWARDING,
    *_SIZES,
    *_OF_ALL,
)
ALL_PROPERTIES = tuple(dict.fromkeys((*QUEUE_PROPERTIES, *TOPIC_PROPERTIES, *SUBSCRIPTION_PROPERTIES)))

CORRELATION_PROPERTIES = {  # as the emulator documents them: field of the filter
    "ContentType": "content_type",
    "CorrelationId": "correlation_id",
    "Label": "label",
    "MessageId": "message_id",
    "ReplyTo": "reply_to",
    "ReplyToSessionId": "reply_to_session_id",
    "SessionId": "session_id",
    "To": "to",
}

_STRING_OR_COMMENT = re.compile(r'"(?:[^"\\]|\\.)*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def without_comments(text: str) -> str:
    """Return JSON with blanks for comments, so that everything else keeps its line and column."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[0].startswith('"') else re.sub(r"[^\n]", " ", match[0])

    return _STRING_OR_COMMENT.sub(blank, text)


# A comma behind a value and before a closing bracket. A string is matched whole, so that nothing in it counts.
_TRAILING_COMMA = re.compile(r'("(?:[^"\\]|\\.)*"|[^\s",\[{:])(\s*),(?=\s*[\]}])|"(?:[^"\\]|\\.)*"', re.DOTALL)


def parse(text: str) -> Any:
    """Read JSON that may hold comments, and commas behind last members. Raises ValueError, RecursionError."""

    def blank(match: re.Match[str]) -> str:
        return match[0] if match[1] is None else f"{match[1]}{match[2]} "

    return json.loads(_TRAILING_COMMA.sub(blank, without_comments(text)), object_pairs_hook=_members_once)


def _members_once(members: list[tuple[str, Any]]) -> dict[str, Any]:
    """A key that is written twice has the last value, unless entities or rules would be lost with the first."""
    found = dict(members)
    if len({key.lower() for key in found}) < len(members):
        seen: dict[str, Any] = {}
        for key, value in members:
            if _may_hold_entities(seen.get(key.lower())):
                raise ValueError(f"{key} is there twice in one object; put all its items into one array")
            seen[key.lower()] = value
    return found


def _may_hold_entities(value: Any) -> bool:
    """Return True for an array of objects, and for an object that has one named as entities or rules, at any depth."""
    waiting = [("rules", value)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            if key.lower() in _ENTITIES and any(isinstance(item, dict) for item in value):
                return True
            waiting += (("", item) for item in value)
    return False


def is_emulator_config(document: Any) -> bool:
    return isinstance(document, dict) and any(key.lower() == "userconfig" for key in document)


def read_emulator_config(document: dict[str, Any]) -> Reading:
    """Never raises, whatever is in `document`: the result's `problems` name everything that is wrong."""
    reader = _Reader()
    reader.read(document)
    return Reading(reader.settings, reader.origins, reader.problems, reader.ignored)


class _Reader:
    def __init__(self) -> None:
        # Clients of the emulator have its well-known key.
        self.settings: dict[str, Any] = {"emulator": True, "queues": [], "topics": []}
        self.origins: dict[Place, Origin] = {("emulator",): Origin("UserConfig", True)}
        self.problems: list[Problem] = []
        self.ignored: list[Problem] = []

    def read(self, document: dict[str, Any]) -> None:
        top = self._members("", document, ("UserConfig",))
        user = self._members("UserConfig", top.get("UserConfig"), ("Namespaces", "Logging"))
        if self.problems:
            return
        self._members("UserConfig.Logging", user.get("Logging", {}), ("Type",))
        at = "UserConfig.Namespaces"
        namespaces = list(self._items(at, user.get("Namespaces")))
        if len(namespaces) == 1:
            self._namespace(*namespaces[0])
        elif not self.problems:
            self._problem(at, f"has {len(namespaces)} namespaces; must have exactly one")

    def _namespace(self, at: str, value: Any) -> None:
        namespace = self._members(at, value, ("Name", "Queues", "Topics"))
        if "Name" in namespace:
            self.settings["namespace"] = namespace["Name"]
            self.origins["namespace",] = Origin(f"{at}.Name", namespace["Name"])
        for queue_at, queue in self._items(f"{at}.Queues", namespace.get("Queues", [])):
            key = ("queues", len(self.settings["queues"]))
            members = self._members(queue_at, queue, ("Name", "Properties"))
            self.settings["queues"].append(self._entity(key, queue_at, members, QUEUE_PROPERTIES))
        for topic_at, topic in self._items(f"{at}.Topics", namespace.get("Topics", [])):
            self._topic(topic_at, topic)

    def _topic(self, at: str, value: Any) -> None:
        members = self._members(at, value, ("Name", "Properties", "Subscriptions"))
        key = ("topics", len(self.settings["topics"]))
        fields = self._entity(key, at, members, TOPIC_PROPERTIES)
        self.origins[*key, "subscriptions"] = Origin(f"{at}.Subscriptions", None)
        fields["subscriptions"] = [
            self._subscription((*key, "subscriptions", index), *item)
            for index, item in enumerate(self._items(f"{at}.Subscriptions", members.get("Subscriptions", [])))
        ]
        self.settings["topics"].append(fields)

    def _subscription(self, key: Place, at: str, value: Any) -> dict[str, Any]:
        members = self._members(at, value, ("Name", "Properties", "Rules"))
        fields = self._entity(key, at, members, SUBSCRIPTION_PROPERTIES)
        if rules := members.get("Rules"):
            self.origins[*key, "rules"] = Origin(f"{at}.Rules", None)
            fields["rules"] = [
                self._rule((*key, "rules", index), *item)
                for index, item in enumerate(self._items(f"{at}.Rules", rules))
            ]
        return fields

    def _rule(self, key: Place, at: str, value: Any) -> dict[str, Any]:
        rule = self._members(at, value, ("Name", "Properties"))
        fields = self._named(key, at, rule)
        at = f"{at}.Properties"
        properties = self._members(
            at, rule.get("Properties"), ("FilterType", "CorrelationFilter", "SqlFilter", "Action")
        )
        self.origins[*key, "filter"] = Origin(at, None)
        kind = str(properties.get("FilterType", "")).lower()
        if kind == "sql":
            fields["filter"] = {
                "kind": "sql",
                **self._sql((*key, "filter"), f"{at}.SqlFilter", properties.get("SqlFilter")),
            }
        elif kind == "correlation":
            fields["filter"] = self._correlation(key, f"{at}.CorrelationFilter", properties.get("CorrelationFilter"))
        elif properties:
            found = json.dumps(properties["FilterType"]) + " " if "FilterType" in properties else ""
            self._problem(f"{at}.FilterType", f"{found}must be Correlation or Sql")
        if "Action" in properties:
            action = self._sql((*key, "action"), f"{at}.Action", properties["Action"])
            fields["action"] = action if "expression" in action else None
        return fields

    def _sql(self, key: Place, at: str, value: Any) -> dict[str, Any]:
        members = self._members(at, value, ("SqlExpression",))
        self.origins[key] = Origin(at, None)
        self.origins[*key, "expression"] = Origin(f"{at}.SqlExpression", members.get("SqlExpression"))
        return {"expression": members["SqlExpression"]} if members else {}

    def _correlation(self, key: Place, at: str, value: Any) -> dict[str, Any]:
        members = self._members(at, value, (*CORRELATION_PROPERTIES, "Properties"))
        self.origins[*key, "filter"] = Origin(at, None)
        fields: dict[str, Any] = {"kind": "correlation"}
        for name, field in CORRELATION_PROPERTIES.items():
            if name in members:
                fields[field] = members[name]
                self.origins[*key, "filter", field] = Origin(f"{at}.{name}", members[name])
        if "Properties" in members:
            fields["properties"] = members["Properties"]
            self.origins[*key, "filter", "properties"] = Origin(f"{at}.Properties", members["Properties"])
        return fields

    def _named(self, key: Place, at: str, members: dict[str, Any]) -> dict[str, Any]:
        self.origins[key] = Origin(at, None)
        self.origins[*key, "name"] = Origin(f"{at}.Name", members.get("Name"))
        return {"name": members["Name"]} if "Name" in members else {}

    def _entity(self, key: Place, at: str, members: dict[str, Any], known: tuple[_Property, ...]) -> dict[str, Any]:
        """Return the fields of the entity's description."""
        fields = self._named(key, at, members)
        names = tuple(item.name for item in known)
        properties = self._members(f"{at}.Properties", members.get("Properties", {}), names)
        for item in known:
            if item.default is not UNSAID:
                fields[item.field] = item.default
            if item.name in properties:
                where = f"{at}.Properties.{item.name}"
                self.origins[*key, item.field] = Origin(where, properties[item.name])
                try:
                    fields[item.field] = item.read(properties[item.name])
                except ValueError as error:
                    self._problem(where, f"{json.dumps(properties[item.name])} {error}")
        return fields

    def _members(self, at: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        """Return the members of an object that are there, under their documented names."""
        if not isinstance(value, dict):
            self._problem(at, "is missing" if value is None else "must be an object")
            return {}
        names = {name.lower(): name for name in known}
        members = {}
        for key, member in value.items():
            if name := names.get(key.lower()):
                if member is not None and member != "":
                    members[name] = member
            elif not key.startswith("$"):  # "$schema" is for editors
                unknown = Problem(f"{at}.{key}".lstrip("."), f"unknown; known here: {', '.join(known)}")
                (self.problems if _may_hold_entities(member) else self.ignored).append(unknown)
        return members

    def _items(self, at: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list):
            yield from ((f"{at}[{index}]", item) for index, item in enumerate(value))
        else:
            self._problem(at, "is missing" if value is None else "must be an array")

    def _problem(self, at: str, text: str) -> None:
        self.problems.append(Problem(at, text))
