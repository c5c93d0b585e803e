"""The settings of a broker: one frozen model, read once and passed down.

`broker.settings.sources` reads it from flags, environment and file; children get it as JSON, secrets included, on their
standard input (`model_dump_json`, `model_validate_json`). Its repr holds no secret.
"""

import ipaddress
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import AfterValidator, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from broker.administration.address import parse_http_address
from broker.namespace.entities import (
    DAY_MS,
    MAX_LOCK_MS,
    MINUTE_MS,
    SECOND_MS,
    AuthorizationRule,
    Description,
    Frozen,
    QueueDescription,
    Right,
    SubscriptionDescription,
    SubscriptionProperties,
    TopicDescription,
)
from broker.namespace.rule_descriptions import RuleDescription
from broker.namespace.tiers import Sku, refusals
from broker.settings import placement
from broker.settings.addresses import parse_address
from protocol.client.connection_string import ConnectionString, InvalidConnectionString
from protocol.host_names import DEFAULT_HOST_NAMES, is_pattern

IDLE_POLL_SECONDS = 400e-6  # as long as an answer takes, whose processes were woken for it, and a third more
KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_MESSAGE_BYTES = 100 * MIB
MAX_PARTITIONS = 64
MAX_SUBSCRIPTIONS = 2000  # of one topic
MAX_RULES = 100_000  # of one topic, and so of one subscription
FORWARDING = ("forward_to", "forward_dead_lettered_messages_to")

Host = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[0-9A-Za-z.:_%-]+$")]
Secret = Annotated[str, StringConstraints(min_length=1, max_length=256)]


def _is_host_pattern(text: str) -> str:
    if not is_pattern(text):
        raise PydanticCustomError("host_pattern", "is no name of a host, nor one with *. before it")
    return text


HostPattern = Annotated[str, AfterValidator(_is_host_pattern)]


class ConfigurationError(Exception):
    """The settings cannot be used. The text is for the user: what is wrong, where, and the fix."""


class NoRoom(ConfigurationError):
    """The disk has no room for a start. Another one finds some when there is."""


Place = tuple[str | int, ...]
"""Where a value is in the settings: ("queues", 0, "name")."""


class Origin(NamedTuple):
    """The place where a value was set, as the user spells it, and the value written there."""

    spelling: str
    value: Any


class Problem(NamedTuple):
    """What is wrong with the value at a place, which is spelled as the user spells it."""

    spelling: str
    text: str


class Refusal(NamedTuple):
    """Why an entity cannot be as it is declared: beside stored ones, or beside others that are declared.

    Without a `field` it is the entity as a whole.
    """

    kind: str
    path: str
    field: str | None
    problem: str

    def __str__(self) -> str:
        what = f"{self.field} {self.problem}" if self.field else self.problem
        return f"{self.kind} {self.path!r}: {what}"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class JournalMode(StrEnum):
    OFF = "off"
    EVENTS = "events"
    BODIES = "bodies"


class ForwardingFailures(StrEnum):
    TRANSFER_DEAD_LETTER = "transfer_dead_letter"
    DEAD_LETTER = "dead_letter"


class ClientCertificates(StrEnum):
    REQUIRED = "required"
    OPTIONAL = "optional"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def inconsistent(text: str, *places: str) -> PydanticCustomError:
    """An error for settings that contradict each other. `places` are dotted, relative to the section that raises it."""
    return PydanticCustomError("inconsistent", "{text}", {"text": text, "places": places})


