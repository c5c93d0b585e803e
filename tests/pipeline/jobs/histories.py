"""Histories for models of the audit, and faults that are planted in them.

Each run of Spark judges many histories, each a namespace of its own.
"""

import random
from collections import defaultdict

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.caller import VARIABLES

EXAMPLES = max(2, int(VARIABLES.get("PEEKLOCK_MODEL_EXAMPLES", 0)) // 50)
HISTORIES = 20  # in one run of Spark


def cases_of(seed):
    """Different ones also of the simplest seed: Hypothesis would draw each number of a history by itself."""
    return [random.Random(f"{seed} {index}") for index in range(HISTORIES)]


CASES = st.integers(0, 1 << 64).map(cases_of)
MODEL = settings(
    max_examples=EXAMPLES,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # to shrink takes a run of Spark for each step
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)


def plantable(history):
    """Places that a plain `completed` has ended, and that the message came to as the first. Their entities may move."""
    rows = defaultdict(list)
    for row in history.rows:
        if row["sequenceNumber"] is not None:
            rows[row["entity"], row["subQueue"], row["sequenceNumber"]].append(row)
    return [
        place
        for place, own in rows.items()
        if own[0]["op"] == "enqueued" and own[0].get("originEntity") is None and own[-1]["op"] == "completed"
    ]  # fmt: skip


def planted(rows, present, place, fault):
    """The rows and what is present, with a fault of that place."""

    def concerns(row, op):
        return (row["entity"], row["subQueue"], row["sequenceNumber"], row["op"]) == (*place, op)

    if fault == "entered_twice":
        rows = [copy for row in rows for copy in ([row, row] if concerns(row, "enqueued") else [row])]
    elif fault == "left_twice":
        rows = [copy for row in rows for copy in ([row, row] if concerns(row, "completed") else [row])]
    elif fault == "unexplained":
        why = {"op": "purged", "reason": "unexplained"}
        rows = [row | why if concerns(row, "completed") else row for row in rows]
    elif fault == "ghost":
        rows = [row for row in rows if not concerns(row, "enqueued")]
    elif fault == "lost":
        rows = [row for row in rows if not concerns(row, "completed")]
    else:
        present = present | {place}
    return rows, present


def renumbered(rows):
    """Copies with contiguous offsets."""
    ends = defaultdict(int)
    found = []
    for row in rows:
        found.append(row | {"journalOffset": ends[row["partition"]]})
        ends[row["partition"]] += 1
    return found
