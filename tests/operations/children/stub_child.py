"""A process that behaves as its supervisor's test wants: the plan is a Python expression per start, in a file.

Each start appends "<name> <pid>" to the file `starts`, and each end by SIGTERM "<name>" to the file `ends`. While there
is a file `stop-<number>` in STUBS, who starts takes one away and stops before it reads anything.
"""

import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

from broker.pulse import Pulse

pulse = Pulse()
with pulse.loading():
    from broker.child import NO_ROOM, announce_ready, fail, read_instructions


def note(file: str, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(descriptor, text.encode() + b"\n")
    os.close(descriptor)


def terminated(*_: object) -> None:
    note("ends", name)
    sys.exit(0)


for file in Path(os.environ["STUBS"]).glob("stop-*"):
    with suppress(FileNotFoundError):
        file.unlink()
        os.kill(os.getpid(), signal.SIGSTOP)
        break
instructions = read_instructions()
name = "gateway" if instructions.worker is None else f"worker-{instructions.worker}"
plan = Path(f"{name}.plan")
behaviour = plan.read_text() if plan.exists() else "serve"
note("starts", f"{name} {os.getpid()} {instructions.restarts}")
signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "ignore SIGTERM" else terminated)
match behaviour.partition(" "):
    case ("crash", _, times) if instructions.restarts < int(times):
        sys.exit(3)
    case ("hang", _, times) if instructions.restarts < int(times):
        pulse.beat()
        time.sleep(3600)
    case ("progress", _, seconds):
        until = time.monotonic() + float(seconds)
        while time.monotonic() < until:
            time.sleep(0.05)
            pulse.beat()
    case ("disk", _, seconds):
        with pulse.waiting_for_disk():
            time.sleep(float(seconds))
    case ("stop-at-disk", _, times) if instructions.restarts < int(times):
        with pulse.waiting_for_disk():
            os.kill(os.getpid(), signal.SIGSTOP)
    case ("full", _, times) if instructions.restarts < int(times):
        fail("the disk has no room", NO_ROOM)
    case ("fail", _, message):
        fail(message)
    case ("chatter", _, _):
        for something in ("a library prints something", "5", '"text"', "{}", "null", ""):
            print(something, flush=True)
announce_ready(port=4711)
if behaviour == "beat once, later" and not instructions.restarts:
    time.sleep(0.95)
    pulse.beat()
    note("beats", f"{name} {time.monotonic()}")
    time.sleep(3600)
print("what is printed later goes to the log", flush=True)
while True:
    pulse.beat()
    time.sleep(0.2)
