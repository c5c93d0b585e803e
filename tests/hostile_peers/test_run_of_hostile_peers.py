"""Hostile peers cost a broker no memory that it does not give back, and honest clients little time."""

from tests.hostile_peers.run import run


def test_processes_stay_as_they_were_and_honest_clients_are_served(tmp_path):
    report = run(tmp_path, 10.0, seed=1)
    assert report.sound, str(report)
    assert report.visits.total() > 30
    assert report.refused.total() < report.visits.total() / 4
    assert report.summary.completed > 50
    assert (tmp_path / "memory.csv").exists()
