"""How many examples model tests run, and for how long each.

`PEEKLOCK_MODEL_EXAMPLES` in the caller's environment says how many examples each model runs; `make model` sets it. A
failure prints its steps and a `@reproduce_failure` line, and hypothesis keeps it in `.hypothesis` for the next run.
"""

from hypothesis import HealthCheck, settings

from tests.caller import VARIABLES


def model_settings(examples: int, steps: int) -> settings:
    """`examples` are run where the caller does not say how many; each has up to `steps` rules."""
    return settings(
        max_examples=int(VARIABLES.get("PEEKLOCK_MODEL_EXAMPLES", examples)),
        stateful_step_count=steps,
        deadline=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
