"""The size of a partitioned entity is that of all its fragments, and each has its share."""

import pytest

from broker.namespace.entities import QueueDescription, TopicDescription
from broker.namespace.tiers import Sku, share_bytes, size_factor
from broker.partition.state.terms import Terms

MIB = 1 << 20


@pytest.mark.parametrize("fragments", [1, 2, 3, 4, 16, 17, 64])
@pytest.mark.parametrize("sku", [None, *Sku])
def test_the_shares_are_what_is_shown_and_no_less_than_before(sku, fragments):
    share = share_bytes(1024, sku, fragments)
    shown = 1024 * MIB * size_factor(sku, fragments)
    assert shown - fragments < share * fragments <= shown
    assert share >= 1024 * MIB, "each fragment had the whole size before"
    if fragments <= 16 and sku is not Sku.PREMIUM:
        assert size_factor(sku, fragments) == 16
    if sku is Sku.PREMIUM:
        assert size_factor(sku, fragments) == fragments


@pytest.mark.parametrize("described", [QueueDescription, TopicDescription])
def test_the_terms_of_a_fragment_have_its_share(described):
    spread = described(name="a", enable_partitioning=True, max_size_mb=3)
    assert Terms.of(spread, (0, 1)).size_bytes_max == 24 * MIB
    assert Terms.of(spread, (0, 1), Sku.PREMIUM).size_bytes_max == 3 * MIB
    assert Terms.of(spread, ()).size_bytes_max == 48 * MIB
    plain = described(name="a", max_size_mb=3)
    assert Terms.of(plain, (1,)).size_bytes_max == 3 * MIB
    document = {"kind": described.kind, "partitions": [0, 1, 2, 3], **spread.model_dump(mode="json")}
    assert Terms.of_definition(document, None).size_bytes_max == 12 * MIB
