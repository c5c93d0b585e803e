"""How many examples Hypothesis draws: a fifth for a change, all at night, where `PEEKLOCK_TEST_EXAMPLES` is `all`."""

from typing import Final

from tests.caller import VARIABLES

SHARE: Final = 1 if VARIABLES.get("PEEKLOCK_TEST_EXAMPLES") == "all" else 5
LEAST: Final = 10  # fewer find nothing


def examples(count: int) -> int:
    """The number of examples of a test that has `count` at night."""
    return max(min(count, LEAST), count // SHARE)
