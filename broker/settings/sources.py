"""Reads settings: flags win over environment, that over the file, that over defaults. Errors name places as written."""

import difflib
import json
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import annotated_types
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from broker.namespace import names
from broker.namespace.durations import format_duration
from broker.namespace.entities import Frozen
from broker.namespace.rule_descriptions import FILTER_KINDS
from broker.settings.config import ConfigurationError, Origin, Place, Problem, Refusal, Settings
from broker.settings.emulator_config import is_emulator_config, parse, read_emulator_config, without_comments
from broker.settings.emulators_place import CONFIG_FILE, image_of_emulator, reason_against
from broker.settings.internal import ADVICE, INTERNAL
from broker.settings.rule_expressions import wrong_expressions
from broker.settings.secrets import masked
from broker.settings.variables import CONFIG_VARIABLE, IMAGE_VARIABLE, PURE_VARIABLE, VARIABLE_PREFIX, config_file

# For the commands that are clients; no settings.
CLIENT_VARIABLES = (
    "PEEKLOCK_CONNECTION_STRING",
    "PEEKLOCK_HTTP_ENDPOINT",
    "PEEKLOCK_CA_FILE",
    "PEEKLOCK_METRICS_URL",
    "PEEKLOCK_PRIMARY",
    "PEEKLOCK_SECONDARY",
    "PEEKLOCK_PRIMARY_HTTP",
    "PEEKLOCK_SECONDARY_HTTP",
)
EMULATOR_HTTP_PORT = "EMULATOR_HTTP_PORT"  # the emulator's own variable, which counts beside its Config.json
MAX_FILE_BYTES = 16 << 20  # room for some 100,000 entities
OFF = "off"
"""How None is written: TOML has no null."""

FLAGS: dict[str, tuple[str, ...]] = {
    "--data-dir": ("data_dir",),
    "--host": ("amqp.host", "http.host", "ops.host"),
    "--amqp-port": ("amqp.port",),
    "--http-port": ("http.port",),
    "--ops-port": ("ops.port",),
    "--partitions": ("partitions",),
    "--workers": ("workers",),
    "--emulator": ("emulator",),
    "--log-level": ("log.level",),
}

# Of `peeklock worker` and `peeklock gateway`.
CLUSTER_FLAGS: dict[str, tuple[str, ...]] = {
    **FLAGS,
    "--workers": ("cluster.workers",),
    "--partitions": ("cluster.owned",),
    "--listen": ("cluster.listen",),
    "--journals": ("cluster.journals",),
    "--journal-listen": ("cluster.journal_listen",),
}

_RENAMED: dict[Place, Place] = {
    ("amqp", "tls_certificate"): ("tls", "certificate"),
    ("amqp", "tls_key"): ("tls", "key"),
    ("amqp", "tls_client_ca"): ("tls", "client_ca"),
    ("amqp", "tls_timeout_ms"): ("tls", "handshake_timeout_ms"),
}

SECRETS = frozenset({"root_key", "primary_key", "secondary_key", "primary"})

# Kubernetes sets these for a service called peeklock or peeklock-something; they are not meant for us. A variable that
# ends in _PORT is one of them only with an address in it: PEEKLOCK_AMQP_PORT=5672 is a misspelt setting.
_SERVICE_LINK = re.compile(
    r"PEEKLOCK(_[A-Z0-9]+)*_"
    r"(SERVICE_HOST=|SERVICE_PORT(_\w+)?=|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?=|PORT=(tcp|udp|sctp)://).*"
)

_PATTERNS = {  # in words; the key is the last name of the place, or the model and that name
    "name": names.RULES["queue"],
    "DeclaredSubscription.name": names.RULES["subscription"],
    "RuleDescription.name": names.RULES["rule"],
    "forward_to": "the name of a queue or topic",
    "forward_dead_lettered_messages_to": "the name of a queue or topic",
    "host": "an IP address or a host name",
    "primary_name": f"1 to 200 letters, digits and . _ - ~, {names.ENDS}",
    "namespace": "2 to 50 letters, digits and -, beginning with a letter and ending with a letter or digit",
}


_OF_PATTERNS = ("string_pattern_mismatch", "string_too_long", "string_too_short")


class Loaded(NamedTuple):
    settings: Settings
    origins: dict[Place, Origin]  # of all settings that are not defaults
    ignored: tuple[Problem, ...] = ()  # what the file has, and nothing reads
    going: tuple[Problem, ...] = ()  # what is set, and the next minor version refuses
    not_emulator: str | None = None  # why the image is not the emulator, although its licence is accepted

    def spelled(self, refusal: Refusal | str) -> str:
        """Return what is wrong with a declared entity, where a file has it if that has other names than we."""
        place = () if isinstance(refusal, str) else self._place_of(refusal.path)
        if isinstance(refusal, str) or place not in self.origins:
            return str(refusal)
        if refusal.field is None:
            return f"{self.origins[place].spelling}: {refusal.problem}"
        if origin := self.origins.get((*place, refusal.field)):
            return f"{origin.spelling}: {refusal.problem}"
        return f"{self.origins[place].spelling}: {refusal.field} {refusal.problem}"

    def _place_of(self, path: str) -> Place:
        for index, queue in enumerate(self.settings.queues):
            if queue.path.lower() == path.lower():
                return "queues", index
        for index, topic in enumerate(self.settings.topics):
            if topic.name.lower() == path.lower():
                return "topics", index
            for number, subscription in enumerate(topic.subscriptions):
                if subscription.description(topic.name).path.lower() == path.lower():
                    return "topics", index, "subscriptions", number
        return ()


def load(
    config: Path | None = None,
    flags: Mapping[str, str | None] | None = None,
    environment: Mapping[str, str] | None = None,
    known_flags: Mapping[str, tuple[str, ...]] = FLAGS,
) -> Loaded:
    """Read settings from a file (else that of PEEKLOCK_CONFIG), an environment, and flags (a known one: text).

    Raises ConfigurationError with everything that is wrong.
    """
    environment, flags = environment or {}, flags or {}
    is_named = config is not None
    if config is None and environment.get(CONFIG_VARIABLE):
        config = Path(config_file(environment[CONFIG_VARIABLE]))
    not_emulator = None
    if config is not None and (image := image_of_emulator(environment)) is not None:
        given = _Sources()
        given.read_environment(environment)
        given.read_flags(flags, known_flags)
        not_emulator = reason_against(image, config, given.values, is_named=is_named)
        if not_emulator is None:
            config = image / CONFIG_FILE
    sources = _Sources()
    if config is not None:
        sources.read_file(config)
    sources.read_environment(environment)
    sources.read_flags(flags, known_flags)
    loaded = sources.settings()
    return loaded if loaded.settings.emulator else loaded._replace(not_emulator=not_emulator)


def leaves() -> dict[Place, FieldInfo]:
    """Return every setting that is not a section, those that are internal included."""
    found: dict[Place, FieldInfo] = {}
    for name, field in Settings.model_fields.items():
        if section := section_of(field):
            found.update({(name, inner): inner_field for inner, inner_field in section.model_fields.items()})
        else:
            found[name,] = field
    return found


def section_of(field: FieldInfo) -> type[Frozen] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, Frozen) else None


def _is_list(field: FieldInfo | None) -> bool:
    return field is not None and get_origin(field.annotation) is tuple


def optional(field: FieldInfo) -> bool:
    return type(None) in get_args(field.annotation)


