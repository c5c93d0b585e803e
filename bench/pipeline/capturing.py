"""What a capture of the journal costs, beside pyarrow alone, which writes the same rows as Parquet."""

import os
import resource
import subprocess
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import pyarrow.parquet as pq

from bench.load import LoadFailed
from bench.pipeline.brokers import ROWS, PeeklockWithJournal
from bench.plan import KIB
from bench.processes import cpu_s
from bench.recording import Recorder
from bench.servers import Peeklock
from storage.capture.manifest import TableName
from storage.capture.reading import captured

WANTED_PER_S = 40_000  # messages
FEW = 100
TIMEOUT_S = 3600


def capture(bench: Recorder, server: Peeklock) -> None:
    """Of messages that were sent and received. What a capture of a few takes is subtracted: the command's start."""
    assert isinstance(server, PeeklockWithJournal)
    count = bench.plan.pipeline_messages
    server.start()
    with tempfile.TemporaryDirectory(prefix="peeklock-bench-") as scratch:
        folder = Path(scratch) / "captured"
        _send_and_receive(bench, server, FEW)
        start_s = capture_once(server, folder)
        _send_and_receive(bench, server, count)
        server.settle()
        broker_s = cpu_s(server.processes())
        own_s = capture_once(server, folder) - start_s
        broker_s = cpu_s(server.processes()) - broker_s
        found = captured(str(folder))
        rows = sum(each.end - each.first for each in found.ranges())
        if rows != (FEW + count) * ROWS["both"]:
            raise LoadFailed(f"{rows:,} rows of {FEW + count:,} messages were captured")
        floor_s = sum(
            _write_s(Path(urlsplit(uri).path), Path(scratch)) for table in TableName for uri in found.uris(table)
        )
    bench.add(server, "capture-row", own_s / (count * ROWS["both"]) * 1e6)
    bench.add(server, "capture-message", own_s / count * 1e6)
    bench.add(server, "capture-processors", own_s / count * WANTED_PER_S)
    bench.add(server, "capture-broker", broker_s / count * 1e6)
    bench.add(server, "capture-floor", floor_s / count * 1e6)
    bench.add(server, "capture-of-floor", own_s / floor_s)


def _send_and_receive(bench: Recorder, server: PeeklockWithJournal, count: int) -> None:
    fill(bench, server, "send", count)
    fill(bench, server, "recv", count)


def fill(bench: Recorder, server: PeeklockWithJournal, mode: str, count: int) -> None:
    """Send or receive so many messages of 1 KiB, and wait until the journal has them."""
    before = server.journaled_rows()
    options = ("--size", str(KIB), "--links", "4", "-n", str(count), "--idle", "60")
    bench.run_at(server, bench.tools.load, mode, server.address(1), *options)
    server.wait_until_journaled(before + count * ROWS[mode])


def capture_once(server: PeeklockWithJournal, folder: Path) -> float:
    """Capture what the journal has now; return the CPU seconds of the command. Raises LoadFailed."""
    command = [server.interpreter, "-m", "broker.cli", "capture", str(folder), "--once"]
    command += ["--http-endpoint", server.http_endpoint]
    environment = {"PYTHONPATH": str(server.root), "PEEKLOCK_CONNECTION_STRING": server.connection_string}
    before = _cpu_s(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        command, cwd=server.root, env=os.environ | environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise LoadFailed(f"capture: {done.stderr.strip()[-1000:]}")
    return _cpu_s(resource.RUSAGE_CHILDREN) - before


def _write_s(path: Path, scratch: Path) -> float:
    """CPU seconds to write the rows of this file, with its compression and its groups of rows."""
    file = pq.ParquetFile(path)
    rows, group_rows = file.read(), file.metadata.row_group(0).num_rows
    before = _cpu_s(resource.RUSAGE_SELF)
    pq.write_table(rows, scratch / "floor.parquet", compression="zstd", row_group_size=group_rows)
    return _cpu_s(resource.RUSAGE_SELF) - before


def _cpu_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime
