"""The options of `format("peeklock")`, checked when the query is planned.

Names are in any case, as everywhere in Spark. Credentials are never options: plans, logs and the UI show options. They
are in a file that `connectionStringFile` names, which each task reads when it connects, so that a new key is used
without a restart.
"""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from pathlib import Path
from typing import Final, Literal

from protocol.client.connection_string import ConnectionString, InvalidConnectionString
from pyspark_peeklock.errors import InvalidOption

POSITION: Final = "queryId/batch/partition/row"

SUB_QUEUES: Final = {
    "active": "",
    "deadletter": "/$deadletterqueue",
    "transferdeadletter": "/$Transfer/$deadletterqueue",
}

_COMMON: Final = ("connectionStringFile", "caFile", "entity", "mode")
_SINK: Final = ("idFromPosition", "sendAmqpMessage", "batchBytes", "maxInFlight", "sendTimeoutSeconds")
_BROWSE: Final = ("subQueue", "includeBody", "includeAmqpMessage", "minPartitions", "filterPushdown")
_JOURNAL: Final = (
    "httpEndpoint",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "maxMessagesPerTrigger",
    "maxBytesPerTrigger",
    "includeRecord",
    "failOnDataLoss",
    "retryTimeoutSeconds",
)
_KNOWN: Final = {name.lower(): name for name in (*_COMMON, *_SINK, *_BROWSE, *_JOURNAL)}
_SECRETS: Final = ("connectionstring", "sharedaccesskey", "sharedaccesssignature", "password", "token", "sastoken")
_MAX_INTEGER: Final = (1 << 63) - 1


class Options:
    """Reads options by name. Raises InvalidOption with the option's name and what it may be."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in values.items()}
        for name in self._values:
            if name in _SECRETS:
                raise InvalidOption(
                    f"option {name!r}: credentials are no option values, because plans and logs show them; write the "
                    "connection string to a file that only Spark can read, and name it with option connectionStringFile"
                )
            near = get_close_matches(name, _KNOWN, 1, cutoff=0.85)
            if near and name not in _KNOWN:  # Spark adds options of its own, so others cannot be refused
                raise InvalidOption(f"there is no option {name!r}; did you mean {_KNOWN[near[0]]!r}?")

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._values.get(name.lower())
        return default if value is None or not value.strip() else value.strip()

    def required(self, name: str, what: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidOption(f"option '{name}' is missing: {what}")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = (self.text(name, default) or default).lower()
        found = {each.lower(): each for each in choices}.get(value)
        if found is None:
            raise InvalidOption(f"option '{name}' may be {' or '.join(choices)}, not {value!r}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def integer(self, name: str, least: int, default: int | None, most: int = _MAX_INTEGER) -> int | None:
        value = self.text(name)
        if value is None:
            return default
        if not (value.isascii() and value.isdigit()) or not least <= int(value[:20]) <= most:
            raise InvalidOption(f"option '{name}' may be a whole number from {least} to {most}, not {value[:100]!r}")
        return int(value)


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the broker; has no secret."""

    connection_string_file: str
    ca_file: str | None

    @classmethod
    def of(cls, options: Options) -> "Access":
        path = options.required("connectionStringFile", "the path of a file with the broker's connection string")
        return cls(path, options.text("caFile"))

    def connection_string(self) -> ConnectionString:
        """Raises InvalidOption; its text has nothing of the file's content."""
        try:
            return ConnectionString.parse(Path(self.connection_string_file).read_text())
        except OSError as error:
            reason = error.strerror or str(error)
        except UnicodeDecodeError:
            reason = "it is no text"
        except InvalidConnectionString as error:
            reason = str(error)
        raise InvalidOption(f"option 'connectionStringFile': {self.connection_string_file}: {reason}")

    def trust(self) -> ssl.SSLContext:
        """The authorities to trust with TLS. Raises InvalidOption."""
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise InvalidOption(f"option 'caFile': {self.ca_file}: {error.strerror or error}") from None


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """`entity` may be empty if a column names it. `batch_bytes` bounds a transfer, `max_in_flight` counts transfers.

    `sends_amqp_message`: the column `amqpMessage` is sent as it is, and no message is made of other columns.
    """

    access: Access
    entity: str
    is_id_from_position: bool
    sends_amqp_message: bool
    batch_bytes: int
    max_in_flight: int
    send_timeout_s: int

    @classmethod
    def of(cls, options: Options) -> "SinkOptions":
        return cls(
            Access.of(options),
            options.text("entity", "") or "",
            bool(options.text("idFromPosition")) and options.choice("idFromPosition", (POSITION,), "") == POSITION,
            options.flag("sendAmqpMessage", False),
            options.integer("batchBytes", 1024, 128 * 1024, 1 << 20) or 0,
            options.integer("maxInFlight", 1, 16, 1000) or 0,
            options.integer("sendTimeoutSeconds", 1, 60, 86_400) or 0,
        )


