"""Requests on the wire: their bytes stay, because gateways and workers of neighbouring versions talk to each other."""

from pathlib import Path
from typing import Any

import msgpack
import pytest

from broker import requests, wire
from broker.errors import NotAllowed, NotImplementedByBroker
from broker.named_records import Malformed, WrongNumber
from broker.requests import Request, packed, parsed, parsed_in_transaction
from broker.wire import Operation, Outcome, SendOperation, SendRunOperation, SettleOperation, pack_operations
from storage.records import Place

TOKEN = bytes(range(16))
MOST = 2**64 - 1
TEXT = "\0\U0001f600é" * 30
PROPERTIES = {"": b"", "DeadLetterReason": "x" * 300, TEXT: b"\xa1\x01r"}
MESSAGE = (bytes(16), b"body", None, None)
HOSTILE = [bytes(16), b"", 2**64 - 1, {1: 2**62, 2: TEXT, 3: "", 4: b"\xff", 5: True, 6: ""}]
RULE = {"name": TEXT, "created_ms": 0, "filter": {"kind": "sql", "expression": "(", "parameters": {"@a": b"@"}}}
RULE |= {"action": None}
FIELDS = {"name": TEXT, "lock_duration_ms": -1, "forward_to": None, "": [{}], "status": 1.5}
DEFINITION = {"kind": "queue", "entity_id": 2**29 - 1, "created_ms": 2**53, "partitions": [0, 3], "name": TEXT}
OPERATIONS: list[Operation] = [
    SendOperation(8, True, [[MESSAGE], [HOSTILE, MESSAGE]]),
    SettleOperation(9, False, [TOKEN], Outcome.ABANDONED, PROPERTIES, 2**40),
    SettleOperation(9, False, [TOKEN], Outcome.ACCEPTED),
    SendRunOperation(10, False, 2, b"run"),
]

# What gateways ask for, and values that they must pass on as they are.
REQUESTS: list[Request] = [
    requests.RenewLocks([TOKEN, b""]),
    requests.RenewLocks(()),
    requests.Peek(0, 1, 261120),
    requests.Peek(MOST, 1000, 0, with_lock_ends=True),
    requests.PeekSession("", 5, 7, 9),
    requests.PeekSession(TEXT, MOST, 7, 9, with_lock_ends=True),
    requests.Browse(0, 256, 65536, None, None),
    requests.Browse(1, 1, 1, TEXT, "a = 1"),
    requests.Browse(MOST, 2, 3, None, None, with_lock_ends=True),
    requests.Browse(MOST, 2, 3, "", "", with_lock_ends=True),
    requests.ReceiveDeferred([1, MOST], receive_and_delete=False),
    requests.ReceiveDeferred([], receive_and_delete=True, active=True),
    requests.ReceiveSessionDeferred(0, "s", (1, 2), receive_and_delete=True),
    requests.ReceiveSessionDeferred(MOST, TEXT, [1], receive_and_delete=False, active=True),
    requests.Settle([TOKEN], Outcome.ACCEPTED, None),
    requests.Settle([], Outcome.ABANDONED, PROPERTIES, 0),
    requests.Settle([TOKEN, TOKEN], Outcome.DEAD_LETTERED, PROPERTIES),
    requests.Settle([TOKEN], Outcome.DEFERRED, None, 2**40),
    requests.Schedule([MESSAGE, HOSTILE]),
    requests.Schedule([]),
    requests.CancelScheduled([1, MOST]),
    requests.DeleteBatch(4000, -(2**63)),
    requests.DeleteBatch(1, 2**63 - 1, ""),
    requests.DeleteBatch(1, 0, TEXT),
    requests.Purge(),
    requests.Purge([]),
    requests.Purge([Place.AVAILABLE, Place.DEFERRED, Place.SCHEDULED]),
    requests.AddRule(RULE),
    requests.ReplaceRule(RULE),
    requests.RemoveRule(TEXT),
    requests.GetRule(""),
    requests.EnumerateRules(0, 2**31),
    requests.RenewSessionLock(0, TEXT),
    requests.RenewSessionLock(7, ""),
    requests.GetSessionState(7, "s"),
    requests.SetSessionState(7, "s", b""),
    requests.SetSessionState(0, TEXT, None),
    requests.SetSessionState(MOST, TEXT, bytes(range(256))),
    requests.GetMessageSessions(None, 0, 100),
    requests.GetMessageSessions(-(2**63), 2**31 - 1, 1),
    requests.PageMessageSessions(0, 1, 2),
    requests.PageMessageSessions(None, 1, 2),
    requests.MessageSessionsBehind(None, TEXT, 2),
    requests.MessageSessionsBehind(2**53, "", 2),
    requests.Counts(),
    requests.Counts([8, 2**32 - 1]),
    requests.Accessed([]),
    requests.Accessed([1, 2]),
    requests.FilterCounts([3]),
    requests.Metrics(),
    requests.Probe(),
    requests.Stored(b"gateway!"),
    requests.Arrive(TOKEN, 1),
    requests.Depart(TOKEN, 1),
    requests.Rows(TOKEN, 1, 1 << 20, 2000),
    requests.StoreRows(TOKEN, [[1, b"key", None, None], [2, b"", b"value", TOKEN]]),
    requests.Hold(TOKEN, 2**29),
    requests.Freeze(TOKEN, 1),
    requests.Transact(TOKEN, True, pack_operations(OPERATIONS)),
    requests.Transact(TOKEN, False, []),
    requests.TransactRequest(TOKEN, True, *packed(requests.Settle([TOKEN], Outcome.ACCEPTED, None))),
    requests.TransactRequest(TOKEN, False, *packed(requests.Schedule([HOSTILE]))),
    requests.TransactRequest(TOKEN, False, *packed(requests.CancelScheduled([MOST]))),
    requests.TransactRequest(TOKEN, False, *packed(requests.SetSessionState(0, TEXT, None))),
    requests.Discharge(TOKEN, True),
    requests.Discharge(b"", False),
]
# A frame's item for each of them, as gateways of version 7 have sent it before requests were records. It is never
# changed: what a later version sends more gets lines of its own.
PACKED = [line.split() for line in (Path(__file__).parent / "packed_requests.txt").read_text().splitlines()]
BOTH = list(zip(REQUESTS, PACKED, strict=True))
IDS = [f"{name}-{number}" for number, (name, _) in enumerate(PACKED)]


