"""Hosts in network namespaces on one network, whose links a test cuts. Needs root, iproute2 and iptables.

A cut is silent, as when a cable is pulled: nobody gets a reset. The namespaces end with `close`.
"""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

NETWORK = "10.77.0"
CLONE_NEWNET = 0x40000000
NAMESPACES = Path("/var/run/netns")


def reason_missing() -> str | None:
    """Why there can be no hosts here; None if there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    for command, package in (("ip", "iproute2"), ("tc", "iproute2"), ("iptables", "iptables")):
        if shutil.which(command) is None:
            return f"hosts need {command}, of {package}"
    probe = f"peeklock-probe-{os.getpid()}"
    try:
        _ip("netns", "add", probe)
        _ip("-n", probe, "link", "add", "bridge", "type", "bridge")
    except subprocess.CalledProcessError as error:
        return f"network namespaces cannot be made here: {error.stderr.decode().strip()}"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _tc(namespace: str, what: str, device: str, *arguments: str) -> None:
    command = ["ip", "netns", "exec", namespace, "tc", "qdisc", what, "dev", device, *arguments]
    subprocess.run(command, check=True, capture_output=True)


class Host:
    """`prefix` runs a command on it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self.prefix = ("ip", "netns", "exec", name)

    def run(self, work: Callable[[], None]) -> threading.Thread:
        """Start `work` in a thread whose new sockets are this host's."""

        def inside() -> None:
            libc = ctypes.CDLL(None, use_errno=True)
            with (NAMESPACES / self.name).open() as namespace:
                if libc.setns(namespace.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns failed")
            work()

        thread = threading.Thread(target=inside)
        thread.start()
        return thread


class Network:
    """So many hosts, each with a link of its own to a switch."""

    def __init__(self, names: Sequence[str]) -> None:
        mark = f"pk{os.getpid()}"
        self._switch = f"{mark}-switch"
        self._made: list[str] = []
        self.hosts: dict[str, Host] = {}
        try:
            self._make(self._switch)
            self._in(self._switch, "link", "add", "bridge", "type", "bridge")
            self._in(self._switch, "link", "set", "bridge", "up")
            for number, name in enumerate(names, start=1):
                host = Host(f"{mark}-{name}", f"{NETWORK}.{number}")
                self._make(host.name)
                port = self._port(name)
                _ip("link", "add", "eth", "netns", host.name, "type", "veth", "peer", port, "netns", self._switch)
                self._in(self._switch, "link", "set", port, "master", "bridge", "up")
                self._in(host.name, "addr", "add", f"{host.address}/24", "dev", "eth")
                self._in(host.name, "link", "set", "eth", "up")
                self.hosts[name] = host
        except BaseException:
            self.close()
            raise

    def _make(self, namespace: str) -> None:
        _ip("netns", "add", namespace)
        self._made.append(namespace)
        self._in(namespace, "link", "set", "lo", "up")

    def _in(self, namespace: str, *arguments: str) -> None:
        _ip("-n", namespace, *arguments)

    def _port(self, name: str) -> str:
        return f"p-{name}"[:15]

    @contextmanager
    def cut(self, name: str) -> Iterator[None]:
        """The host's link carries nothing meanwhile."""
        self._in(self._switch, "link", "set", self._port(name), "nomaster")
        try:
            yield
        finally:
            self._in(self._switch, "link", "set", self._port(name), "master", "bridge")

    @contextmanager
    def slow(self, name: str) -> Iterator[None]:
        """The host's link carries little meanwhile, in both directions, and that late."""
        ends = (self.hosts[name].name, "eth"), (self._switch, self._port(name))
        shape = ("root", "tbf", "rate", "400kbit", "burst", "16kb", "latency", "1s")
        for namespace, device in ends:
            _tc(namespace, "add", device, *shape)
        try:
            yield
        finally:
            for namespace, device in ends:
                _tc(namespace, "del", device, "root")

    @contextmanager
    def lossy(self, name: str) -> Iterator[None]:
        """A fifth of the packets to the host gets lost meanwhile."""
        rule = ("INPUT", "-i", "eth", "-m", "statistic", "--mode", "random", "--probability", "0.2", "-j", "DROP")
        inside = self.hosts[name].prefix
        subprocess.run([*inside, "iptables", "-A", *rule], check=True, capture_output=True)
        try:
            yield
        finally:
            subprocess.run([*inside, "iptables", "-D", *rule], check=True, capture_output=True)

    def close(self) -> None:
        for namespace in self._made:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
