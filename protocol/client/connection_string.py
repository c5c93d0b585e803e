"""Reads connection strings of Azure Service Bus: host, port, key, entity.

Endpoint=sb://host[:port];SharedAccessKeyName=name;SharedAccessKey=key[;EntityPath=queue]
    [;UseDevelopmentEmulator=true]
"""

from dataclasses import dataclass, field
from typing import Final, Self
from urllib.parse import urlsplit

AMQP_PORT: Final = 5672
AMQPS_PORT: Final = 5671


class InvalidConnectionString(ValueError):
    """The text names the mistake, and has no key."""


@dataclass(frozen=True, slots=True)
class Anonymous:
    """No credentials, for brokers that need none."""


@dataclass(frozen=True, slots=True)
class Plain:
    """Credentials of SASL PLAIN: for Service Bus the name of a key and the key."""

    name: str
    password: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class SharedAccessKey:
    """A key for making tokens for $cbs, each of which is valid for `lifetime_s`."""

    name: str
    key: str = field(repr=False)
    lifetime_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class SharedAccessSignature:
    """A token that was made elsewhere and cannot be refreshed."""

    token: str = field(repr=False)


Credentials = Anonymous | Plain | SharedAccessKey | SharedAccessSignature


@dataclass(frozen=True, slots=True)
class ConnectionString:
    """`entity_path` is empty if the string is for the whole namespace."""

    host: str
    port: int
    tls: bool
    credentials: Credentials
    entity_path: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """Raises InvalidConnectionString. Names may be in any case; unknown ones are ignored."""
        values: dict[str, str] = {}
        for part in text.strip().split(";"):
            name, equals, value = part.strip().partition("=")
            if not name and not equals:
                continue
            if not equals:
                raise InvalidConnectionString("A part of the connection string has no '='.")
            if name.lower() in values:
                raise InvalidConnectionString(f"The connection string has {name} twice.")
            values[name.lower()] = value.strip()
        emulator = values.get("usedevelopmentemulator", "").lower() == "true"
        host, port, tls = _endpoint(values.get("endpoint", ""), emulator)
        return cls(host, port, tls, _credentials(values), values.get("entitypath", "").strip("/"))


def _endpoint(endpoint: str, emulator: bool) -> tuple[str, int, bool]:
    if not endpoint:
        raise InvalidConnectionString("The connection string has no Endpoint.")
    try:
        url = urlsplit(endpoint)
        host, port = url.hostname, url.port
    except ValueError:
        raise InvalidConnectionString("Endpoint is not a URL such as sb://host:port.") from None
    if url.scheme not in ("sb", "amqp", "amqps") or not host:
        raise InvalidConnectionString("Endpoint is not a URL such as sb://host:port.")
    tls = url.scheme == "amqps" or (url.scheme == "sb" and not emulator)
    return host, port or (AMQPS_PORT if tls else AMQP_PORT), tls


def _credentials(values: dict[str, str]) -> Credentials:
    if token := values.get("sharedaccesssignature"):
        return SharedAccessSignature(token)
    name, key = values.get("sharedaccesskeyname"), values.get("sharedaccesskey")
    if not name and not key:
        return Anonymous()
    if not name or not key:
        raise InvalidConnectionString("SharedAccessKeyName and SharedAccessKey must both be given.")
    return SharedAccessKey(name, key)
