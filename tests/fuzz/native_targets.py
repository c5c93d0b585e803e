"""Fuzzes the C of the extension under AddressSanitizer and UndefinedBehaviorSanitizer.

    python -m tests.fuzz.native_targets --seconds 600    each target, with libFuzzer and the coverage; needs clang
    python -m tests.fuzz.native_targets --target intake

Where there is no clang, the suite's short form changes the same seeds with a driver of our own (`native/driver.c`).
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import msgpack

from protocol.codec import Described, Symbol, UByte, UInt, ULong, encode
from protocol.message.intake import take_apart
from storage.records import NEVER, Place, encode_entry, encode_message, message_key, queue_key
from tests.end_to_end.raw_peer import DISPOSITION, TRANSFER, performative
from tests.fuzz.mutations import session

HERE = Path(__file__).parent / "native"
SOURCES = Path(__file__).parents[2] / "protocol" / "native"
TARGETS = ("intake", "frames", "records", "memory", "turns", "stored")
PURE = ("intake.c", "frames.c", "records.c", "memory.c", "packed.c", "stored.c", "turns.c")  # those without Python
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
MOST_SECONDS = 1
FLAGS = ("-std=gnu11", "-g", "-O1", f"-I{SOURCES}", "-Wno-pointer-arith")


class Found(Exception):
    """A target failed."""


def _section(code: int, value: object) -> bytes:
    return encode(Described(ULong(code), value))


def seeds(target: str) -> list[bytes]:
    body = _section(0x75, b"body")
    properties = ["id", b"user", "to", "subject", "reply", ULong(7), Symbol("text/plain"), None, None, None, None, None]
    messages = [
        body,
        _section(0x77, "text"),
        _section(0x70, [True, UByte(4)]) + body,
        _section(0x72, {Symbol("k"): 1, Symbol("x-opt-a"): "v"}) + body,
        _section(0x73, properties) + _section(0x74, {"a": 1, "b": "text", "c": None}) + body,
        _section(0x73, [None, None, "to"]) + body,
        _section(0x75, bytes(300)),
    ]
    if target == "intake":
        return messages
    if target == "records":
        made = [encode_message(1000, NEVER, bytes(16), message) for message in messages]
        runs = [b"".join(len(record).to_bytes(4, "big") + record for record in made)]
        return [len(record).to_bytes(4, "big") + record for record in made] + runs
    if target == "stored":
        return [encode_message(1000, NEVER, *take_apart(message)[:2]) for message in messages]
    if target == "turns":
        records = [encode_message(1000, NEVER, layout, stored) for layout, stored, _, _ in map(take_apart, messages)]
        keys = [queue_key(1, Place.AVAILABLE, number) for number, _ in enumerate(records, 1)]
        entries = [(key, encode_entry(number)) for number, key in enumerate(keys, 1)]
        stored = [(message_key(number), record) for number, record in enumerate(records, 1)]
        values = [
            keys,
            {"a": [None, True, 1.5, -7, "text" * 9, b"x" * 300]},
            (entries, stored),
            (1 << 63, 1 << 40, 70_000, 300),
        ]
        return [msgpack.packb(value) for value in (*values, (entries[:2], stored[1:]))]
    if target == "frames":
        frames = session("orders")[1:]
        form = frames[5][4:12] + b"\xa0\x10" + frames[5][-9:]
        head = bytes((8, 1, 9, 255, 0, 1, 0, 0))
        accepted = Described(ULong(0x24), [])
        states = [Described(ULong(0x34), [b"0123456789abcdef", *more]) for more in ([], [None], [accepted])]
        frames += [
            performative(0, TRANSFER, [UInt(1), UInt(0), b"tag", UInt(0), False, False, None, state], messages[0])
            for state in states
        ]
        frames.append(performative(0, DISPOSITION, [True, UInt(1), None, False, states[2]]))
        return [
            *(head + form + frame for frame in frames),
            *(head + form + encode(state)[3:] for state in states),
            bytes(8) + b"".join(frames),
        ]
    return [bytes(range(256)), bytes(range(255, -1, -1)) * 2]


def _write_seeds(target: str, directory: Path) -> list[str]:
    paths = []
    for number, seed in enumerate(seeds(target)):
        path = directory / f"seed-{number}"
        path.write_bytes(seed)
        paths.append(str(path))
    return paths


def _build(compiler: Sequence[str], target: str, output: Path, *more: Path) -> None:
    sources = [HERE / "targets.c", *(SOURCES / name for name in PURE), *more]
    command = [*compiler, *FLAGS, f'-DTARGET="{target}"', *map(str, sources), "-o", str(output)]
    subprocess.run(command, check=True)


def change_seeds(target: str, seconds: int, seed: int, directory: Path) -> int:
    """The short form: the number of cases. Raises Found."""
    program = directory / target
    _build(["gcc", *SANITIZERS], target, program, HERE / "driver.c")
    command = [str(program), str(seconds), str(seed), *_write_seeds(target, directory)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds + 60)
    if done.returncode:
        raise Found(f"{target}, seed {seed}: exit code {done.returncode}\n{done.stderr[-4000:]}")
    return int(done.stdout)


def fuzz(target: str, seconds: int, directory: Path) -> str:
    """libFuzzer's last line, and the coverage of the sources. Raises Found, with the input that fails in its text."""
    corpus = directory / "corpus"
    corpus.mkdir()
    _write_seeds(target, corpus)
    _build(["clang", "-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=all"], target, directory / target)
    command = [str(directory / target), str(corpus), f"-max_total_time={seconds}", "-max_len=70000", "-verbosity=1"]
    command.append(f"-timeout={MOST_SECONDS}")  # of one case; libFuzzer's least is a second
    done = subprocess.run(command, capture_output=True, text=True, cwd=directory)
    if done.returncode:
        crash = next((found for kind in ("crash", "timeout") for found in directory.glob(f"{kind}-*")), None)
        raise Found(f"{target}: {crash.read_bytes().hex() if crash else ''}\n{done.stderr[-4000:]}")
    counted = directory / "counted"
    compiler = ["clang", "-fsanitize=fuzzer", "-fprofile-instr-generate", "-fcoverage-mapping"]
    _build(compiler, target, counted)
    profile = directory / "profile"
    subprocess.run(
        [str(counted), str(corpus), "-runs=0"],
        check=True,
        capture_output=True,
        env={"LLVM_PROFILE_FILE": f"{profile}.raw"},
    )
    tools = {name: shutil.which(name) or shutil.which(f"{name}-14") or name for name in ("llvm-profdata", "llvm-cov")}
    subprocess.run([tools["llvm-profdata"], "merge", f"{profile}.raw", "-o", str(profile)], check=True)
    report = subprocess.run(
        [
            tools["llvm-cov"],
            "report",
            str(counted),
            f"-instr-profile={profile}",
            *(str(SOURCES / each) for each in PURE),
        ],
        check=True,
        capture_output=True,
        text=True,
    )
    last = [line for line in done.stderr.splitlines() if line.startswith("Done")]
    return "\n".join((*last, report.stdout))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.native_targets", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--target", choices=TARGETS, action="append", help="only this one")
    options = parser.parse_args(argv)
    for target in options.target or TARGETS:
        with tempfile.TemporaryDirectory(prefix="peeklock-fuzz-") as scratch:
            print(f"== {target}", flush=True)
            try:
                print(fuzz(target, options.seconds, Path(scratch)), flush=True)
            except Found as found:
                print(found, file=sys.stderr)
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
