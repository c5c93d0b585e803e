"""The flow audit as one would do it by hand: replay the rows in their order, with a set and some counters."""

from collections import Counter
from collections.abc import Iterable, Sequence

from tests.pipeline.ledgers import Place, Row

ENTERS = {"enqueued", "scheduled"}
LEAVES = {"completed", "expired", "purged", "cancelled", "quarantined"}
LEAVES |= {"deadlettered", "activated", "forwarded", "published"}


def verdicts(rows: Sequence[Row], present: Iterable[Place] | None) -> dict[Place, str]:
    """The verdict of each place, of a ledger without gaps, of one partition, before which all queues were empty."""
    entered: Counter[Place] = Counter()
    left: Counter[Place] = Counter()
    inside: set[Place] = set()
    unexplained: set[Place] = set()
    left_before: set[Place] = set()
    places: dict[Place, None] = {}
    for row in sorted(rows, key=lambda each: each["journalOffset"]):
        if row["sequenceNumber"] is None:
            continue
        place = (row["entity"], row["subQueue"], row["sequenceNumber"])
        places[place] = None
        if row["op"] in ENTERS:
            entered[place] += 1
            inside.add(place)
        elif row["op"] in LEAVES:
            if place not in inside and not entered[place]:
                left_before.add(place)
            left[place] += 1
            if (row["op"], row.get("reason")) == ("purged", "unexplained"):
                unexplained.add(place)
            inside.discard(place)
    there = set(present or ())
    places |= dict.fromkeys(there)
    found = {}
    for place in places:
        if entered[place] >= 2:
            found[place] = "entered_twice"
        elif left[place] >= 2:
            found[place] = "left_twice"
        elif place in unexplained:
            found[place] = "unexplained"
        elif not entered[place] or place in left_before:
            found[place] = "ghost"
        elif present is not None and left[place] and place in there:
            found[place] = "left_but_present"
        elif present is not None and not left[place] and place not in there and place[1] != "transfer":
            found[place] = "lost"
        else:
            found[place] = "ok"
    return found
