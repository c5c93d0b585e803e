"""Names and settings of backlog queues, and which one a sender uses (PN3, PN5, PN7)."""

import random

import pytest

from broker.pairing.backlog import Rotation, backlog_queues, check_name, lease_queue, namespace_name
from broker.pairing.options import InvalidPairing, PairingOptions


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("contoso.servicebus.windows.net", "contoso"),
        ("Contoso.Example", "contoso"),
        ("localhost", "localhost"),
        ("127.0.0.1", "127.0.0.1"),
        ("fd00::1", "fd00--1"),
    ],
)
def test_a_namespace_is_named_by_its_host(host, name):
    assert namespace_name(host) == name


def test_queues_are_named_as_the_cloud_names_them():
    assert backlog_queues("contoso", 2) == ["contoso/x-servicebus-transfer/0", "contoso/x-servicebus-transfer/1"]
    assert lease_queue("contoso") not in backlog_queues("contoso", 1000)


@pytest.mark.parametrize("name", ["", "a/b", "a b", "-", "a?", "x" * 201, "ü", "a\n", "$x"])
def test_a_name_that_cannot_be_in_a_path_is_refused(name):
    with pytest.raises(InvalidPairing, match="the primary's name"):
        check_name(name)


@pytest.mark.parametrize("name", ["a", "contoso", "a.b-c_d~e", "10.0.0.1"])
def test_usual_names_are_taken(name):
    assert check_name(name) == name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("backlog_queue_count", 0),
        ("backlog_queue_count", -1),
        ("backlog_queue_count", 1001),
        ("failover_interval_ms", -1),
        ("ping_interval_ms", 0),
        ("attempt_timeout_ms", 0),
        ("busy_wait_ms", -1),
        ("failover_interval_ms", 2**63 - 1),
    ],
)
def test_options_out_of_range_are_named_with_their_limits(field, value):
    with pytest.raises(InvalidPairing, match=f"{field} is {value}; it must be"):
        PairingOptions(**{field: value})


def test_each_client_picks_at_random_and_stays():
    queues = [str(number) for number in range(10)]
    rotation = Rotation(queues, 1000, random.Random(1).choice)
    picks = [rotation.pick(None, 0) for _ in range(1000)]
    assert all(60 < picks.count(queue) < 140 for queue in queues)
    assert all(rotation.pick(queue, 0) == queue for queue in queues)


def test_all_learn_of_a_queue_that_was_pulled_and_it_comes_back():
    rotation = Rotation(["a", "b"], 1000, random.choice)
    assert rotation.pull("a", 0)
    assert not rotation.pull("a", 0)
    assert {rotation.pick(present, 999) for present in (None, "a", "b")} == {"b"}
    assert not rotation.is_exhausted
    assert rotation.pick("a", 1000) == "a"


def test_if_all_are_pulled_the_one_that_was_pulled_first_is_tried_again():
    rotation = Rotation(["a", "b", "c"], 1000, random.choice)
    for queue, now_ms in (("a", 1), ("b", 2), ("c", 3), ("a", 4)):
        rotation.pull(queue, now_ms)
    assert rotation.is_exhausted
    assert rotation.pick("c", 5) == "b"
    rotation.pull("b", 6)
    assert rotation.pick("b", 7) == "c"


def test_a_single_queue_has_no_alternative():
    rotation = Rotation(["a"], 1000, random.choice)
    rotation.pull("a", 0)
    assert rotation.pick("a", 1) == "a"
