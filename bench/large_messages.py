"""What messages of 1 to 96 MiB cost: CPU, page faults and memory of each process, for a MiB of their bodies.

    python -m bench.large_messages --mib 1,8,64 --total-mib 512
    python -m bench.large_messages --before ../old           # beside another checkout, in turn
    python -m bench.large_messages --pure --workers 0

Every size is sent, and then received, by `amqpload`. CPU is that of user and system time. A page fault is one that the
kernel served without the disk (a page of 4 KiB that the process touched for the first time, or a huge page), so 256 in
a MiB are one whole copy into memory that was not used before. The peak is the most that a process had in memory at once
(VmHWM) above what it had when the broker had started; hardly anything of that is shared, so it is the growth of its
PSS, too, and the kernel tells it without samples. It is given in bytes for a byte of one message.

Ratios of a size to 1 MiB, and before to after, mean something on a machine that others use, too; times do not.
"""

import argparse
import contextlib
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import psutil

from bench import load
from bench.processes import command_of, cpu_s, role
from bench.servers import ROOT, Peeklock, ServerFailed, ServerMissing

MIB = 1 << 20
SIZES_MIB = (1, 4, 8, 16, 32, 64, 96)
MODES = ("send", "recv", "both")
LEAST_MESSAGES = 4
WINDOW = 2  # messages in flight: more would be a matter of memory alone
IDLE_S = 600
CLIENT = "client"
RESET_PEAK = "5"  # clear_refs of proc(5)


class LargeMessages(Peeklock):
    """Peeklock that takes messages of 100 MiB."""

    start_timeout_s = 600.0

    def __init__(self, directory: Path, root: Path, name: str, workers: int, pure: bool) -> None:
        super().__init__(directory, root, name)
        self._workers = workers
        self._pure = pure

    def _command(self) -> tuple[list[str], dict[str, str]]:
        command, environment = super()._command()
        return command, environment | ({"PEEKLOCK_PURE": "1"} if self._pure else {})

    def _settings(self) -> list[str]:
        return [
            f"workers = {self._workers}",
            "partitions = 1",
            "worker_stall_timeout_ms = 600000",
            "idle_poll_us = 0",  # what polling takes depends on the machine
            "[amqp]\nmax_message_size_bytes = 104857600",
            "sasl_timeout_ms = 600000\nopen_timeout_ms = 600000",  # the machine may be busy
        ]


@dataclass(frozen=True)
class Used:
    """What a process has used."""

    cpu_s: float = 0.0
    faults: int = 0
    peak_bytes: int = 0

    def __sub__(self, other: "Used") -> "Used":
        return Used(self.cpu_s - other.cpu_s, self.faults - other.faults, self.peak_bytes - other.peak_bytes)

    def __add__(self, other: "Used") -> "Used":
        return Used(self.cpu_s + other.cpu_s, self.faults + other.faults, self.peak_bytes + other.peak_bytes)


def used(pid: int) -> Used:
    """Since the process began, but for the peak, which is that since `reset_peak`. Raises OSError."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    status = Path(f"/proc/{pid}/status").read_text()
    [peak] = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    return Used(cpu_s([psutil.Process(pid)]), int(fields[7]), int(peak) * 1024)


def reset_peak(pid: int) -> None:
    """From now on the peak is what is in memory now, or more. Raises OSError."""
    Path(f"/proc/{pid}/clear_refs").write_text(RESET_PEAK)


def _children() -> Used:
    """Of all ended children of this process; without a peak, which is that of the largest one."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return Used(usage.ru_utime + usage.ru_stime, usage.ru_minflt)


def used_by_all(server: Peeklock) -> dict[int, Used]:
    """By process, with the peak from now on."""
    found = {}
    for process in server.processes():
        with contextlib.suppress(OSError):  # it has ended
            reset_peak(process.pid)
            found[process.pid] = used(process.pid)
    return found


