"""Kills one of the workers of a partitioned queue under load, and prints what clients notice.

    python -m tests.partitioned.losing_a_worker --workers 4 --stored 1000000

Clients are processes of their own, and send and receive at rates that leave the machine room: the figures are of what
the kill does, and not of a queue that is full.
"""

import argparse
import itertools
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from bench import load
from tests.brokers import KEY, KEY_NAME, Broker
from tests.end_to_end.health import is_ready, worker_of
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, TRANSFER, RawPeer, message
from tests.partitioned.operations import FAULTY, PARTITIONS, key_of
from tests.partitioned.operations import KEY as PARTITION_KEY
from tests.patience import eventually

CONFIG = f"""
partitions = {PARTITIONS}

[partitioning]
default = true

[[queues]]
name = "stored"
max_size_mb = 20480

[[queues]]
name = "without-keys"

[[queues]]
name = "with-keys"
"""
BODY = bytes(1024)
WINDOW = 100
BEFORE_S, AFTER_S = 5.0, 5.0  # of load around the kill; the first second is not counted
WARM_UP_S = 1.0
CREDIT = 200
WINDOW_S = 0.2


@dataclass(frozen=True)
class Answer:
    """`at` is on the monotonic clock, which is the same for all processes."""

    at: float
    seconds: float
    is_accepted: bool


def send(port: int, address: str, keys: Sequence[str | None], rate_per_s: float, until: float) -> list[Answer]:
    """At this rate, with up to WINDOW unanswered; messages have these keys in turn."""
    messages = [message(BODY, annotations=None if key is None else {PARTITION_KEY: key}) for key in keys]
    answers = []
    with RawPeer.connect(port) as peer:
        handle = peer.attach_sender(address)
        began = time.monotonic()
        sent: dict[int, float] = {}
        count = 0
        while (now := time.monotonic()) < until or sent:
            while now < until and count < (now - began) * rate_per_s and len(sent) < WINDOW:
                sent[peer.transfer(messages[count % len(messages)], handle)] = time.monotonic()
                count += 1
            with suppress(TimeoutError):
                frame = peer.expect(DISPOSITION, 0.002 if now < until else 30.0)
                now = time.monotonic()
                first, last = frame.fields[1], frame.fields[2]
                for number in range(first, (first if last is None else last) + 1):
                    is_accepted = frame.fields[4].descriptor == ACCEPTED
                    answers.append(Answer(now, now - sent.pop(number), is_accepted))
    return answers


