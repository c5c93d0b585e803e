"""The settings of a broker: one frozen model, read once and passed down.

`broker.settings.sources` reads it from flags, environment and file; children get it as JSON, secrets included, on their
standard input (`model_dump_json`, `model_validate_json`). Its repr holds no secret.
"""

import ipaddress
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from broker.namespace.entities import (
    DAY_MS,
    MINUTE_MS,
    SECOND_MS,
    AuthorizationRule,
    Description,
    Frozen,
    QueueDescription,
    SubscriptionDescription,
    SubscriptionProperties,
    TopicDescription,
)
from broker.namespace.rule_descriptions import RuleDescription

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_MESSAGE_BYTES = 100 * MIB
MAX_PARTITIONS = 64
MAX_PORT = 65_535
MAX_SUBSCRIPTIONS = 2000  # of one topic
MAX_RULES = 100_000  # of one topic, and so of one subscription
FORWARDING = ("forward_to", "forward_dead_lettered_messages_to")

Host = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[0-9A-Za-z.:_%-]+$")]
Secret = Annotated[str, StringConstraints(min_length=1, max_length=256)]


class ConfigurationError(Exception):
    """The settings, or what they ask for, cannot be used. Its text is for the user: what, where, and the fix."""


Place = tuple[str | int, ...]
"""Where a value is in the settings: ("queues", 0, "name")."""


class Origin(NamedTuple):
    """Where a value was set, as its user spells the place, and what is written there."""

    spelling: str
    value: Any


class Problem(NamedTuple):
    """What is wrong with the value at a place, spelled as its user does."""

    spelling: str
    text: str


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


def is_loopback(host: str) -> bool:
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def inconsistent(text: str, *places: str) -> PydanticCustomError:
    """Settings that do not go together. `places` are dotted and relative to the section that raises it."""
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
        5672, ge=0, le=65535, description="Port for plain TCP; 0 takes any free one, off has none."
    )
    tls_port: int | None = Field(None, ge=0, le=65535, description="Port for TLS, usually 5671; off has none.")
    tls_certificate: Path | None = Field(None, description="PEM file with the server's certificate and its chain.")
    tls_key: Path | None = Field(None, description="PEM file with the certificate's private key.")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of the authorities whose client certificates are required; off asks for none."
    )
    max_frame_size_bytes: int = Field(64 * KIB, ge=512, le=MIB, description="Largest frame accepted from a peer.")
    idle_time_out_ms: int = Field(
        240 * SECOND_MS, ge=SECOND_MS, le=DAY_MS, description="Silence after which a connection is closed."
    )
    tls_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has for the TLS handshake."
    )
    sasl_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has to finish SASL after connecting."
    )
    open_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has to send open after SASL."
    )
    cbs_timeout_ms: int = Field(
        20 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time a peer has to put a first valid token after open."
    )
    write_stall_timeout_ms: int = Field(
        30 * SECOND_MS, ge=100, le=DAY_MS, description="Time a peer may leave its output unread before it is cut off."
    )
    max_connections: int = Field(6000, ge=1, le=100_000, description="Connections open at once, in one gateway.")
    max_sessions_per_connection: int = Field(5000, ge=1, le=65_536, description="AMQP sessions on one connection.")
    max_links_per_session: int = Field(256, ge=1, le=65_536, description="Links in one AMQP session.")
    max_links_per_connection: int = Field(5000, ge=1, le=65_536, description="Links on one connection.")
    max_state_bytes_per_connection: int = Field(
        128 * MIB, ge=MIB, le=GIB, description="Memory for the sessions and links of one connection, estimated high."
    )
    max_unfinished_bytes_per_connection: int = Field(
        64 * MIB,
        ge=MIB,
        le=64 * GIB,
        description="Of messages that one connection has begun to send; 4 of the largest are always allowed.",
    )
    max_unfinished_bytes: int = Field(
        512 * MIB,
        ge=MIB,
        le=1024 * GIB,
        description="Of messages begun on all connections of one gateway; 16 of the largest are always allowed.",
    )
    sender_credit: int = Field(
        1000, ge=1, le=100_000, description="Messages a sender may have in flight, on one link (its credit)."
    )
    receiver_window: int = Field(
        2000, ge=1, le=100_000, description="Messages taken from partitions ahead of the wire, for one link at most."
    )
    max_unsettled_per_link: int = Field(
        50_000, ge=1, le=1_000_000, description="Messages handed out on one link and not yet settled, at most."
    )
    max_message_size_bytes: int = Field(
        MIB, ge=KIB, le=MAX_MESSAGE_BYTES, description="Largest message accepted; a queue may set a smaller one."
    )
    max_output_buffer_bytes: int = Field(
        8 * MIB, ge=64 * KIB, le=GIB, description="Output kept for one connection before its deliveries wait."
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
    def handle_max(self) -> int:
        """The highest handle, as begin carries it (2.7.2)."""
        return self.max_links_per_session - 1

    @model_validator(mode="after")
    def _tls_is_complete(self) -> Self:
        if self.tls_port is not None and (self.tls_certificate is None or self.tls_key is None):
            raise inconsistent("needs both tls_certificate and tls_key; set them, or turn it off", "tls_port")
        if self.tls_port is None and (self.tls_certificate or self.tls_key or self.tls_client_ca):
            places = ("tls_certificate", "tls_key", "tls_client_ca")
            raise inconsistent(
                "has no effect without tls_port; set that, usually to 5671",
                *(place for place in places if getattr(self, place)),
            )
        if self.port is None and self.tls_port is None:
            raise inconsistent("is off, and so is tls_port: nobody could connect; set one of them", "port")
        return self


class Ops(Frozen):
    """The HTTP endpoint for operators: metrics and health."""

    host: Host = Field("127.0.0.1", description="Address to listen on; 0.0.0.0 or :: for all.")
    port: int | None = Field(9464, ge=0, le=65535, description="Port; 0 takes any free one, off has no endpoint.")


class Stores(Frozen):
    """The partitions' stores on disk."""

    map_size_bytes: int = Field(
        64 * GIB,
        ge=16 * MIB,
        le=1024 * 1024 * GIB,
        description="Size a partition's store may grow to; sparse until used.",
    )
    send_watermark: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="Used share of the store above which sends are refused; receiving goes on. A quarter of the store, "
        "or 16 MiB if that is less, stays free in any case.",
    )
    min_free_disk_bytes: int = Field(
        256 * MIB, ge=0, le=1024 * 1024 * GIB, description="Free disk space below which sends are refused."
    )


