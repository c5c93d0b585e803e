"""How many connections a number of file descriptors is enough for, and what the log hears of those refused."""

import pytest

from broker.gateway import descriptors
from broker.gateway.descriptors import OWN_DESCRIPTORS, RepeatedWarning, connections_for
from broker.http.ops import MAX_CONNECTIONS as OPS_CONNECTIONS
from broker.settings.config import Settings


@pytest.mark.parametrize("available", [1, 64, 256, 1024, 4096, 7000, 1 << 20])
@pytest.mark.parametrize("most", [1, 100, 6000])
def test_connections_never_need_more_descriptors_than_there_are(available, most):
    settings = Settings.model_validate({"workers": 1, "amqp": {"max_connections": most}})
    served, refused = connections_for(settings, available)
    assert 1 <= served <= most
    assert refused >= 1
    if available >= 256:
        assert served + refused + OWN_DESCRIPTORS + OPS_CONNECTIONS + 1 <= available


def test_enough_descriptors_allow_all_connections_that_are_set():
    assert connections_for(Settings.model_validate({"workers": 1}), 6501) == (6000, 200)


def test_many_refusals_are_few_lines_that_count_them_all(monkeypatch):
    now_s = 100.0
    lines = []
    monkeypatch.setattr("time.monotonic", lambda: now_s)
    monkeypatch.setattr(
        descriptors, "log", type("Log", (), {"warning": lambda _, event, **fields: lines.append(fields)})()
    )
    refusals = RepeatedWarning("connections refused")
    for _ in range(1000):
        refusals.happened("full", last_peer="1.2.3.4:5")
        now_s += 0.01
    assert len(lines) == 2
    now_s += 10
    refusals.happened("full")
    assert sum(line["count"] for line in lines) == 1001
