"""A client and a server that are open."""

from typing import Any

import pytest

from tests.protocol_engine.pair import Pair


@pytest.fixture
def pair() -> Any:
    pair = Pair()
    yield pair
    pair.client.engine.free()
    pair.server.engine.free()
