"""`python -m broker.inner_syphon`: the syphon as a process of a broker, as the supervisor starts it."""

import sys

from broker.pulse import Pulse

_PULSE = Pulse()
with _PULSE.loading():
    import uvloop

    from broker.child import collect_rarely, fail, read_instructions
    from broker.inner_syphon.inner_syphon import InnerSyphon
    from broker.logging import configure_logging
    from broker.settings.config import ConfigurationError


async def _serve() -> None:
    await InnerSyphon(_INSTRUCTIONS, _PULSE.beat).run()


_INSTRUCTIONS = read_instructions()
configure_logging(_INSTRUCTIONS.settings.log)
collect_rarely()
try:
    uvloop.run(_serve())
except ConfigurationError as error:
    fail(str(error))
sys.exit(0)
