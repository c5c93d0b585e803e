"""Run `broker.supervisor.processes` in the directory given, with stub children: one gateway and two workers.

Further arguments: the seconds that they have to stop, and those after which a silent one is replaced (0: never), and a
number that makes the instructions long.
"""

import json
import os
import sys
from pathlib import Path

from broker.child import Instructions
from broker.settings.config import ConfigurationError, Settings
from broker.supervisor.processes import Processes, Role

directory = Path(sys.argv[1])
stall_seconds = float(sys.argv[3]) or None
queues = [f"queue-{number:0200}" for number in range(int(sys.argv[4]))]
sockets = ("run/worker-0.sock", "run/worker-1.sock")


def role(worker: int | None) -> Role:
    def instructions(restarts: int) -> Instructions:
        return Instructions(
            settings=Settings.model_validate({"journal": {"mode": "events", "modes": dict.fromkeys(queues, "events")}}),
            supervisor=os.getpid(),
            gateway=0 if worker is None else None,
            worker=worker,
            partitions=() if worker is None else (worker, worker + 2),
            sockets=sockets,
            restarts=restarts,
        )

    return Role("gateway" if worker is None else f"worker-{worker}", "stub_child", instructions, stall_seconds)


def say(line: str) -> None:
    """In a line of its own and in one write, since the children write to the same pipe."""
    os.write(1, f"\n{line}\n".encode())


processes = Processes(
    [[role(None)], [role(0), role(1)]], directory, stop_seconds=float(sys.argv[2]), reload=lambda: None
)
try:
    code = processes.run(lambda answers: say(f"READY {json.dumps(answers)}"))
except ConfigurationError as error:
    say(f"ERROR {error}")
    code = 78
say("END")
sys.exit(code)
