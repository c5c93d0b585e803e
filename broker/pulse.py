"""Signs of life of a gateway, worker or other child process to its supervisor.

    pulse = Pulse()
    with pulse.loading():  # before the modules are loaded that take time
        from broker.worker.process import main

From the start of a child on, its supervisor replaces it if it gives no sign for the time that a setting states
(`broker.supervisor.processes`). This module must stay light: children import it before anything else.
"""

import os
from contextlib import suppress

from storage.liveness import PipeSigns


class Pulse(PipeSigns):
    """Signs on the pipe of the answer (`broker.child`), as lines of their own. Make it before the answer is given.

    A sign never blocks: if the pipe is full, it is left out.
    """

    def __init__(self) -> None:
        self._pipe = os.dup(1)
        os.set_blocking(self._pipe, False)
        super().__init__(self._put)

    def _put(self, line: bytes) -> None:
        with suppress(OSError):
            os.write(self._pipe, line)
