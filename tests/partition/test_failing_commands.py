"""A command that fails anywhere within, as by a mistake in the code, says truly whether it had changed anything.

Each command is tried again and again, and fails at the first, second, third ... call of a function that it makes. A
worker answers such a command and goes on if `has_changed` is False, so then memory must be as it was.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any

import pytest

from broker import requests
from broker.errors import BrokerError
from broker.partition.settings import PartitionSettings
from broker.wire import Operation, Outcome, SendOperation, SettleOperation
from protocol.codec import Long, encode
from protocol.symbols import DELAY
from storage.queue_ids import queue_id_of
from storage.records import NEVER, encode_message
from tests.partition.driver import ENTITY, MAIN, Driver, message
from tests.partition.session_driver import SessionDriver
from tests.partition.topic_driver import TOPIC, A, B, TopicDriver, event, rule

# What is only remembered of the store, counted for metrics, or harmless if it is there for nothing.
APART = {
    "_changes_before", "_store", "bodies", "changes", "home", "last_page", "past", "room", "seen_memory",
    "settings", "store", "tally", "terms", "timers", "next_token", "topics", "work", "work_limit",
}  # fmt: skip


class Injected(Exception):
    pass


@contextmanager
def failing_at(call: int) -> Iterator[None]:
    """Within, the call of this number raises Injected."""
    calls = count(1)

    def profile(frame: Any, kind: str, _: Any) -> None:
        is_generator = frame.f_code.co_flags & inspect.CO_GENERATOR  # one that ends is "called", and must not fail
        if kind in ("call", "c_call") and not is_generator and next(calls) == call:
            raise Injected

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


def picture(value: Any, within: tuple[int, ...] = ()) -> Any:
    """All that an object holds, comparable. Of queues that were opened meanwhile and hold nothing, nothing is said."""
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if id(value) in within:
        return "..."
    within = (*within, id(value))
    if isinstance(value, dict):
        return [(repr(key), picture(item, within)) for key, item in value.items()]
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, list | tuple):
        return [picture(item, within) for item in value]
    names = [name for kind in type(value).__mro__ for name in getattr(kind, "__slots__", ())]
    names += getattr(value, "__dict__", {})
    return {name: picture(getattr(value, name), within) for name in names if name not in APART}


def core_of(driver: Driver) -> dict[str, Any]:
    core = driver.partition._core
    for each in core.queues.values():
        each.locks.part_runs()  # locks in runs are the same as single ones
    shown: dict[str, Any] = picture(core)
    shown["queues"] = {queue_id: picture(queue) for queue_id, queue in core.queues.items()}
    shown["transactions"] = [(key, picture(each)) for key, each in core.transactions.open.items() if each.operations]
    return shown


def queue() -> Driver:
    driver = Driver(settings=PartitionSettings(abandon_delays=True), requires_duplicate_detection=True)
    driver.send(*(message(str(number), ttl_ms=60_000, scheduled_ms=0) for number in range(4)))
    driver.send(message("later", scheduled_ms=driver.now_ms + 1000))
    driver.send(message("0", message_id=encode("0")))
    driver.settle(Outcome.DEFERRED, *driver.receive(1))
    driver.receive(2)
    return driver


def sessions() -> Driver:
    driver = SessionDriver()
    driver.put("a", "1", "2")
    driver.put("b", "3")
    driver.ask("r", "a")
    driver.receive(1)
    return driver


def topic() -> Driver:
    driver = TopicDriver(A)
    driver.subscribe(B, rule("r", "n = 1", action="SET x = 1"), requires_session=True)
    driver.publish(event("1", n=1), event("2", scheduled_ms=driver.now_ms + 1000))
    driver.receive(1, "a", A)
    return driver


def tokens(driver: Driver, queue_id: int = MAIN) -> list[bytes]:
    return list(driver.partition._core.queues[queue_id].locks.held)


def request(name: str, *args: Any, queue_id: int = MAIN) -> Callable[[Driver], Any]:
    return lambda driver: driver.partition.request(queue_id, requests.RECORDS.made(name, *args), driver.now_ms)


def settle(outcome: Outcome, properties: Any = None) -> Callable[[Driver], Any]:
    return lambda driver: driver.partition.settle(MAIN, tokens(driver), outcome, properties, driver.now_ms)


def transact(driver: Driver) -> None:
    operations: list[Operation] = [
        SendOperation(MAIN, False, [[message("t")]]),
        SettleOperation(MAIN, False, tokens(driver)[:1], Outcome.ACCEPTED),
    ]
    driver.partition.transact("t", True, operations, driver.now_ms)


def open_session(session: str | None) -> Callable[[Driver], Any]:
    return lambda driver: driver.partition.open_receiver("s", MAIN, False, driver.now_ms, [session, 1000])


def schedule_in(driver: Driver) -> None:
    driver.partition.request_in("t", True, MAIN, requests.Schedule([message("t", scheduled_ms=1)]), driver.now_ms)


def send(driver: Driver) -> None:
    driver.partition.send(MAIN, [message("m", 5, message_id=encode("1"))], driver.now_ms)


def take_over(driver: Driver) -> None:
    record = encode_message(0, NEVER, bytes(16), b"m")
    driver.partition.take_over(b"another!", queue_id_of(ENTITY), ENTITY, [1, record, {}], driver.now_ms)


COMMANDS: dict[str, tuple[Callable[[], Driver], Callable[[Driver], Any]]] = {
    "send": (
        queue,
        lambda driver: driver.partition.send(MAIN, [message("m", 5, message_id=encode("1"))], driver.now_ms),
    ),
    "schedule": (queue, request("schedule", [message("m", scheduled_ms=1 << 42)])),
    "publish": (topic, lambda driver: driver.partition.send(TOPIC, [event("3", ttl_ms=9, n=1)], driver.now_ms)),
    "complete": (queue, settle(Outcome.ACCEPTED)),
    "abandon": (queue, settle(Outcome.ABANDONED, {"a": "b"})),
    "abandon for a while": (queue, settle(Outcome.ABANDONED, {"a": "b", DELAY: encode(Long(1000))})),
    "defer": (queue, settle(Outcome.DEFERRED)),
    "dead-letter": (queue, settle(Outcome.DEAD_LETTERED)),
    "settle by request": (queue, lambda driver: request("settle", tokens(driver), Outcome.ABANDONED, None)(driver)),
    "renew": (queue, lambda driver: request("renew-locks", tokens(driver))(driver)),
    "peek": (queue, request("peek", 0, 10, 1000)),
    "receive deferred": (queue, request("receive-deferred", [1], False)),
    "delete deferred": (queue, request("receive-deferred", [1], True)),
    "receive active": (queue, request("receive-deferred", [4], False, True)),
    "delete active": (queue, request("receive-deferred", [4], True, True)),
    "receive active of a session": (sessions, request("receive-session-deferred", "r", "a", [2], False, True)),
    "cancel": (queue, request("cancel-scheduled", [5])),
    "delete": (queue, request("delete-batch", 10, 1 << 42)),
    "purge": (queue, request("purge")),
    "open": (queue, lambda driver: driver.partition.open_receiver("s", MAIN, False, driver.now_ms)),
    "transact": (queue, transact),
    "schedule in a transaction": (queue, schedule_in),
    "take over": (queue, take_over),
    "next session": (sessions, open_session(None)),
    "named session": (sessions, open_session("b")),
    "renew session": (sessions, request("renew-session-lock", "r", "a")),
    "set state": (sessions, request("set-session-state", "r", "a", b"state")),
    "get state": (sessions, request("get-session-state", "r", "a")),
    "sessions": (sessions, request("get-message-sessions", None, 0, 10)),
    "add rule": (topic, request("add-rule", rule("new"), queue_id=A)),
    "remove rule": (topic, request("remove-rule", "r", queue_id=B)),
    "rules": (topic, request("enumerate-rules", 0, 10, queue_id=B)),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_that_failed_and_had_changed_nothing_left_all_as_it_was(name):
    make, command = COMMANDS[name]
    unchanged = 0
    for call in count(1):
        driver = make()
        before = core_of(driver)
        try:
            with failing_at(call):
                command(driver)
        except Injected:
            pass
        except BrokerError:
            raise AssertionError("the command is to succeed") from None
        else:
            break
        if not driver.partition.has_changed:
            unchanged += 1
            assert not driver.store.dirty
            after = core_of(driver)
            assert after["queues"].keys() >= before["queues"].keys()
            after["queues"] = {queue_id: after["queues"][queue_id] for queue_id in before["queues"]}
            assert after == before, f"call {call}"
    assert unchanged, "it never failed before it had changed something"
    assert call > 3
