"""A capture in an object store: moto's server speaks S3. Skipped if moto is not installed."""

from collections.abc import Iterator

import pyarrow as pa
import pytest

from storage.capture.chain import load
from storage.capture.compaction import clean, compact
from storage.capture.errors import InUse, Superseded
from storage.capture.place import Place
from storage.capture.reading import captured
from storage.capture.writing import CaptureOptions, CaptureWriter
from tests.capture.synthetic_rows import EPOCH, batch

server = pytest.importorskip("moto.server", reason="needs moto[server]")

OPTIONS = CaptureOptions(compact_after_seconds=0, lease_seconds=0)


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        service = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
        service.start()
        host, port = service.get_host_and_port()
        yield f"s3://captures/of-broker?scheme=http&endpoint_override={host}:{port}&allow_bucket_creation=true&region=us-east-1"
        service.stop()


def writer_at(url: str) -> CaptureWriter:
    return CaptureWriter(Place.of(url), "sample", OPTIONS, sleep=lambda _: None)


def test_rows_go_there_and_come_back(url):
    Place.of(url)._file_system.create_dir("captures")
    for roll in range(3):
        with writer_at(url) as writer:
            writer.add(0, EPOCH, batch(0, roll * 30, roll * 30 + 30, body_bytes=50))
            writer.roll()
            if roll == 2:
                assert compact(writer, {}) == 6
                assert clean(writer) == 0
    found = captured(url)
    assert [tuple(each) for each in found.ranges()] == [(0, EPOCH, 0, 90)]
    rows = pa.Table.from_batches(found.batches(0, EPOCH, 10, 80))
    assert rows.equals(pa.Table.from_batches([batch(0, 10, 80, body_bytes=50)]))
    [uri] = found.uris()
    assert uri.startswith("s3://captures/of-broker/table=ledger/date=2026-01-31/hour=22/")


def test_of_two_writers_one_goes_on(url):
    first = writer_at(url)
    with writer_at(url) as second:
        offset = second.next_offset(0, EPOCH) or 0
        for writer in (first, second):
            writer.add(0, EPOCH, batch(0, offset, offset + 5))
        second.roll()
        with pytest.raises(Superseded):
            first.roll()
    assert load(Place.of(url)).next[0, EPOCH].offset == offset + 5
    renewed = CaptureWriter(Place.of(url), "sample", OPTIONS)
    with pytest.raises(InUse):
        CaptureWriter(Place.of(url), "sample", OPTIONS, sleep=lambda _: renewed.chain.renew_when_due())
    renewed.close()
