"""What the log hears of what happens very often."""

from broker import repeated_warning


def test_many_refusals_are_few_lines_that_count_them_all(monkeypatch):
    now_s = 100.0
    lines = []
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    log = type("Log", (), {"warning": lambda _, event, **fields: lines.append(fields)})()
    monkeypatch.setattr(repeated_warning, "get_logger", lambda process: log)
    refusals = repeated_warning.RepeatedWarning("connections refused")
    for _ in range(1000):
        refusals.happened("full", last_peer="1.2.3.4:5")
        now_s += 0.01
    assert len(lines) == 2
    now_s += 10
    refusals.happened("full")
    assert sum(line["count"] for line in lines) == 1001