def _refuse_duplicates(what: str, place: str, names: list[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise inconsistent(f"{what} {name!r} is declared twice; remove one", place)
        seen.add(name)


class Amqp(Frozen):
    """The AMQP listener and the limits of its connections."""

    host: Host = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 or :: for all.")
    port: int | None = Field(
        5672, ge=0, le=65535, description="Port for plain TCP; 0 takes any free port, off disables plain TCP."
    )
    tls_port: int | None = Field(None, ge=0, le=65535, description="Port for TLS, usually 5671; off disables TLS.")
    max_frame_size_bytes: int = Field(64 * KIB, ge=512, le=MIB, description="Largest frame accepted from a peer.")
    idle_time_out_ms: int = Field(
        240 * SECOND_MS, ge=SECOND_MS, le=DAY_MS, description="Silence after which a connection is closed."
    )
    sasl_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has to finish SASL after connecting."
    )
    open_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has to send open after SASL."
    )
    cbs_timeout_ms: int = Field(
        20 * SECOND_MS,
        ge=100,
        le=10 * MINUTE_MS,
        description="Time a peer has after open to send its first valid token.",
    )
    write_stall_timeout_ms: int = Field(
        30 * SECOND_MS,
        ge=100,
        le=DAY_MS,
        description="Time a peer may leave its output unread before its connection is closed.",
    )
    max_connections: int = Field(
        6000, ge=1, le=100_000, description="Connections at once in one gateway, those in the TLS handshake included."
    )
    max_sessions_per_connection: int = Field(5000, ge=1, le=65_536, description="AMQP sessions on one connection.")
    max_links_per_session: int = Field(256, ge=1, le=65_536, description="Links in one AMQP session.")
    max_links_per_connection: int = Field(5000, ge=1, le=65_536, description="Links on one connection.")
    max_temporary_entities_per_connection: int = Field(
        256,
        ge=0,
        le=5000,
        description="Temporary queues and topics, and subscriptions that are not durable, of one connection.",
    )
    max_state_bytes_per_connection: int = Field(
        128 * MIB,
        ge=MIB,
        le=GIB,
        description="Memory for the sessions and links of one connection, by an estimate that is never too low.",
    )
    max_unfinished_bytes_per_connection: int = Field(
        64 * MIB,
        ge=MIB,
        le=64 * GIB,
        description="Bytes of messages that one connection has begun to send and not ended; 4 messages of the "
        "largest size are always allowed.",
    )
    max_unfinished_bytes: int = Field(
        512 * MIB,
        ge=MIB,
        le=1024 * GIB,
        description="Bytes of messages begun and not ended on all connections of one gateway; 16 messages of the "
        "largest size are always allowed.",
    )
    sender_credit: int = Field(
        1000, ge=1, le=100_000, description="Messages a sender may have in flight, on one link (its credit)."
    )
    receiver_window: int = Field(
        2000,
        ge=1,
        le=100_000,
        description="Messages that a gateway asks a partition for at once, at most, for one link. It asks for no more "
        "than can be sent to the client when they come.",
    )
    max_unsettled_per_link: int = Field(
        50_000, ge=1, le=1_000_000, description="Messages that are handed out on one link and not settled yet, at most."
    )
    max_message_size_bytes: int = Field(
        MIB,
        ge=KIB,
        le=MAX_MESSAGE_BYTES,
        description="Largest message accepted; a queue or topic may set a lower limit.",
    )
    max_output_buffer_bytes: int = Field(
        8 * MIB,
        ge=64 * KIB,
        le=GIB,
        description="Output that one connection may have unsent; beyond it, deliveries wait.",
    )
    max_connections_bytes: int = Field(
        GIB,
        ge=64 * MIB,
        le=2048 * GIB,
        description="Memory for all connections of one gateway, those of HTTP included: input, unfinished messages, "
        "state and output. Near it, those that hold most are closed. Unfinished messages have half of it, and "
        "512 MiB, at most. 32 messages of the largest size are always allowed.",
    )

    @property
    def channel_max(self) -> int:
        """The highest channel number, as open carries it (2.7.1)."""
        return self.max_sessions_per_connection - 1

    @property
    def unfinished_bytes_per_connection(self) -> int:
        return max(self.max_unfinished_bytes_per_connection, 4 * self.max_message_size_bytes)

    @property
    def unfinished_bytes(self) -> int:
        return max(self.max_unfinished_bytes, 16 * self.max_message_size_bytes)

    @property
    def connections_bytes(self) -> int:
        return max(self.max_connections_bytes, 32 * self.max_message_size_bytes)

    @property
    def handle_max(self) -> int:
        """The highest handle, as begin carries it (2.7.2)."""
        return self.max_links_per_session - 1

    @model_validator(mode="after")
    def _unfinished_has_half(self) -> Self:
        """Settings of an earlier version, which had no budget for all, keep their meaning."""
        if 2 * self.max_unfinished_bytes <= self.max_connections_bytes:
            return self
        if "max_connections_bytes" not in self.model_fields_set:
            return self.model_copy(update={"max_connections_bytes": 2 * self.max_unfinished_bytes})
        if "max_unfinished_bytes" not in self.model_fields_set:
            return self.model_copy(update={"max_unfinished_bytes": self.max_connections_bytes // 2})
        raise inconsistent(
            f"is more than half of amqp.max_connections_bytes, which is {self.max_connections_bytes}; set it lower, or "
            "that higher",
            "max_unfinished_bytes",
        )

    @model_validator(mode="after")
    def _somebody_can_connect(self) -> Self:
        if self.port is None and self.tls_port is None:
            raise inconsistent("is off, and so is tls_port: nobody could connect; set one of them", "port")
        return self


class Tls(Frozen):
    """TLS for AMQP (`amqp.tls_port`) and HTTP (`http.tls_port`). The files are read again at SIGHUP."""

    certificate: Path | None = Field(None, description="PEM file with the server's certificate and its chain.")
    key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    client_ca: Path | None = Field(
        None, description="PEM file of authorities for the certificates of clients; off asks for no certificate."
    )
    client_certificates: ClientCertificates = Field(
        ClientCertificates.REQUIRED,
        description="With client_ca: whether a client without a certificate is refused, or needs a key as without TLS.",
    )
    handshake_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has for the TLS handshake."
    )

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            given, missing = ("certificate", "key") if self.key is None else ("key", "certificate")
            raise inconsistent(f"has no effect without tls.{missing}; set both", given)
        if self.client_ca is not None and self.certificate is None:
            raise inconsistent("has no effect without tls.certificate and tls.key; set them", "client_ca")
        return self


class Ops(Frozen):
    """The HTTP endpoint for operators: metrics and health."""

    host: Host = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 or :: for all.")
    port: int | None = Field(
        9464, ge=0, le=65535, description="Port; 0 takes any free port, off disables the endpoint."
    )


class Http(Frozen):
    """The HTTP listener: management, sending and receiving by requests, AMQP over WebSockets."""

    host: Host = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 or :: for all.")
    port: int | None = Field(
        5300, ge=0, le=65535, description="Port for plain HTTP; 0 takes any free port, off disables plain HTTP."
    )
    tls_port: int | None = Field(None, ge=0, le=65535, description="Port for HTTPS, usually 443; off disables HTTPS.")
    max_connections: int = Field(
        1000,
        ge=1,
        le=100_000,
        description="Connections at once in one gateway, besides WebSockets that carry AMQP. A new one takes the place "
        "of one that waits for its next request.",
    )


class Stores(Frozen):
    """The partitions' stores on disk."""

    map_size_bytes: int = Field(
        64 * GIB,
        ge=16 * MIB,
        le=1024 * 1024 * GIB,
        description="Size that a partition's store may grow to; the file is sparse, so unused space takes no disk.",
    )
    send_watermark: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="Used share of the store above which sends are refused; receiving still works. A quarter of the "
        "store, or 16 MiB if that is less, stays free in any case.",
    )
    min_free_disk_bytes: int = Field(
        256 * MIB, ge=0, le=1024 * 1024 * GIB, description="Free disk space below which sends are refused."
    )
    log_bytes: int = Field(
        64 * MIB,
        ge=8 * MIB,
        le=64 * GIB,
        description="Changes that a worker has logged and its stores have not, at most; they are in memory, too, where "
        "small ones take up to four times as much. Sends are refused beyond it; 4 messages of the largest size are "
        "always allowed.",
    )