def arguments_of(frame: str) -> tuple[str, list[Any]]:
    [message] = wire.unpack(bytes.fromhex(frame), lambda data: [msgpack.unpackb(data, strict_map_key=False)])
    assert isinstance(message, wire.Request)
    return message.name, message.arguments


@pytest.mark.parametrize(("request_", "line"), BOTH, ids=IDS)
def test_requests_are_packed_as_before(request_: Request, line: list[str]) -> None:
    name, arguments = packed(request_)
    assert msgpack.packb(wire.request(1, 9, name, 8, arguments)).hex() == line[1]


@pytest.mark.parametrize(("request_", "line"), BOTH, ids=IDS)
def test_what_was_packed_before_is_read(request_: Request, line: list[str]) -> None:
    name, arguments = arguments_of(line[1])
    found = parsed(name, arguments)
    assert type(found) is type(request_)
    assert packed(found) == (name, arguments)


def test_every_request_is_tried() -> None:
    tried = {type(each) for each in REQUESTS}
    assert {requests.RECORDS.name_of(each) for each in tried} == {name for name, _ in PACKED}
    assert tried | {requests.ChangeCatalog} == set(requests.RECORDS.classes.values())


# As gateways of earlier versions send them.
SHORTER: list[tuple[str, list[Any], Request]] = [
    ("browse", [1, 2, 3, "s"], requests.Browse(1, 2, 3, "s", None)),
    ("purge", [], requests.Purge(None)),
    ("settle", [[TOKEN], 0, None], requests.Settle([TOKEN], Outcome.ACCEPTED, None, requests.ANYONE)),
    ("delete-batch", [1, 2], requests.DeleteBatch(1, 2, None)),
    ("peek", [1, 2, 3], requests.Peek(1, 2, 3, with_lock_ends=False)),
    ("receive-deferred", [[1], False], requests.ReceiveDeferred([1], receive_and_delete=False, active=False)),
]


@pytest.mark.parametrize(("name", "arguments", "expected"), SHORTER, ids=[name for name, _, _ in SHORTER])
def test_optional_arguments_at_the_end_may_be_missing(name: str, arguments: list[Any], expected: Request) -> None:
    assert parsed(name, arguments) == expected


# Of these, a worker has always left out what it does not know; it has refused longer lists of the others.
LEFT_OUT = {
    "renew-locks", "peek", "peek-session", "browse", "receive-deferred", "receive-session-deferred", "settle",
    "schedule", "cancel-scheduled", "delete-batch", "purge", "add-rule", "replace-rule", "remove-rule", "get-rule",
    "metrics", "probe", "stored", "discharge",
}  # fmt: skip


@pytest.mark.parametrize("name", requests.RECORDS.classes)
def test_the_number_of_arguments(name: str) -> None:
    """Those that a list of any length has are tried above."""
    if name in ("counts", "accessed", "filter-counts", "change-catalog"):
        return
    of_name = [arguments_of(frame)[1] for each, frame in PACKED if each == name]
    shortest, longest = min(of_name, key=len), max(of_name, key=len)
    required = len(shortest) - (name == "browse")
    if required:
        with pytest.raises(WrongNumber):
            parsed(name, shortest[: required - 1])
    more = [*longest, "more"]
    if name in LEFT_OUT and longest == more[:-1] and len(longest) == len(requests.RECORDS.classes[name]._fields):
        assert parsed(name, more) == parsed(name, longest)
    elif name not in LEFT_OUT:
        with pytest.raises(WrongNumber):
            parsed(name, more)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("peek", None),
        ("peek", {}),
        ("peek", ["1", 2, 3]),
        ("peek", [-1, 2, 3]),
        ("peek", [1, 2.0, 3]),
        ("peek-session", [b"s", 1, 2, 3]),
        ("renew-locks", [TOKEN]),
        ("renew-locks", [["token"]]),
        ("receive-deferred", [[-1], False]),
        ("receive-deferred", [[1], None]),
        ("receive-session-deferred", ["r", "s", [1], False]),
        ("settle", [[TOKEN], None, None]),
        ("settle", [[TOKEN], 0, []]),
        ("add-rule", ["rule"]),
        ("counts", [[1]]),
        ("counts", [2**32]),
        ("set-session-state", [1, "s", "state"]),
        ("discharge", [1, True]),
        ("transact", [TOKEN, True, None]),
    ],
)
def test_arguments_of_wrong_types_are_refused(name: str, arguments: Any) -> None:
    with pytest.raises(Malformed):
        parsed(name, arguments)


@pytest.mark.parametrize("name", ["", "Peek", "lost", None, 1, [], {}, b"peek"])
def test_names_that_no_request_has(name: Any) -> None:
    with pytest.raises(NotImplementedByBroker, match="There is no operation"):
        parsed(name, [])


@pytest.mark.parametrize("name", ["", "lost", "peek"])
def test_requests_that_are_no_part_of_a_transaction(name: str) -> None:
    with pytest.raises(NotAllowed, match=rf"The operation '{name}' cannot be a part of a transaction."):
        parsed_in_transaction(name, [1, 2, 3])
