"""Settings as people read them: docs/configuration.md, and the output of `peeklock config show`."""

import json
import re
from collections.abc import Iterable
from enum import StrEnum
from pathlib import Path
from typing import Any, get_args

from pydantic.fields import FieldInfo

from broker.namespace.durations import format_duration
from broker.namespace.entities import AuthorizationRule, Frozen, QueueDescription, SubscriptionDescription
from broker.namespace.rule_descriptions import CorrelationFilter, RuleDescription, SqlAction, SqlFilter, TrueFilter
from broker.settings.audiences import AUDIENCES, Audience, audience_of
from broker.settings.config import Place, Settings
from broker.settings.declared import DeclaredSubscription, DeclaredTopic
from broker.settings.emulator_config import (
    ALL_PROPERTIES,
    CORRELATION_PROPERTIES,
    QUEUE_PROPERTIES,
    SUBSCRIPTION_PROPERTIES,
    TOPIC_PROPERTIES,
    UNSAID,
)
from broker.settings.internal import INTERNAL
from broker.settings.sources import FLAGS, OFF, SECRETS, Loaded, dotted, leaves, limits, optional, section_of, variable

MASK = "***"

_INTRODUCTION = """\
# Configuration

Written by `peeklock config reference`; a test keeps it current.

A setting comes from a flag of `peeklock serve`, else from its environment variable, else from the file named by
`--config` or `PEEKLOCK_CONFIG`, else it has its default. An empty variable counts as not set. The word `off` switches a
setting off, where that is allowed. In a variable, lists and tables are written as JSON. With an unknown setting or a
wrong value the broker does not start, and a message names the place and the fix. `peeklock config check` checks the
settings without a start. `peeklock config show` prints the settings in force and where each came from, without keys.

The file is TOML:

```toml
data_dir = "/var/lib/peeklock"

[amqp]
host = "0.0.0.0"
max_message_size_bytes = 104857600

[[security.authorization_rules]]
key_name = "reports"
primary_key = "a long random text"
rights = ["Listen"]

[[queues]]
name = "orders"
lock_duration_ms = 60000

[[topics]]
name = "prices"

[[topics.subscriptions]]
name = "audit"

[[topics.subscriptions]]
name = "large"

[[topics.subscriptions.rules]]
name = "large"
filter = { kind = "sql", expression = "amount > @limit", parameters = { "@limit" = 1000 } }
action = { expression = "SET priority = 'high'" }
```

or the Service Bus emulator's `Config.json`, unchanged: see the end of this page.

Names end in the unit: `_ms` is milliseconds, `_bytes` bytes, `_kb` KiB, `_mb` MiB.

The settings are in the order of who needs them; most brokers need those of the first part alone.
"""

_EMULATOR = """\
## The Service Bus emulator's Config.json

A file whose outermost member is `UserConfig` is read as a file of the emulator, as is each whose name ends in `.json`;
it may hold `//` comments and trailing commas. It declares one namespace with its queues and topics, and sets
`emulator`, so that the well-known key is the broker's (`--no-emulator` says otherwise). Other settings come from flags
and environment, `http.port` also from `EMULATOR_HTTP_PORT`. `Logging` has no effect. Unknown keys are ignored, and a
warning names them; one that may hold entities or rules, because its value is an array of objects, is refused. See
[In place of the emulator](emulator.md), also for the image without such a file.
Durations are ISO 8601 (`PT1M`, `P7D`, `PT0.5S`). An absent or empty property has the emulator's default, which is not
always the default above:

| Property | Setting | Default | Of |
|---|---|---|---|
"""

_QUEUES = """\
## queues

Each `[[queues]]` is created when it is missing, and updated when a property differs. A queue that is no longer
declared stays. Names are compared without regard to case, and a new queue or topic is named in lower case
(`keep_case_of_names`). These properties cannot change after the creation, and the broker does not start if they
differ: {immutable}.

"""

