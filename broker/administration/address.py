"""The address of a namespace's management API."""

from typing import Final, NamedTuple
from urllib.parse import urlsplit

LOCAL_HTTP_PORT: Final = 5300


class Address(NamedTuple):
    """The address of an HTTP server. `host` has no brackets."""

    scheme: str
    host: str
    port: int

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == {"http": 80, "https": 443}[self.scheme] else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.authority}"


def parse_http_address(url: str) -> Address:
    """Read http://host:port or https://host. Raises ValueError, whose text says what to write instead."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if (
        not host
        or parts.scheme not in ("http", "https")
        or parts.path not in ("", "/")
        or parts.query
        or "@" in parts.netloc
    ):
        raise ValueError("is no address such as http://localhost:5300")
    return Address(parts.scheme, host, port or (443 if parts.scheme == "https" else 80))


def usual_address(host: str, tls: bool) -> Address:
    """Where a namespace that speaks AMQP at `host`, with TLS or without, has its management API."""
    return Address("https", host, 443) if tls else Address("http", host, LOCAL_HTTP_PORT)
