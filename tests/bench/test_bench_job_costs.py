"""What a command and its children have used is counted."""

import sys

from bench.pipeline.job_costs import cost_of

CHILD = """
import time
kept, end = bytes(range(256)) * 400_000, time.process_time() + 0.5
while time.process_time() < end:
    pass
"""
PARENT = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}]); sys.exit(7)"


def test_costs_are_those_of_all_processes():
    found = cost_of([sys.executable, "-c", PARENT])
    assert found.code == 7
    assert 0.1 < found.cpu_s < found.seconds + 1
    assert found.pss_bytes > 100_000_000
