"""The name by which clients reach a broker with TLS: one that its certificate is for."""

import ipaddress
import socket
from collections.abc import Iterable, Iterator

from broker.settings.config import ConfigurationError, Settings
from broker.tls import certified_names

_ALL_ADDRESSES = ("0.0.0.0", "::")


def certified_host(settings: Settings) -> str:
    """Where clients connect to `amqp.tls_port`. Raises ConfigurationError if the certificate does not say."""
    names = certified_names(settings.tls)
    own = [each for each in settings.security.host_names if "*" not in each]
    found = choose(settings.amqp.host, names, [*own, socket.gethostname()])
    if found is None:
        raise ConfigurationError(
            f"tls.certificate {settings.tls.certificate} is for {', '.join(names) or 'no host'}: name the host that "
            "clients connect to in security.host_names, or take a certificate that has a name"
        )
    return found


def choose(host: str, names: Iterable[str], others: Iterable[str] = ()) -> str | None:
    """A host that a certificate with these names is for.

    `host` is the address on which the broker listens. If the certificate is not for that, it is one of the `others`
    that it is for, else the first of its names, and an IP address only if there is nothing else. None if it has only
    names with wildcards.
    """
    names = [name.removesuffix(".") for name in names]
    for wanted in (*_reached_by(host), *others):
        if any(_is_for(name, wanted) for name in names):
            return wanted
    whole = [name for name in names if "*" not in name]
    return next((name for name in whole if _address(name) is None), next(iter(whole), None))


def _reached_by(host: str) -> Iterator[str]:
    if host in _ALL_ADDRESSES or host in ("127.0.0.1", "::1"):
        yield "localhost"
    if host not in _ALL_ADDRESSES:
        yield host


def _is_for(name: str, host: str) -> bool:
    """RFC 6125 6.4.3: a wildcard stands for one label."""
    if (address := _address(host)) is not None:
        return _address(name) == address
    name, host = name.lower(), host.lower().removesuffix(".")
    label, _, domain = host.partition(".")
    return name == host or (name.startswith("*.") and label != "" and domain == name.removeprefix("*."))


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