class Partitioning(Frozen):
    """Partitioned queues and topics, which are on all partitions."""

    default: bool = Field(
        False,
        description="Partition new queues and topics whose declarations do not say enable_partitioning.",
    )
    max_entities: int = Field(
        100, ge=0, le=10_000, description="Partitioned queues and topics that the namespace may have."
    )


def _is_address(text: str) -> str:
    try:
        parse_address(text)
    except ValueError as error:
        raise PydanticCustomError("address", "{text}", {"text": str(error)}) from None
    return text


HostAndPort = Annotated[str, AfterValidator(_is_address)]


class Cluster(Frozen):
    """A namespace on several machines: for `peeklock worker` and `peeklock gateway`."""

    workers: tuple[HostAndPort, ...] = Field(
        (), max_length=MAX_PARTITIONS, description="Addresses of all workers of the namespace, as host:port."
    )
    listen: HostAndPort | None = Field(None, description="Address at which this worker listens, as host:port.")
    owned: tuple[Annotated[int, Field(ge=0, lt=MAX_PARTITIONS)], ...] = Field(
        (),
        max_length=MAX_PARTITIONS,
        description="Partitions of this worker; partition 0 is the home of the namespace.",
    )
    journals: tuple[HostAndPort, ...] = Field(
        (),
        max_length=MAX_PARTITIONS,
        description="Addresses of the workers' journals, as host:port, in the order of `cluster.workers`.",
    )
    journal_listen: HostAndPort | None = Field(
        None, description="Address at which the journal of this worker listens, as host:port."
    )
    heartbeat_timeout_ms: int = Field(
        10 * SECOND_MS,
        ge=3 * SECOND_MS,
        le=10 * SECOND_MS,
        description="Processes on several machines give each other a sign of life each second. One from which nothing "
        "has come for this long is taken for dead, as if its machine had lost its power. A worker that only waits for "
        "its disk is not: worker_stall_timeout_ms says how long it may. The same in all processes of the namespace.",
    )
    certificate: Path | None = Field(
        None,
        description="PEM file with the certificate, and its chain, that this process shows to the others. A worker's "
        "has the name by which the others reach it.",
    )
    key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    ca: Path | None = Field(
        None, description="PEM file of the authorities whose certificates the other processes must have."
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _refuse_duplicates("worker", "workers", [str(parse_address(each)).lower() for each in self.workers])
        _refuse_duplicates("partition", "owned", [str(each) for each in self.owned])
        _refuse_duplicates("journal", "journals", [str(parse_address(each)).lower() for each in self.journals])
        if self.journals and len(self.journals) != len(self.workers):
            raise inconsistent(
                f"has {len(self.journals)} addresses, and there are {len(self.workers)} workers; each has a journal of "
                "its own, in the same order",
                "journals",
            )
        files = {"certificate": self.certificate, "key": self.key, "ca": self.ca}
        missing = [name for name, path in files.items() if path is None]
        if missing and len(missing) < len(files):
            raise inconsistent(f"is missing; certificate, key and ca belong together, {missing[0]} too", missing[0])
        if missing:
            addresses = [
                *(("workers", each) for each in self.workers),
                *(("journals", each) for each in self.journals),
                *(("listen", self.listen), ("journal_listen", self.journal_listen)),
            ]
            for name, text in addresses:
                if text is not None and not parse_address(text).is_loopback:
                    raise inconsistent(
                        f"has {text}: beyond this machine the processes need cluster.certificate, key and ca", name
                    )
        return self


def _is_connection_string(text: str) -> str:
    try:
        ConnectionString.parse(text)
    except InvalidConnectionString as error:
        raise PydanticCustomError("connection_string", "{text}", {"text": str(error)}) from None
    return text


def _is_http_address(text: str) -> str:
    try:
        parse_http_address(text)
    except ValueError as error:
        raise PydanticCustomError("http_address", "{text}", {"text": str(error)}) from None
    return text


class Syphon(Frozen):
    """A syphon that the broker runs, if its namespace has the backlog of another one."""

    primary: Annotated[str, StringConstraints(max_length=4096), AfterValidator(_is_connection_string)] | None = Field(
        None,
        repr=False,
        description="Connection string of the primary namespace, to which a process of this broker brings what is in "
        "the backlog here. It has a key, so the variable is a better place for it than a file that others may read.",
    )
    primary_http: Annotated[str, StringConstraints(max_length=1024), AfterValidator(_is_http_address)] | None = Field(
        None,
        description="Address of the primary for HTTP; off is http://HOST:5300 if its connection string is for plain "
        "AMQP, else https://HOST.",
    )
    primary_name: (
        Annotated[str, StringConstraints(max_length=200, pattern=r"^[A-Za-z0-9](?:[A-Za-z0-9_.~-]*[A-Za-z0-9_-])?$")]
        | None
    ) = Field(
        None,
        description="The primary's name in the paths of the backlog queues; off is the first part of its host name.",
    )
    backlog_queues: int = Field(10, ge=1, le=1000, description="Backlog queues of the pairing. Missing ones are made.")
    rate: float | None = Field(
        None, gt=0, le=1_000_000, description="Messages that it moves in a second, at most; off is no limit."
    )
    ca: Path | None = Field(
        None, description="PEM file of the authorities to trust with TLS to the primary; off trusts the system's."
    )


class Journal(Frozen):
    """The journal: what happened to each message, to be read as data."""

    mode: JournalMode = Field(
        JournalMode.OFF,
        description="What is journaled of messages: nothing, events, or events and the messages themselves. If it "
        "is not off for some, a process more writes the journal, and serves it at /$journal of the HTTP listener.",
    )
    modes: dict[Annotated[str, StringConstraints(min_length=1, max_length=300)], JournalMode] = Field(
        {},
        max_length=1000,
        description="The mode of some entities, by patterns of their paths, as `orders`, `audit-*` or "
        "`prices/subscriptions/*`: the first that fits counts, and without one `journal.mode`.",
    )
    retention_hours: int = Field(
        168, ge=1, le=100 * 366 * 24, description="Time that rows are kept. They are deleted by files of up to an hour."
    )
    retention_bytes: int = Field(
        16 * GIB,
        ge=64 * MIB,
        le=1024 * 1024 * GIB,
        description="Size of all journal files, beyond which the oldest are deleted.",
    )
    hold_for: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,100}$")], ...] = Field(
        (),
        max_length=16,
        description="Names of consumers, as `capture`. Files that one of them has not read are kept beyond "
        "`journal.retention_hours` and `journal.retention_bytes`, up to `journal.held_bytes`.",
    )
    held_bytes: int = Field(
        64 * GIB,
        ge=64 * MIB,
        le=1024 * 1024 * GIB,
        description="Size of all journal files, beyond which even those are deleted that a consumer has not read.",
    )
    backlog_bytes: int = Field(
        256 * MIB,
        ge=8 * MIB,
        le=1024 * GIB,
        description="Log that a worker keeps for the journal, while that is behind. Beyond it the journal has a gap.",
    )

    @property
    def is_on(self) -> bool:
        """True if any entity may be journaled."""
        return self.mode is not JournalMode.OFF or any(mode is not JournalMode.OFF for mode in self.modes.values())


