"""All reports over a few rows, so that the JVM loads the classes that they need and writes an archive of them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.jobs import audit, classes, dead_letters, latency, running, usage
from pyspark_peeklock import readiness
from storage.capture.tables import LEDGER_SCHEMA

SECONDS: Final = 600.0


def _rows() -> list[dict[str, Any]]:
    """A message that waits, one that is completed, one that is dead-lettered; one that is lost, one that never was."""
    began = datetime(2026, 1, 1, tzinfo=UTC)
    dead = {"reason": "deadlettered", "originEntity": "orders", "originSubQueue": "active", "originSequenceNumber": 3}
    told: list[tuple[str, int, dict[str, Any]]] = [
        ("enqueued", 1, {}),
        ("enqueued", 2, {}),
        ("delivered", 2, {"deliveryCount": 1}),
        ("completed", 2, {}),
        ("enqueued", 3, {}),
        ("deadlettered", 3, {"reason": "MaxDeliveryCountExceeded"}),
        ("enqueued", 1, dead | {"subQueue": "deadletter"}),
        ("enqueued", 4, {}),
        ("completed", 5, {}),
        ("deadlettered", 6, {}),
    ]
    return [
        {
            **{
                "namespace": "rehearsal",
                "epoch": "",
                "partition": 0,
                "journalOffset": offset,
                "op": op,
                "entity": "orders",
            },
            **{"eventTime": began + timedelta(seconds=offset), "subQueue": "active", "sequenceNumber": number},
            **{"messageId": f"m{number}", "bodySize": 100},
            **more,
        }
        for offset, (op, number, more) in enumerate(told)
    ]


def _rehearse(scratch: Path) -> int:
    """Exit code of the first job that fails, or 0."""
    ledger, present = scratch / "ledger", scratch / "present"
    for folder, rows in ((ledger, _rows()), (present, _rows()[:1])):
        folder.mkdir()
        pq.write_table(pa.Table.from_pylist(rows, schema=LEDGER_SCHEMA), folder / "rows.parquet")
    given = ["--ledger", str(ledger), "--output", str(scratch / "output")]
    compared = ["--present", str(present), "--whole"]
    jobs: tuple[tuple[ModuleType, list[str]], ...] = ((audit, compared), (dead_letters, []), (latency, []), (usage, []))
    return next((code for job, more in jobs if (code := job.main([*given, *more])) != 0), 0)


def write_archive(archive: Path = classes.ARCHIVE) -> int:
    """Rehearse in a process of its own. Returns the archive's size in bytes. Raises NotReady, NotDone, OSError."""
    readiness.versions()
    archive.parent.mkdir(parents=True, exist_ok=True)
    # Beside it, so that it takes the place of an older one at once. A JVM that has mapped that one keeps it.
    with TemporaryDirectory(dir=archive.parent) as scratch:
        made = Path(scratch) / archive.name
        # The JVM writes when Python has ended. It holds the pipe, too: all is written when that is at its end.
        done = subprocess.run(
            [sys.executable, "-m", __spec__.name, scratch],
            env=classes.writing(made),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=SECONDS,
            text=True,
            check=False,
        )
        if done.returncode or not made.exists():
            raise running.NotDone(f"no archive of classes was written: {done.stdout.strip()[-500:]}")
        must_be_whole(made)
        made.replace(archive)
    return archive.stat().st_size


def must_be_whole(archive: Path) -> None:
    """Bring the archive to the disk. Raises NotDone if it was cut off, as on a full one."""
    with archive.open("rb") as file:
        os.fsync(file.fileno())
    command = [readiness.java_command(), *classes.reading(archive).split(), "--version"]
    # Java crashes, and writes a report of that where it runs.
    ran = subprocess.run(command, cwd=archive.parent, capture_output=True, timeout=SECONDS, check=False)
    if ran.returncode:
        raise running.NotDone(f"no archive of classes was written: Java cannot read what it wrote to {archive.parent}")


def _job(_: Sequence[str]) -> int:
    with running.step("rehearsing the reports"):
        size = write_archive()
    print(f"{classes.ARCHIVE}: {size / 1e6:.0f} MB of classes, which jobs on this machine map from now on")
    return 0


def main() -> int:
    return running.run(_job, [])


if __name__ == "__main__":
    raise SystemExit(_rehearse(Path(sys.argv[1])))
