"""A process that behaves as its supervisor's test wants: the plan is a Python expression per start, in a file.

Each start appends "<name> <pid>" to the file `starts`, and each end by SIGTERM "<name>" to the file `ends`.
"""

import os
import signal
import sys
import time
from pathlib import Path

from broker.child import Pulse, announce_ready, fail, read_instructions


def note(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, text.encode() + b"\n")
    os.close(descriptor)


def terminated(*_: object) -> None:
    note("ends", name)
    sys.exit(0)


instructions = read_instructions()
name = "gateway" if instructions.worker is None else f"worker-{instructions.worker}"
plan = Path(f"{name}.plan")
behaviour = plan.read_text() if plan.exists() else "serve"
note("starts", f"{name} {os.getpid()} {instructions.restarts}")
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "ignore SIGTERM" else terminated)
pulse = Pulse()
match behaviour.partition(" "):
    case ("crash", _, times) if instructions.restarts < int(times):
        sys.exit(3)
    case ("hang", _, times) if instructions.restarts < int(times):
        pulse.beat()
        time.sleep(3600)
    case ("fail", _, message):
        fail(message)
    case ("chatter", _, _):
        print("a library prints something", flush=True)
announce_ready(port=4711)
print("what is printed later goes to the log", flush=True)
while True:
    pulse.beat()
    time.sleep(0.2)
