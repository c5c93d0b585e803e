"""`python -m broker.gateway`: one gateway process, as the supervisor starts it."""

import gc
import sys

import uvloop

from broker.child import fail, read_instructions
from broker.gateway.gateway import Gateway
from broker.logging import configure_logging
from broker.settings.config import ConfigurationError


async def _serve() -> None:
    await Gateway(_INSTRUCTIONS).run()


_INSTRUCTIONS = read_instructions()
configure_logging(_INSTRUCTIONS.settings.log)
gc.freeze()  # objects made by imports live as long as the process, so the collector need not look at them
try:
    uvloop.run(_serve())
except ConfigurationError as error:
    fail(str(error))
sys.exit(0)
