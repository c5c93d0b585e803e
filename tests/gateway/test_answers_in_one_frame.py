"""What a frame of a worker has for one client is written at once, whatever kinds of answers it has."""

from collections import Counter
from pathlib import Path
from unittest.mock import patch
from uuid import UUID

from broker.wire import Op
from protocol.codec import Described, ULong, encode
from tests.end_to_end.raw_peer import DISPOSITION, TRANSFER, message
from tests.gateway.in_process import Client, started_gateway


async def test_replies_and_outcomes_leave_in_one_write(tmp_path: Path) -> None:
    gateway, worker = started_gateway(tmp_path)
    client = Client(gateway)
    client.connect()
    sender = client.attach(sender=True, address="orders")
    client.attach(sender=False, address="orders/$management", credit=10)
    requests = client.attach(sender=True, address="orders/$management")
    renewal = encode(Described(ULong(0x74), {"operation": "com.microsoft:renew-lock"}))
    for number in (1, 2):
        tokens = encode(Described(ULong(0x77), {"lock-tokens": [UUID(int=number)]}))
        client.transfer(requests, renewal + tokens, settled=True)
    client.transfer(sender, message(b"sent"))
    commands = await worker.commands()
    asked = [command[2] for command in commands if command[0] == Op.REQUEST]
    [channel] = [command[2] for command in commands if command[0] == Op.SEND]
    client.frames()
    writes: list[bytes] = []
    with patch.object(client.transport, "write", writes.append):
        worker.say(*([Op.REPLY, number, [1000]] for number in asked), [Op.SENT, channel, 1])
    [client.transport.written] = map(bytearray, writes)
    assert Counter(frame.code for frame in client.frames()) == {TRANSFER: 2, DISPOSITION: 1}