def limits(field: FieldInfo) -> str | None:
    """Return the limits of a number or a count in words: "from 0 to 65535"; None if there are none."""
    metadata = [*field.metadata, *(item for kind in get_args(field.annotation) for item in _metadata(kind))]
    low = next((f"from {item.ge}" for item in metadata if isinstance(item, annotated_types.Ge)), None)
    low = low or next((f"above {item.gt}" for item in metadata if isinstance(item, annotated_types.Gt)), None)
    high = next((f"to {item.le}" for item in metadata if isinstance(item, annotated_types.Le)), None)
    high = high or next((f"below {item.lt}" for item in metadata if isinstance(item, annotated_types.Lt)), None)
    if low and high:
        return f"{low} {high}" if high.startswith("to") else f"{low} and {high}"
    if low or high:
        return (low or high or "").replace("from", "at least").replace("to", "at most")
    return None


def _metadata(kind: Any) -> Iterable[Any]:
    return getattr(kind, "__metadata__", ())


def dotted(place: Place) -> str:
    """Return the place as text: queues[0].name"""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).lstrip(".")


def variable(place: Place) -> str:
    return VARIABLE_PREFIX + "__".join(str(part) for part in place).upper()


class _Sources:
    """The settings read so far; what is read later replaces what was read earlier."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self._origins: dict[Place, Origin] = {}
        self._problems: list[Problem] = []
        self._ignored: list[Problem] = []
        self._leaves = leaves()
        self._file: Path | None = None
        self._is_emulators = False  # the file

    def read_file(self, path: Path) -> None:
        self._file = path
        try:
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            if len(content) > MAX_FILE_BYTES:
                raise ConfigurationError(f"{path}: is larger than {MAX_FILE_BYTES >> 20} MiB; name a file of settings")
            text = content.decode("utf-8-sig")
        except OSError as error:
            denied = isinstance(error, PermissionError)
            advice = f"make it readable for user id {os.geteuid()}" if denied else "name an existing file"
            raise ConfigurationError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
        except UnicodeDecodeError:
            raise ConfigurationError(f"{path}: is not UTF-8 text; save it as UTF-8") from None
        if path.suffix.lower() == ".json" or without_comments(text).lstrip().startswith("{"):
            self._read_emulator_config(path, text)
            return
        try:
            document = tomllib.loads(text)
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise ConfigurationError(f"{path}: is not valid TOML: {error}") from None
        for place, value in self._members(document):
            field = self._leaves.get(place)
            if field and optional(field) and value == OFF:
                value = None
            self._set(place, value, Origin(f"{path}: {dotted(place)}", value))

    def _read_emulator_config(self, path: Path, text: str) -> None:
        if not without_comments(text).strip():
            raise ConfigurationError(f"{path}: is empty; write the emulator's Config.json into it")
        try:
            document = parse(text)
        except (ValueError, RecursionError) as error:
            raise ConfigurationError(f"{path}: is not valid JSON: {error}") from None
        if not is_emulator_config(document):
            raise ConfigurationError(
                f"{path}: is JSON without UserConfig, so not the emulator's Config.json; write other settings as TOML"
            )
        self._is_emulators = True
        reading = read_emulator_config(document)
        for name, value in reading.settings.items():
            self.values[name] = value
        if not _is_text(document):
            self._problems.append(Problem(str(path), _NO_TEXT))
            self.values.clear()
        for place, origin in reading.origins.items():
            self._origins[place] = Origin(f"{path}: {origin.spelling}", origin.value)
        self._problems += [Problem(f"{path}: {problem.spelling}", problem.text) for problem in reading.problems]
        self._ignored += [Problem(f"{path}: {problem.spelling}", problem.text) for problem in reading.ignored]

    def _members(self, document: dict[str, Any]) -> Iterable[tuple[Place, Any]]:
        """Yield the settings of a TOML document: the members of sections, and other top-level values as they are."""
        for name, value in document.items():
            field = Settings.model_fields.get(name)
            if field and section_of(field) and isinstance(value, dict):
                yield from (((name, inner), inner_value) for inner, inner_value in value.items())
            else:
                yield (name,), value

    def read_environment(self, environment: Mapping[str, str]) -> None:
        """Read the variables. An empty one is not set: a compose file can pass on what its caller may have set."""
        by_variable = {variable(place): place for place in self._leaves}
        renamed = {variable(before): variable(now) for before, now in _RENAMED.items()}
        if self._is_emulators and (text := environment.get(EMULATOR_HTTP_PORT)):
            self._set_text(("http", "port"), text, EMULATOR_HTTP_PORT)
        for name, text in sorted(environment.items()):
            if not name.startswith(VARIABLE_PREFIX) or text == "":
                continue
            if name in (CONFIG_VARIABLE, IMAGE_VARIABLE, PURE_VARIABLE, *CLIENT_VARIABLES):
                continue
            if place := by_variable.get(name):
                self._set_text(place, text, name)
            elif name in renamed:
                self._problems.append(Problem(name, f"is {renamed[name]} now"))
            elif not _SERVICE_LINK.fullmatch(f"{name}={text}"):
                known = (each for each, place in by_variable.items() if place not in INTERNAL)
                self._problems.append(Problem(name, "no such setting; " + _suggestion(name, known, VARIABLE_PREFIX)))

    def read_flags(self, flags: Mapping[str, str | None], known: Mapping[str, tuple[str, ...]]) -> None:
        """Read the flags, in which lists are written with commas."""
        for flag, text in flags.items():
            if text is None:
                continue
            for place in (tuple(name.split(".")) for name in known[flag]):
                if _is_list(self._leaves[place]):
                    items = [each.strip() for each in text.split(",")]
                    text = json.dumps([int(each) if each.isdecimal() else each for each in items])
                self._set_text(place, text, flag)

    def _set_text(self, place: Place, text: str, spelling: str) -> None:
        field = self._leaves[place]
        value = _parse(field, text)
        self._set(place, value, Origin(spelling, value if _is_list(field) else text))

    def _set(self, place: Place, value: Any, origin: Origin) -> None:
        for known in [known for known in self._origins if known[: len(place)] == place]:
            del self._origins[known]
        if not _is_text(value):
            self._problems.append(Problem(origin.spelling, _NO_TEXT))
            return
        self._origins[place] = origin
        if len(place) == 1:
            self.values[str(place[0])] = value
            return
        section = self.values.setdefault(str(place[0]), {})
        if isinstance(section, dict):  # else the file has a plain value in place of a section, which is reported later
            section[str(place[1])] = value

    def settings(self) -> Loaded:
        try:
            # Strict JSON: a boolean is no number, and text is no boolean.
            settings = Settings.model_validate_json(json.dumps(self.values, default=_nothing_we_take), strict=True)
        except ValidationError as error:
            told = {spelling for spelling, _ in self._problems}
            for details in error.errors(include_url=False):
                # What is wrong in a value that is told to be wrong already is the same mistake.
                found = (each for each in self._explain(details) if not told.intersection(_around(each.spelling)))
                self._problems += dict.fromkeys(found)
        else:
            self._problems += [*self._missing_files(settings), *self._wrong_rules(settings)]
        if self._problems:
            raise ConfigurationError("\n".join(f"{spelling}: {text}" for spelling, text in self._problems))
        going = tuple(Problem(self._origins[place].spelling, ADVICE) for place in self._origins if place in INTERNAL)
        return Loaded(settings, self._origins, tuple(self._ignored), going)

    def _missing_files(self, settings: Settings) -> Iterable[Problem]:
        files = {("tls", name): getattr(settings.tls, name) for name in ("certificate", "key", "client_ca")}
        for place, path in (files | {("syphon", "ca"): settings.syphon.ca}).items():
            if path is not None and not path.is_file():
                yield Problem(self._origin(place).spelling, f"{str(path)!r} is not a file; name a PEM file")

    def _wrong_rules(self, settings: Settings) -> Iterable[Problem]:
        for at_topic, topic in enumerate(settings.topics):
            for at_subscription, subscription in enumerate(topic.subscriptions):
                for at_rule, rule in enumerate(subscription.rules or ()):
                    place = ("topics", at_topic, "subscriptions", at_subscription, "rules", at_rule)
                    for field, text in wrong_expressions(rule):
                        yield Problem(self._origin((*place, *field)).spelling, text)

    def _explain(self, details: ErrorDetails) -> list[Problem]:
        place = _as_written(details["loc"])
        if details["type"] == "inconsistent":
            context = details["ctx"]
            places = [
                (*place, *(int(part) if part.isdecimal() else part for part in dotted_place.split(".")))
                for dotted_place in context["places"]
            ]
            return [self._problem(at, context["text"]) for at in places]
        if details["type"] == "extra_forbidden":
            if renamed := _RENAMED.get(place):
                return [Problem(self._origin(place).spelling, f"is {dotted(renamed)} now")]
            fields = _model_and_field(details["loc"])[0].model_fields
            known = [name for name in fields if (*place[:-1], name) not in INTERNAL]
            return [Problem(self._origin(place).spelling, f"no such setting; {_suggestion(str(place[-1]), known)}")]
        return [self._problem(place, _in_words(place, details))]

    def _problem(self, place: Place, text: str) -> Problem:
        origin = self._origin(place)
        # A value in the wrong place may be a key, so values near keys are never shown.
        secret = SECRETS.intersection(place) or place[:1] == ("security",) or "authorization_rules" in place
        if secret or not isinstance(origin.value, str | int | float) or _is_list(_model_and_field(place)[1]):
            return Problem(origin.spelling, text)
        value = masked(json.dumps(origin.value, ensure_ascii=False))
        return Problem(origin.spelling, f"{value if len(value) <= 100 else value[:99] + '…'} {text}")

    def _origin(self, place: Place) -> Origin:
        """Return where `place` was set, or else the nearest enclosing place that was set."""
        if origin := self._origins.get(place):
            return origin
        for length in range(len(place) - 1, 0, -1):
            if around := self._origins.get(place[:length]):
                rest = dotted(place[length:])
                value = _inside(around.value, place[length:])
                joint = "" if rest.startswith("[") else "."
                return Origin(f"{around.spelling}{joint}{rest}", value)
        return Origin(f"{self._file}: {dotted(place)}" if self._file else dotted(place), None)


def _around(spelling: str) -> Iterator[str]:
    """Yield a place as it is spelled, and those that it is in."""
    yield spelling
    yield from (spelling[: match.start()] for match in re.finditer(r"[.\[]", spelling))


def _inside(value: Any, place: Place) -> Any:
    for part in place:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            return None
    return value


def _parse(field: FieldInfo, text: str) -> Any:
    """Return the value of `text` from a flag or variable; the text itself if it is no value of the field's type."""
    kinds = get_args(field.annotation) if optional(field) else (field.annotation,)
    word = text.strip().lower()
    if optional(field) and word == OFF:
        return None
    if bool in kinds:
        return {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}.get(word, text)
    if any(isinstance(kind, type) and issubclass(kind, StrEnum) for kind in kinds):
        return word
    try:
        if int in kinds:
            return int(text)
        if float in kinds:
            return float(text)
        if _is_list(field) or get_origin(field.annotation) is dict:
            return json.loads(text)
    except (ValueError, RecursionError):
        pass
    return text


