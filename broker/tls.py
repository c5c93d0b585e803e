"""TLS towards clients: one server context for AMQP and HTTP, whose files can be read again."""

import asyncio
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from broker.logging import get_logger
from broker.settings.config import ConfigurationError
from broker.settings.listeners import ClientCertificates, Tls

if TYPE_CHECKING:
    from cryptography import x509

# A certificate that ends within this time is warned about, each day.
WARN_SECONDS = 14 * 86400.0
DAY_SECONDS = 86400.0

log = get_logger("gateway")


class ServerTls:
    """The context for the next handshake. Connections keep the one that they were made with."""

    context: ssl.SSLContext

    def __init__(self, tls: Tls) -> None:
        """`tls.certificate` and `tls.key` are set. Raises ConfigurationError."""
        self._tls = tls
        self.handshake_timeout_s = tls.handshake_timeout_ms / 1000
        self.expires_s = 0.0  # when the certificate ends; Unix seconds
        self.host_names: tuple[str, ...] = ()  # those that the certificate is for, perhaps with a wildcard
        self.load()

    def load(self) -> None:
        """Read the files. Raises ConfigurationError, and then nothing has changed."""
        context = _server_context(self._tls)
        self.expires_s, self.host_names = _of_certificate(self._tls)
        self.context = context
        self._warn()

    async def keep_warning(self) -> None:
        """Log each day that the certificate ends soon, if it does. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(DAY_SECONDS)
            self._warn()

    def _warn(self) -> None:
        left_s = self.expires_s - time.time()
        if left_s < WARN_SECONDS:
            log.warning(
                "certificate has ended" if left_s <= 0 else "certificate ends soon",
                certificate=str(self._tls.certificate),
                days_left=round(left_s / DAY_SECONDS, 1),
                fix="put a new one in its place, and send SIGHUP to the broker",
            )


def _server_context(tls: Tls) -> ssl.SSLContext:
    """TLS 1.2 or later. Raises ConfigurationError."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert tls.certificate is not None
    try:
        # Without a password an encrypted key would be asked for at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
    except (OSError, ssl.SSLError) as error:
        raise ConfigurationError(
            f"tls.certificate {tls.certificate} with tls.key {tls.key} cannot be used: {error}. "
            "Both must be readable PEM files that belong together; the key must not be encrypted"
        ) from error
    if tls.client_ca is not None:
        try:
            context.load_verify_locations(tls.client_ca)
        except (OSError, ssl.SSLError) as error:
            raise ConfigurationError(f"tls.client_ca {tls.client_ca} cannot be used: {error}") from error
        is_required = tls.client_certificates is ClientCertificates.REQUIRED
        context.verify_mode = ssl.CERT_REQUIRED if is_required else ssl.CERT_OPTIONAL
    return context


def _of_certificate(tls: Tls) -> tuple[float, tuple[str, ...]]:
    """When it ends, in Unix seconds, and the names of hosts that it is for. Raises ConfigurationError."""
    certificate = _certificate(tls)
    return certificate.not_valid_after_utc.timestamp(), _alternative_names(certificate)[0]


def certified_names(tls: Tls) -> tuple[str, ...]:
    """The names of hosts that the certificate is for, then its IP addresses; none without one.

    Raises ConfigurationError.
    """
    if tls.certificate is None:
        return ()
    hosts, addresses = _alternative_names(_certificate(tls))
    return hosts + addresses


def _certificate(tls: Tls) -> "x509.Certificate":
    from cryptography import x509  # only a broker with TLS needs it

    assert isinstance(tls.certificate, Path)
    try:
        return x509.load_pem_x509_certificate(tls.certificate.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"tls.certificate {tls.certificate} cannot be used: {error}") from error


def _alternative_names(certificate: "x509.Certificate") -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of hosts, perhaps with a wildcard, and IP addresses. SDKs do not look at the common name."""
    from cryptography import x509

    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return (), ()
    except ValueError as error:
        raise ConfigurationError(f"the names in tls.certificate cannot be read: {error}") from error
    addresses = names.get_values_for_type(x509.IPAddress)
    return tuple(names.get_values_for_type(x509.DNSName)), tuple(map(str, addresses))


def names_of(certificate: Mapping[str, Any] | None) -> frozenset[str]:
    """The names that a verified peer has: common names and alternative names. `certificate` is as `ssl` gives it."""
    return frozenset(_names(certificate or {}))


def _names(certificate: Mapping[str, Any]) -> Iterator[str]:
    for part in certificate.get("subject", ()):
        for kind, name in part:
            if kind == "commonName":
                yield name
    for kind, name in certificate.get("subjectAltName", ()):
        if kind in ("DNS", "URI", "email"):
            yield name