class Delivery(Frozen):
    """How messages are handed out."""

    keep_locks_of_broken_connections: bool = Field(
        False,
        description="When a connection breaks, keep its locks until they expire, as the cloud does; "
        "else the messages are available at once and each delivery that left the broker counts as failed.",
    )
    max_lock_duration_ms: int = Field(
        5 * MINUTE_MS,
        ge=5 * MINUTE_MS,
        le=MAX_LOCK_MS,
        description="Longest lock_duration_ms that an entity may have. The cloud has 5 minutes; clients that renew "
        "locks do not need more.",
    )
    abandon_delays: bool = Field(
        False,
        description="A message that is abandoned with the property peeklock:delay-ms is available again so many "
        "milliseconds later, and the property is not stored. Else it is a property like others, as in the cloud.",
    )
    receive_active_by_number: bool = Field(
        False,
        description="The SDKs' request for deferred messages, which names them by their sequence numbers, receives "
        "active messages, too, for example those of a dead-letter queue. Else it does not find them, as in the cloud, "
        "unless it has peeklock:active.",
    )


class Expiry(Frozen):
    """What happens to messages whose time to live has ended."""

    timer: bool = Field(
        False,
        description="Where expired messages are dead-lettered, they move when their time comes, by a timer. Else they "
        "move while somebody receives from the entity, and by the timer only if the entity forwards its messages or "
        "its dead-lettered messages.",
    )


