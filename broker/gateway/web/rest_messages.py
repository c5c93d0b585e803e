"""Messages as HTTP shows them: the BrokerProperties header, custom headers, the JSON of a batch (management.md 2)."""

import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from decimal import Decimal
from email.utils import format_datetime, parsedate_to_datetime
from typing import Any, Final
from uuid import UUID

from broker.errors import InvalidArgument
from protocol.client.messages import Message
from protocol.codec import Described, Long, Timestamp
from protocol.symbols import (
    ENQUEUE_SEQUENCE_NUMBER,
    ENQUEUED_TIME,
    LOCKED_UNTIL,
    MESSAGE_STATE,
    PARTITION_KEY,
    SCHEDULED_ENQUEUE_TIME,
    TIMESPAN,
    VIA_PARTITION_KEY,
)

MAX_TTL_MS = (1 << 32) - 1
MAX_BATCH = 4500  # messages
_FIELDS: Final = {
    "MessageId": "message_id",
    "CorrelationId": "correlation_id",
    "SessionId": "group_id",
    "Label": "subject",
    "ReplyTo": "reply_to",
    "ReplyToSessionId": "reply_to_group_id",
    "To": "to",
}
_KEYS: Final = {"PartitionKey": PARTITION_KEY, "ViaPartitionKey": VIA_PARTITION_KEY}
_STATES: Final = ("Active", "Deferred", "Scheduled")

# Names of headers that are never properties of a message, and prefixes of such.
_HEADERS: Final = frozenset({
    "accept", "accept-charset", "accept-encoding", "accept-language", "accept-ranges", "age", "allow",
    "authorization", "baggage", "brokerproperties", "cache-control", "connection", "content-disposition",
    "content-encoding", "content-language", "content-length", "content-location", "content-md5",
    "content-range", "content-type", "cookie", "correlation-context", "date", "dnt", "etag", "expect",
    "expires", "forwarded", "from", "host", "http2-settings", "if-match", "if-modified-since", "if-none-match",
    "if-range", "if-unmodified-since", "keep-alive", "last-modified", "location", "max-forwards", "origin",
    "pragma", "proxy-authenticate", "proxy-authorization", "proxy-connection", "range", "referer",
    "request-context", "request-id", "retry-after", "server", "servicebusdlqsupplementaryauthorization",
    "servicebussupplementaryauthorization", "set-cookie", "strict-transport-security", "te", "traceparent",
    "tracestate", "trailer", "transfer-encoding", "upgrade", "upgrade-insecure-requests", "user-agent", "vary",
    "via", "warning", "www-authenticate", "x-real-ip",
})  # fmt: skip
_PREFIXES: Final = ("x-ms-", "x-forwarded-", "sec-", "access-control-")
_TOKEN = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
_INTEGER = re.compile(r"[+-]?[0-9]{1,19}")
_TIME_SPAN = re.compile(r"(?:([0-9]{1,8})\.)?([0-9]{1,2}):([0-9]{1,2}):([0-9]{1,2}(?:\.[0-9]{1,7})?)", re.ASCII)
_FIRST_CENTURY = re.compile(r" (00[0-9]{2}) [0-9]{2}:")
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?")


def read_message(headers: Iterable[tuple[str, str]], body: bytes) -> Message:
    """The message of a request. Raises InvalidArgument."""
    properties: Mapping[str, Any] | None = None
    content_type = None
    custom: dict[str, tuple[str, str]] = {}  # by name in lower case: name and text
    for name, text in headers:
        lower = name.lower()
        if lower == "brokerproperties":
            if properties is not None:
                raise InvalidArgument("The request has BrokerProperties twice.")
            properties = _json(text, "BrokerProperties")
        elif lower == "content-type":
            content_type = text
        elif lower in custom:  # one list for HTTP, in whatever case
            first, so_far = custom[lower]
            custom[lower] = first, f"{so_far}, {text}"
        elif lower not in _HEADERS and not lower.startswith(_PREFIXES):
            custom[lower] = str(name), text  # aiohttp's are of a class of their own
    return _message(body, content_type, properties or {}, {name: _custom(text) for name, text in custom.values()})


def read_batch(body: bytes) -> list[Message]:
    """The messages of a request with many. Raises InvalidArgument."""
    items = _parsed(body, "The body")
    if not isinstance(items, list) or not 1 <= len(items) <= MAX_BATCH:
        raise InvalidArgument(f"The body is no JSON array of 1 to {MAX_BATCH} messages.")
    messages = []
    for at, item in enumerate(items):
        content = item.get("Body") if isinstance(item, dict) else None
        if not isinstance(content, str):
            raise InvalidArgument(f"Message {at} has no 'Body' that is text.")
        properties, custom = (item.get(name) or {} for name in ("BrokerProperties", "UserProperties"))
        if not isinstance(properties, dict) or not isinstance(custom, dict):
            raise InvalidArgument(f"'BrokerProperties' or 'UserProperties' of message {at} is no JSON object.")
        for name, value in custom.items():
            if isinstance(value, dict | list):
                raise InvalidArgument(f"The property '{name[:100]}' of message {at} is no text, number or boolean.")
            _utf8(name, "The name of a property")
        values = {name: _checked(value, name) for name, value in custom.items()}
        content_type = properties.get("ContentType")
        messages.append(
            _message(
                _utf8(content, "Body"), content_type if isinstance(content_type, str) else None, properties, values
            )
        )
    return messages


def _message(body: bytes, content_type: str | None, properties: Mapping[str, Any], custom: dict[str, Any]) -> Message:
    if content_type is not None and not (content_type.isascii() and content_type.isprintable()):
        raise InvalidArgument("The Content-Type has characters that are not allowed.")
    message = Message.of(body, content_type=content_type, application_properties=custom)
    known = {name.lower(): name for name in (*_FIELDS, *_KEYS, *_OTHERS)}
    seen = set[str]()
    for given, value in properties.items():
        name = known.get(given.lower())
        if name is None or value is None:
            continue
        if name in seen:
            raise InvalidArgument(f"'{name}' is in BrokerProperties twice.")
        seen.add(name)
        if name in _OTHERS:
            _OTHERS[name](message, value)
            continue
        if not isinstance(value, str):
            raise InvalidArgument(f"'{name}' of BrokerProperties is no text.")
        _utf8(value, name)
        if name in _KEYS:
            message.annotations[_KEYS[name]] = value
        else:
            setattr(message, _FIELDS[name], value)
    return message


