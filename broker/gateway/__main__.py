"""`python -m broker.gateway`: one gateway process, as the supervisor starts it."""

import sys

from broker.pulse import Pulse

_PULSE = Pulse()
with _PULSE.loading():
    import uvloop

    from broker.child import collect_rarely, fail, keep_freed, read_instructions
    from broker.gateway.gateway import Gateway
    from broker.logging import configure_logging
    from broker.settings.config import ConfigurationError


async def _serve() -> None:
    await Gateway(_INSTRUCTIONS, beat=_PULSE.beat).run()


_INSTRUCTIONS = read_instructions()
configure_logging(_INSTRUCTIONS.settings.log)
collect_rarely()
keep_freed()
try:
    uvloop.run(_serve())
except ConfigurationError as error:
    fail(str(error))
sys.exit(0)
