"""What a connection may do, and until when."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from broker.errors import Unauthorized
from broker.gateway.connection import LOOK_AT_RIGHTS_SECONDS, ClientConnection
from broker.gateway.connection_timers import Timers
from broker.gateway.rights import Rights
from broker.namespace.entities import Right
from protocol.nodes.sas_tokens import Claim


def rights(path: str, *names: str, until_s: float = 100.0) -> Rights:
    held = Rights()
    held.grant(path, names, None, until_s)
    return held


def test_nothing_is_allowed_without_a_grant() -> None:
    assert Rights().is_empty
    with pytest.raises(Unauthorized, match=r"'Listen' claim\(s\) are required.*orders"):
        Rights().require("orders", Right.LISTEN, 0)


def test_a_right_does_not_imply_another_but_manage_implies_all() -> None:
    assert rights("orders", "Send").allows("orders", Right.SEND, 0)
    assert not rights("orders", "Send").allows("orders", Right.LISTEN, 0)
    assert all(rights("orders", "Manage").allows("orders", right, 0) for right in Right)


@pytest.mark.parametrize(
    ("scope", "path", "allowed"),
    [
        ("", "orders", True),
        ("orders", "orders", True),
        ("orders", "orders/$deadletterqueue", True),
        ("news", "news/subscriptions/all", True),
        ("orders/$deadletterqueue", "orders", False),
        ("orders", "orders2", False),
        ("orders", "orders/eu", False),  # another queue, whose name happens to go on
        ("orders/eu", "orders", False),
        ("news", "news/subscriptions/all/$deadletterqueue", True),
        ("news", "news/subscriptions/all/$transfer/$deadletterqueue", True),
        ("news", "news/subscriptions", False),
        ("news", "news/subscriptions/all/eu", False),  # a queue may have this name
        ("news", "news/subscriptions/all/eu/$deadletterqueue", False),
    ],
)
def test_rights_reach_from_an_entity_to_its_parts_only(scope: str, path: str, allowed: bool) -> None:
    assert rights(scope, "Listen").allows(path, Right.LISTEN, 0) is allowed


def test_a_right_ends_at_the_instant_its_token_expires() -> None:
    held = rights("orders", "Send", until_s=100)
    assert held.allows("orders", Right.SEND, 99.9)
    assert not held.allows("orders", Right.SEND, 100)


def test_a_later_token_for_the_same_path_replaces_the_earlier() -> None:
    held = rights("orders", "Send", until_s=100)
    held.put(Claim("orders", "name", "key", frozenset({"Listen"}), 200))
    assert held.allows("orders", Right.LISTEN, 150)
    assert not held.allows("orders", Right.SEND, 50)


def test_the_next_expiry_is_that_of_the_next_token_to_end() -> None:
    held = rights("a", "Send", until_s=100)
    held.grant("b", ("Send",), None, 50)
    held.grant("c", ("Send",), None)
    assert held.next_expiry_s(0) == 50
    assert held.next_expiry_s(50) == 100
    assert held.next_expiry_s(100) is None


def test_a_token_ends_in_time_though_the_wall_clock_is_set_forward() -> None:
    """The connection waits by another clock than the token's, so never for long at once."""

    async def wait_s(left_s: float) -> float:
        held = rights("orders", "Send", until_s=time.time() + left_s)
        connection: Any = SimpleNamespace(_timers=Timers(), rights=held, _check_rights=lambda: None)
        ClientConnection._watch_expiry(connection, time.time())
        [handle] = connection._timers._handles.values()
        connection._timers.stop_all()
        return float(handle.when() - asyncio.get_running_loop().time())

    assert asyncio.run(wait_s(86_400)) <= LOOK_AT_RIGHTS_SECONDS
    assert 4 < asyncio.run(wait_s(5)) <= 5
