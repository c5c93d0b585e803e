"""Four operations for each message of an outage (PN11), as two real brokers count them."""

import asyncio

from broker.cli.watching.rates import Traffic
from broker.cli.watching.traffic import MetricsPage
from broker.pairing.costs import OPERATIONS_PER_MESSAGE
from broker.pairing.options import PairingOptions
from broker.pairing.pairing import Pairing
from broker.pairing.syphon.checks import check
from broker.pairing.syphon.options import SyphonOptions
from broker.pairing.syphon.syphon import Syphon
from protocol.client.messages import Message
from tests.brokers import Broker
from tests.pairing.conftest import QUEUES, contents, namespace
from tests.patience import PATIENCE_S

MESSAGES = 50
FAST = PairingOptions(backlog_queue_count=2, failover_interval_ms=200, ping_interval_ms=500)


async def traffic(broker: Broker) -> dict[str, Traffic]:
    """Messages in and out, by entity."""
    async with MetricsPage(f"http://localhost:{broker.ops_port}/metrics") as page:
        found = await page.read()
    assert found is not None
    return found


async def test_a_message_of_an_outage_is_sent_twice_and_received_twice(tmp_path):
    primary, secondary = Broker(tmp_path / "primary", QUEUES), Broker(tmp_path / "secondary")
    try:
        await asyncio.to_thread(secondary.start)
        async with await Pairing.open(namespace(primary), namespace(secondary), FAST, primary_name="main") as pairing:
            senders = [pairing.sender("orders") for _ in range(5)]
            bodies = [b"%d" % number for number in range(MESSAGES)]
            await asyncio.gather(
                *(senders[n % 5].send(Message.of(body, message_id=str(n)).encode()) for n, body in enumerate(bodies))
            )
            await asyncio.to_thread(primary.start)
            path = pairing.availability.path("orders")
            while path.health.has_failed_over:
                await path.changed
        options = SyphonOptions(backlog_queue_count=2, once=True)
        found = await check(namespace(primary), namespace(secondary), "main", options)
        await asyncio.wait_for(Syphon(namespace(primary), namespace(secondary), found, options).run(), PATIENCE_S)
        assert sorted(await contents(primary, "orders")) == sorted(bodies)

        of_backlog = await traffic(secondary)
        of_entity = (await traffic(primary))["orders"]
        into_backlog = sum(of_backlog[queue].incoming for queue in found.queues)
        out_of_backlog = sum(of_backlog[queue].outgoing for queue in found.queues)
        pings_taken = of_entity.incoming - MESSAGES
        assert (into_backlog, out_of_backlog, of_entity.outgoing) == (MESSAGES, MESSAGES, MESSAGES)
        assert 1 <= pings_taken <= pairing.counters.pings  # one, unless the first ones were answered late
        operations = into_backlog + out_of_backlog + of_entity.incoming + of_entity.outgoing
        assert operations == OPERATIONS_PER_MESSAGE * MESSAGES + pings_taken
    finally:
        for broker in (primary, secondary):
            broker.kill()
