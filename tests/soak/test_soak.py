"""The checks of a long run, and a short run through all of it."""

from dataclasses import replace

import pytest

from tests.soak.checks import Limits, Sample, growth, problems, quantile
from tests.soak.run import run

LIMITS = Limits(
    memory_growth_mb=20,
    open_files_growth=10,
    cpu_ms_per_message=2,
    least_accepted=200,
    stall_s=5,
    most_others=0.2,
    p99_ms=250,
    least_accepted_per_s=50,
)


def steady(count: int = 40) -> list[Sample]:
    return [
        Sample(
            at_s=n,
            memory_bytes=100_000_000,
            open_files=50,
            accepted=500 * n,
            waiting=10,
            p50_ms=2,
            p99_ms=9,
            cpu_s=0.5 * n,
        )
        for n in range(count)
    ]


def test_a_steady_run_has_no_problems():
    assert problems(steady(), LIMITS) == []


def test_memory_that_grows_until_warm_and_then_stays_is_no_leak():
    samples = [replace(sample, memory_bytes=min(n, 9) * 10_000_000) for n, sample in enumerate(steady())]
    assert problems(samples, LIMITS) == []


def test_memory_that_keeps_growing_is_reported():
    samples = [replace(sample, memory_bytes=n * 1_000_000) for n, sample in enumerate(steady())]
    assert problems(samples, Limits(memory_growth_mb=15)) == ["memory grew by 20.0 MB, allowed are 15"]


def test_open_files_that_keep_growing_are_reported():
    samples = [replace(sample, open_files=n) for n, sample in enumerate(steady())]
    assert problems(samples, LIMITS) == ["open files grew by 20, allowed are 10"]


def test_slow_deliveries_at_the_end_are_reported_and_one_hiccup_is_not():
    samples = steady()
    hiccup = [*samples[:20], replace(samples[20], p99_ms=5000), *samples[21:]]
    assert problems(hiccup, LIMITS) == []
    slow = [*samples[:30], *(replace(sample, p99_ms=300) for sample in samples[30:])]
    assert problems(slow, LIMITS) == ["latency p99 at the end is 300 ms, allowed are 250"]


def test_a_stall_is_reported_with_its_time():
    samples = steady()
    samples[16:20] = [replace(sample, accepted=samples[15].accepted) for sample in samples[16:20]]
    assert problems(samples, LIMITS) == []
    samples[20] = replace(samples[20], accepted=samples[15].accepted)
    assert problems(samples, LIMITS) == ["nothing was accepted before 20 s"]


def test_too_few_messages_are_reported():
    samples = [replace(sample, accepted=10 * n, cpu_s=0) for n, sample in enumerate(steady())]
    assert problems(samples, LIMITS) == ["10 messages accepted per second, expected are 50"]
    samples = [replace(sample, accepted=n, others=1.5, cpu_s=0) for n, sample in enumerate(steady())]
    assert problems(samples, LIMITS) == ["39 messages accepted in all, expected are 200"]


def test_messages_that_take_much_of_a_processor_are_reported():
    samples = [replace(sample, cpu_s=1.5 * n) for n, sample in enumerate(steady())]
    assert problems(samples, LIMITS) == ["a message took 3.0 ms of a processor, allowed are 2"]


def test_how_fast_it_is_while_others_use_the_machine_is_not_judged():
    slow = [replace(sample, accepted=10 * n, p99_ms=300, cpu_s=0) for n, sample in enumerate(steady())]
    assert problems([replace(sample, others=0.5) for sample in slow], LIMITS) == []
    in_part = [replace(sample, others=0 if n in (35, 36) else 0.5) for n, sample in enumerate(slow)]
    assert problems(in_part, LIMITS) == [
        "latency p99 at the end is 300 ms, allowed are 250",
        "10 messages accepted per second, expected are 50",
    ]


def test_a_run_too_short_is_not_called_sound():
    assert problems(steady(7), LIMITS) == ["only 7 samples: the run was too short to judge"]


def test_growth_leaves_the_first_quarter_out():
    assert growth([0, 0, 5, 5, 6, 6, 7, 7]) == 2


@pytest.mark.parametrize(
    ("values", "share", "expected"), [([], 0.5, 0.0), ([1.0], 0.99, 1.0), ([3.0, 1.0, 2.0], 0.5, 2.0)]
)
def test_quantiles_of_few_values(values, share, expected):
    assert quantile(values, share) == expected


def test_a_short_soak_is_sound(tmp_path):
    warming_up = Limits(memory_growth_mb=60, open_files_growth=20, p99_ms=2000)
    report = run(tmp_path, 10, every_s=1, break_every_s=1, limits=warming_up, seed=1)
    assert report.problems == []
    assert report.summary.completed > 500
    assert report.summary.epochs > 4  # connections were broken
