"""A message as rules see it: its properties by lower-case name, decoded when the first rule needs them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from uuid import UUID

from broker.rules.errors import FilterError
from broker.rules.usual_sections import properties_fields, user_properties
from broker.rules.values import Duration, Instant, canonical
from protocol import codec
from protocol.codec import Buffer, Described
from protocol.errors import ProtocolError

# sys. names as Service Bus spells them. First those of the properties section (AMQP 1.0 3.2.4), with their field.
_FIELDS: Final = {
    "MessageId": 0,
    "To": 2,
    "Label": 3,
    "ReplyTo": 4,
    "CorrelationId": 5,
    "ContentType": 6,
    "SessionId": 10,
    "ReplyToSessionId": 12,
}
# Then those of message annotations. Values that the broker knows better are `given` to the view.
_ANNOTATIONS: Final = {
    "DeadLetterSource": "x-opt-deadletter-source",
    "EnqueuedSequenceNumber": "x-opt-enqueue-sequence-number",
    "EnqueuedTimeUtc": "x-opt-enqueued-time",
    "LockedUntilUtc": "x-opt-locked-until",
    "PartitionKey": "x-opt-partition-key",
    "ScheduledEnqueueTimeUtc": "x-opt-scheduled-enqueue-time",
    "SequenceNumber": "x-opt-sequence-number",
    "State": "x-opt-message-state",
    "ViaPartitionKey": "x-opt-via-partition-key",
}
_ONLY_GIVEN: Final = ("DeliveryCount", "ExpiresAtUtc", "ForcePersistence", "LockToken", "Size", "TimeToLive")

SYSTEM_NAMES: Final = {name.lower(): name for name in (*_FIELDS, *_ANNOTATIONS, *_ONLY_GIVEN)} | {"subject": "Label"}
IN_PROPERTIES: Final = frozenset(name.lower() for name in _FIELDS)
_NAME_OF_ANNOTATION: Final = {annotation: name.lower() for name, annotation in _ANNOTATIONS.items()}

Getter = Callable[["MessageView"], Any]

MAX_STEPS: Final = 4_000_000  # for all rules of a topic and one message: at most some 25 ms
_NAME_STEPS: Final = 16  # the cost of comparing a name without regard to case


class MessageView:
    """A message for rules. Making one costs nothing; a section is decoded once, when it is first needed.

    `properties` and `application_properties` are the sections as encoded, with or without their descriptors, or a
    list and a map already decoded; None if the message has none. `annotations` are the pairs of the message
    annotations map, encoded one after the other, or a map. `given` are system properties that the broker knows and
    the message does not have (SequenceNumber: int, EnqueuedTimeUtc and ExpiresAtUtc: Timestamp, TimeToLive: Duration,
    Size: int), by their names in SYSTEM_NAMES, or a function that returns them; they win over annotations.

    `steps_left` is the work that all rules of the topic together may still spend on this message. One step is about the
    work of comparing one character. `tried` is the number of filters that `RuleSet.match` has tried on the message, one
    after the other. The other attributes below hold canonical values (broker.rules.values) by
    lower-case name, except `encoded`: the application properties as AMQP values by the names that they have. Each
    raises FilterError if the section's bytes are invalid.
    """

    steps_left: int
    tried: int
    user: dict[str, Any]
    encoded: dict[str, Any]
    system_properties: dict[str, Any]  # of the properties section
    other_system: dict[str, Any]

    __slots__ = (
        "_annotations",
        "_application_properties",
        "_given",
        "_properties",
        "encoded",
        "other_system",
        "steps_left",
        "system_properties",
        "tried",
        "user",
    )

    def __init__(
        self,
        properties: Buffer | Sequence[Any] | None = None,
        application_properties: Buffer | Mapping[str, Any] | None = None,
        annotations: Buffer | Mapping[Any, Any] | None = None,
        given: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        self._properties = properties
        self._application_properties = application_properties
        self._annotations = annotations
        self._given = given
        self.tried = 0

    def __getattr__(self, name: str) -> Any:
        """Called for attributes that are not set yet: decodes the section."""
        decode = _DECODERS.get(name)
        if decode is None:
            raise AttributeError(name)
        value = decode(self)
        setattr(self, name, value)
        return value

    def spend(self, steps: int) -> None:
        """Take so many steps from those left. Raises FilterError if they are too few; then nothing is left."""
        left = self.steps_left - steps
        if left >= 0:
            self.steps_left = left
            return
        self.steps_left = 0
        raise FilterError(
            f"the rules of the topic need more than {MAX_STEPS:,} steps for this message (characters that LIKE "
            "searches, characters of computed strings, and operators)"
        )

    def _decode_encoded(self) -> dict[str, Any]:
        section = _section(self._application_properties, "application properties", {})
        return {str(name): value for name, value in section.items()}

    def _decode_user(self) -> dict[str, Any]:
        """The properties by lower-case name; of names that differ only in case, the first counts."""
        section = self._application_properties
        if type(section) is bytes and section and (usual := user_properties(section)) is not None:
            return usual
        user: dict[str, Any] = {}
        for name, value in self.encoded.items():
            user.setdefault(name.lower(), canonical(value))
        return user

    def _decode_properties(self) -> dict[str, Any]:
        section = self._properties
        if type(section) is bytes and section and (usual := properties_fields(section)) is not None:
            return {name.lower(): usual[at] for name, at in _FIELDS.items() if at < len(usual)}
        fields = _section(section, "properties", ())
        count = len(fields)
        found = {name.lower(): canonical(fields[at]) for name, at in _FIELDS.items() if at < count}
        for name in ("messageid", "correlationid"):  # texts in Service Bus, whatever the AMQP type of the id is
            value = found.get(name)
            if type(value) is int or type(value) is UUID:
                found[name] = str(value)
        return found

    def _decode_other(self) -> dict[str, Any]:
        found = {
            _NAME_OF_ANNOTATION[key]: canonical(value)
            for key, value in _pairs(self._annotations).items()
            if isinstance(key, str) and key in _NAME_OF_ANNOTATION
        }
        given = self._given() if callable(self._given) else self._given
        for name, value in (given or {}).items():
            found[name.lower()] = canonical(value)
        return found


_DECODERS: Final[dict[str, Callable[[MessageView], Any]]] = {
    "steps_left": lambda message: MAX_STEPS,
    "encoded": MessageView._decode_encoded,
    "user": MessageView._decode_user,
    "system_properties": MessageView._decode_properties,
    "other_system": MessageView._decode_other,
}


def _section(section: Any, what: str, empty: Any) -> Any:
    """The list or map of a section, `empty` if there is none."""
    if section is None or (isinstance(section, bytes | bytearray | memoryview) and not section):
        return empty
    if isinstance(section, bytes | bytearray | memoryview):
        try:
            section = codec.decode_exactly(section)
        except ProtocolError as error:
            raise FilterError(f"the message's {what} cannot be read: {error}") from None
        if isinstance(section, Described):
            section = section.value
    if not isinstance(section, Mapping if isinstance(empty, dict) else Sequence):
        raise FilterError(f"the message's {what} are no {'map' if isinstance(empty, dict) else 'list'}")
    return section


def _pairs(annotations: Any) -> Mapping[Any, Any]:
    if annotations is None or isinstance(annotations, Mapping):
        return annotations or {}
    pairs = {}
    at = 0
    try:
        while at < len(annotations):
            key, at = codec.decode(annotations, at)
            value, at = codec.decode(annotations, at)
            if isinstance(key, str):
                pairs[key] = value
    except ProtocolError as error:
        raise FilterError(f"the message's annotations cannot be read: {error}") from None
    return pairs


def user_property(name: str) -> Getter:
    """Reads the application property of this name, in any case; None if there is none."""
    lower = name.lower()
    return lambda message: message.user.get(lower)


def system_property(name: str) -> Getter:
    """Reads a property of SYSTEM_NAMES, in any case; None if it has no value."""
    lower = SYSTEM_NAMES[name.lower()].lower()
    if lower in IN_PROPERTIES:
        return lambda message: message.system_properties.get(lower)
    return lambda message: message.other_system.get(lower)


def section_of(is_system: bool, lower: str) -> str:
    """The attribute of a MessageView from which the property of this lower-case name is read."""
    if not is_system:
        return "user"
    return "system_properties" if lower in IN_PROPERTIES else "other_system"


class Draft(MessageView):
    """A copy of a message that an action changes; only later reads of this copy see the changes."""

    __slots__ = ("_message", "original")

    def __init__(self, message: MessageView) -> None:
        super().__init__(message._properties, message._application_properties, message._annotations, message._given)
        self._message = message
        self.original = message.encoded
        self.spend(len(self.original))
        self.encoded = dict(message.encoded)
        self.user = dict(message.user)

    def spend(self, steps: int) -> None:
        self._message.spend(steps)

    def spelled(self, name: str) -> list[str]:
        """The names of application properties that equal `name` in any case; the one that counts is first."""
        lower = name.lower()
        self.spend(_NAME_STEPS * len(self.encoded))
        return [each for each in self.encoded if each.lower() == lower]

    def encoded_value(self, name: str) -> Any:
        """The AMQP value of an application property; None if there is none."""
        names = self.spelled(name)
        return self.encoded[names[0]] if names else None

    def set_user(self, name: str, value: Any) -> None:
        """Set a property. `name` is as spelled in the message, or new; `value` is an AMQP value."""
        self.encoded[name] = value
        self.user[name.lower()] = canonical(value)

    def remove_user(self, names: Sequence[str]) -> None:
        for name in names:
            del self.encoded[name]
            self.user.pop(name.lower(), None)

    def set_system(self, name: str, value: str | Instant | Duration | None) -> None:
        lower = name.lower()
        (self.system_properties if lower in IN_PROPERTIES else self.other_system)[lower] = value
