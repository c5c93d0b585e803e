import pytest

from tests.partition.driver import Driver


@pytest.fixture
def queue() -> Driver:
    return Driver()
