"""The exact audit of a large ledger, beside the plainest aggregation that Spark can do over the same files.

As a program it does one of the two in a session of its own, as whoever runs the job gets it, and prints what it took
after the session had started.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.load import LoadFailed
from bench.processes import cpu_s_by_process, cpu_s_since, tree
from bench.recording import Recorder
from bench.servers import ROOT, Peeklock

AUDIT, COUNT = "audit", "count"
TIMEOUT_S = 3600


def audit(bench: Recorder, server: Peeklock) -> None:
    """Over a ledger with known faults. The audit must find these and no others. No broker takes part."""
    # Beside the tests of the audit, which share it; it is not installed with anything else.
    from tests.pipeline.ledgers import write_large

    with TemporaryDirectory(prefix="peeklock-bench-") as scratch:
        directory = Path(scratch)
        large = write_large(directory, bench.plan.audit_messages)
        took = {work: _in_own_session(work, directory) for work in (AUDIT, COUNT)}
        found = _faults(directory / "output" / "faults")
        if found != large.faults:
            raise LoadFailed(f"the audit has found other faults than were planted: {found}")
    for work, figures in took.items():
        bench.add(server, f"audit-{work}", figures["seconds"])
        bench.add(server, f"audit-{work}-cpu", figures["cpu_s"])
    for part, key in (("seconds", "audit-ratio"), ("cpu_s", "audit-ratio-cpu")):
        bench.add(server, key, took[AUDIT][part] / took[COUNT][part])


def _in_own_session(work: str, directory: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.pipeline.auditing", work, str(directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise LoadFailed(f"{work}: {done.stderr.strip()[-1000:]}")
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def _faults(folder: Path) -> dict[str, set[tuple[str, int]]]:
    import pyarrow.parquet as pq

    found: dict[str, set[tuple[str, int]]] = {}
    for row in pq.read_table(folder, columns=["verdict", "entity", "sequenceNumber"]).to_pylist():
        found.setdefault(row["verdict"], set()).add((row["entity"], row["sequenceNumber"]))
    return found


def measure(spark: Any, work: str, directory: Path) -> dict[str, float]:
    """Seconds, and CPU seconds of this process and its descendants. Raises LoadFailed."""
    from pipeline.jobs import audit as job
    from pipeline.jobs.ledger import read

    used, began = cpu_s_by_process(tree(os.getpid())), time.monotonic()
    if work == AUDIT:
        given = ["--ledger", str(directory), "--present", str(directory / "present"), "--whole"]
        if (code := job.main([*given, "--output", str(directory / "output")])) != 0:
            raise LoadFailed(f"the audit has ended with {code}")
    else:
        counted = read(spark, str(directory)).groupBy("entity", "sequenceNumber").count()
        counted.write.format("noop").mode("overwrite").save()
    return {"seconds": time.monotonic() - began, "cpu_s": cpu_s_since(used, tree(os.getpid()))}


def main(work: str, directory: Path) -> int:
    from pipeline.jobs import running

    spark = running.session("peeklock bench")
    print(json.dumps(measure(spark, work, directory)))
    spark.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
