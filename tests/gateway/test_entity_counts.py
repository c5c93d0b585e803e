"""What the counts of an entity's queues say of the entity."""

import pytest

from broker.gateway.namespace import Entity
from broker.gateway.nodes.entity_counts import accessed_ms, counted_queues, entity_counts
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from storage.queue_ids import Part

PLAIN = QueueDescription(name="orders")
FORWARDS = QueueDescription(name="orders", forward_to="billing")


def of(description: Description, **counts: list[int]) -> dict[str, int]:
    """`counts`: part -> available, deferred, scheduled, bytes, locked. Those that are not 0."""
    entity = Entity(7, description, (0,))
    queues = {7 << 3 | Part[part.upper()]: counts[part] for part in counts}
    assert queues.keys() <= set(counted_queues(entity))
    return {name: count for name, count in entity_counts(entity, queues).items() if count}


def test_every_state_has_its_count():
    assert of(
        PLAIN,
        main=[5, 2, 3, 100, 4],
        dead_letter=[6, 1, 0, 10, 1],
        transfer_dead_letter=[2, 0, 0, 20, 0],
        transfer=[8, 0, 1, 30, 0],
    ) == {
        "active": 7,
        "locked": 4,
        "deferred": 2,
        "scheduled": 3,
        "dead-lettered": 7,
        "transfer": 9,
        "transfer-dead-lettered": 2,
        "size-bytes": 160,
    }


def test_messages_of_an_entity_that_forwards_are_in_transfer_and_not_active():
    found = of(FORWARDS, main=[5, 2, 3, 100, 0], transfer=[1, 0, 0, 10, 0])
    assert found == {"active": 2, "deferred": 2, "scheduled": 3, "transfer": 6, "size-bytes": 110}


def test_messages_that_the_dead_letter_queue_forwards_count_as_dead_lettered():
    description = QueueDescription(name="orders", forward_dead_lettered_messages_to="billing")
    found = of(description, main=[1, 0, 0, 5, 0], dead_letter=[6, 0, 0, 10, 0])
    assert found == {"active": 1, "dead-lettered": 6, "size-bytes": 15}


@pytest.mark.parametrize(
    "description", [PLAIN, TopicDescription(name="news"), SubscriptionDescription(topic="news", name="s")]
)
def test_an_entity_that_never_held_anything_has_only_zeros(description):
    assert of(description) == {}


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(50, {7: 0})], None),
        ([(50, {7: 120})], 120),
        ([(110, {7: 0})], 110),  # it may have been accessed before the partition was opened
        ([(50, {7: 120}), (50, {7: 130}), (125, {7: 0})], 130),
        ([(50, {7: 0}), None, (50, {})], None),
        ([(50, {}), None], 105),
    ],
)
def test_the_last_access_is_that_of_any_partition_as_far_as_they_know(answers, expected):
    assert accessed_ms(Entity(7, PLAIN, (0,), created_ms=100, updated_ms=105), answers) == expected
