"""A topic whose copies do not fit into the store: the broker goes on, and gives them as room comes."""

import asyncio
import itertools
import time

from protocol.client.connection import connect_to
from protocol.client.messages import Message
from protocol.codec import Timestamp
from tests.brokers import Broker
from tests.end_to_end.health import WITNESS, assert_undisturbed, metrics, process_ids
from tests.end_to_end.raw_peer import ACCEPTED, DISPOSITION, RawPeer, message, outcome
from tests.patience import eventually

SUBSCRIPTIONS = 200
MESSAGES = 1500  # due at once

CONFIG = """
partitions = 1
[store]
map_size_bytes = 16777216
min_free_disk_bytes = 0
[[queues]]
name = "witness"
[[topics]]
name = "news"
""" + "".join(f'[[topics.subscriptions]]\nname = "s{number}"\n' for number in range(SUBSCRIPTIONS))


async def schedule(broker: Broker, due_ms: int) -> None:
    async with (
        await connect_to(broker.connection_string) as connection,
        await connection.sender("news") as sender,
    ):
        later = {"x-opt-scheduled-enqueue-time": Timestamp(due_ms)}
        sent = [Message.of(b"%04d" % number, annotations=dict(later)).encode() for number in range(MESSAGES)]
        outcomes = [await sender.post(message) for message in sent]
        await asyncio.gather(*outcomes)


async def bodies(broker: Broker, subscription: int, count: int) -> list[bytes]:
    async with (
        await connect_to(broker.connection_string) as connection,
        await connection.receiver(f"news/subscriptions/s{subscription}") as receiver,
    ):
        found = []
        while len(found) < count and (delivery := await receiver.receive(5.0)) is not None:
            await receiver.accept(delivery)
            found.append(delivery.message().content())
        return found


def accepts(broker: Broker) -> bool:
    """True if a small message is accepted. What room the copies leave is known exactly only at checkpoints."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.transfer(message(b"small"), peer.attach_sender(WITNESS))
        return bool(peer.expect(DISPOSITION).fields[4] == outcome(ACCEPTED))


def test_what_is_due_for_many_subscriptions_ends_no_worker(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        before = process_ids(broker)
        due_ms = int(time.time() * 1000) + 8000
        asyncio.run(schedule(broker, due_ms))
        time.sleep(max(0.0, due_ms / 1000 - time.time()))
        published = ("peeklock_active_messages", "news/Subscriptions/s0")
        eventually(lambda: metrics(broker).get(published, 0) > 0, "something is published")
        time.sleep(1.5)  # a worker that cannot go on ends at once, and again at each start
        accepts(broker)  # or refuses: the copies may have filled the store up to its watermark until some are received
        assert_undisturbed(broker, before)
        broker.restart()
        before = process_ids(broker)
        assert asyncio.run(bodies(broker, 7, 20)) == [b"%04d" % number for number in range(20)]
        others = itertools.count(8)

        def accepts_when_messages_are_received() -> bool:
            """The copies fill the store up to its watermark or a little beyond. Each that goes makes room."""
            asyncio.run(bodies(broker, next(others), 50))
            return accepts(broker)

        eventually(accepts_when_messages_are_received, "it takes a message of another")
        assert_undisturbed(broker, before)
