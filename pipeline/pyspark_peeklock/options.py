"""The options of `format("peeklock")`, checked when the query is planned.

Names are in any case, as everywhere in Spark. Credentials are never options: plans, logs and the UI show options. They
are in a file that `connectionStringFile` names, which each task reads when it connects, so that a new key is used
without a restart.
"""

import json
import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from difflib import get_close_matches
from enum import Enum
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


class Use(Enum):
    """What options are for, as errors call it."""

    BROWSE = "mode=browse"
    BATCH = "batch queries of mode=journal"
    STREAM = "streams of mode=journal"
    SINK = "writing"


_JOURNAL: Final = (Use.BATCH, Use.STREAM)
_READING: Final = (Use.BROWSE, *_JOURNAL)
_NAMES: Final[dict[tuple[Use, ...], tuple[str, ...]]] = {
    tuple(Use): ("connectionStringFile", "caFile", "entity"),
    (Use.SINK,): (
        *("idFromPosition", "sendAmqpMessage", "batchBytes", "maxInFlight", "sendTimeoutSeconds"),
        *("onBadRow", "badRowEntity"),
    ),
    # The endpoint is also for browsing with asOfOffsets.
    _READING: ("mode", "includeBody", "includeAmqpMessage", "minPartitions", "httpEndpoint", "retryTimeoutSeconds"),
    (Use.BROWSE,): ("subQueue", "asOfOffsets"),
    (Use.BROWSE, Use.BATCH): ("filterPushdown",),
    _JOURNAL: (
        "startingOffsets",
        "startingTimestamp",
        "startingOffsetsByTimestamp",
        "includeRecord",
        "failOnDataLoss",
        "capturePath",
    ),
    (Use.BATCH,): ("endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    (Use.STREAM,): (
        "maxMessagesPerTrigger",
        "maxOffsetsPerTrigger",
        "maxBytesPerTrigger",
        "minOffsetsPerTrigger",
        "maxTriggerDelay",
        "consumerName",
    ),
}
_USES: Final = {name.lower(): uses for uses, names in _NAMES.items() for name in names}
_KNOWN: Final = {name.lower(): name for names in _NAMES.values() for name in names}
# Options of Spark's source for Kafka that we do not have, with what is there instead.
_OF_KAFKA: Final = {
    "subscribe": "name the entity, or a pattern of entities, with option entity",
    "subscribepattern": "give a pattern such as orders* with option entity",
    "assign": "startingOffsets and endingOffsets choose what is read of a partition",
    "topic": "name the queue or topic with option entity",
    "includeheaders": "the column applicationProperties has them always",
    "groupidprefix": "a stream tells the broker what it has read with option consumerName",
    "maxrecordsperpartition": "option minPartitions makes more tasks",
    "startingoffsetsbytimestampstrategy": "a time behind the last row is the end",
    "fetchoffset.numretries": "retryTimeoutSeconds says how long the endpoint may be away",
    "fetchoffset.retryintervalms": "retryTimeoutSeconds says how long the endpoint may be away",
    "kafkaconsumer.polltimeoutms": "retryTimeoutSeconds says how long the endpoint may be away",
}
# Names of Kafka's clients, which its source takes with "kafka." before them, and of Event Hubs' source.
_OF_OTHERS: Final = {
    **dict.fromkeys(("bootstrap.servers", "security.protocol"), "connectionStringFile names the broker"),
    **dict.fromkeys(("group.id", "auto.offset.reset", "enable.auto.commit"), "Spark's checkpoint is the position"),
    "topics": "name the entity, or a pattern of entities, with option entity",
    "startingposition": "say where to begin with startingOffsets or startingTimestamp",
    "startingpositions": "say where to begin with startingOffsets or startingOffsetsByTimestamp",
    "endingposition": "say where to end with endingOffsets or endingTimestamp",
    "endingpositions": "say where to end with endingOffsets or endingOffsetsByTimestamp",
    "maxeventspertrigger": "option maxMessagesPerTrigger bounds a batch",
}
_MAX_PATTERN: Final = 1024  # characters
_SECRETS: Final = (
    "connectionstring",
    "eventhubs.connectionstring",
    "sharedaccesskey",
    "sharedaccesssignature",
    "password",
    "token",
    "sastoken",
)
_MAX_INTEGER: Final = (1 << 63) - 1


