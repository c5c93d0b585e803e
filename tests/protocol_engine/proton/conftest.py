"""Proton alone, as the server of a connection that is open."""

from collections.abc import Iterator

import pytest

from tests.protocol_engine.proton.bare import Bare


@pytest.fixture
def bare() -> Iterator[Bare]:
    bare = Bare()
    bare.open()
    yield bare
    bare.free()
