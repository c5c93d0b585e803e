"""Feeds mutated sessions to the engine, as a gateway does, without a socket: `python -m tests.fuzz.engine_cases`.

A process of its own, since what is looked for may end it. It writes the number of each case before it begins, and
ends with 0 if only a peer's mistakes were found.
"""

import faulthandler
import resource
import sys
import time
from random import Random
from typing import Any

from protocol.engine.deliveries import ACCEPTED, Delivery, forget, modification, reject, rejection, settle
from protocol.engine.engine import Engine
from protocol.engine.links import Link, Session
from protocol.errors import ProtocolError
from protocol.message.intake import take_apart
from protocol.message.rendering import render_embedded  # noqa: F401 - imports what a gateway has, so that memory is like its
from tests.fuzz.mutations import mutated, session

MEMORY_BYTES = 1 << 30
# The CPU time of a case, which takes 1 us a byte at most; work that is not linear shows in those with many frames.
MOST_SECONDS, MOST_US_PER_BYTE = 0.3, 5.0


class TooSlow(Exception):
    """The work of a case is out of proportion to its bytes."""


class Server:
    """Does with an engine what a gateway's connection does."""

    def __init__(self) -> None:
        self.engine = Engine(self, server=True, container_id="fuzz")
        self.opened = False

    def on_open(self, container_id: str, hostname: str) -> None:
        self.opened = True
        self.engine.open()

    def on_session(self, session: Session) -> None: ...

    def on_session_end(self, session: Session) -> None: ...

    def on_attach(self, link: Link) -> None:
        link.source_filter()
        link.remote_properties()
        if link.is_coordinator or link.is_dynamic or not link.address or link.address.startswith("$"):
            link.refuse("amqp:not-implemented", f"not {link.address}")
        else:
            link.accept(0 if link.is_sender else 1 << 16, 100)

    def on_detach(self, link: Link, closed: bool, condition: str, description: str) -> None: ...

    def on_flow(self, link: Link) -> None:
        for number in range(min(link.credit, 10)):
            link.send(number.to_bytes(16, "big"), b"\x00\x53\x75\xa0\x04", b"body", 0, link.settled_by_sender)
        if link.drain:
            link.drained()

    def on_message(
        self, link: Link, delivery: Delivery, payload: bytes, batch: bool, settled: bool, state: int
    ) -> None:
        try:
            take_apart(payload)
        except ProtocolError as error:
            if settled:
                forget(delivery)
            else:
                reject(delivery, "amqp:decode-error", str(error))
            return
        if settled:
            forget(delivery)
        else:
            settle(delivery, ACCEPTED)

    def on_oversized(self, link: Link, delivery: Delivery, size_bytes: int, settled: bool) -> None:
        forget(delivery)

    def on_crowded(self, link: Link, delivery: Delivery, settled: bool) -> None: ...

    def on_aborted(self, link: Link) -> None: ...

    def on_outcome(self, link: Link, delivery: Delivery, token: bytes, state: int, settled: bool) -> None:
        rejection(delivery)
        modification(delivery)
        if settled:
            forget(delivery)
        else:
            settle(delivery, state if 0x24 <= state <= 0x27 else 0x25)

    def on_close(self, condition: str, description: str) -> None: ...


def run_case(seed: int, case: int, frames: list[bytes]) -> None:
    """Raises whatever is no mistake of the peer's."""
    random = Random(f"{seed}/{case}")
    data = mutated(random, frames)
    server = Server()
    engine = server.engine
    began = time.process_time()
    try:
        at = 0
        while at < len(data):
            size = random.choice((1, 7, 40, 300, 5000, 70_000, 1 << 20))
            try:
                engine.push(data[at : at + size])
            except ProtocolError as error:
                if server.opened:
                    engine.close("amqp:decode-error", str(error))
                else:
                    engine.refusal("amqp:decode-error", str(error))
                    break
            at += size
            engine.pull()
            engine.check()
        engine.tick(1000)
        engine.input_ended()
        engine.pull()
        engine.check()
    finally:
        engine.free()
    spent = time.process_time() - began
    if spent > MOST_SECONDS + MOST_US_PER_BYTE * 1e-6 * len(data):
        raise TooSlow(f"{len(data)} bytes took {spent:.2f} s")


def main(arguments: list[str]) -> int:
    seed, first, seconds = int(arguments[0]), int(arguments[1]), float(arguments[2])
    last = int(arguments[3]) if len(arguments) > 3 else sys.maxsize
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    faulthandler.dump_traceback_later(seconds + 5, exit=True)  # says where a case does not end
    frames = session("orders")
    progress: Any = sys.stdout
    end = time.monotonic() + seconds
    case = first
    resident = 0
    while case <= last and (time.monotonic() < end or last < sys.maxsize):
        print(case, file=progress, flush=True)
        run_case(seed, case, frames)
        case += 1
        if case == first + 500:
            resident = resident_bytes()
    if resident and resident_bytes() - resident > 40 << 20:
        print(f"memory grew by {resident_bytes() - resident} bytes in {case - first} cases", file=sys.stderr)
        return 3
    return 0


def resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
