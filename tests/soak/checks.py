"""What a long run must look like: pure checks on samples taken while it lasted."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

MB = 1_000_000


@dataclass(frozen=True)
class Sample:
    """The broker at one moment, and the latencies since the sample before."""

    at_s: float
    memory_bytes: int
    open_files: int
    accepted: int
    waiting: int
    p50_ms: float
    p99_ms: float


@dataclass(frozen=True)
class Limits:
    """Growth is from the second quarter of the run (the first warms up) to the last, medians of both."""

    memory_growth_mb: float = 20.0
    open_files_growth: int = 10
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
    if len(samples) < 8:
        return [f"only {len(samples)} samples: the run was too short to judge"]
    memory = growth([sample.memory_bytes / MB for sample in samples])
    if memory > limits.memory_growth_mb:
        found.append(f"memory grew by {memory:.1f} MB, allowed are {limits.memory_growth_mb:g}")
    files = growth([sample.open_files for sample in samples])
    if files > limits.open_files_growth:
        found.append(f"open files grew by {files:.0f}, allowed are {limits.open_files_growth}")
    late = median(sample.p99_ms for sample in samples[-(len(samples) // 4) :])
    if late > limits.p99_ms:
        found.append(f"latency p99 at the end is {late:.0f} ms, allowed are {limits.p99_ms:g}")
    span = samples[-1].at_s - samples[0].at_s
    rate = (samples[-1].accepted - samples[0].accepted) / span
    if rate < limits.least_accepted_per_s:
        found.append(f"{rate:.0f} messages accepted per second, expected are {limits.least_accepted_per_s:g}")
    stalls = [b.at_s for a, b in itertools.pairwise(samples) if a.accepted == b.accepted]
    if stalls:
        found.append(f"nothing was accepted before {', '.join(f'{at:.0f}' for at in stalls[:5])} s")
    return found
