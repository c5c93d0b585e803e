"""`python -m broker.worker`: one worker process, as the supervisor starts it."""

import sys

from broker.pulse import Pulse

_PULSE = Pulse()
with _PULSE.loading():
    from broker.child import collect_rarely, keep_freed
    from broker.worker.process import main

collect_rarely()
keep_freed()
sys.exit(main(_PULSE))
