"""What a long run must look like: pure checks on samples taken while it lasted.

Memory, files, processor time for each message and that it goes on are the broker's own. How fast it answers is only
judged while nobody else used the processors.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MB = 1_000_000
LEAST_SAMPLES = 8


@dataclass(frozen=True)
class Sample:
    """The broker at one moment, and the latencies since the sample before.

    `cpu_s`: of the broker so far. `others`: processors that programs beside the broker and its load have used since the
    sample before.
    """

    at_s: float
    memory_bytes: int
    open_files: int
    accepted: int
    waiting: int
    p50_ms: float
    p99_ms: float
    cpu_s: float = 0.0
    others: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Growth is from the second quarter of the run (the first warms up) to the last, medians of both."""

    memory_growth_mb: float = 20.0
    open_files_growth: int = 10
    cpu_ms_per_message: float = 2.0  # it takes 0.2
    least_accepted: int = 1000
    stall_s: float = 30.0
    # While others use no more than this:
    most_others: float = 0.2
    p99_ms: float = 250.0
    least_accepted_per_s: float = 50.0


def growth(values: Sequence[float]) -> float:
    """Median of the last quarter less median of the second. Needs at least four values."""
    quarter = len(values) // 4
    return median(values[-quarter:]) - median(values[quarter : 2 * quarter])


def quantile(values: Sequence[float], share: float) -> float:
    """0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0


def problems(samples: Sequence[Sample], limits: Limits) -> list[str]:
    """What is wrong, one line each; empty when all is well."""
    found = []
    if len(samples) < LEAST_SAMPLES:
        return [f"only {len(samples)} samples: the run was too short to judge"]
    memory = growth([sample.memory_bytes / MB for sample in samples])
    if memory > limits.memory_growth_mb:
        found.append(f"memory grew by {memory:.1f} MB, allowed are {limits.memory_growth_mb:g}")
    files = growth([sample.open_files for sample in samples])
    if files > limits.open_files_growth:
        found.append(f"open files grew by {files:.0f}, allowed are {limits.open_files_growth}")
    if samples[-1].accepted < limits.least_accepted:
        found.append(f"{samples[-1].accepted} messages accepted in all, expected are {limits.least_accepted}")
    warm = samples[len(samples) // 4]
    if accepted := samples[-1].accepted - warm.accepted:
        cpu_ms = (samples[-1].cpu_s - warm.cpu_s) * 1000 / accepted
        if cpu_ms > limits.cpu_ms_per_message:
            found.append(f"a message took {cpu_ms:.1f} ms of a processor, allowed are {limits.cpu_ms_per_message:g}")
    stalls = [last.at_s for first, last in stalls_of(samples) if last.at_s - first.at_s >= limits.stall_s]
    if stalls:
        found.append(f"nothing was accepted before {', '.join(f'{at:.0f}' for at in stalls[:5])} s")
    return found + slowness(samples, limits)


def stalls_of(samples: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """The first and the last of samples in a row between which nothing was accepted."""
    rows = [list(row) for _, row in itertools.groupby(samples, lambda sample: sample.accepted)]
    return [(row[0], row[-1]) for row in rows if len(row) > 1]


def slowness(samples: Sequence[Sample], limits: Limits) -> list[str]:
    """What is too slow, among the samples that had the machine for themselves."""
    found = []
    quiet = [(a, b) for a, b in itertools.pairwise(samples) if b.others <= limits.most_others]
    at_the_end = samples[-(len(samples) // 4)].at_s
    if latencies := [sample.p99_ms for _, sample in quiet if sample.at_s >= at_the_end]:
        late = median(latencies)
        if late > limits.p99_ms:
            found.append(f"latency p99 at the end is {late:.0f} ms, allowed are {limits.p99_ms:g}")
    if quiet:
        rate = sum(b.accepted - a.accepted for a, b in quiet) / sum(b.at_s - a.at_s for a, b in quiet)
        if rate < limits.least_accepted_per_s:
            found.append(f"{rate:.0f} messages accepted per second, expected are {limits.least_accepted_per_s:g}")
    return found