class Forwarding(Frozen):
    """What happens to messages that cannot be forwarded."""

    failures: ForwardingFailures = Field(
        ForwardingFailures.TRANSFER_DEAD_LETTER,
        description="The queue of the source for messages that can never be forwarded, because they made more than "
        "four hops or the destination is disabled, missing or over its size: `transfer_dead_letter` is its transfer "
        "dead-letter queue, and `dead_letter` its dead-letter queue, as in the cloud. Messages that clients send "
        "through an entity, and dead-lettered messages that cannot be forwarded, always go to the transfer "
        "dead-letter queue. What is in either queue stays there when this is changed.",
    )


class Certificate(Frozen):
    """What the holders of certificates with one name may do."""

    name: Annotated[str, StringConstraints(min_length=1, max_length=256)] = Field(
        description="The common name of the certificate, or an alternative name (DNS, URI, e-mail)."
    )
    rights: frozenset[Right] = Field(min_length=1, description="Any of Listen, Send and Manage.")
    entity: Annotated[str, StringConstraints(max_length=260)] | None = Field(
        None, description="The queue or topic that the rights are for; off is the whole namespace."
    )


class Security(Frozen):
    """Who may do what."""

    root_key: Secret | None = Field(
        None,
        repr=False,
        description="Key of RootManageSharedAccessKey; off makes a random key and keeps it in the file root-key of "
        "data_dir.",
    )
    root_secondary_key: Secret | None = Field(
        None,
        repr=False,
        description="A second key of RootManageSharedAccessKey, so that clients can change from one key to another; "
        "off takes the second line of the file root-key, if there is one.",
    )
    authorization_rules: tuple[AuthorizationRule, ...] = Field(
        (), max_length=12, description="Shared access keys for the whole namespace, beside the root key."
    )
    certificates: tuple[Certificate, ...] = Field(
        (),
        max_length=1000,
        description="Rights of clients by the names in their certificates, which an authority of tls.client_ca has "
        "signed. With SASL EXTERNAL, and with HTTP, they need no key.",
    )
    host_names: tuple[HostPattern, ...] = Field(
        DEFAULT_HOST_NAMES,
        max_length=1000,
        description="Names of the broker, such as `queues.example.com` or `*.example.com`, beside those of its "
        "certificate and the addresses that it listens on. A token whose resource has no scheme, as Go's programs make "
        "it, may begin with one of them; any other name is that of an entity.",
    )
    allow_anonymous: bool = Field(
        False, description="Let clients without a key do everything. For development; loopback addresses only."
    )

    @model_validator(mode="after")
    def _key_names_differ(self) -> Self:
        names = [rule.key_name for rule in self.authorization_rules]
        _refuse_duplicates("authorization rule", "authorization_rules", ["RootManageSharedAccessKey", *names])
        held = [f"{each.name} at {each.entity or 'the namespace'}" for each in self.certificates]
        _refuse_duplicates("certificate", "certificates", held)
        return self


class Log(Frozen):
    """Logs, on standard error."""

    level: LogLevel = Field(LogLevel.INFO, description="Lowest level that is logged.")
    format: LogFormat = Field(LogFormat.AUTO, description="JSON lines or console; auto is console on a terminal.")


class DeclaredSubscription(SubscriptionProperties):
    """A subscription as it is declared, below its topic."""

    rules: tuple[RuleDescription, ...] | None = Field(
        None,
        max_length=MAX_RULES,
        description="The rules of the subscription, and no others; unset keeps the stored rules. Without any, a new "
        "subscription takes every message.",
    )

    def description(self, topic: str) -> SubscriptionDescription:
        fields = {name: getattr(self, name) for name in SubscriptionProperties.model_fields}
        return SubscriptionDescription(topic=topic, **fields)


class DeclaredTopic(TopicDescription):
    """A topic as it is declared, with its subscriptions."""

    subscriptions: tuple[DeclaredSubscription, ...] = Field(
        (),
        max_length=MAX_SUBSCRIPTIONS,
        description="Subscriptions to create when missing and to update when they differ.",
    )

    def description(self) -> TopicDescription:
        return TopicDescription(
            **{name: getattr(self, name) for name in TopicDescription.model_fields if name in self.model_fields_set}
        )