class Delivery(Frozen):
    """How messages are handed out."""

    keep_locks_of_broken_connections: bool = Field(
        False,
        description="Keep locks until they expire when a connection breaks, as the cloud does; "
        "else the messages are free at once and each delivery that left the broker counts as failed.",
    )


class Security(Frozen):
    """Who may do what."""

    root_key: Secret | None = Field(
        None,
        repr=False,
        description="Key of RootManageSharedAccessKey; off makes a random one, kept in the file root-key of data_dir.",
    )
    authorization_rules: tuple[AuthorizationRule, ...] = Field(
        (), max_length=12, description="Shared access keys for the whole namespace, beside the root key."
    )
    allow_anonymous: bool = Field(
        False, description="Let clients without a key do everything. For development; loopback addresses only."
    )

    @model_validator(mode="after")
    def _key_names_differ(self) -> Self:
        names = [rule.key_name for rule in self.authorization_rules]
        _refuse_duplicates("authorization rule", "authorization_rules", ["RootManageSharedAccessKey", *names])
        return self


class Log(Frozen):
    """Logs, on standard error."""

    level: LogLevel = Field(LogLevel.INFO, description="Least level that is written.")
    format: LogFormat = Field(LogFormat.AUTO, description="JSON lines or console; auto is console on a terminal.")


class DeclaredSubscription(SubscriptionProperties):
    """A subscription as it is declared, below its topic."""

    rules: tuple[RuleDescription, ...] | None = Field(
        None,
        max_length=MAX_RULES,
        description="Rules it has, and no others; unset leaves them alone, a new subscription takes every message.",
    )

    def description(self, topic: str) -> SubscriptionDescription:
        fields = {name: getattr(self, name) for name in SubscriptionProperties.model_fields}
        return SubscriptionDescription(topic=topic, **fields)


class DeclaredTopic(TopicDescription):
    """A topic as it is declared, with its subscriptions."""

    subscriptions: tuple[DeclaredSubscription, ...] = Field(
        (), max_length=MAX_SUBSCRIPTIONS, description="Subscriptions to create when missing and to update."
    )

    def description(self) -> TopicDescription:
        return TopicDescription(**{name: getattr(self, name) for name in TopicDescription.model_fields})


