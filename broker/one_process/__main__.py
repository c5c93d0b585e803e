"""`python -m broker.one_process`: a gateway with all partitions inside, as the supervisor starts it."""

import sys

from broker.pulse import Pulse

_PULSE = Pulse()
with _PULSE.loading():
    import uvloop

    from broker.child import collect_rarely, keep_freed, read_instructions
    from broker.one_process.process import serve
    from broker.worker.process import run

_INSTRUCTIONS = read_instructions()
collect_rarely()
keep_freed()
sys.exit(run(_INSTRUCTIONS, lambda worker: uvloop.run(serve(_INSTRUCTIONS, worker)), _PULSE))
