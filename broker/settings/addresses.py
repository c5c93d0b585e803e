"""Addresses of workers: the path of a unix socket on this machine, or host and port of a worker on any machine."""

from typing import NamedTuple

from broker.settings.hosts import is_loopback


class Address(NamedTuple):
    host: str  # name or IP address
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        return is_loopback(self.host)


def parse_address(text: str) -> Address:
    """Read host:port, or [IPv6 address]:port. Raises ValueError."""
    host, colon, port = text.strip().rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("an IPv6 address is written in brackets, as in [::1]:5680")
    if not colon or not host or any(each.isspace() for each in host):
        raise ValueError("must be host:port")
    if not (port.isascii() and port.isdecimal() and len(port) <= 5 and 0 <= int(port) <= 65535):
        raise ValueError("the port must be a number from 0 to 65535")
    host.encode("idna")  # a ValueError says what is wrong with the name
    return Address(host, int(port))
