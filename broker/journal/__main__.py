"""`python -m broker.journal`: the journal as a process of a broker, as the supervisor starts it."""

import sys

from broker.pulse import Pulse

_PULSE = Pulse()
with _PULSE.loading():
    import uvloop

    from broker.child import NO_ROOM, collect_rarely, fail, keep_freed, read_instructions
    from broker.journal.process import JournalProcess
    from broker.logging import configure_logging
    from broker.settings.config import ConfigurationError, NoRoom


async def _serve() -> None:
    await JournalProcess(_INSTRUCTIONS, _PULSE.beat).run()


_INSTRUCTIONS = read_instructions()
configure_logging(_INSTRUCTIONS.settings.log)
collect_rarely()
keep_freed()
try:
    uvloop.run(_serve())
except NoRoom as error:
    fail(str(error), NO_ROOM)
except ConfigurationError as error:
    fail(str(error))
sys.exit(0)