class Options:
    """Reads options by name. Raises InvalidOption with the option's name and what it may be."""

    def __init__(self, values: Mapping[str, str]) -> None:
        self._values = {name.lower(): value for name, value in values.items()}
        for name, value in self._values.items():
            if name in _SECRETS:
                raise InvalidOption(
                    f"option {name!r}: credentials are no option values, because plans and logs show them; write the "
                    "connection string to a file that only Spark can read, and name it with option connectionStringFile"
                )
            hint = _OF_KAFKA.get(
                name, "the broker is named with connectionStringFile" if name[:6] == "kafka." else None
            )
            if hint is not None:
                raise InvalidOption(f"option {name!r} is of Spark's source for Kafka, and is not here: {hint}")
            hint = _OF_OTHERS.get(
                name, "this source has others, for the same things" if name[:10] == "eventhubs." else None
            )
            if hint is not None:
                raise InvalidOption(f"option {name!r} is of another source, and is not here: {hint}")
            near = get_close_matches(name, _KNOWN, 1, cutoff=0.85)
            if near and name not in _KNOWN:  # Spark adds options of its own, so others cannot be refused
                raise InvalidOption(f"there is no option {name!r}; did you mean {_KNOWN[near[0]]!r}?")
            if name in _KNOWN:
                _check_text(_KNOWN[name], value)

    def check(self, use: Use) -> None:
        """Raise InvalidOption for an option that does not count there: else it would be ignored without a word."""
        for name in self._values:
            uses = _USES.get(name)
            if uses is not None and use not in uses and self.text(name) is not None:
                where = " and ".join(each.value for each in uses)
                raise InvalidOption(f"option '{_KNOWN[name]}' is for {where}, and does not count for {use.value}")

    def text(self, name: str, default: str | None = None) -> str | None:
        value = self._values.get(name.lower())
        return default if value is None else value.strip()

    def required(self, name: str, what: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidOption(f"option '{name}' is missing: {what}")
        return value

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        value = (self.text(name, default) or default).lower()
        found = {each.lower(): each for each in choices}.get(value)
        if found is None:
            raise InvalidOption(f"option '{name}' may be {' or '.join(choices)}, not {value[:100]!r}")
        return found

    def flag(self, name: str, default: bool) -> bool:
        return self.choice(name, ("true", "false"), str(default).lower()) == "true"

    def integer(self, name: str, least: int, default: int | None, most: int = _MAX_INTEGER) -> int | None:
        value = self.text(name)
        if value is None:
            return default
        # Of more digits than any limit has, Python makes no number.
        digits = (value.lstrip("0") or "0") if value.isascii() and value.isdigit() else ""
        if not 0 < len(digits) < 20 or not least <= int(digits) <= most:
            raise InvalidOption(f"option '{name}' may be a whole number from {least} to {most}, not {value[:100]!r}")
        return int(digits)


def _check_text(name: str, value: str) -> None:
    """Raise InvalidOption for a text that no option may have."""
    if not value.strip():
        raise InvalidOption(f"option '{name}' is empty: give it a value, or leave it out")
    if "\0" in value or not _is_unicode(value):
        raise InvalidOption(f"option '{name}' has characters that are no text: {value[:100]!r}")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a pair of surrogates
        return False
    return True


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
        """Read the connection string from its file. Raises InvalidOption, whose text has nothing of the content."""
        try:
            return ConnectionString.parse(Path(self.connection_string_file).read_text())
        except OSError as error:
            reason = error.strerror or str(error)
        except UnicodeDecodeError:
            reason = "it is no text"
        except InvalidConnectionString as error:
            reason = str(error)
        raise InvalidOption(f"option 'connectionStringFile': {self.connection_string_file}: {reason}")

    def trust_of(self, *, tls: bool) -> ssl.SSLContext | None:
        """The authorities to trust; None without TLS, but a file that has none is refused then, too.

        Raises InvalidOption.
        """
        found = self.trust() if tls or self.ca_file is not None else None
        return found if tls else None

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
    `on_bad_row`: fail, skip, or queue, with `bad_row_entity`.
    """

    access: Access
    entity: str
    is_id_from_position: bool
    sends_amqp_message: bool
    batch_bytes: int
    max_in_flight: int
    send_timeout_s: int
    on_bad_row: str
    bad_row_entity: str

    @classmethod
    def of(cls, options: Options) -> "SinkOptions":
        options.check(Use.SINK)
        on_bad_row = options.choice("onBadRow", ("fail", "skip", "queue"), "fail")
        if (on_bad_row == "queue") != (options.text("badRowEntity") is not None):
            raise InvalidOption("options 'onBadRow=queue' and 'badRowEntity', a queue or topic, are for each other")
        return cls(
            Access.of(options),
            options.text("entity", "") or "",
            bool(options.text("idFromPosition")) and options.choice("idFromPosition", (POSITION,), "") == POSITION,
            options.flag("sendAmqpMessage", False),
            options.integer("batchBytes", 1024, 128 * 1024, 1 << 20) or 0,
            options.integer("maxInFlight", 1, 16, 1000) or 0,
            options.integer("sendTimeoutSeconds", 1, 60, 86_400) or 0,
            on_bad_row,
            options.text("badRowEntity", "") or "",
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
    as_of_offsets: str | None
    http_endpoint: str
    retry_timeout_s: int

    @property
    def address(self) -> str:
        return self.entity + SUB_QUEUES[self.sub_queue]

    @classmethod
    def of(cls, options: Options) -> "BrowseOptions":
        options.check(Use.BROWSE)
        if options.text("asOfOffsets") is None:
            for name in ("httpEndpoint", "retryTimeoutSeconds"):
                if options.text(name) is not None:
                    raise InvalidOption(f"option '{name}' does not count for mode=browse without option 'asOfOffsets'")
        elif options.flag("filterPushdown", False):
            raise InvalidOption("option 'filterPushdown' does not count with option 'asOfOffsets'")
        return cls(
            Access.of(options),
            options.required("entity", "a queue, or topic/subscriptions/name"),
            options.choice("subQueue", tuple(SUB_QUEUES), "active"),
            options.flag("includeBody", True),
            options.flag("includeAmqpMessage", False),
            options.integer("minPartitions", 1, 1, 10_000) or 1,
            options.flag("filterPushdown", False),
            options.text("asOfOffsets"),
            options.text("httpEndpoint", "") or "",
            options.integer("retryTimeoutSeconds", 1, 60, 86_400) or 0,
        )


@dataclass(frozen=True, slots=True)
class Times:
    """Times by partition, and that of all others; None: they have none."""

    by_partition: Mapping[int, datetime]
    default: datetime | None

    def of(self, partition: int) -> datetime | None:
        return self.by_partition.get(partition, self.default)


@dataclass(frozen=True, slots=True)
class JournalOptions:
    """`entity` is a pattern such as `orders/*`, or None for all; offsets are texts, whose sense the journal gives.
    Where there are times, the offsets do not count.
    """

    access: Access
    http_endpoint: str
    entity: str | None
    starting_offsets: str
    ending_offsets: str
    starting_times: Times | None
    ending_times: Times | None
    max_messages: int | None
    max_bytes: int | None
    min_messages: int | None
    max_trigger_delay_s: float
    min_partitions: int
    pushes_filters: bool
    includes_body: bool
    includes_amqp_message: bool
    includes_record: bool
    fails_on_data_loss: bool
    retry_timeout_s: int
    capture_path: str | None
    consumer: str | None

    @classmethod
    def of(cls, options: Options, *, is_stream: bool) -> "JournalOptions":
        options.check(Use.STREAM if is_stream else Use.BATCH)
        ending = options.text("endingOffsets")
        if (ending or "").lower() == "earliest":
            raise InvalidOption("option 'endingOffsets' may be latest, or JSON, not earliest: that would be no rows")
        starting_times, ending_times = _times(options, "starting"), _times(options, "ending")
        begin, end = (None if each is None else each.default for each in (starting_times, ending_times))
        if begin is not None and end is not None and end < begin:
            raise InvalidOption("option 'endingTimestamp' is before 'startingTimestamp'")
        _one_of(options, "maxMessagesPerTrigger", "maxOffsetsPerTrigger")  # two names of one thing
        fewest = options.integer("minOffsetsPerTrigger", 1, None)
        most = options.integer("maxMessagesPerTrigger", 1, options.integer("maxOffsetsPerTrigger", 1, None))
        if fewest is None and options.text("maxTriggerDelay") is not None:
            raise InvalidOption("option 'maxTriggerDelay' does not count without option 'minOffsetsPerTrigger'")
        if fewest is not None and most is not None and fewest > most:
            raise InvalidOption("option 'minOffsetsPerTrigger' is larger than what a batch may have at most")
        return cls(
            Access.of(options),
            options.text("httpEndpoint", "") or "",
            _pattern(options.text("entity")),
            options.text("startingOffsets") or ("latest" if is_stream else "earliest"),
            ending or "latest",
            starting_times,
            ending_times,
            most,
            options.integer("maxBytesPerTrigger", 1, None),
            fewest,
            _seconds("maxTriggerDelay", options.text("maxTriggerDelay", "15m") or ""),
            options.integer("minPartitions", 1, 1, 10_000) or 1,
            options.flag("filterPushdown", False),
            options.flag("includeBody", True),
            options.flag("includeAmqpMessage", False),
            options.flag("includeRecord", False),
            options.flag("failOnDataLoss", True),
            options.integer("retryTimeoutSeconds", 1, 60, 86_400) or 0,
            _capture_path(options.text("capturePath")),
            _consumer(options.text("consumerName")),
        )


def _one_of(options: Options, *names: str) -> str | None:
    """The only one of these options that is given. Raises InvalidOption if there are several."""
    given = [name for name in names if options.text(name) is not None]
    if len(given) > 1:
        raise InvalidOption(f"options '{given[0]}' and '{given[1]}' cannot both be given")
    return given[0] if given else None


def _times(options: Options, which: Literal["starting", "ending"]) -> Times | None:
    """Read `startingTimestamp` or `startingOffsetsByTimestamp`, or those for the end; None if neither is given."""
    of_all, by_partition = f"{which}Timestamp", f"{which}OffsetsByTimestamp"
    given = _one_of(options, of_all, by_partition, f"{which}Offsets")
    if given == of_all:
        return Times({}, _instant(of_all, options.text(of_all) or ""))
    if given != by_partition:
        return None
    text = options.text(by_partition) or ""
    try:
        found = {partition_of(partition): str(time) for partition, time in json.loads(text).items()}
    except (ValueError, TypeError, AttributeError, RecursionError):
        what = 'may be JSON such as {"0": "2026-01-31T12:00:00Z"}'
        raise InvalidOption(f"option '{by_partition}' {what}, not {text[:100]!r}") from None
    return Times({partition: _instant(by_partition, time) for partition, time in found.items()}, None)


def partition_of(text: str) -> int:
    """The number of a partition, as JSON has it as a key. Raises ValueError."""
    if not re.fullmatch("0|[1-9][0-9]{0,9}", text):
        raise ValueError(f"{text[:50]!r} is no number of a partition")
    return int(text)


_UNITS_S: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}


def _seconds(name: str, text: str) -> float:
    """Read a span as Spark writes it, such as 15m, in seconds."""
    found = re.fullmatch(r"([0-9]{1,9})\s*(ms|s|m|min|h|d)", text.lower())
    if found is None:
        raise InvalidOption(f"option '{name}' may be a span such as 500ms, 30s, 15m or 1h, not {text[:100]!r}")
    return int(found[1]) * _UNITS_S[found[2]]


def _pattern(text: str | None) -> str | None:
    if text is not None and not (len(text) <= _MAX_PATTERN and text.isprintable()):
        what = f"may be a pattern of 1 to {_MAX_PATTERN} printable characters"
        raise InvalidOption(f"option 'entity' {what}, not {text[:100]!r}")
    return text


def _consumer(name: str | None) -> str | None:
    # A name of dots alone would be a step in the path of its URL.
    if name is not None and not re.fullmatch(r"(?!\.{1,2}$)[A-Za-z0-9._-]{1,100}", name):
        what = "must have 1 to 100 letters, digits, dots, underscores and hyphens, and is not '.' or '..'"
        raise InvalidOption(f"option 'consumerName' {what}: {name[:100]!r}")
    return name


def _capture_path(url: str | None) -> str | None:
    """Return the URL by pyarrow's name of its scheme, or a path made absolute: executors run elsewhere."""
    if url is None:
        return None
    if re.match(r"[^/]*://[^/@]*:[^/@]*@", url):
        raise InvalidOption(
            "option 'capturePath': credentials are no option values, because plans and logs show them; they come from "
            "the environment of the driver and the executors"
        )
    return re.sub("^s3[an]:", "s3:", url) if "://" in url else str(Path(url).absolute())


def _instant(name: str, text: str) -> datetime:
    """Read an instant in ISO 8601, or in milliseconds since 1970."""
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
