"""Names in mixed case of an earlier version stay over restarts, and what is new beside them is in lower case."""

from pathlib import Path

from protocol.client.messages import Message
from tests.brokers import Broker
from tests.clients import received, run, send
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import RawPeer
from tests.end_to_end.raw_requests import Node
from tests.end_to_end.test_catalog_at_run_time import NODE, create, update

AS_BEFORE = """
keep_case_of_names = true
"""
DECLARED = """
partitions = 3

[[queues]]
name = "Orders"

  [[queues.authorization_rules]]
  key_name = "own"
  primary_key = "of orders"
  rights = ["Send"]

[[topics]]
name = "News"

  [[topics.subscriptions]]
  name = "All"
  forward_to = "ORDERS"
"""
AS_UPGRADED = (
    DECLARED
    + """
[[topics]]
name = "New-News"

  [[topics.subscriptions]]
  name = "All"
  forward_to = "ORDERS"
"""
)
KEPT = {"Orders", "Made", "News", "News/Subscriptions/All"}


def entities(broker: Broker) -> set[str]:
    return {key[1] for key in metrics(broker) if key[0] == "peeklock_messages"}


def test_what_there_was_keeps_its_name_and_what_is_new_gets_one_in_lower_case(tmp_path: Path) -> None:
    with Broker(tmp_path, AS_BEFORE + DECLARED) as broker:
        with RawPeer.connect(broker.amqp_port) as peer:
            assert create(Node(peer, NODE), "queue", name="Made").body["properties"]["name"] == "Made"
        run(broker, lambda connection: send(connection, "orders", Message.of(b"before")))
        broker.stop()
        broker.config_file.write_text(AS_UPGRADED)
        broker.start()
        own = broker.connection_string_for("own", "of orders")
        run(broker, lambda connection: send(connection, "ORDERS", Message.of(b"with its key")), own)
        for topic in ("nEWS", "New-NEWS"):
            run(broker, lambda connection, to=topic: send(connection, to, Message.of(to.encode())))
        found = run(broker, lambda connection: received(connection, "oRDERS", 4))
        assert sorted(each.content() for each in found) == [b"New-NEWS", b"before", b"nEWS", b"with its key"]
        with RawPeer.connect(broker.amqp_port) as peer:
            node = Node(peer, NODE)
            assert create(node, "queue", name="Made").status == 409
            assert create(node, "queue", name="Made-Now").body["properties"]["name"] == "made-now"
            assert update(node, "made", user_metadata="changed").body["properties"]["name"] == "Made"
        assert entities(broker) == {*KEPT, "made-now", "new-news", "new-news/Subscriptions/All"}
        broker.kill()
        broker.start()
        assert entities(broker) == {*KEPT, "made-now", "new-news", "new-news/Subscriptions/All"}
