"""The estimate of what a connection keeps: it counts what is begun, gives back what has ended, and has a bound."""

from random import Random

import pytest

from protocol.codec import Array, Described, Symbol, UInt, ULong
from protocol.engine.proton.state_bytes import StateBytes, StateTooLarge, check_disposition
from protocol.errors import InvalidField

FIELDS = ["link", UInt(0), False, {Symbol("a"): [None, "b"]}]
MODIFIED = Described(ULong(0x27), [True])


@pytest.mark.parametrize("seed", range(10))
def test_state_that_has_ended_is_subtracted(seed):
    """After any order of beginnings and ends, the same is counted as if only what is left had ever begun."""
    random = Random(seed)
    kept = StateBytes()
    there: dict[int, set[int]] = {}
    for _ in range(500):
        channel, handle = random.randrange(4), random.randrange(4)
        links = there.get(channel)
        if links is None:
            kept.begin(channel, 30, [])
            there[channel] = set()
        elif random.random() < 0.1:
            kept.end(channel)
            del there[channel]
        elif handle in links:
            kept.detach(channel, handle)
            links.remove(handle)
        else:
            kept.attach(channel, handle, 100, FIELDS)
            links.add(handle)
    anew = StateBytes()
    for channel, links in there.items():
        anew.begin(channel, 30, [])
        for handle in links:
            anew.attach(channel, handle, 100, FIELDS)
    assert kept.total == anew.total
    for channel in there:
        kept.end(channel)
    assert kept.total == 0


def attach_many(kept, count):
    for handle in range(count):
        kept.attach(0, handle, 100, FIELDS)


def test_beyond_the_maximum_nothing_is_taken():
    kept = StateBytes()
    kept.maximum = 100_000
    kept.begin(0, 30, [])
    attach_many(kept, 10)
    with pytest.raises(StateTooLarge, match="100000 bytes"):
        attach_many(kept, 100)


@pytest.mark.parametrize("value", [[None] * 1000, dict.fromkeys(range(500)), Array(type(None), (None,) * 1000)])
def test_values_count_however_few_bytes_they_take_on_the_wire(value):
    kept = StateBytes()
    kept.open(10, ["c", value])
    assert kept.total >= 1000 * 143


@pytest.mark.parametrize(
    ("size", "last", "state", "error"),
    [
        (100, 1_000_000, Described(ULong(0x24), []), None),
        (60_000, None, MODIFIED, None),
        (60_000, 200, MODIFIED, None),
        (60_000, 300, MODIFIED, StateTooLarge),
        (60_000, 2**32 - 1, MODIFIED, StateTooLarge),
        (60_000, None, Described(ULong(0x23), []), InvalidField),
        (60_000, None, Described(Symbol("any:thing"), []), InvalidField),
        (60_000, None, Described(Symbol("amqp:modified:list"), []), None),
        (60_000, None, None, InvalidField),
    ],
)
def test_a_large_state_is_an_outcome_for_few_deliveries(size, last, state, error):
    fields = [True, UInt(1), None if last is None else UInt(last), False, state, None]
    if error is None:
        check_disposition(size, fields)
    else:
        with pytest.raises(error):
            check_disposition(size, fields)
