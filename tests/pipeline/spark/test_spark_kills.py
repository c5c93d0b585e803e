"""On a standalone cluster each message is copied once, though what copies it is killed."""

import random

import pytest

pytest.importorskip("pyspark")

from tests.pipeline.kills import Victim, run
from tests.pipeline.session import require


def test_each_message_is_copied_once_over_kills_of_executor_broker_and_driver(tmp_path):
    """`make pipeline-kills` does it for longer, with more that is killed, and audits the journal."""
    require()
    victims = (Victim.EXECUTOR, Victim.PYTHON_WORKER, Victim.BROKER, Victim.DRIVER_JVM)
    outcome = run(tmp_path, iter(victims), random.Random(7), print, per_second=500.0, audits=False)
    assert not outcome.faults, str(outcome)
    assert outcome.accepted > 500
    assert outcome.drivers == 2
    assert set(outcome.kills) == set(victims)
