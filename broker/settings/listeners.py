"""Settings of what listens for clients and operators: AMQP, HTTP, TLS, the endpoint for metrics and health."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, StringConstraints, model_validator

from broker.namespace.entities import DAY_MS, MINUTE_MS, SECOND_MS, Frozen
from broker.settings.fields import GIB, KIB, MIB, inconsistent

MAX_MESSAGE_BYTES = 100 * MIB
Host = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[0-9A-Za-z.:_%-]+$")]


class ClientCertificates(StrEnum):
    REQUIRED = "required"
    OPTIONAL = "optional"


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
        """Return the highest channel number, as open carries it (2.7.1)."""
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
        """Return the highest handle, as begin carries it (2.7.2)."""
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
