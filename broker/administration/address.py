"""The address of a namespace's management API."""

from typing import Final, NamedTuple

LOCAL_HTTP_PORT: Final = 5300


class Address(NamedTuple):
    """Of HTTP. `host` has no brackets."""

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


def usual_address(host: str, tls: bool) -> Address:
    """Where a namespace that speaks AMQP at `host`, with TLS or without, has its management API."""
    return Address("https", host, 443) if tls else Address("http", host, LOCAL_HTTP_PORT)
