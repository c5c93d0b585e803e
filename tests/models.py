"""How many examples model tests run, and for how long each.

`PEEKLOCK_MODEL_EXAMPLES` in the caller's environment says how many examples each model runs; `make model` sets it. A
failure prints its steps and a `@reproduce_failure` line, and hypothesis keeps it in `.hypothesis` for the next run.

Rules that find nothing to do are wasted, and hypothesis draws them as readily as others: so rules have preconditions,
and what ends most of what is going on is rare.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis.stateful import precondition

from tests.caller import VARIABLES
from tests.examples import examples as in_tier

STRAY = 999_999  # a sequence number that no message of a model reaches


def model_settings(examples: int, steps: int) -> settings:
    """`examples` are run at night where the caller does not say how many; each has up to `steps` rules."""
    return settings(
        max_examples=int(VARIABLES.get("PEEKLOCK_MODEL_EXAMPLES", in_tier(examples))),
        stateful_step_count=steps,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


def rarely(function: Callable[..., None]) -> Callable[..., None]:
    """A rule that ends most of what is going on comes only some `turns` after the last, at `ended_at`."""

    @wraps(function)
    def end(self: Any, **given: Any) -> None:
        self.ended_at = self.turns
        function(self, **given)

    wanted: Callable[..., None] = precondition(lambda self: self.turns > self.ended_at + 8)(end)
    return wanted