_NO_TEXT = "has characters that are no text: half of a surrogate pair, or bytes that are not UTF-8"


def _is_text(value: Any) -> bool:
    """Return False if UTF-8 cannot have a string in it, as JSON has by escapes, and variables of any bytes."""
    try:
        json.dumps(value, ensure_ascii=False, default=_nothing_we_take).encode()
    except UnicodeEncodeError:
        return False
    return True


def _nothing_we_take(_: object) -> dict[str, str]:
    """Replace a TOML date by a value that is wrong for every setting."""
    return {"date": ""}


def _suggestion(name: str, known: Iterable[str], prefix: str = "") -> str:
    known = list(known)
    # The common prefix would make all names similar.
    close = difflib.get_close_matches(name.removeprefix(prefix), [item.removeprefix(prefix) for item in known], n=1)
    if close:
        return f"did you mean {prefix}{close[0]}?"
    return "known: " + ", ".join(known) if len(known) <= 32 else "docs/configuration.md lists them"


def _as_written(place: Place) -> Place:
    """Return the place without the kind of the filter, which pydantic inserts where an error is in a filter."""
    return tuple(
        part for at, part in enumerate(place) if at == 0 or place[at - 1] != "filter" or part not in FILTER_KINDS
    )


def _in_words(place: Place, details: ErrorDetails) -> str:
    """Say what the value must be. The text follows the value in the message, so it begins with a verb like "must"."""
    kind, context = details["type"], details.get("ctx", {})
    model, field = _model_and_field(place)
    name = str(place[-1])
    if kind == "missing":
        return "is missing; add it"
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        return f"must have a kind, which is {_one_of(FILTER_KINDS)}"
    words = {
        "int_type": "must be a whole number",
        "int_from_float": "must be a whole number",
        "float_type": "must be a number",
        "bool_type": "must be true or false",
        "string_type": "must be a string",
        "path_type": "must be a path",
        "model_type": "must be a table",
        "dict_type": "must be a table",
        "model_attributes_type": "must be a table",
        "tuple_type": "must be a list (in a variable: as JSON)",
        "frozen_set_type": "must be a list",
    }.get(kind)
    if kind == "enum":
        words = f"must be {context['expected']}"
    elif kind == "literal_error" and field:
        words = f"must be {_one_of([repr(str(value)) for value in get_args(field.annotation)])}"
    elif kind in _OF_PATTERNS and (pattern := _PATTERNS.get(f"{model.__name__}.{name}") or _PATTERNS.get(name)):
        words = f"must be {pattern}"
    elif kind == "string_pattern_mismatch":
        words = f"must match {context['pattern']}"
    elif kind == "string_too_long":
        words = f"must have at most {context['max_length']} characters"
    elif kind == "string_too_short":
        words = "must not be empty"
    elif kind == "too_long":
        return f"must have at most {context['max_length']} items"
    elif kind in ("greater_than_equal", "greater_than", "less_than_equal", "less_than"):
        words = "is out of range; it must be"
    words = words or details["msg"]
    allowed = limits(field) if field else None
    if allowed:
        words += f" {allowed}"
        if field and name.endswith("_ms"):
            words += f" ms ({_as_durations(allowed)})"
        elif name.endswith("_bytes"):
            words += " bytes"
    if field and optional(field) and len(place) <= 2:
        words += f", or {OFF}"
    return words


def _one_of(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} or {words[-1]}"


def _as_durations(allowed: str) -> str:
    return re.sub(r"\d+", lambda number: format_duration(int(number[0])), allowed)


def _model_and_field(place: Place) -> tuple[type[Frozen], FieldInfo | None]:
    """Return the model around the value at `place`, and its field of that name."""
    model: type[Frozen] = Settings
    field: FieldInfo | None = None
    for at, part in enumerate(place):
        if isinstance(part, str):
            models = [model] if field is None else list(_models(field.annotation)) or [model]
            if at and place[at - 1] == "filter" and part in FILTER_KINDS:
                model, field = next(each for each in models if each.model_fields["kind"].default == part), None
                continue
            model = next((each for each in models if part in each.model_fields), models[0])
            field = model.model_fields.get(part)
    return model, field


def _models(annotation: Any) -> Iterator[type[Frozen]]:
    """Yield the models in a field's type, including those in its lists and tables."""
    if isinstance(annotation, type) and issubclass(annotation, Frozen):
        yield annotation
    for inner in get_args(annotation):
        yield from _models(inner)
