"""`python -m broker.observer`: the operations endpoint as a process, as the supervisor starts it."""

import sys

from broker.pulse import Pulse

_PULSE = Pulse()
with _PULSE.loading():
    import uvloop

    from broker.child import collect_rarely, fail, read_instructions
    from broker.logging import configure_logging
    from broker.observer.observer import Observer
    from broker.settings.config import ConfigurationError


async def _observe() -> None:
    await Observer(_INSTRUCTIONS, _PULSE.beat).run()


_INSTRUCTIONS = read_instructions()
configure_logging(_INSTRUCTIONS.settings.log)
collect_rarely()
try:
    uvloop.run(_observe())
except ConfigurationError as error:
    fail(str(error))
sys.exit(0)