class Settings(Frozen):
    """All settings of one broker."""

    data_dir: Path = Field(
        Path("peeklock-data"),
        validate_default=False,  # strict JSON, as config_sources reads, takes a path as text only
        description="Directory that holds messages, entities and the root key.",
    )
    partitions: int = Field(
        4, ge=1, le=MAX_PARTITIONS, description="Partitions of the namespace; fixed when the data directory is made."
    )
    workers: int | None = Field(
        None,
        ge=1,
        le=MAX_PARTITIONS,
        description="Worker processes, at most one per partition; off takes one less than there are processors.",
    )
    gateways: int = Field(
        1,
        ge=1,
        le=64,
        description="Gateway processes that share the AMQP ports; their operations endpoints are on ports in a row.",
    )
    emulator: bool = Field(
        False, description="Be the Service Bus emulator, with its well-known key: for whoever can connect."
    )
    namespace: Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9-]{0,48}[A-Za-z0-9]$")] = Field(
        "peeklock", description="Name of the namespace, in metrics and logs."
    )
    shutdown_timeout_ms: int = Field(
        10 * SECOND_MS, ge=100, le=10 * MINUTE_MS, description="Time processes have to end after SIGTERM."
    )
    worker_stall_timeout_ms: int = Field(
        30 * SECOND_MS,
        ge=3 * SECOND_MS,
        le=60 * MINUTE_MS,
        description="A worker that makes no turn for this long is killed and started again; its locks are lost.",
    )
    amqp: Amqp = Field(Amqp(), description="The AMQP listener and the limits of its connections.")
    ops: Ops = Field(Ops(), description="The HTTP endpoint for operators: metrics and health.")
    store: Stores = Field(Stores(), description="The partitions' stores on disk.")
    delivery: Delivery = Field(Delivery(), description="How messages are handed out.")
    security: Security = Field(Security(), description="Who may do what.")
    log: Log = Field(Log(), description="Logs, on standard error.")
    queues: tuple[QueueDescription, ...] = Field(
        (), max_length=10_000, description="Queues to create when missing and to update when they differ."
    )

    topics: tuple[DeclaredTopic, ...] = Field(
        (), max_length=10_000, description="Topics, with subscriptions and rules, to create and to update."
    )

    @property
    def entities(self) -> list[Description]:
        """All that is declared, a topic before its subscriptions."""
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
    def worker_count(self) -> int:
        if self.workers is not None:
            return self.workers
        return max(1, min(self.partitions, (os.cpu_count() or 1) - 1))

    def _check_ports(self) -> None:
        amqp, ops = self.amqp, self.ops
        if amqp.port and amqp.port == amqp.tls_port:
            raise inconsistent("is amqp.port, too; each needs one of its own", "amqp.tls_port")
        if not ops.port:
            return
        last = ops.port + self.gateways - 1
        if last > MAX_PORT:
            raise inconsistent(f"leaves no ports in a row for {self.gateways} gateways; choose a lower one", "ops.port")
        for name, port in (("amqp.port", amqp.port), ("amqp.tls_port", amqp.tls_port)):
            if port and ops.port <= port <= last and _collide(amqp.host, ops.host):
                raise inconsistent(f"needs {name} {port}, too; choose another", "ops.port")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.workers is not None and self.workers > self.partitions:
            raise inconsistent(f"is more than the {self.partitions} partitions; lower it, or leave it out", "workers")
        if self.security.allow_anonymous and not is_loopback(self.amqp.host):
            raise inconsistent(
                f"would open the namespace to everybody who reaches {self.amqp.host}; "
                "set amqp.host to 127.0.0.1, or turn this off",
                "security.allow_anonymous",
            )
        self._check_ports()
        _refuse_duplicates("queue", "queues", [queue.name.lower() for queue in self.queues])
        for index, queue in enumerate(self.queues):
            _check_entity(f"queues.{index}", queue)
        _refuse_duplicates("topic", "topics", [topic.name.lower() for topic in self.topics])
        queues = {queue.name.lower() for queue in self.queues}
        for index, topic in enumerate(self.topics):
            if topic.name.lower() in queues:
                text = "is the name of a queue, too; queues and topics share their names, so rename one"
                raise inconsistent(text, f"topics.{index}.name")
            _check_topic(f"topics.{index}", topic)
        return self


def _collide(one: str, other: str) -> bool:
    """Whether two listeners on one port would be in each other's way."""
    return one == other or any(host in ("0.0.0.0", "::") for host in (one, other))


def _check_topic(place: str, topic: DeclaredTopic) -> None:
    _check_entity(place, topic)
    names = [subscription.name.lower() for subscription in topic.subscriptions]
    _refuse_duplicates("subscription", f"{place}.subscriptions", names)
    for index, subscription in enumerate(topic.subscriptions):
        at = f"{place}.subscriptions.{index}"
        _check_entity(at, subscription)
        _refuse_duplicates("rule", f"{at}.rules", [rule.name.lower() for rule in subscription.rules or ()])


def _check_entity(place: str, entity: QueueDescription | DeclaredTopic | DeclaredSubscription) -> None:
    if not isinstance(entity, DeclaredSubscription):
        names = [rule.key_name for rule in entity.authorization_rules]
        _refuse_duplicates("authorization rule", f"{place}.authorization_rules", names)
    if isinstance(entity, DeclaredTopic):
        return
    if entity.requires_session and entity.forward_to:
        raise inconsistent(
            "cannot be set on an entity that requires sessions; remove one of the two", f"{place}.forward_to"
        )
    for field in FORWARDING if isinstance(entity, QueueDescription) else ():
        if (getattr(entity, field) or "").lower() == entity.name.lower():
            raise inconsistent("is the queue itself; name another", f"{place}.{field}")
