"""The processes of a broker while hostile peers visit it: samples, a table of them, and what is wrong with them."""

import csv
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression, median

import psutil

from bench.processes import command_of, role
from tests.brokers import Broker

MIB = 1 << 20
MOST_GROWTH_BYTES, MOST_GROWTH_SHARE = 32 * MIB, 0.1
MOST_MORE_DESCRIPTORS = 8  # files of logs and of the journal come and go
ENDED_S = 20.0
LEAST_SAMPLES = 10


@dataclass(frozen=True)
class Sample:
    at_s: float
    rss_bytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Course:
    """What a process had after warm-up (median of the second tenth), at the end (of the last tenth), and between."""

    warm: float
    end: float
    per_hour: float  # the slope of the second half, by least squares
    maximum: float


def course(samples: Sequence[tuple[float, float]]) -> Course:
    """Of pairs of seconds and a value."""
    tenth = max(1, len(samples) // 10)
    values = [value for _, value in samples]
    half = samples[len(samples) // 2 :]
    slope = linear_regression([at for at, _ in half], [value for _, value in half]).slope
    return Course(median(values[tenth : 2 * tenth]), median(values[-tenth:]), slope * 3600, max(values))


class Watch:
    """Samples by name of the process."""

    def __init__(self, broker: Broker) -> None:
        self._processes = named(broker)
        self.pids = {process.pid for process in broker.processes()}
        self.samples: dict[str, list[Sample]] = {name: [] for name in self._processes}
        self.before = self.after = self._descriptors()

    def sample(self, at_s: float) -> None:
        for name, process in self._processes.items():
            with suppress(psutil.NoSuchProcess), process.oneshot():
                rss, threads = process.memory_info().rss, process.num_threads()
                self.samples[name].append(Sample(at_s, rss, process.num_fds(), threads))

    def _descriptors(self) -> dict[str, int]:
        """0 for processes that have ended."""
        found = dict.fromkeys(self._processes, 0)
        for name, process in self._processes.items():
            with suppress(psutil.NoSuchProcess):
                found[name] = process.num_fds()
        return found

    def wait_for_descriptors(self) -> None:
        """All peers have gone: wait until no process has more than before they came, or for `ENDED_S`."""
        deadline = time.monotonic() + ENDED_S
        self.after = self._descriptors()
        while self._more_descriptors() and time.monotonic() < deadline:
            time.sleep(0.2)
            self.after = self._descriptors()

    def _more_descriptors(self) -> list[str]:
        return [name for name, count in self.after.items() if count > self.before[name] + MOST_MORE_DESCRIPTORS]

    def line(self) -> str:
        last = ((name, samples[-1].rss_bytes / MIB) for name, samples in self.samples.items() if samples)
        return "          MiB: " + ", ".join(f"{name} {now:.0f}" for name, now in last)

    def memory(self, name: str) -> Course:
        return course([(each.at_s, each.rss_bytes / MIB) for each in self.samples[name]])

    def problems(self) -> list[str]:
        found = []
        for name, samples in self.samples.items():
            if len(samples) < LEAST_SAMPLES:
                found.append(f"{name}: only {len(samples)} samples")
                continue
            memory = self.memory(name)
            if memory.end > memory.warm * (1 + MOST_GROWTH_SHARE) + MOST_GROWTH_BYTES / MIB:
                found.append(f"{name} grew from {memory.warm:.1f} to {memory.end:.1f} MiB")
        for name in self._more_descriptors():
            found.append(
                f"{name} had {self.before[name]} descriptors before its peers, and {self.after[name]} after them"
            )
        return found

    def table(self) -> str:
        """Memory in MiB; descriptors before all peers, the most, and after all peers."""
        lines = [f"{'process':16}{'warm':>10}{'end':>10}{'MiB/hour':>10}{'most':>10}{'descriptors':>17}{'threads':>9}"]
        for name, samples in self.samples.items():
            if len(samples) >= LEAST_SAMPLES:
                memory = self.memory(name)
                most = max(each.descriptors for each in samples)
                descriptors = f"{self.before[name]}, {most}, {self.after[name]}"
                lines.append(
                    f"{name:16}{memory.warm:10.1f}{memory.end:10.1f}{memory.per_hour:10.1f}{memory.maximum:10.1f}"
                    f"{descriptors:>17}{max(each.threads for each in samples):9}"
                )
        return "\n".join(lines)


def named(broker: Broker) -> dict[str, psutil.Process]:
    """The processes by their roles, with numbers where several have one."""
    by_role: dict[str, list[psutil.Process]] = {}
    for process in broker.processes():
        by_role.setdefault(role(command_of(process) or [""]), []).append(process)
    return {
        name if len(processes) == 1 else f"{name} {number}": process
        for name, processes in by_role.items()
        for number, process in enumerate(sorted(processes, key=lambda each: each.create_time()))
    }


def write_csv(path: Path, samples: Mapping[str, Sequence[Sample]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(("process", "seconds", "rss_bytes", "descriptors", "threads"))
        for name, each in samples.items():
            writer.writerows((name, f"{one.at_s:.1f}", one.rss_bytes, one.descriptors, one.threads) for one in each)


def plot(path: Path, samples: Mapping[str, Sequence[Sample]]) -> bool:
    """False without matplotlib, which the group `bench` has."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 6))
    axes = figure.subplots()
    for name, each in samples.items():
        axes.plot([one.at_s / 60 for one in each], [one.rss_bytes / MIB for one in each], label=name, linewidth=1)
    axes.set_xlabel("minutes")
    axes.set_ylabel("resident memory, MiB")
    axes.set_ylim(bottom=0)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize="small")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    return True
