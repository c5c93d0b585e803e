import pytest
from driver import Driver


@pytest.fixture
def queue() -> Driver:
    return Driver()
