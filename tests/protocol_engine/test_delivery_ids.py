"""Translation of delivery-ids, against a plain table of what was taken."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.engine.delivery_ids import MAX_RUNS, MAX_SEARCHED_RUNS, DeliveryIds
from protocol.errors import LimitExceeded

LARGEST = (1 << 32) - 1


def taken(ids: DeliveryIds, *peers: int) -> list[int]:
    return [ids.take(peers_id, False) for peers_id in peers]


def test_ids_in_order_need_no_translation() -> None:
    ids = DeliveryIds()
    assert taken(ids, 5, 6, 7) == [5, 6, 7]
    assert not ids.translates


def test_a_repeated_id_gets_the_next_and_is_told_by_its_own() -> None:
    ids = DeliveryIds()
    assert taken(ids, 0, 1, 1, 3) == [0, 1, 2, 3]
    assert ids.peers(0, 3) == [(0, 1), (1, 1), (3, 3)]
    assert ids.protons(1, 1) == [(1, 1), (2, 2)]
    ids.settled(2, 2)
    assert not ids.translates  # the peer's count is right again


def test_an_id_that_is_left_out_shifts_the_rest() -> None:
    ids = DeliveryIds()
    assert taken(ids, 0, 2, 3) == [0, 1, 2]
    assert ids.peers(0, 2) == [(0, 0), (2, 3)]
    assert ids.protons(0, LARGEST >> 1) == [(0, 0), (1, 2)]
    ids.settled(0, 2)
    assert ids.translates
    assert taken(ids, 4) == [3]
    assert ids.peers(3, 3) == [(4, 4)]


def test_ids_go_round() -> None:
    ids = DeliveryIds()
    assert taken(ids, LARGEST - 1, LARGEST, 0, 0, 1, 3) == [LARGEST - 1, LARGEST, 0, 1, 2, 3]
    assert ids.peers(LARGEST, 3) == [(LARGEST, 0), (0, 1), (3, 3)]
    assert ids.protons(LARGEST, 0) == [(LARGEST, 0), (1, 1)]
    ids.settled(LARGEST - 1, 3)
    assert not ids.translates
    assert taken(ids, 4) == [4]


def test_one_id_for_hundreds_at_a_time() -> None:
    ids = DeliveryIds()
    assert taken(ids, *[7] * 300, 307) == [*range(7, 308)]
    assert ids.peers(7, 307) == [(7, 7)] * 300 + [(307, 307)]
    with pytest.raises(LimitExceeded, match=str(MAX_SEARCHED_RUNS)):
        ids.protons(7, 7)
    for number in range(7, 307):
        ids.settled(number, number)
    assert not ids.translates


def test_runs_are_bounded() -> None:
    ids = DeliveryIds()
    taken(ids, *[0] * (MAX_RUNS + 1))
    with pytest.raises(LimitExceeded):
        ids.take(0, False)


@given(
    st.sampled_from([0, 3, LARGEST - 2]),
    st.lists(st.tuples(st.integers(-3, 3).map(lambda jump: jump if abs(jump) < 3 else 0), st.booleans()), max_size=25),
    st.data(),
)
def test_translations_of_ids_follow_a_table(start: int, jumps: list[tuple[int, bool]], data: Any) -> None:
    ids = DeliveryIds()
    of_proton: dict[int, int] = {}  # unsettled ones
    expected = peers = start
    for jump, settled in jumps:
        peers = (peers + jump) & LARGEST if of_proton or expected != start else start
        found = ids.take(peers, settled)
        assert found == expected
        if not settled:
            of_proton[found] = peers
        expected = (expected + 1) & LARGEST
        peers = (peers + 1) & LARGEST
        if of_proton and data.draw(st.booleans()):
            first = last = data.draw(st.sampled_from([*of_proton]))
            while (last + 1) & LARGEST in of_proton and data.draw(st.booleans()):
                last = (last + 1) & LARGEST
            members = [(first + at) & LARGEST for at in range(((last - first) & LARGEST) + 1)]
            if ids.translates:
                ranges = ids.peers(first, last)
                told = [(a + at) & LARGEST for a, b in ranges for at in range(((b - a) & LARGEST) + 1)]
                assert told == [of_proton[member] for member in members]
                low, high = min(of_proton.values()), max(of_proton.values())
                if high - low < 1000:
                    first_peers, last_peers = sorted(data.draw(st.tuples(*[st.integers(low, high)] * 2)))
                    heard = Counter(
                        (a + at) & LARGEST
                        for a, b in ids.protons(first_peers, last_peers)
                        for at in range(min(2000, ((b - a) & LARGEST) + 1))
                    )
                    wanted = {n for n, p in of_proton.items() if first_peers <= p <= last_peers}
                    assert {n for n in heard if n in of_proton} == wanted
                    assert max(heard.values(), default=0) <= 1
                ids.settled(first, last)
            else:
                assert all(of_proton[member] == member for member in members)
            for member in members:
                del of_proton[member]
        if ids.translates is False:
            assert all(number == peers_id for number, peers_id in of_proton.items())
