"""What docs/failures.md says of a worker with a fault is what clients see."""

from pathlib import Path

import pytest

from tests.own_disk import own_disk_or_skip
from tests.partitioned.failure_table import (
    AWAY,
    FULL,
    HUNG,
    PAGE,
    SLOW,
    STALLED,
    UNDER_WAY,
    Outcome,
    cell,
    documented,
    full,
    hung,
    killed,
    render,
    slow,
)
from tests.partitioned.operations import ALL
from tests.shims import NoCompiler


def is_as_documented(column: str, outcomes: list[Outcome]) -> None:
    said = documented()[column]
    differences = [
        f"{operation.kind.value}: {operation.title}: {found} in {outcome.seconds:.2f} s, and the page says {known}"
        for operation, outcome, known in zip(ALL, outcomes, said, strict=True)
        if (found := cell(column, outcome)) != known
    ]
    assert not differences, "\n".join([column, *differences, "run: python -m tests.partitioned.failure_table"])


@pytest.mark.parametrize("column", [UNDER_WAY, AWAY])
def test_a_worker_that_is_killed(tmp_path: Path, column: str) -> None:
    is_as_documented(column, killed(tmp_path, column))


@pytest.mark.slow
def test_a_worker_that_hangs(tmp_path: Path) -> None:
    found = hung(tmp_path)
    is_as_documented(HUNG, found[HUNG])
    is_as_documented(STALLED, found[STALLED])


def test_a_worker_with_a_slow_disk(tmp_path: Path) -> None:
    try:
        found = slow(tmp_path)
    except NoCompiler as error:
        pytest.skip(str(error))
    is_as_documented(SLOW, found)


def test_a_worker_with_a_full_disk(tmp_path: Path) -> None:
    with own_disk_or_skip(tmp_path) as disk:
        is_as_documented(FULL, full(tmp_path / "broker", disk))


def test_the_page_has_every_operation() -> None:
    assert PAGE.read_text() == render(documented()), "run: python -m tests.partitioned.failure_table"
