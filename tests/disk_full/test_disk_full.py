"""What was accepted is never lost and what was completed never comes back, though the disk is full again and again."""

import pytest

from tests.disk_full.run import DISK_BYTES, run
from tests.own_disk import own_disk_or_skip


@pytest.mark.parametrize("workers", [1, 0])
def test_nothing_is_lost_and_nothing_comes_back_over_a_full_disk(tmp_path, workers):
    with own_disk_or_skip(tmp_path, DISK_BYTES) as disk:
        report = run(tmp_path / "broker", disk, 2, seed=1, workers=workers)
    assert report.sound, str(report)
    assert report.rounds == 2
    assert report.kills.total() == 1
    assert report.summary.completed > 500
    assert report.others.chains.committed > 20
    assert report.others.order.completed_count > 100
    assert report.others.copies.completed_count > 100
    for name, book in report.more.books.items():
        assert len(book.completed) > 100, name
