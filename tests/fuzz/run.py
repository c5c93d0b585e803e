"""Says mutated sessions to the engine and to a running broker, and looks whether either took harm.

    python -m tests.fuzz.run --seconds 600
    python -m tests.fuzz.run --engine-case SEED/CASE     one case again

A case is made by its seed and number alone. What is found has the number in its text.
"""

import argparse
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from random import Random

from tests.brokers import KEY, KEY_NAME, REPOSITORY, Broker
from tests.end_to_end.health import assert_unharmed, metrics, process_ids
from tests.fuzz.mutations import mutated, sasl_init, session
from tests.patience import PATIENCE_S, eventually

CONFIG = """
partitions = 2

[amqp]
sasl_timeout_ms = 500
open_timeout_ms = 500
cbs_timeout_ms = 500

[[queues]]
name = "witness"

[[queues]]
name = "orders"
max_size_mb = 16
"""
CASES_BETWEEN_CHECKS = 200


class Found(Exception):
    """A case did harm."""


def fuzz_engine(seed: int, seconds: float) -> int:
    """The number of cases. Raises Found."""
    return _engine_cases([str(seed), "0", str(seconds)], seed, seconds)


def _engine_cases(arguments: Sequence[str], seed: int, seconds: float) -> int:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.fuzz.engine_cases", *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate(timeout=seconds + PATIENCE_S)
        how = f"signal {-process.returncode}" if process.returncode < 0 else f"exit code {process.returncode}"
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        how = "does not end"
    numbers = output.split()
    if process.returncode != 0:
        case = numbers[-1].decode() if numbers else "none"
        raise Found(f"engine case {seed}/{case}: {how}\n{errors.decode(errors='replace')[-4000:]}")
    return len(numbers)


def fuzz_broker(seed: int, seconds: float, directory: Path) -> int:
    """The number of cases. Raises Found."""
    frames = session("orders")
    case = 0
    with Broker(directory, CONFIG) as broker:
        before = process_ids(broker)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(CASES_BETWEEN_CHECKS):
                random = Random(f"{seed}/{case}")
                sasl = sasl_init(KEY_NAME, KEY)
                data = mutated(random, [sasl, *frames]) if random.random() < 0.1 else sasl + mutated(random, frames)
                say(broker.amqp_port, data, random)
                case += 1
                if time.monotonic() >= end:
                    break
            try:
                assert_unharmed(broker, before)
            except Exception as error:
                raise Found(f"broker, up to case {seed}/{case}: {error!r}\n{broker.log()}") from error
        eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "no connection left")
    return case


def say(port: int, data: bytes, random: Random) -> None:
    """Say it in pieces, read some of what comes, and go; sometimes without a word."""
    with socket.socket() as peer, suppress(OSError):
        peer.settimeout(0.02)
        peer.connect(("127.0.0.1", port))
        at = 0
        while at < len(data):
            size = random.choice((50, 500, 70_000, 70_000))
            peer.sendall(data[at : at + size])
            at += size
        if random.random() < 0.5:
            peer.shutdown(socket.SHUT_WR)
        if random.random() < 0.5:
            while peer.recv(1 << 16):
                pass


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120, help="half for the engine, half for a broker")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--engine-case", metavar="SEED/CASE", help="run this case only")
    options = parser.parse_args(arguments)
    try:
        if options.engine_case:
            seed, case = map(int, options.engine_case.split("/"))
            _engine_cases([str(seed), str(case), "60", str(case)], seed, 60)
            print(f"engine case {seed}/{case}: no harm")
            return 0
        print(f"seed {options.seed}", flush=True)
        print(f"engine: {fuzz_engine(options.seed, options.seconds / 2)} cases, no harm", flush=True)
        with tempfile.TemporaryDirectory(prefix="peeklock-fuzz-") as directory:
            count = fuzz_broker(options.seed, options.seconds / 2, Path(directory))
        print(f"broker: {count} cases, no harm")
    except Found as found:
        print(found, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
