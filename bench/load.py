"""Runs of the load tools (bench/amqpload): built from source, one JSON line of figures each.

`amqpload` sends and receives; `amqpwork` accepts sessions and does transactions.
"""

import fcntl
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SOURCE = Path(__file__).parent / "amqpload"
INSTALL_HINT = "install a C compiler, make, pkg-config and libqpid-proton11-dev (Debian, Ubuntu)"


class LoadToolMissing(Exception):
    """The load tools cannot be built here. The text says what to install."""


class LoadFailed(Exception):
    """A run of a load tool ended with an error, or lost or damaged messages."""


@dataclass(frozen=True)
class Endpoint:
    """Where a broker listens, and as whom to log in (SASL PLAIN)."""

    port: int
    user: str
    password: str
    host: str = "127.0.0.1"


@dataclass(frozen=True)
class Latency:
    """Milliseconds; quantiles from a histogram with errors below 0.8 %."""

    p50: float
    p99: float
    p999: float
    most: float


@dataclass(frozen=True)
class Figures:
    """What one run measured. `ack`: send to accept, `end_to_end`: intended send to receive.

    Of `amqpwork accept` the messages are sessions and `ack` is attach to attach; of `transact` they are transactions
    and `ack` is declare to the outcome of the discharge.
    """

    messages: int
    messages_per_s: float
    seconds: float
    client_cpu_s: float
    ack: Latency | None
    end_to_end: Latency | None


@dataclass(frozen=True)
class Tools:
    """The binaries."""

    load: Path
    work: Path


def build() -> Tools:
    """Compile what is not up to date. Raises LoadToolMissing."""
    for tool in ("make", "cc", "pkg-config"):
        if shutil.which(tool) is None:
            raise LoadToolMissing(f"{tool} not found: {INSTALL_HINT}")
    lock = os.open(SOURCE, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)  # several processes of tests want them at once
        made = subprocess.run(["make", "-s", "-C", str(SOURCE)], capture_output=True, text=True)
    finally:
        os.close(lock)
    if made.returncode:
        raise LoadToolMissing(f"{INSTALL_HINT}\n{made.stderr.strip()}")
    return Tools(SOURCE / "build" / "amqpload", SOURCE / "build" / "amqpwork")


def command(binary: Path, mode: str, endpoint: Endpoint, address: str, *options: str) -> list[str]:
    """`address` may be several, separated by commas."""
    made = [str(binary), mode, "--host", endpoint.host, "--port", str(endpoint.port)]
    return [*made, "--user", endpoint.user, "--password", endpoint.password, "--addresses", address, *options]


def run(binary: Path, mode: str, endpoint: Endpoint, address: str, *options: str, timeout_s: float = 7200) -> Figures:
    """One run in a mode of the binary. Raises LoadFailed."""
    try:
        done = subprocess.run(
            command(binary, mode, endpoint, address, *options), capture_output=True, text=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired as late:
        raise LoadFailed(f"{binary.name} {mode} {address}: did not end within {timeout_s:g} s") from late
    if done.returncode or not done.stdout:
        raise LoadFailed(
            f"{binary.name} {mode} {address} {' '.join(options)}: {done.stderr.strip()}{done.stdout.strip()}"
        )
    return parse(done.stdout)


def parse(line: str) -> Figures:
    raw: dict[str, Any] = json.loads(line)
    return Figures(
        messages=raw["n"],
        messages_per_s=raw["msgs_per_s"],
        seconds=raw["seconds"],
        client_cpu_s=raw["client_cpu_s"],
        ack=_latency(raw.get("ack_us")),
        end_to_end=_latency(raw.get("e2e_us")),
    )


def _latency(raw: dict[str, float] | None) -> Latency | None:
    return Latency(*(raw[key] / 1000 for key in ("p50", "p99", "p999", "max"))) if raw else None