def receive(port: int, address: str, until: float) -> list[tuple[float, int]]:
    """When a message came, and from which fragment."""
    found = []
    with RawPeer.connect(port) as peer:
        handle = peer.attach_receiver(address, CREDIT)
        count = 0
        while time.monotonic() < until:
            with suppress(TimeoutError):
                delivery = peer.expect(TRANSFER, 0.1)
                found.append((time.monotonic(), int.from_bytes(bytes(delivery.fields[2])[:2], "big")))
                peer.settle(delivery.fields[1], settled=True)
                count += 1
                if count % (CREDIT // 4) == 0:
                    peer.flow(handle, CREDIT, delivery_count=count, next_incoming_id=count)
    return found


class Client:
    """A function in a process of its own."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._reader, writer = context.Pipe(duplex=False)
        self._process = context.Process(target=_answer, args=(writer, function, arguments))
        self._process.start()
        writer.close()

    def result(self) -> Any:
        found = self._reader.recv()
        self._process.join()
        return found


def _answer(writer: Connection, function: Callable[..., Any], arguments: Sequence[Any]) -> None:
    writer.send(function(*arguments))


@dataclass(frozen=True)
class Figures:
    errors: int  # of sends without a key
    sent: int
    pause_s: float  # longest time between two accepted messages without a key, from the kill on
    slowest_s: float  # longest time of one of them
    usual_s: float  # the same before the kill
    back_s: float  # from the kill until a message with a key of the lost fragment is accepted
    rate_before: float  # deliveries per second of messages with keys of the other fragments
    rate_away: float  # until it was back
    rate_worst: float  # in the worst WINDOW_S of that

    def __str__(self) -> str:
        return (
            f"without a key: {self.sent:,} sent, {self.errors} errors, longest pause {self.pause_s * 1e3:.0f} ms, "
            f"slowest {self.slowest_s * 1e3:.0f} ms (before the kill {self.usual_s * 1e3:.0f} ms)\n"
            f"the worker is back after {self.back_s:.2f} s\n"
            f"other fragments: {self.rate_before:.0f} msg/s before, {self.rate_away:.0f} until it is back "
            f"({self.rate_away / self.rate_before:.1%}), {self.rate_worst:.0f} in the worst {WINDOW_S:g} s"
        )


def run(broker: Broker, rate_per_s: float) -> Figures:
    """Raises AssertionError if it is not back in time."""
    port = broker.amqp_port
    starting_s = 2.0  # of the clients' interpreters
    killed_at = time.monotonic() + starting_s + WARM_UP_S + BEFORE_S
    until = killed_at + AFTER_S
    assert broker.workers is not None
    lost = range(FAULTY % broker.workers, PARTITIONS, broker.workers)
    others = [key_of(partition) for partition in range(PARTITIONS) if partition not in lost]
    sender = Client(send, port, "without-keys", [None], rate_per_s, until)
    keyed = Client(send, port, "with-keys", others, rate_per_s, until)
    receivers = [Client(receive, port, name, until + 0.5) for name in ("without-keys", "with-keys")]
    worker = worker_of(broker, FAULTY)
    time.sleep(killed_at - time.monotonic())
    killed_at = time.monotonic()
    worker.kill()
    back_s = accepted_after(port) - killed_at
    answers: list[Answer] = sender.result()
    keyed.result()
    _, deliveries = [each.result() for each in receivers]
    times = sorted(each.at for each in answers if each.at > killed_at - WINDOW_S)
    before = [at for at, _ in deliveries if killed_at - BEFORE_S < at < killed_at]
    away = [at for at, _ in deliveries if killed_at < at < killed_at + back_s]
    steps = range(int(back_s / (WINDOW_S / 4)) - 3)
    windows = [killed_at + step * WINDOW_S / 4 for step in steps]
    return Figures(
        errors=sum(not each.is_accepted for each in answers),
        sent=len(answers),
        pause_s=max(later - earlier for earlier, later in itertools.pairwise(times)),
        slowest_s=max(each.seconds for each in answers if each.at > killed_at),
        usual_s=max(each.seconds for each in answers if killed_at - BEFORE_S < each.at < killed_at),
        back_s=back_s,
        rate_before=len(before) / BEFORE_S,
        rate_away=len(away) / back_s,
        rate_worst=min(sum(begin < at < begin + WINDOW_S for at in away) for begin in windows) / WINDOW_S,
    )


def accepted_after(port: int) -> float:
    """When a message of the lost fragment is accepted."""
    encoded = message(BODY, annotations={PARTITION_KEY: key_of(FAULTY)})
    with RawPeer.connect(port) as peer:
        handle = peer.attach_sender("with-keys")

        def is_accepted() -> bool:
            peer.transfer(encoded, handle)
            return bool(peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED)

        eventually(is_accepted, "it is back")
        return time.monotonic()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.partitioned.losing_a_worker", description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--stored", type=int, default=1_000_000, help="messages of 1 KiB (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=1000, help="of each of two senders, per second")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="peeklock-losing-") as name:
        broker = Broker(Path(name), CONFIG, workers=options.workers)
        with broker:
            if options.stored:
                at = load.Endpoint(broker.amqp_port, KEY_NAME, KEY)
                count = ("-n", str(options.stored), "--size", str(len(BODY)), "--idle", "60")
                print(f"stored {load.run(load.build().load, 'send', at, 'stored', *count).messages:,}", flush=True)
            for _ in range(options.rounds):
                broker.restart()  # so that the supervisor does not wait longer each time
                print(run(broker, options.rate), flush=True)
                eventually(lambda: is_ready(broker), "all are there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
