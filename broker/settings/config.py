"""The settings of a broker: one frozen model, read once and passed down.

`broker.settings.sources` reads it from flags, environment and file; children get it as JSON, secrets included, on their
standard input (`model_dump_json`, `model_validate_json`). Its repr holds no secret.
"""

from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

from pydantic import Field, StringConstraints, model_validator

from broker.namespace.entities import MINUTE_MS, SECOND_MS, Description, Frozen, QueueDescription
from broker.namespace.rule_descriptions import RuleDescription
from broker.namespace.tiers import Sku, refusals
from broker.settings import placement
from broker.settings.behaviour import Delivery, Expiry, Forwarding, Partitioning
from broker.settings.cluster import Cluster
from broker.settings.declared import DeclaredTopic, check_entity, check_lock, check_topic
from broker.settings.fields import GIB, MAX_PARTITIONS, MIB, inconsistent, refuse_duplicates
from broker.settings.hosts import collide, is_loopback, reaches
from broker.settings.listeners import Amqp, ClientCertificates, Http, Ops, Tls
from broker.settings.log import Log
from broker.settings.security import Security
from broker.settings.stores import Journal, JournalMode, Stores
from broker.settings.syphon import Syphon
from protocol.client.connection_string import ConnectionString

IDLE_POLL_SECONDS = 400e-6  # as long as an answer takes, whose processes were woken for it, and a third more


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
        """Return all declared entities, each topic before its subscriptions."""
        found: list[Description] = list(self.queues)
        for topic in self.topics:
            found.append(topic.description())
            found += [subscription.description(topic.name) for subscription in topic.subscriptions]
        return found

    @property
    def rules(self) -> dict[str, tuple[RuleDescription, ...]]:
        """Return the declared rules by the path of their subscription, in lower case, for those that declare some."""
        return {
            subscription.description(topic.name).path.lower(): subscription.rules
            for topic in self.topics
            for subscription in topic.subscriptions
            if subscription.rules is not None
        }

    @property
    def partitions_here(self) -> tuple[int, ...]:
        """Return the partitions of this worker of a cluster, else all of the namespace."""
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
        """Return the time for which processes may poll before they sleep: see `broker.idle_polling`."""
        if self.idle_poll_us is not None:
            return self.idle_poll_us / 1_000_000
        return 0.0 if placement.processors() == 1 or placement.has_processor_limit() else IDLE_POLL_SECONDS

    @property
    def busy_seconds(self) -> float:
        """A worker that has not answered for so long is busy. It is a third of the time after which it is replaced."""
        return self.worker_stall_timeout_ms / 3000

    @property
    def worker_count(self) -> int:
        """Return the number of workers, each with a log. The only one may have no process of its own."""
        return placement.worker_count(self.workers, self.partitions)

    @property
    def workers_here(self) -> int:
        """Return the number of workers with this data directory."""
        return 1 if self.cluster.workers else self.worker_count

    @property
    def listeners(self) -> list[tuple[str, str, int]]:
        """Return (setting, host, port) of each fixed port."""
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
                if port == same and collide(host, at):
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
        if reaches(primary.host, self.amqp.host) and primary.port in (self.amqp.port, self.amqp.tls_port):
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
        refuse_duplicates("queue", "queues", [queue.name.lower() for queue in self.queues])
        for index, queue in enumerate(self.queues):
            check_entity(f"queues.{index}", queue)
            check_lock(f"queues.{index}", queue, self.delivery.max_lock_duration_ms)
            self._check_sizes(f"queues.{index}", queue)
        refuse_duplicates("topic", "topics", [topic.name.lower() for topic in self.topics])
        queues = {queue.name.lower() for queue in self.queues}
        for index, topic in enumerate(self.topics):
            if topic.name.lower() in queues:
                text = "is the name of a queue, too; queues and topics share their names, so rename one"
                raise inconsistent(text, f"topics.{index}.name")
            check_topic(f"topics.{index}", topic)
            self._check_sizes(f"topics.{index}", topic.description())
            for number, subscription in enumerate(topic.subscriptions):
                place = f"topics.{index}.subscriptions.{number}"
                check_lock(place, subscription, self.delivery.max_lock_duration_ms)
        return self
