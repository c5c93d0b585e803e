"""Tests of jobs that change data. Most need no Spark: only those with `quick` start it."""

import pytest

from tests.pipeline.jobs.conftest import QUICK


@pytest.fixture
def quick(spark):
    """Plans over few rows, which take longer to compile than to run."""
    before = {name: spark.conf.get(name) for name in QUICK}
    for name, value in QUICK.items():
        spark.conf.set(name, value)
    yield spark
    for name, value in before.items():
        spark.conf.set(name, value)
