"""The extension's loops over digests and rows do what Python's do."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.extension import extension
from storage import seen_ids, seen_runs
from storage.records import encode_seen
from storage.seen_runs import Probes, add_to_filter, filter_bytes_for

pytestmark = pytest.mark.skipif(extension is None, reason="the extension is not built, or is switched off")

DIGESTS = st.lists(st.binary(min_size=16, max_size=16), max_size=60)
TIMES = st.integers(-(1 << 63), (1 << 63) - 1)
NUMBERS = st.integers(0, (1 << 63) - 1)


def without_extension(call: Any, *arguments: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (seen_ids, seen_runs):
            patch.setattr(module, "extension", None)
        return call(*arguments)


def found(digests: list[bytes], bits: bytearray) -> list[bytes]:
    return Probes(digests).passing(bits, 65 - len(bits).bit_length())


@given(DIGESTS.filter(bool), DIGESTS, st.integers(1, 200))
def test_filters_are_made_and_read_alike(kept, others, ids):
    rows = [encode_seen(digest, 1, 1) for digest in kept]
    native, plain = bytearray(filter_bytes_for(ids)), bytearray(filter_bytes_for(ids))
    add_to_filter(native, rows)
    without_extension(add_to_filter, plain, rows)
    assert native == plain
    sought = [*kept, *others]
    assert found(sought, native) == without_extension(found, sought, native)
    assert found(kept, native) == kept


@given(DIGESTS, TIMES, NUMBERS)
def test_rows_are_alike(digests, end_ms, first):
    assert extension.seen_rows(digests, end_ms, first) == [
        encode_seen(digest, end_ms, number) for number, digest in enumerate(digests, first)
    ]


@given(st.lists(st.binary(min_size=1, max_size=4), max_size=300))
def test_rows_come_by_their_first_byte(rows):
    buckets = extension.by_first_byte(rows)
    assert buckets == without_extension(seen_ids._by_first_byte, rows)
    assert len(buckets) == 256


def test_what_is_no_digest_or_no_filter_is_refused():
    digest, bits = bytes(15) + b"\1", bytearray(32)
    for arguments in (
        ([b"short"], bits, 59),
        (["text"], bits, 59),
        ([b"\xff" * 16], bits, 58),
        ([digest], bits, 0),
        ([digest], bits, 64),
        ([digest], bits, -1),
        ([digest], bytearray(), 59),
        ((digest,), bits, 59),
    ):
        with pytest.raises((ValueError, TypeError)):
            extension.passing(*arguments)
    for adding in ((bits, 58, [b"\xff" * 32]), (bits, 59, [b"short"]), (bytes(32), 59, [digest])):
        with pytest.raises((ValueError, TypeError, BufferError)):
            extension.add_to_filter(*adding)
    for rows in ([b""], ["text"], (b"row",)):
        with pytest.raises((ValueError, TypeError)):
            extension.by_first_byte(rows)
    for digests in ([b"short"], ["text"]):
        with pytest.raises((ValueError, TypeError)):
            extension.seen_rows(digests, 1, 1)
