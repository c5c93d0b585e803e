"""Changes of entities wait at the home for workers that are being restarted, for a stated time."""

from typing import Any

import pytest

from broker.catalog.catalog import Definition
from broker.errors import ServerBusy
from broker.namespace.entities import QueueDescription
from broker.worker.held_changes import HeldChanges, HoldBounds
from tests.configuration.test_catalog_of_workers import GATEWAY, T0, Broker

WAIT_MS = 3000
BOUNDS = HoldBounds(WAIT_MS, 2, 1000)
OTHERS = (1, 3)


def held_changes() -> HeldChanges[str]:
    return HeldChanges(BOUNDS, OTHERS, T0)


def test_partitions_are_awaited_for_a_time_after_the_start_and_after_each_loss() -> None:
    held = held_changes()
    assert held.awaits(OTHERS, T0 + WAIT_MS - 1)
    assert not held.awaits(OTHERS, T0 + WAIT_MS)
    held.lost([1], T0 + WAIT_MS)
    assert held.awaits([1], T0 + 2 * WAIT_MS - 1)
    assert not held.awaits(OTHERS, T0 + 2 * WAIT_MS - 1)  # 3 is away for longer


def test_a_partition_of_the_home_itself_is_not_awaited() -> None:
    """It is parked, and stays so until the worker is started anew."""
    assert not held_changes().awaits([0], T0)


def test_by_default_nothing_waits() -> None:
    assert not HeldChanges[str](HoldBounds(), OTHERS, T0).awaits(OTHERS, T0)


def test_changes_come_back_in_their_order_and_without_those_of_who_is_gone() -> None:
    held = held_changes()
    assert held.hold("a", 1, ["delete", "x"])
    assert held.hold("b", 1, ["delete", "y"])
    held.drop("a")
    assert held.hold("b", 2, ["delete", "z"])
    assert [(each.caller, each.number, each.arguments) for each in held.take()] == [
        ("b", 1, ["delete", "y"]),
        ("b", 2, ["delete", "z"]),
    ]
    assert len(held) == 0


def test_there_is_room_for_so_many_changes_and_so_many_bytes() -> None:
    held = held_changes()
    assert not held.hold("a", 1, ["delete", "x" * 1000])
    assert held.hold("a", 2, ["delete", "x" * 600])
    assert not held.hold("a", 3, ["delete", "x" * 600])
    assert held.hold("a", 4, ["delete", "x"])
    assert not held.hold("a", 5, ["delete", "x"])
    list(held.take())
    assert held.hold("a", 6, ["delete", "x" * 600])


@pytest.fixture
def broker() -> Broker:
    return Broker(hold_bounds=BOUNDS)


def create(broker: Broker, number: int, name: str) -> Any:
    properties = QueueDescription(name=name).model_dump(mode="json", exclude_unset=True)
    return broker.home.change(GATEWAY, number, ["create", "queue", properties, None], broker.now_ms)


def test_a_change_waits_until_a_lost_follower_has_joined(broker: Broker) -> None:
    broker.home.leave(1, broker.now_ms)
    for number, name in enumerate(("first", "second")):
        assert create(broker, number, name) is None
    assert [*broker.home.take_held(broker.now_ms)] == []
    broker.connect(1)
    held = [*broker.home.take_held(broker.now_ms)]
    assert [each.number for each in held] == [0, 1]
    news = [broker.home.change(each.caller, each.number, each.arguments, broker.now_ms) for each in held]
    made = [Definition.from_document(each.changes[0][1]).description.name for each in news]
    assert made == ["first", "second"]


def test_a_change_that_has_waited_in_vain_is_refused(broker: Broker) -> None:
    broker.home.leave(1, broker.now_ms)
    assert create(broker, 0, "waits") is None
    broker.now_ms += WAIT_MS
    [held] = broker.home.take_held(broker.now_ms)
    for arguments in (held.arguments, ["delete", "q1"]):
        with pytest.raises(ServerBusy, match="Partition 1 is not in service"):
            broker.home.change(GATEWAY, 1, arguments, broker.now_ms)


def test_what_finds_no_room_is_refused_at_once(broker: Broker) -> None:
    broker.home.leave(1, broker.now_ms)
    for number in range(BOUNDS.changes):
        assert create(broker, number, f"n{number}") is None
    with pytest.raises(ServerBusy, match="Partition 1 is not in service"):
        create(broker, 9, "n9")


def test_when_the_home_itself_was_restarted_changes_wait_for_its_followers(broker: Broker) -> None:
    broker.start(0, connects=False)
    assert create(broker, 0, "waits") is None
    broker.connect(1)
    assert len([*broker.home.take_held(broker.now_ms)]) == 1


def test_a_gateway_that_is_gone_has_nothing_changed(broker: Broker) -> None:
    broker.home.leave(1, broker.now_ms)
    assert create(broker, 0, "waits") is None
    broker.home.leave(GATEWAY, broker.now_ms)
    broker.connect(1)
    assert [*broker.home.take_held(broker.now_ms)] == []


def test_the_end_of_a_move_does_not_wait(broker: Broker) -> None:
    """Its entity is frozen meanwhile."""
    broker.home.leave(1, broker.now_ms)
    with pytest.raises(ServerBusy, match="Partition 1 is not in service"):
        broker.home.change(GATEWAY, 1, ["end-move", b"token"], broker.now_ms)
