"""The whole bench, tiny and without a peer, against the real broker: it keeps working."""

import json

import pytest

from bench import load, run
from bench.rows import ROWS


@pytest.mark.slow
def test_a_quick_bench_fills_every_row(tmp_path, capsys):
    try:
        load.build()
    except load.LoadToolMissing as missing:
        pytest.skip(str(missing))
    result = tmp_path / "bench.json"
    assert run.main(["--quick", "--no-peer", "--json", str(result)]) == 0, capsys.readouterr().err
    document = json.loads(result.read_text())
    sizes_not_run = {f"{mode}-{size}" for mode in ("send", "recv", "both") for size in (100, 10240)}
    assert set(document["rows"]) == {row.key for row in ROWS} - sizes_not_run
    assert all(value > 0 for key, value in ((key, row["ours"]) for key, row in document["rows"].items()) if "-p" in key)
    assert "2,000/s, send to receive: p99" in capsys.readouterr().out