def _time_to_live(message: Message, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e12:
        raise InvalidArgument("'TimeToLive' of BrokerProperties is no number of seconds above 0.")
    message.ttl_ms = min(MAX_TTL_MS, max(1, round(value * 1000)))


def _time_to_live_span(message: Message, value: Any) -> None:
    match = _TIME_SPAN.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise InvalidArgument("'TimeToLiveTimeSpan' of BrokerProperties is no time like 0.01:30:00.")
    days, hours, minutes, seconds = match.groups()
    total = ((int(days or 0) * 24 + int(hours)) * 60 + int(minutes)) * 60 + float(seconds)
    _time_to_live(message, total)


def _scheduled(message: Message, value: Any) -> None:
    at = _date(value) if isinstance(value, str) else None
    if at is None:
        raise InvalidArgument(
            "'ScheduledEnqueueTimeUtc' of BrokerProperties is no date like Sun, 06 Nov 2044 08:49:37 GMT."
        )
    message.annotations[SCHEDULED_ENQUEUE_TIME] = Timestamp(int(at.timestamp() * 1000))


_OTHERS: Final = {
    "TimeToLive": _time_to_live,
    "TimeToLiveTimeSpan": _time_to_live_span,
    "ScheduledEnqueueTimeUtc": _scheduled,
}


def _date(text: str) -> datetime | None:
    try:
        found = parsedate_to_datetime(text)
        if match := _FIRST_CENTURY.search(text):  # Python takes 0001, where .NET's dates begin, for 2001
            found = found.replace(year=int(match[1]))
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found


def _custom(text: str) -> Any:
    """The value of a custom header (management.md 2.4)."""
    text = text.strip()
    if len(text) >= 2 and text[0] == text[-1] == '"':
        content = text[1:-1]
        at = _date(content) if content.endswith("GMT") else None
        return _utf8_text(content) if at is None else Timestamp(int(at.timestamp() * 1000))
    if text in ("true", "false"):
        return text == "true"
    if _INTEGER.fullmatch(text) and -(1 << 63) <= int(text) < 1 << 63:
        return Long(int(text))
    if _NUMBER.fullmatch(text) and math.isfinite(number := float(text)):
        return number
    return _utf8_text(text)


def _checked(value: Any, name: str) -> Any:
    if isinstance(value, int) and not isinstance(value, bool):
        if not -(1 << 63) <= value < 1 << 63:
            raise InvalidArgument(f"The property '{name[:100]}' does not fit into 64 bits.")
        return Long(value)
    if isinstance(value, str):
        _utf8(value, name)
    return value


def _utf8(text: str, name: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"'{name[:100]}' is no valid Unicode.") from None


def _utf8_text(text: str) -> str:
    """Headers may hold bytes that are no UTF-8, which aiohttp gives as surrogates."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _json(text: str, name: str) -> Mapping[str, Any]:
    value = _parsed(text, name)
    if not isinstance(value, dict):
        raise InvalidArgument(f"{name} is no JSON object.")
    return value


def _parsed(text: str | bytes, name: str) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a name is repeated")
        return found

    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is no JSON")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise InvalidArgument(f"{name} is JSON that is nested too deeply.") from None
    except ValueError as error:
        raise InvalidArgument(f"{name} is no valid JSON: {error}.") from None


def write_headers(message: Message, lock_token: UUID | None) -> dict[str, str]:
    """The headers of an answer with this message; `lock_token` if it is locked."""
    annotations = message.annotations
    shown: dict[str, Any] = {"DeliveryCount": (message.delivery_count or 0) + 1}
    sequence_number = annotations.get(ENQUEUE_SEQUENCE_NUMBER)
    shown["EnqueuedSequenceNumber"] = sequence_number or 0
    _add_time(shown, "EnqueuedTimeUtc", annotations.get(ENQUEUED_TIME))
    if lock_token is not None:
        _add_time(shown, "LockedUntilUtc", annotations.get(LOCKED_UNTIL))
        shown["LockToken"] = str(lock_token)
    for name, field in _FIELDS.items():
        if (value := getattr(message, field)) is not None:
            shown[name] = value.hex() if isinstance(value, bytes) else str(value)
    if (key := annotations.get(PARTITION_KEY)) is not None:
        shown["PartitionKey"] = str(key)
    _add_time(shown, "ScheduledEnqueueTimeUtc", annotations.get(SCHEDULED_ENQUEUE_TIME))
    shown["SequenceNumber"] = message.sequence_number or 0
    state = annotations.get(MESSAGE_STATE) or 0
    shown["State"] = _STATES[state] if state in range(len(_STATES)) else _STATES[0]
    if message.ttl_ms is not None:
        shown["TimeToLive"] = message.ttl_ms / 1000
    headers = {"BrokerProperties": json.dumps(shown)}
    if message.content_type is not None:
        headers["Content-Type"] = _one_line(str(message.content_type))
    for name, value in message.application_properties.items():
        text = _shown(value)
        is_own = name.lower() in _HEADERS or name.lower().startswith(_PREFIXES)
        if text is not None and not is_own and _TOKEN.fullmatch(name):
            headers[name] = text
    return headers


def _shown(value: Any) -> str | None:
    """The value of a custom header, or None if it cannot be shown."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Timestamp):
        return None if (text := _time(value)) is None else f'"{text}"'
    if isinstance(value, int | float):
        return str(value) if math.isfinite(value) else None
    if isinstance(value, str | UUID):
        return f'"{_one_line(str(value))}"'
    if isinstance(value, Described) and value.descriptor == TIMESPAN and isinstance(value.value, int):
        return f"{Decimal(value.value).scaleb(-7):f}".rstrip("0").removesuffix(".")  # seconds; a tick is 100 ns
    return None


def _one_line(text: str) -> str:
    """Return the text without characters that would end a header."""
    return "".join(character if character.isprintable() else " " for character in text)


def _time(milliseconds: int) -> str | None:
    try:
        return format_datetime(datetime.fromtimestamp(milliseconds / 1000, UTC), usegmt=True)
    except (ValueError, OverflowError, OSError):
        return None


def _add_time(shown: dict[str, Any], name: str, milliseconds: Any) -> None:
    if isinstance(milliseconds, int) and (text := _time(milliseconds)) is not None:
        shown[name] = text
