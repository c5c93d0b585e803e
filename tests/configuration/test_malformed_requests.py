"""A request that no gateway of this version makes is answered, and the worker goes on, whatever else is in the turn."""

from collections.abc import Iterator
from typing import Any

import msgpack
import pytest

from broker.namespace.entities import QueueDescription
from broker.wire import Op
from broker.worker.worker import INTERNAL_ERROR
from storage.queue_ids import queue_id_of
from tests.configuration.workers_in_process import Workers, frame

QUEUE = queue_id_of(1)
ID = bytes(16)
MALFORMED: list[tuple[str, Any, str]] = [
    ("peek", [], "InternalError"),
    ("peek", None, "InternalError"),
    ("peek", ["1", 2, 3], "InternalError"),
    ("settle", [[ID], 0], "InternalError"),
    ("settle", [[ID], 9, None], "InvalidArgument"),
    ("settle", [["token"], 0, None], "InternalError"),
    ("schedule", [[None]], "InternalError"),
    ("purge", [[3]], "InternalError"),
    ("renew-session-lock", [1, "s", "more"], "InternalError"),
    ("lost", [], "NotImplementedByBroker"),
    ("", {}, "NotImplementedByBroker"),
    ("stored", [], "InternalError"),
    ("transact", [], "InternalError"),
    ("transact", [ID, True, [[9, []]]], "InternalError"),
    ("transact", [ID, True, [None]], "InternalError"),
    ("transact-request", [ID, True, "peek", []], "NotAllowed"),
    ("transact-request", [ID, True, "settle", []], "InternalError"),
    ("discharge", [ID], "InternalError"),
    ("change-catalog", [], "InvalidArgument"),
    ("change-catalog", ["create"], "InvalidArgument"),
    ("change-catalog", ["create", "queue", {"name": "a"}, 5], "InternalError"),
]


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    found = Workers([QueueDescription(name="orders")], 1, 1, 1_000_000)
    yield found
    found.close()


@pytest.mark.parametrize(("name", "arguments", "error"), MALFORMED)
def test_a_malformed_request_is_refused(workers: Workers, name: str, arguments: Any, error: str) -> None:
    with workers.client(0) as client:
        send = [Op.SEND, 0, 1, QUEUE, [[bytes(16), b"body", None, None]]]
        client.sendall(frame(send, [Op.REQUEST, 0, 7, name, QUEUE, arguments], send))
        workers.settle()
        data = client.recv(1 << 20)
    said = []
    while data:
        end = 4 + int.from_bytes(data[:4], "big")
        said += msgpack.unpackb(data[4:end], strict_map_key=False)
        data = data[end:]
    assert [each for each in said if each[0] == Op.SENT] == [[Op.SENT, 1, 1]] * 2
    [[_, number, kind, text]] = [each for each in said if each[0] == Op.FAILED]
    assert (number, kind) == (7, error)
    assert (text == INTERNAL_ERROR) == (error == "InternalError")
