"""Times as extreme as clients can say them, on a real broker that is restarted after."""

from protocol.codec import Symbol, Timestamp
from tests.brokers import Broker
from tests.end_to_end.raw_peer import RawPeer, message
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.raw_transactions import Coordinator, within
from tests.patience import eventually

CONFIG = """
partitions = 1
[[queues]]
name = "orders"
[[topics]]
name = "news"
[[topics.subscriptions]]
name = "all"
"""
YEAR_1 = -62_135_596_800_000  # .NET's DateTime.MinValue


def scheduled(time_ms: int, body: bytes) -> bytes:
    return message(body, annotations={Symbol("x-opt-scheduled-enqueue-time"): Timestamp(time_ms)})


def available(port: int, entity: str) -> int:
    with RawPeer.connect(port) as peer:
        counts = Node(peer, f"{entity}/$management").ask("peeklock:get-counts", {}).body["counts"]
        peer.close()
        return int(counts["active"])


def test_a_time_before_1970_scheduled_in_a_transaction_leaves_the_broker_ready(tmp_path):
    with Broker(tmp_path, CONFIG) as broker:
        with RawPeer.connect(broker.amqp_port) as peer:
            controller = Coordinator(peer)
            for entity in ("orders", "news"):
                transaction = controller.declare()
                node = Node(peer, f"{entity}/$management")
                items = [{"message-id": "1", "message": scheduled(YEAR_1, b"1")}]
                node.say("com.microsoft:schedule-message", {"messages": items}, state=within(transaction))
                assert node.response().status == 200
                assert controller.discharge(transaction) == "accepted"
            peer.close()
        for entity in ("orders", "news/subscriptions/all"):
            eventually(lambda entity=entity: available(broker.amqp_port, entity) == 1, "the message is available")
        broker.restart()
        assert broker.get("/readyz")[0] == 200
        for entity in ("orders", "news/subscriptions/all"):
            assert available(broker.amqp_port, entity) == 1
        assert "Traceback" not in broker.log()
