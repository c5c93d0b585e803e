"""`python -m broker.journal`: the journal as a process of a broker, as the supervisor starts it."""

import sys

import uvloop

from broker.child import Pulse, collect_rarely, fail, keep_freed, read_instructions
from broker.journal.process import JournalProcess
from broker.logging import configure_logging
from broker.settings.config import ConfigurationError


async def _serve() -> None:
    await JournalProcess(_INSTRUCTIONS, Pulse().beat).run()


_INSTRUCTIONS = read_instructions()
configure_logging(_INSTRUCTIONS.settings.log)
collect_rarely()
keep_freed()
try:
    uvloop.run(_serve())
except ConfigurationError as error:
    fail(str(error))
sys.exit(0)
