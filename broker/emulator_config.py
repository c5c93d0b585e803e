"""The Service Bus emulator's Config.json, read as settings of ours.

Schema: {"UserConfig": {"Namespaces": [{"Name", "Queues": [{"Name", "Properties"}], "Topics"}], "Logging": {"Type"}}}.
As in the emulator, the case of a key does not matter, a number or boolean may be written as a string, and an empty
string or null means the property is absent. An absent property has the emulator's default.
"""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from broker.config import Origin, Place, Problem
from broker.durations import parse_duration

UNLIMITED_MS = 10_675_199 * 86_400_000
"""From here on a time to live is unlimited: the longest .NET TimeSpan, which tools write for "never"."""


class Reading(NamedTuple):
    """What a Config.json says: settings, where each was written, and what is wrong with it."""

    settings: dict[str, Any]
    origins: dict[Place, Origin]
    problems: list[Problem]


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


def _time_to_live_ms(value: Any) -> int | None:
    duration_ms = _duration_ms(value)
    return duration_ms if duration_ms < UNLIMITED_MS else None


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    raise ValueError("must be a string")


class _Property(NamedTuple):
    name: str  # as the emulator documents it
    field: str  # of QueueDescription
    read: Callable[[Any], Any]
    default: Any  # the emulator's


QUEUE_PROPERTIES = (
    _Property("LockDuration", "lock_duration_ms", _duration_ms, 60_000),
    _Property("MaxDeliveryCount", "max_delivery_count", _whole_number, 3),
    _Property("DefaultMessageTimeToLive", "default_message_time_to_live_ms", _time_to_live_ms, 3_600_000),
    _Property("DeadLetteringOnMessageExpiration", "dead_lettering_on_message_expiration", _boolean, False),
    _Property("RequiresSession", "requires_session", _boolean, False),
    _Property("RequiresDuplicateDetection", "requires_duplicate_detection", _boolean, False),
    _Property(
        "DuplicateDetectionHistoryTimeWindow", "duplicate_detection_history_time_window_ms", _duration_ms, 20_000
    ),
    _Property("ForwardTo", "forward_to", _text, None),
    _Property("ForwardDeadLetteredMessagesTo", "forward_dead_lettered_messages_to", _text, None),
)


def is_emulator_config(document: Any) -> bool:
    return isinstance(document, dict) and any(key.lower() == "userconfig" for key in document)


def read_emulator_config(document: dict[str, Any]) -> Reading:
    """Never raises for what is in `document`: everything wrong is in `problems`."""
    reader = _Reader()
    reader.read(document)
    return Reading(reader.settings, reader.origins, reader.problems)


class _Reader:
    def __init__(self) -> None:
        self.settings: dict[str, Any] = {"queues": []}
        self.origins: dict[Place, Origin] = {}
        self.problems: list[Problem] = []

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
        for topic_at, topic in self._items(f"{at}.Topics", namespace.get("Topics", [])):
            name = self._members(topic_at, topic, ("Name", "Properties", "Subscriptions")).get("Name")
            self._problem(topic_at, f"topic {name!r}: this version serves queues and no topics yet; remove it")
        for queue_at, queue in self._items(f"{at}.Queues", namespace.get("Queues", [])):
            self._queue(queue_at, queue)

    def _queue(self, at: str, value: Any) -> None:
        queue = self._members(at, value, ("Name", "Properties"))
        key = ("queues", len(self.settings["queues"]))
        self.origins[key] = Origin(at, None)
        self.origins[*key, "name"] = Origin(f"{at}.Name", queue.get("Name"))
        names = tuple(item.name for item in QUEUE_PROPERTIES)
        properties = self._members(f"{at}.Properties", queue.get("Properties", {}), names)
        fields: dict[str, Any] = {"name": queue["Name"]} if "Name" in queue else {}
        for item in QUEUE_PROPERTIES:
            fields[item.field] = item.default
            if item.name in properties:
                where = f"{at}.Properties.{item.name}"
                self.origins[*key, item.field] = Origin(where, properties[item.name])
                try:
                    fields[item.field] = item.read(properties[item.name])
                except ValueError as error:
                    self._problem(where, f"{json.dumps(properties[item.name])} {error}")
        self.settings["queues"].append(fields)

    def _members(self, at: str, value: Any, known: tuple[str, ...]) -> dict[str, Any]:
        """The members of an object that are there, under their documented names."""
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
                self._problem(f"{at}.{key}".lstrip("."), f"unknown; known here: {', '.join(known)}")
        return members

    def _items(self, at: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list):
            yield from ((f"{at}[{index}]", item) for index, item in enumerate(value))
        else:
            self._problem(at, "is missing" if value is None else "must be an array")

    def _problem(self, at: str, text: str) -> None:
        self.problems.append(Problem(at, text))