@dataclass(frozen=True, slots=True)
class BrowseOptions:
    access: Access
    entity: str
    sub_queue: str
    includes_body: bool
    includes_amqp_message: bool
    min_partitions: int
    pushes_filters: bool

    @property
    def address(self) -> str:
        return self.entity + SUB_QUEUES[self.sub_queue]

    @classmethod
    def of(cls, options: Options) -> "BrowseOptions":
        return cls(
            Access.of(options),
            options.required("entity", "a queue, or topic/subscriptions/name"),
            options.choice("subQueue", tuple(SUB_QUEUES), "active"),
            options.flag("includeBody", True),
            options.flag("includeAmqpMessage", False),
            options.integer("minPartitions", 1, 1, 10_000) or 1,
            options.flag("filterPushdown", False),
        )


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """`entity` is a pattern such as `orders/*`, or None for all; positions are texts, whose sense the journal gives."""

    access: Access
    http_endpoint: str
    entity: str | None
    starting_offsets: str
    ending_offsets: str
    starting_timestamp: datetime | None
    max_messages: int | None
    max_bytes: int | None
    min_partitions: int
    includes_body: bool
    includes_record: bool
    fails_on_data_loss: bool
    retry_timeout_s: int

    @classmethod
    def of(cls, options: Options, *, is_stream: bool) -> "JournalOptions":
        ending, starting = options.text("endingOffsets"), options.text("startingOffsets")
        if is_stream and ending is not None:
            raise InvalidOption("option 'endingOffsets' is for batch queries: a stream has no end")
        if (ending or "").lower() == "earliest":
            raise InvalidOption("option 'endingOffsets' may be latest, or JSON, not earliest: that would be no rows")
        timestamp = options.text("startingTimestamp")
        if timestamp is not None and starting is not None:
            raise InvalidOption("options 'startingOffsets' and 'startingTimestamp' cannot both be given")
        return cls(
            Access.of(options),
            options.text("httpEndpoint", "") or "",
            options.text("entity"),
            starting or ("latest" if is_stream else "earliest"),
            ending or "latest",
            None if timestamp is None else _instant("startingTimestamp", timestamp),
            options.integer("maxMessagesPerTrigger", 1, None),
            options.integer("maxBytesPerTrigger", 1, None),
            options.integer("minPartitions", 1, 1, 10_000) or 1,
            options.flag("includeBody", True),
            options.flag("includeRecord", False),
            options.flag("failOnDataLoss", True),
            options.integer("retryTimeoutSeconds", 1, 60, 86_400) or 0,
        )


def _instant(name: str, text: str) -> datetime:
    """Of ISO 8601, or of milliseconds since 1970."""
    try:
        if text.isascii() and text.isdigit():
            return datetime.fromtimestamp(int(text) / 1000, UTC)
        found = datetime.fromisoformat(text)
        return found if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError, OSError):
        what = "may be a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970"
        raise InvalidOption(f"option '{name}' {what}, not {text[:100]!r}") from None


def mode_of(options: Options, default: Literal["browse", "journal"]) -> str:
    return options.choice("mode", ("browse", "journal"), default)
