"""What a worker answers a gateway whose links get few messages each."""

from typing import Any

import pytest

from broker import runs
from broker.wire import Op
from protocol.extension import extension
from storage.records import MESSAGE_HEADER_BYTES
from tests.partition.driver import MAIN, Driver, message
from tests.partition.in_a_worker import PARTITION, through_a_worker

CHANNELS = range(11, 17)
TAKES: dict[str, list[Any]] = {"an older gateway": [Op.TAKES_RUNS], "this version": [Op.TAKES_RUNS, True]}


@pytest.mark.skipif(extension is None, reason="the extension is not built, or is switched off")
@pytest.mark.parametrize("gateway", TAKES)
@pytest.mark.parametrize("sizes", [[5] * 6, [5, 5, 5, 20_000, 5, 5]], ids=["small", "with a large one"])
def test_small_deliveries_of_several_links_are_one_message(gateway, sizes):
    driver = Driver(requires_session=True)
    opened = [[Op.OPEN_RECEIVER, PARTITION, channel, MAIN, False, [f"s{channel}", 0]] for channel in CHANNELS]
    granted = [[Op.GRANT, PARTITION, channel, 10] for channel in CHANNELS]
    messages = [message(bytes(size), session_id=f"s{channel}") for channel, size in zip(CHANNELS, sizes, strict=True)]
    sent = [Op.SEND, PARTITION, 1, MAIN, messages]
    answers = through_a_worker(driver, TAKES[gateway], *opened, *granted, sent)
    together = [each for each in answers if each.op == Op.DELIVER_RUNS]
    alone = [each for each in answers if each.op == Op.DELIVER_RUN]
    if gateway == "this version" and max(sizes) < 16_000:
        assert not alone
        [found] = together
        deliveries: list[Any] = [(channel, until_ms, *part) for channel, until_ms, part in found.deliveries]
    else:
        assert not together
        deliveries = [each[1:] for each in alone]
    assert [(channel, number, count) for channel, _, _, number, _, count, _ in deliveries] == [
        (channel, number, 1) for number, channel in enumerate(CHANNELS, deliveries[0][3])
    ]
    found_bodies = [runs.records_of(each)[0][MESSAGE_HEADER_BYTES:] for *_, each in deliveries]
    assert found_bodies == [*map(bytes, sizes)]