class Settings(Frozen):
    """All settings of one broker."""

    data_dir: Path = Field(
        Path("peeklock-data"),
        validate_default=False,  # strict JSON, as config_sources reads, takes a path as text only
        description="Directory that holds messages, entities and the root key.",
    )
    partitions: int = Field(
        placement.PARTITIONS,
        ge=1,
        le=MAX_PARTITIONS,
        description="Partitions of the namespace. The number may grow at a start, and never shrinks. Entities stay on "
        "the partitions that there were when they were created; new ones use all.",
    )
    workers: int | None = Field(
        None,
        ge=0,
        le=MAX_PARTITIONS,
        description="Worker processes, at most one per partition. With 0 the partitions are in the gateway's process, "
        "which answers sooner and takes less memory, but uses one processor. Off takes 0 where there is one processor "
        "and gateways is 1, else one less than there are processors, but at least one.",
    )
    gateways: int = Field(
        1,
        ge=1,
        le=64,
        description="Gateway processes that share the AMQP ports. With several, the operations endpoint is one more "
        "process, which shows them all.",
    )
    idle_poll_us: int | None = Field(
        None,
        ge=0,
        le=100_000,
        description="Microseconds for which gateways and workers poll before they sleep, while what they wait for "
        "comes within this time: a lone message is answered a third sooner, for processor time that nobody else wants. "
        "Off takes 400, but 0 where a container's processor time is limited, and where there is one processor.",
    )
    emulator: bool = Field(
        False,
        description="Behave like the Service Bus emulator, with its well-known key: whoever can connect has all "
        "rights.",
    )
    namespace: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,48}[A-Za-z0-9]$")] = Field(
        "peeklock", description="Name of the namespace, in metrics and logs."
    )
    sku: Sku | None = Field(
        None,
        description="The tier that the namespace shows to administration clients, and whose sizes it takes: standard "
        "refuses those of Premium, and sessions that are not exclusive; premium has its own ranges. Off shows Standard "
        "and takes all.",
    )
    keep_case_of_names: bool = Field(
        False,
        description="New queues and topics are named as they are declared or requested. Else they are named in lower "
        "case, as in the cloud. They are found in any case, and those that exist keep their names. Names of "
        "subscriptions and rules always keep their case.",
    )
    shutdown_timeout_ms: int = Field(
        10 * SECOND_MS,
        ge=100,
        le=10 * MINUTE_MS,
        description="Time that gateways, and then workers, have to end after SIGTERM.",
    )
    worker_stall_timeout_ms: int = Field(
        30 * SECOND_MS,
        ge=3 * SECOND_MS,
        le=60 * MINUTE_MS,
        description="A worker that makes no turn for this long, or no progress in its start, is killed and restarted; "
        "its locks are lost. Its checkpointer is replaced likewise, but may wait longer for the disk.",
    )
    worker_restart_wait_ms: int = Field(
        3 * SECOND_MS,
        ge=0,
        le=10 * SECOND_MS,
        description="What begins in this time after a worker's process has died waits for the next one, and is done "
        "then. After it, and with 0 at once, it is refused as server-busy, after which SDKs wait for up to 10 s.",
    )
    worker_restart_wait_operations: int = Field(
        10_000,
        ge=1,
        le=1_000_000,
        description="Operations (a message, a request) that may wait in each gateway for each worker that is "
        "restarted, and changes of entities that may wait for all workers; others are refused as server-busy.",
    )
    worker_restart_wait_bytes: int = Field(
        32 * MIB,
        ge=MIB,
        le=4 * GIB,
        description="Bytes that these operations may have.",
    )
    gateway_stall_timeout_ms: int = Field(
        30 * SECOND_MS,
        ge=3 * SECOND_MS,
        le=60 * MINUTE_MS,
        description="A gateway whose event loop makes no round for this long, or which makes no progress in its start, "
        "is killed and restarted; its connections end. A gateway that has the partitions in its process is a worker "
        "here.",
    )
    amqp: Amqp = Field(Amqp(), description="The AMQP listener and the limits of its connections.")
    ops: Ops = Field(Ops(), description="The HTTP endpoint for operators: metrics and health.")
    http: Http = Field(
        Http(),
        description="The HTTP listener: management, sending and receiving by requests, AMQP over WebSockets.",
    )
    tls: Tls = Field(Tls(), description="TLS for AMQP and HTTP.")
    store: Stores = Field(Stores(), description="The partitions' stores on disk.")
    partitioning: Partitioning = Field(
        Partitioning(), description="Partitioned queues and topics, which are on all partitions."
    )
    cluster: Cluster = Field(Cluster(), description="A namespace on several machines.")
    syphon: Syphon = Field(
        Syphon(), description="A syphon that the broker runs, if its namespace has the backlog of another one."
    )
    journal: Journal = Field(Journal(), description="The journal: what happened to each message, to be read as data.")
    delivery: Delivery = Field(Delivery(), description="How messages are handed out.")
    forwarding: Forwarding = Field(Forwarding(), description="What happens to messages that cannot be forwarded.")
    expiry: Expiry = Field(Expiry(), description="What happens to messages whose time to live has ended.")
    security: Security = Field(Security(), description="Who may do what.")
    log: Log = Field(Log(), description="Logs, on standard error.")
    queues: tuple[QueueDescription, ...] = Field(
        (), max_length=10_000, description="Queues to create when missing and to update when they differ."
    )

    topics: tuple[DeclaredTopic, ...] = Field(
        (),
        max_length=10_000,
        description="Topics, with subscriptions and rules, to create when missing and to update when they differ.",
    )

    @property
    def entities(self) -> list[Description]:
        """All declared entities, each topic before its subscriptions."""
        found: list[Description] = list(self.queues)
        for topic in self.topics:
            found.append(topic.description())
            found += [subscription.description(topic.name) for subscription in topic.subscriptions]
        return found

    @property
    def rules(self) -> dict[str, tuple[RuleDescription, ...]]:
        """The declared rules by the path of their subscription, in lower case; a path is missing if there are none."""
        return {
            subscription.description(topic.name).path.lower(): subscription.rules
            for topic in self.topics
            for subscription in topic.subscriptions
            if subscription.rules is not None
        }

    @property
    def partitions_here(self) -> tuple[int, ...]:
        """Those of this worker of a cluster, else all of the namespace."""
        return tuple(sorted(self.cluster.owned)) or tuple(range(self.partitions))

    @property
    def log_bytes(self) -> int:
        return max(self.store.log_bytes, 4 * self.amqp.max_message_size_bytes)

    @property
    def is_one_process(self) -> bool:
        """The only gateway and the only worker are in one process."""
        return placement.is_one_process(self.workers, self.gateways)

    @property
    def poll_seconds(self) -> float:
        """The time for which processes may poll before they sleep: see `broker.idle_polling`."""
        if self.idle_poll_us is not None:
            return self.idle_poll_us / 1_000_000
        return 0.0 if placement.processors() == 1 or placement.has_processor_limit() else IDLE_POLL_SECONDS

    @property
    def busy_seconds(self) -> float:
        """A worker that has not answered for so long is busy. It is a third of the time after which it is replaced."""
        return self.worker_stall_timeout_ms / 3000

    @property
    def worker_count(self) -> int:
        """Workers, each with a log and some of the partitions; also when the only one has no process of its own."""
        return placement.worker_count(self.workers, self.partitions)

    @property
    def workers_here(self) -> int:
        """Workers with this data directory."""
        return 1 if self.cluster.workers else self.worker_count

    @property
    def listeners(self) -> list[tuple[str, str, int]]:
        """(setting, host, port) of each fixed port."""
        listeners = (
            ("amqp.port", self.amqp.host, self.amqp.port),
            ("amqp.tls_port", self.amqp.host, self.amqp.tls_port),
            ("http.port", self.http.host, self.http.port),
            ("http.tls_port", self.http.host, self.http.tls_port),
            ("ops.port", self.ops.host, self.ops.port),
        )
        return [(setting, host, port) for setting, host, port in listeners if port]

    def _check_sizes(self, place: str, entity: Description) -> None:
        for field, text in refusals(self.sku, entity):
            raise inconsistent(f"is no size of the tier in sku: {text}", f"{place}.{field}")

    def _check_ports(self) -> None:
        taken: list[tuple[str, str, int]] = []
        for name, host, port in self.listeners:
            for other, at, same in taken:
                if port == same and _collide(host, at):
                    raise inconsistent(f"is {other}, too; choose another", name)
            taken.append((name, host, port))

    def _check_tls(self) -> None:
        listening = [name for name in ("amqp", "http") if getattr(self, name).tls_port is not None]
        if self.tls.certificate is None:
            for name in listening:
                raise inconsistent("needs tls.certificate and tls.key; set them, or turn it off", f"{name}.tls_port")
        elif not listening:
            raise inconsistent(
                "has no effect without amqp.tls_port, usually 5671, or http.tls_port, usually 443", "tls.certificate"
            )
        if self.security.certificates and self.tls.client_ca is None:
            raise inconsistent("has no effect without tls.client_ca; set that", "security.certificates")

    def _check_syphon(self) -> None:
        if self.syphon.primary is None:
            return
        primary = ConnectionString.parse(self.syphon.primary)
        if _reaches(primary.host, self.amqp.host) and primary.port in (self.amqp.port, self.amqp.tls_port):
            raise inconsistent("is this broker itself; name the other namespace of the pairing", "syphon.primary")
        asks_for_certificate = (
            self.tls.client_ca is not None and self.tls.client_certificates is ClientCertificates.REQUIRED
        )
        for name, port in (("amqp", self.amqp.port), ("http", self.http.port)):
            tls_port = getattr(self, name).tls_port
            if port is None and (tls_port is None or asks_for_certificate):
                raise inconsistent(
                    f"needs {name}.port, or {name}.tls_port with tls.client_certificates = 'optional', because the "
                    "syphon is a client of this broker",
                    "syphon.primary",
                )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.workers == 0 and self.gateways > 1:
            raise inconsistent(
                f"leaves no process for the partitions of {self.gateways} gateways; set gateways to 1, or this to 1",
                "workers",
            )
        if self.workers is not None and self.workers > self.partitions:
            raise inconsistent(f"is more than the {self.partitions} partitions; lower it, or leave it out", "workers")
        for name, host in (("amqp.host", self.amqp.host), ("http.host", self.http.host)):
            if self.security.allow_anonymous and not is_loopback(host):
                raise inconsistent(
                    f"would open the namespace to everybody who reaches {host}; "
                    f"set {name} to 127.0.0.1, or turn this off",
                    "security.allow_anonymous",
                )
        if beyond := [each for each in self.cluster.owned if each >= self.partitions]:
            raise inconsistent(
                f"has {beyond[0]}, and the {self.partitions} partitions are 0 to {self.partitions - 1}", "cluster.owned"
            )
        self._check_ports()
        self._check_tls()
        self._check_syphon()
        if self.journal.modes and self.journal.mode is JournalMode.OFF:
            raise inconsistent(
                "has no effect while journal.mode is off; set that to events, and add '*' = 'off' as the last pattern "
                "if all other entities are to be left out",
                "journal.modes",
            )
        if self.journal.hold_for and not self.journal.is_on:
            raise inconsistent("has no effect while journal.mode is off", "journal.hold_for")
        if self.journal.hold_for and self.journal.held_bytes < self.journal.retention_bytes:
            raise inconsistent(
                f"is less than journal.retention_bytes, {self.journal.retention_bytes}", "journal.held_bytes"
            )
        _refuse_duplicates("queue", "queues", [queue.name.lower() for queue in self.queues])
        for index, queue in enumerate(self.queues):
            _check_entity(f"queues.{index}", queue)
            _check_lock(f"queues.{index}", queue, self.delivery.max_lock_duration_ms)
            self._check_sizes(f"queues.{index}", queue)
        _refuse_duplicates("topic", "topics", [topic.name.lower() for topic in self.topics])
        queues = {queue.name.lower() for queue in self.queues}
        for index, topic in enumerate(self.topics):
            if topic.name.lower() in queues:
                text = "is the name of a queue, too; queues and topics share their names, so rename one"
                raise inconsistent(text, f"topics.{index}.name")
            _check_topic(f"topics.{index}", topic)
            self._check_sizes(f"topics.{index}", topic.description())
            for number, subscription in enumerate(topic.subscriptions):
                place = f"topics.{index}.subscriptions.{number}"
                _check_lock(place, subscription, self.delivery.max_lock_duration_ms)
        return self


