"""Which hosts a text means: whether it is this machine, and whether two listeners are in each other's way."""

import ipaddress

_LOOPBACK = {4: ipaddress.ip_address("127.0.0.1"), 6: ipaddress.ip_address("::1")}


def is_loopback(host: str) -> bool:
    """Return True for an address of the loopback network, and for localhost."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def reaches(host: str, listening: str) -> bool:
    """Return True if who connects to `host` from this machine reaches what listens at `listening`.

    Names of hosts are not resolved.
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


def _addresses(host: str) -> set[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """Return the addresses that the text names; none if it is the name of another host than localhost."""
    if host.lower() == "localhost":
        return set(_LOOPBACK.values())
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return set()
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return {mapped or address}


def collide(one: str, other: str) -> bool:
    """Return True if listeners on these two hosts cannot have the same port."""
    return one == other or any(host in ("0.0.0.0", "::") for host in (one, other))
