"""Tokens for entities that come and go while the gateway runs."""

from pathlib import Path

from broker.catalog.catalog import Definition
from broker.namespace.entities import QueueDescription
from broker.wire import Op
from protocol.codec import Described, ULong, decode, encode
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.raw_peer import TRANSFER
from tests.gateway.in_process import QUEUE_ID, Client, started_gateway

RESPONSES, REQUESTS = 0, 1


def put_token(client: Client, path: str) -> int:
    """The status of the answer."""
    token = generate("sb://localhost/", KEY_NAME, KEY, 2**40)
    properties = {"operation": "put-token", "type": "servicebus.windows.net:sastoken", "name": f"sb://localhost/{path}"}
    request = encode(Described(ULong(0x74), properties)) + encode(Described(ULong(0x77), token))
    client.transfer(REQUESTS, request, settled=True)
    [answer] = [frame.payload for frame in client.frames() if frame.code == TRANSFER]
    _, at = decode(answer, 0)
    return int(decode(answer, at)[0].value["status-code"])


async def test_a_token_is_taken_as_long_as_there_is_its_entity(tmp_path: Path) -> None:
    gateway, worker = started_gateway(tmp_path)
    client = Client(gateway)
    client.connect()
    client.attach(sender=False, address="$cbs", credit=10)
    client.attach(sender=True, address="$cbs")
    client.frames()
    assert (put_token(client, "orders"), put_token(client, "invoices")) == (202, 404)
    worker.say([Op.DELETED, 2, [QUEUE_ID >> 3]])
    assert (put_token(client, "orders"), put_token(client, "")) == (404, 202)
    documents = [
        Definition(number, QueueDescription(name=name), 0, 0, (0,)).document() for number, name in ((8, "invoices"),)
    ]
    worker.say([Op.CATALOG, 3, documents])
    assert (put_token(client, "orders"), put_token(client, "Invoices/$DeadLetterQueue")) == (404, 202)
