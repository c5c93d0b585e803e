"""A run that is a part of a transaction goes to the partition as the version of its worker knows it."""

from collections import OrderedDict
from types import SimpleNamespace
from typing import Any

import pytest

from broker import requests, runs, wire
from broker.errors import QuotaExceeded
from broker.gateway.transactions import Transaction
from broker.wire import SendOperation, SendRunOperation
from protocol.codec import Described, ULong, encode
from protocol.message.intake import take_apart
from storage.records import MESSAGE_HEADER_BYTES

MESSAGES = [
    encode(Described(ULong(0x73), ["id", *[None] * 9, "session"])) + encode(Described(ULong(0x75), b"body")),
    encode(Described(ULong(0x75), b"other")),
]


class Posted:
    """A turn, a router and its worker, which note what is asked."""

    def __init__(self, knows_runs: bool) -> None:
        self._knows_runs = knows_runs
        self.active: OrderedDict[Any, None] = OrderedDict()
        self.losses = 0
        self.asked: list[Any] = []
        self.reply: Any = None

    def takes_run_in_transaction(self, run: bytes) -> bool:
        return self._knows_runs

    def worker(self, partition: int) -> "Posted":
        return self

    def request(
        self, partition: int, queue: int, asked: requests.Transact, reply: Any, owner: Any, *, waits: bool
    ) -> None:
        assert waits
        self.asked.append((partition, type(asked), wire.unpack_operations(asked.operations)))
        self.reply = reply

    def flush(self) -> None: ...


@pytest.mark.parametrize("knows_runs", [True, False])
def test_an_older_worker_gets_the_messages_one_by_one(knows_runs):
    taken = [take_apart(message, want_message_id=True) for message in MESSAGES]
    run = runs.run_of([bytes(MESSAGE_HEADER_BYTES - len(layout)) + layout + body for layout, body, _, _ in taken])
    posted = Posted(knows_runs)
    declaring: Any = SimpleNamespace(crosses_entities=lambda link: False)
    transaction = Transaction(b"t" * 16, posted, posted, declaring)  # type: ignore[arg-type]
    entity = SimpleNamespace(partition=3, partitions=(3,), is_partitioned=False)
    sender: Any = SimpleNamespace(entity=entity, queue=8, link=None, destination=None)
    told: list[Any] = []
    transaction.send_run(sender, run, 2, told.append)
    transaction.post()
    [(partition, kind, [operation])] = posted.asked
    assert (partition, kind) == (3, requests.Transact)
    if knows_runs:
        assert operation == SendRunOperation(8, True, 2, run)
    else:
        assert operation == SendOperation(8, True, [[[*message[:3], message[3]]] for message in taken])
    posted.reply([None], None)
    posted.reply([[None, ["QuotaExceeded", "full"]]], None)
    assert told[0] is None
    first, second = told[1]
    assert first is None
    assert isinstance(second, QuotaExceeded)
