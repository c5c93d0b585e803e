"""The journals of several machines as one: what is put together, and what each is told."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.errors import ServerBusy
from broker.gateway.web.journals import merged, split

COUNT = 3
HOMES = {0: 0, 1: 1, 2: 2, 3: 0, 4: 1}


def journal_of(partition):
    return HOMES.get(partition, 0)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
items = st.fixed_dictionaries({"partition": st.integers(-1, 6) | values}, optional={"epoch": values, "offset": values})
documents = st.one_of(
    st.binary(max_size=60),
    values.map(lambda value: json.dumps(value).encode()),
    st.lists(items | values, max_size=6).map(lambda told: json.dumps({"partitions": told}).encode()),
    st.just(b"[" * 100_000),
    st.just(b'{"partitions": [{"partition": 1, "offset": ' + b"[" * 900 + b"]" * 900 + b"}]}"),
)


def read(text):
    return json.loads(text)["partitions"]


@given(documents)
def test_each_journal_is_told_its_own_and_what_is_wrong_goes_to_one_that_refuses_it(text):
    parts = split(text, journal_of, COUNT)
    assert len(parts) == COUNT
    if parts[0] == text and parts[1:] == [b'{"partitions": []}'] * 2:
        return  # the first refuses it, or it is all of the first
    told = read(text)
    assert sorted(map(repr, told)) == sorted(repr(each) for part in parts for each in read(part))
    for number in (1, 2):
        for each in read(parts[number]):
            assert type(each["partition"]) is int
            assert HOMES[each["partition"]] == number


def test_what_nobody_has_is_for_the_first():
    told = [{"partition": each, "epoch": "00", "offset": 1} for each in (1, 9, True, "2", 4)]
    parts = [read(part) for part in split(json.dumps({"partitions": told}).encode(), journal_of, COUNT)]
    assert parts == [told[1:4], [told[0], told[4]], []]


def test_one_journal_gets_what_was_told():
    assert split(b"anything", journal_of, 1) == [b"anything"]


def test_overviews_are_put_together():
    def overview(partitions, consumers):
        return {
            "namespace": "shop",
            "partitions": [{"partition": each, "stable": each} for each in partitions],
            "consumers": [
                {"name": name, "behind": behind, "partitions": [{"partition": each, "offset": 1} for each in told]}
                for name, behind, told in consumers
            ],
        }

    found = merged([overview([1, 3], [("b", 5, [3])]), overview([0, 2], [("a", 0, []), ("b", 7, [0])])])
    assert found == overview([0, 1, 2, 3], [("a", 0, []), ("b", 12, [0, 3])])
    alone = overview([0, 1], [("a", 1, [1])])
    assert merged([alone]) == alone


def test_a_partition_whose_worker_was_not_reached_is_busy_and_not_unknown():
    def away(partition):
        raise ServerBusy(f"partition {partition}")

    told = json.dumps({"partitions": [{"partition": 2, "epoch": "00", "offset": 1}]}).encode()
    with pytest.raises(ServerBusy, match="partition 2"):
        split(told, away, COUNT)