def _reaches(host: str, listening: str) -> bool:
    """True if who connects to `host` from this machine reaches what listens at `listening`, as far as that is written.

    Two addresses of the loopback network are two, as 127.0.0.1 and 127.0.0.2: each may have a broker of its own.
    """
    if host.lower() == listening.lower():
        return True
    own = _addresses(listening)
    reached = {_LOOPBACK[each.version] if each.is_unspecified else each for each in _addresses(host)}
    if reached & own:
        return True
    everywhere = {each.version for each in own if each.is_unspecified}
    return any(each.is_loopback and each.version in everywhere for each in reached)


_LOOPBACK = {4: ipaddress.ip_address("127.0.0.1"), 6: ipaddress.ip_address("::1")}


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Those that the text names; none if it is the name of another host than localhost."""
    if host.lower() == "localhost":
        return set(_LOOPBACK.values())
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return set()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return {mapped or address}


def _collide(one: str, other: str) -> bool:
    """True if listeners on these two hosts cannot have the same port."""
    return one == other or any(host in ("0.0.0.0", "::") for host in (one, other))


def _check_topic(place: str, topic: DeclaredTopic) -> None:
    _check_entity(place, topic)
    names = [subscription.name.lower() for subscription in topic.subscriptions]
    _refuse_duplicates("subscription", f"{place}.subscriptions", names)
    for index, subscription in enumerate(topic.subscriptions):
        at = f"{place}.subscriptions.{index}"
        _check_entity(at, subscription)
        _refuse_duplicates("rule", f"{at}.rules", [rule.name.lower() for rule in subscription.rules or ()])


def _check_lock(place: str, entity: QueueDescription | DeclaredSubscription, most_ms: int) -> None:
    if entity.lock_duration_ms > most_ms:
        raise inconsistent(
            f"must be at most {most_ms}; lower it, or set delivery.max_lock_duration_ms higher",
            f"{place}.lock_duration_ms",
        )


def _check_entity(place: str, entity: QueueDescription | DeclaredTopic | DeclaredSubscription) -> None:
    if not isinstance(entity, DeclaredSubscription):
        names = [rule.key_name for rule in entity.authorization_rules]
        _refuse_duplicates("authorization rule", f"{place}.authorization_rules", names)
    if isinstance(entity, DeclaredTopic):
        return
    for field in FORWARDING if isinstance(entity, QueueDescription) else ():
        if (getattr(entity, field) or "").lower() == entity.name.lower():
            raise inconsistent("is the queue itself; name another", f"{place}.{field}")