def measure(
    server: Peeklock, tools: load.Tools, mode: str, mib: int, messages: int, idle: Mapping[int, Used]
) -> dict[str, Used]:
    """By role, with CLIENT. `idle` is what processes had used when the broker had started. Raises LoadFailed."""
    watched = {process.pid: role(command_of(process)) for process in server.processes()}
    before = used_by_all(server)
    client = _children()
    options = ("-n", str(messages), "--size", str(mib * MIB - 1024), "--window", str(WINDOW), "--idle", str(IDLE_S))
    load.run(tools.load, mode, server.endpoint, server.address(1), *options)
    found = {CLIENT: _children() - client}
    server.settle(60)
    for pid, name in watched.items():
        if pid in before:
            with contextlib.suppress(OSError):  # it has ended
                was = replace(before[pid], peak_bytes=idle.get(pid, before[pid]).peak_bytes)
                found[name] = found.get(name, Used()) + used(pid) - was
    return found


def table(results: Mapping[tuple[str, str, int], tuple[int, Mapping[str, Used]]]) -> str:
    """`results` by name of the broker, mode and MiB: the number of messages, and what was used by role."""
    roles = ("gateway", "worker", "checkpointer", CLIENT)
    lines = [
        "| broker | mode | MiB | CPU, ms/MiB: " + " | ".join(roles) + " | to 1 MiB | faults/MiB: "
        + " | ".join(roles) + " | peak, bodies: " + " | ".join(roles[:3]) + " |"
    ]  # fmt: skip
    lines.append("|---|---|--:" + "|--:" * (2 * len(roles) + 4) + "|")
    for (name, mode, mib), (messages, found) in results.items():
        of = [found.get(each, Used()) for each in roles]
        moved = messages * mib
        smallest = results.get((name, mode, 1))
        ratio = "-" if smallest is None else f"{_broker_s(found) / moved / (_broker_s(smallest[1]) / smallest[0]):.2f}"
        cells = [
            *(f"{1000 * each.cpu_s / moved:.2f}" for each in of),
            ratio,
            *(f"{each.faults / moved:.0f}" for each in of),
            *(f"{each.peak_bytes / (mib * MIB):.1f}" for each in of[:3]),
        ]
        lines.append(f"| {name} | {mode} | {mib} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _broker_s(found: Mapping[str, Used]) -> float:
    return sum(each.cpu_s for name, each in found.items() if name != CLIENT)


def run(options: argparse.Namespace) -> dict[tuple[str, str, int], tuple[int, dict[str, Used]]]:
    """Raises ServerFailed, LoadFailed, LoadToolMissing."""
    tools = load.build()
    roots = {"after" if options.before else "Peeklock": options.root}
    if options.before:
        roots = {"before": options.before} | roots
    results: dict[tuple[str, str, int], tuple[int, dict[str, Used]]] = {}
    for mib in options.mib:
        messages = max(LEAST_MESSAGES, options.total_mib // mib)
        for name, root in roots.items():
            with tempfile.TemporaryDirectory(prefix="peeklock-large-") as scratch:
                server = LargeMessages(Path(scratch), root.resolve(), name, options.workers, options.pure)
                server.start()
                try:
                    server.settle(60)
                    idle = used_by_all(server)
                    for mode in options.modes:  # once without a measurement: what comes later finds memory in use
                        measure(server, tools, mode, mib, LEAST_MESSAGES, idle)
                    for mode in options.modes:
                        results[name, mode, mib] = messages, measure(server, tools, mode, mib, messages, idle)
                finally:
                    server.close()
            print(table({key: value for key, value in results.items() if key[2] == mib and key[0] == name}), flush=True)
    return results


def _mib(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bench.large_messages", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=_mib, default=SIZES_MIB, help="sizes of messages (default: %(default)s)")
    parser.add_argument("--total-mib", type=int, default=512, help="of bodies in a run (default: %(default)s)")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=("send", "recv"), help=", ".join(MODES))
    parser.add_argument("--workers", type=int, default=1, help="0: gateway and worker are one process")
    parser.add_argument("--pure", action="store_true", help="without the extension")
    parser.add_argument("--root", type=Path, default=ROOT, help="the checkout to measure (default: this one)")
    parser.add_argument("--before", type=Path, help="another checkout, measured in turn with it")
    options = parser.parse_args(argv)
    try:
        results = run(options)
    except (ServerFailed, ServerMissing, load.LoadToolMissing, load.LoadFailed) as problem:
        print(problem, file=sys.stderr)
        return 2
    print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
