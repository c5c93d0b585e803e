"""Rows of quiet times, a frame for each, are joined at a cost that does not grow with their number."""

import time

import pyarrow as pa
import pytest

from storage.journal.batches import stream
from storage.journal.entities import Wanted
from storage.journal.files import PartitionJournal
from storage.journal.frames import Made
from tests.journal.journaled import plain_rows

FRAMES = 1500


@pytest.mark.parametrize(("wanted", "rows"), [(None, FRAMES), (Wanted("others"), 0)])
def test_many_small_frames_cost_no_more_each_than_a_few(tmp_path, wanted, rows):
    journal = PartitionJournal(tmp_path / "0")
    journal.begin_epoch(time.time())
    for offset in range(FRAMES):
        made = Made(b"store-id", b"log-id----------", offset + 1)
        journal.append(plain_rows(offset, 1, 10, "orders"), offset, offset, made, time.time())
    journal.sync(time.time())
    begun = time.process_time()
    pieces = b"".join(stream(0, journal.read(0, FRAMES, 1 << 30), wanted, records=False, time_ms=0))
    spent_s = time.process_time() - begun
    journal.close()
    assert len(pa.ipc.open_stream(pieces).read_all()) == rows
    assert spent_s < 10, "it took 0.3 s, and 50 s when each frame was counted again for each further one"