_TOPICS = """\
## topics

Each `[[topics]]` is created or updated as a queue is. A queue and a topic cannot have the same name. These properties
cannot change after the creation: {immutable}.

"""

_SUBSCRIPTIONS = """\
## topics.subscriptions

Each `[[topics.subscriptions]]` is a queue of its own below the topic before it, with its own dead-letter queue. These
properties cannot change after the creation: {immutable}.

"""

_RULES = """\
## topics.subscriptions.rules

Each `[[topics.subscriptions.rules]]` selects messages for the subscription before it. All matching rules without an
action make one copy of a message together; each matching rule with an action makes a copy of its own. After the start
the subscription has only the declared rules. If none are declared, it keeps the rules that clients made.

"""

_FILTERS = """\
A filter is `{ kind = "true" }`, `{ kind = "false" }`, or one of these. A value is a string, `true` or `false`, a whole
number (a long), another number (a double), or a table with its type: `{ type = "int", value = 5 }`. Types are
`string`, `int`, `long`, `double`, `boolean`, `timestamp` (ISO 8601 or milliseconds since 1970), `uuid` and `duration`
(ISO 8601 or ticks of 100 ns).

"""

_KEYS = """\
## authorization_rules

Shared access keys for the namespace (`security.authorization_rules`), for one queue, or for one topic and its
subscriptions.

"""

_EMULATOR_RULES = """
A topic has `Subscriptions`, each with `Rules`; a subscription without rules takes every message. A rule's
`Properties` are `FilterType` (`Sql` or `Correlation`), `SqlFilter` or `CorrelationFilter`, and `Action`. `SqlFilter`
and `Action` have an `SqlExpression`; a `CorrelationFilter` has {correlation}
and `Properties`.
"""

_TABLE = "| Setting | Default | Allowed | Meaning |\n|---|---|---|---|\n"


def document() -> str:
    """Return the text of docs/configuration.md."""
    flags = {place: flag for flag, places in FLAGS.items() for place in places}
    rows: dict[tuple[Audience, str], list[str]] = {}
    for place, field in leaves().items():
        if place in INTERNAL:
            continue
        name = dotted(place)
        spellings = f"`{name}`<br>`{variable(place)}`" + (f"<br>`{flags[name]}`" if name in flags else "")
        section = str(place[0]) if len(place) > 1 else ""
        rows.setdefault((audience_of(place), section), []).append(_row(spellings, field))
    parts = [_INTRODUCTION]
    told = set[str]()
    for audience in AUDIENCES:
        parts.append(f"## {audience.title}\n\n{audience.words}\n")
        for section in [section for each, section in rows if each is audience]:
            parts.append(_title(section, again=section in told) + _TABLE + "".join(rows[audience, section]))
            told.add(section)
    for words, model in ((_QUEUES, QueueDescription), (_TOPICS, DeclaredTopic)):
        parts.append(words.format(immutable=_names(model.immutable)) + _model_table(model))
    fixed = _names(SubscriptionDescription.immutable)
    parts.append(_SUBSCRIPTIONS.format(immutable=fixed) + _model_table(DeclaredSubscription))
    parts.append(_RULES + _model_table(RuleDescription))
    parts.append(_FILTERS + _TABLE + "".join(_filter_rows()))
    parts.append(_KEYS + _model_table(AuthorizationRule))
    parts.append(_EMULATOR + "".join(_emulator_rows()))
    parts.append(_EMULATOR_RULES.format(correlation=_names(CORRELATION_PROPERTIES)).lstrip())
    return "\n".join(parts)


def _title(section: str, *, again: bool) -> str:
    """Return the heading of a section, with what it is for where it stands first; settings without one have none."""
    if not section:
        return ""
    if again:
        return f"### {section}, its limits\n\n"
    return f"### {section}\n\n{Settings.model_fields[section].description}\n\n"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _filter_rows() -> Iterable[str]:
    for title, model in (("filter", SqlFilter), ("filter", CorrelationFilter), ("action", SqlAction)):
        for name, field in model.model_fields.items():
            if name == "kind":
                yield f'| `{title}.kind` | must be given | `"{field.default}"` | {model.__doc__} |\n'
            else:
                yield _row(f"`{title}.{name}`", field, off=False)


