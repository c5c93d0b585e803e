"""Commands that tests run in this process set logging up for it, to a stream that is closed afterwards."""

from collections.abc import Iterator

import pytest
import structlog


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    yield
    structlog.reset_defaults()
