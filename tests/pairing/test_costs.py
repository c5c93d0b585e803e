"""What a pairing costs (PN11): the formulas, and pings of entities that have failed over, in simulated time.

The polls of a syphon are counted in `tests/pairing/syphon`.
"""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.pairing.availability import Availability
from broker.pairing.costs import OPERATIONS_PER_MESSAGE, OutageCosts, outage, polls
from broker.pairing.counters import Counters
from broker.pairing.options import PairingOptions
from protocol.client.errors import ConnectionLost
from tests.pairing.syphon.simulation import simulate

SECOND = 1000
MINUTE = 60 * SECOND
HOUR = 60 * MINUTE
DAY = 24 * HOUR
USUAL = PairingOptions()


def test_polls_are_those_of_the_cloud():
    assert [polls(10, each_ms / SECOND) for each_ms in (HOUR, DAY, 30 * DAY)] == [40, 960, 28_800]


def cost(outage_ms: int, *, messages: int = 0, entities: int = 1, clients: int = 1, options=USUAL):
    return outage(
        messages=messages,
        outage_ms=outage_ms,
        entities=entities,
        clients=clients,
        ping_interval_ms=options.ping_interval_ms,
        failover_interval_ms=options.failover_interval_ms,
    )


def test_an_outage_costs_pings_and_four_operations_for_each_message():
    costs = cost(HOUR, messages=1000, entities=5, clients=2)
    assert costs.pings == 5 * 2 * 60
    assert costs.messages == 1000 * OPERATIONS_PER_MESSAGE == 4000
    assert costs.total == 4600


def test_an_outage_that_ends_before_the_failover_costs_nothing():
    assert cost(9999, messages=1000, entities=5, clients=2) == OutageCosts(0, 0)
    assert cost(10_000, messages=1) == OutageCosts(1, OPERATIONS_PER_MESSAGE)


class Primary:
    """One that is away until `back_ms`, from 0 on: it refuses connections, or it hangs. It counts the pings."""

    def __init__(self, back_ms: int, *, hangs: bool) -> None:
        self._back_ms = back_ms
        self._hangs = hangs
        self.pings: Counter[str] = Counter()

    async def ping(self, path: str) -> None:
        self.pings[path] += 1
        if Availability.now_ms() <= self._back_ms:
            if self._hangs:
                await asyncio.Event().wait()
            raise ConnectionLost("", "the primary is away")


async def live_through(outage_ms: int, entities: int, clients: int, options: PairingOptions, *, hangs: bool) -> int:
    """The pings of an outage that each client notices at once, by a send to each entity. Returns their number."""
    primary = Primary(outage_ms, hangs=hangs)
    counters = [Counters() for _ in range(clients)]
    pairings = [Availability(options, primary.ping, each) for each in counters]
    for pairing in pairings:
        for entity in range(entities):
            pairing.failed(pairing.path(f"entity-{entity}"), 0)
    if outage_ms < options.failover_interval_ms:
        await asyncio.sleep(outage_ms / SECOND)
        for pairing in pairings:
            for path in pairing:
                pairing.succeeded(path)  # senders try again meanwhile
    await asyncio.sleep((outage_ms + options.failover_interval_ms + 3 * options.ping_interval_ms) / SECOND)
    assert not any(pairing.failed_over for pairing in pairings)
    pings = sum(each.pings for each in counters)
    assert sum(each.failbacks for each in counters) == (entities * clients if pings else 0)
    assert primary.pings.total() == pings
    assert len(set(primary.pings.values())) <= 1  # no entity costs more than another
    for pairing in pairings:
        pairing.close()
    return pings


@pytest.mark.parametrize("hangs", [False, True], ids=["refuses", "hangs"])
@pytest.mark.parametrize(
    ("outage_ms", "entities", "clients", "pings"),
    [
        (9999, 3, 2, 0),
        (10_000, 3, 2, 6),
        (HOUR, 1, 1, 60),
        (HOUR, 5, 2, 600),
        (DAY, 1, 1, 1440),
        (30 * DAY, 1, 1, 43_200),
    ],
)
def test_pings_in_simulated_time_are_as_many_as_the_formula_says(outage_ms, entities, clients, pings, hangs):
    assert simulate(live_through(outage_ms, entities, clients, USUAL, hangs=hangs)) == pings
    assert cost(outage_ms, entities=entities, clients=clients).pings == pings


@given(
    st.integers(0, 5 * MINUTE),
    st.integers(0, MINUTE),
    st.integers(2 * SECOND, 2 * MINUTE),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
)
def test_so_it_is_with_any_intervals(outage_ms, failover_ms, ping_ms, entities, clients, hangs):
    options = PairingOptions(failover_interval_ms=failover_ms, ping_interval_ms=ping_ms)
    pings = simulate(live_through(outage_ms, entities, clients, options, hangs=hangs))
    assert pings == cost(outage_ms, entities=entities, clients=clients, options=options).pings
