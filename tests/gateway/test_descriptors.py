"""How many connections a number of file descriptors is enough for."""

import pytest

from broker.gateway.limits.descriptors import OWN_DESCRIPTORS, connections_for
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
