"""The memory and CPU that the processes of one broker use together, read from /proc."""

import re
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import psutil

MAPPING = re.compile(r"^[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \S+ *(.*)$")


@dataclass(frozen=True)
class Memory:
    """Bytes of several processes together.

    `rss` counts a page shared by n processes n times. `pss` counts each page once. `store_cache` is the part of `pss`
    that maps files under the data directory: page cache the kernel drops when anybody needs it, which a broker that
    uses read() has as well but is not charged for. `anonymous` is heap, stacks and shared memory only, no code.
    """

    rss: int
    pss: int
    store_cache: int
    anonymous: int

    @property
    def used(self) -> int:
        """Memory that others cannot use: every page once, without the store's page cache."""
        return self.pss - self.store_cache

    def __sub__(self, other: "Memory") -> "Memory":
        return Memory(
            self.rss - other.rss,
            self.pss - other.pss,
            self.store_cache - other.store_cache,
            self.anonymous - other.anonymous,
        )


def role(command: Sequence[str]) -> str:
    """What to call a process: the module that its Python runs, for `broker.cli` the supervisor, or else its program."""
    words = [word for word in command if word]
    if len(words) == 1:  # a copy of the supervisor's process, whose command is one text
        words = words[0].split()
    for option, module in pairwise(words):
        if option == "-m":
            name = module.removesuffix(".__main__").rpartition(".")[2]
            return "supervisor" if name == "cli" else name
    return Path(command[0]).name if command else "ended"


def tree(root_pid: int) -> list[psutil.Process]:
    """A process and all its descendants; empty when it has ended."""
    try:
        root = psutil.Process(root_pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def memory_of(processes: Sequence[psutil.Process], data_dir: Path) -> Memory:
    """Processes that end meanwhile count as nothing."""
    total = [0, 0, 0, 0]
    prefix = str(data_dir.resolve())
    for process in processes:
        try:
            one = _memory_of_one(Path(f"/proc/{process.pid}"), prefix)
        except (FileNotFoundError, ProcessLookupError):
            continue
        total = [a + b for a, b in zip(total, one, strict=True)]
    return Memory(*total)


def _memory_of_one(proc: Path, prefix: str) -> tuple[int, int, int, int]:
    rollup = _kib_fields((proc / "smaps_rollup").read_text())
    cached = 0
    in_store = False
    for line in (proc / "smaps").read_text().splitlines():
        if header := MAPPING.match(line):
            in_store = header[1].startswith(prefix)
        elif in_store and line.startswith("Pss:"):
            cached += int(line.split()[1])
    anonymous = rollup["Pss_Anon"] + rollup["Pss_Shmem"] + rollup["SwapPss"]
    return rollup["Rss"] * 1024, rollup["Pss"] * 1024, cached * 1024, anonymous * 1024


def _kib_fields(text: str) -> dict[str, int]:
    fields = {}
    for line in text.splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name.rstrip(":")] = int(value)
    return fields


def cpu_s(processes: Sequence[psutil.Process]) -> float:
    """CPU seconds used so far, by processes that still live."""
    total = 0.0
    for process in processes:
        with suppress(OSError):
            total += time.clock_gettime(cpu_clock_of(process.pid))
    return total


def cpu_clock_of(pid: int) -> int:
    """The clock of a process's CPU time, in nanoseconds where /proc counts ticks of 10 ms; clock_getcpuclockid(3)."""
    return ~pid << 3 | 2


def cpu_s_by_process(processes: Sequence[psutil.Process]) -> dict[psutil.Process, float]:
    """CPU seconds that each living process has used, with those of its children that ended and were waited for."""
    used: dict[psutil.Process, float] = {}
    for process in processes:
        try:
            times = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        used[process] = times.user + times.system + times.children_user + times.children_system
    return used


def cpu_s_since(before: dict[psutil.Process, float], processes: Sequence[psutil.Process]) -> float:
    """CPU seconds used since `before`, as `cpu_s_by_process` gave it.

    A process that has ended meanwhile takes nothing from the others: PySpark's daemon does not wait for its workers,
    which end when they were idle for a minute, so that nobody has their time.
    """
    return sum(now - before.get(process, 0.0) for process, now in cpu_s_by_process(processes).items())


def cpu_s_by_role(processes: Sequence[psutil.Process]) -> dict[str, float]:
    """CPU seconds used so far by the living processes of each role."""
    used: dict[str, float] = {}
    for process in processes:
        name = role(command_of(process))
        used[name] = used.get(name, 0.0) + cpu_s([process])
    return used


def command_of(process: psutil.Process) -> list[str]:
    """Its words, also if it has a title, which is one argument; empty when it has ended."""
    try:
        return " ".join(process.cmdline()).split()
    except psutil.NoSuchProcess:
        return []


def machine_cpu_s() -> float:
    """CPU seconds the whole machine has spent on work so far."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - times.iowait - times.guest - times.guest_nice)