def _model_table(model: type[Frozen]) -> str:
    rows = (_row(f"`{name}`", field, off=False) for name, field in model.model_fields.items())
    return _TABLE + "".join(rows)


def _emulator_rows() -> Iterable[str]:
    kinds = {"queue": QUEUE_PROPERTIES, "topic": TOPIC_PROPERTIES, "subscription": SUBSCRIPTION_PROPERTIES}
    for item in ALL_PROPERTIES:
        default = item.default
        if default is UNSAID:
            described = SubscriptionDescription if item in SUBSCRIPTION_PROPERTIES else QueueDescription
            default = described.model_fields[item.field].default
        if item.field.endswith("_ms") and default is not None:
            default = format_duration(default)
        shown = "none" if default is None else _value(default)
        if item.field == "enable_partitioning":
            shown = "`partitioning.default`"
        of = ", ".join(kind for kind, properties in kinds.items() if item in properties)
        yield f"| `{item.name}` | `{item.field}` | {shown} | {of} |\n"


def _row(spellings: str, field: FieldInfo, off: bool = True) -> str:
    """`off`: the user writes `off` for None; otherwise the user leaves the setting out."""
    return f"| {spellings} | {_default(field, off)} | {_allowed(field, off)} | {field.description} |\n"


def _default(field: FieldInfo, off: bool) -> str:
    if field.is_required():
        return "must be given"
    if field.default is None:
        return f"`{OFF}`" if off else "unset"
    if isinstance(field.default, TrueFilter):
        return '`{ kind = "true" }`'
    return "none" if field.default in ((), {}) else _value(field.default)


def _value(value: Any) -> str:
    if value == "":
        return "empty"
    return f"`{value if isinstance(value, str | Path) else json.dumps(value)}`"


def _allowed(field: FieldInfo, off: bool) -> str:
    kinds = get_args(field.annotation) or (field.annotation,)
    words = [f"`{member}`" for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum) for member in kind]
    words += [f"`{member}`" for member in kinds if isinstance(member, str)]
    if bool in kinds:
        words = ["`true`", "`false`"]
    if allowed := limits(field):
        words.append(allowed)
    if optional(field) and off:
        words.append(f"`{OFF}`")
    return ", ".join(words)


def show(loaded: Loaded) -> str:
    """Return the settings in force as TOML, with comments that say where each was set; keys are masked."""
    values = loaded.settings.model_dump(mode="json")
    general, sections = [], []
    for name, field in Settings.model_fields.items():
        if section_of(field):
            shown = [
                (place, value) for inner, value in values[name].items() if _is_shown(loaded, place := (name, inner))
            ]
            sections.append("\n".join([f"\n[{name}]", *(_line(loaded, *each) for each in shown)]))
        elif _is_shown(loaded, (name,)):
            general.append(_line(loaded, (name,), values[name]))
    return "\n".join(general + sections) + "\n"


def _is_shown(loaded: Loaded, place: Place) -> bool:
    """Return False for an internal setting that nobody has set."""
    return place not in INTERNAL or place in loaded.origins


def _line(loaded: Loaded, place: Place, value: Any) -> str:
    origin = loaded.origins.get(place)
    comment = f"  # {origin.spelling}" if origin else ""
    return f"{place[-1]} = {_toml(value, str(place[-1]))}{comment}"


def _toml(value: Any, name: str) -> str:
    """Return an inline TOML value; members without value are left out, and keys are masked."""
    if isinstance(value, dict):
        members = (f"{_key(key)} = {_toml(member, key)}" for key, member in value.items() if member is not None)
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(_toml(item, name) for item in value) + "]"
    if value is None:
        return json.dumps(OFF)
    return json.dumps(MASK if name in SECRETS else value, ensure_ascii=False)


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)
