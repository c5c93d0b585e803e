"""Before a syphon begins: what is missing is made, and what is wrong is said, by two real brokers."""

import pytest
from structlog.testing import capture_logs

from broker.atom.client_documents import change, new_description, settings, write_entry
from broker.pairing.options import InvalidPairing
from broker.pairing.pairing import Namespace
from broker.pairing.syphon.checks import check
from broker.pairing.syphon.options import SyphonOptions
from tests.brokers import KEY, KEY_NAME, Broker
from tests.pairing.conftest import QUEUES, namespace
from tests.ports import free_ports

OPTIONS = SyphonOptions(backlog_queue_count=2)
# Not an emulator: keys are looked at. New queues are partitioned if nobody says otherwise.
STRICT = f"""
[security]
root_key = "{KEY}"
[[security.authorization_rules]]
key_name = "listener"
primary_key = "listener's"
rights = ["Listen"]
[[security.authorization_rules]]
key_name = "sender"
primary_key = "sender's"
rights = ["Send"]
[partitioning]
default = true
"""
UNUSUAL = '[[queues]]\nname = "twice"\n'


@pytest.fixture(scope="module")
def primary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("primary"), STRICT + QUEUES + UNUSUAL, arguments=()) as broker:
        yield broker


@pytest.fixture(scope="module")
def secondary(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("secondary"), STRICT, arguments=()) as broker:
        yield broker


def as_(broker: Broker, name: str, key: str | None = None) -> Namespace:
    return namespace(broker, broker.connection_string_for(name, f"{name}'s" if key is None else key))


async def described(broker: Broker, queue: str) -> dict[str, object]:
    async with namespace(broker).management() as client:
        return settings((await client.get(queue)).description)


async def test_what_is_missing_is_made_in_one_partition_and_who_may_get_twice_is_named(primary, secondary):
    with capture_logs() as said:
        found = await check(namespace(primary), namespace(secondary), "contoso", OPTIONS)
    assert found.queues == ["contoso/x-servicebus-transfer/0", "contoso/x-servicebus-transfer/1"]
    assert set(found.lock_s.values()) == {found.lease_s} == {60.0}
    for queue in (*found.queues, found.lease_queue):
        assert (await described(secondary, queue))["EnablePartitioning"] is False
    assert (await described(secondary, found.lease_queue))["RequiresSession"] is True
    [twice] = [each for each in said if each["event"].startswith("no duplicate detection")]
    assert (twice["entities"], twice["count"]) == (["small", "twice"], 2)
    assert not [each for each in said if each["log_level"] == "warning"]


async def test_queues_that_may_harm_messages_are_named_and_stay_as_they_are(primary, secondary):
    harmful = {"LockDuration": "PT10S", "DefaultMessageTimeToLive": "PT1H", "EnablePartitioning": "true"}
    description = new_description("QueueDescription")
    change("queue", description, harmful)
    async with namespace(secondary).management() as client:
        await client.put("harm/x-servicebus-transfer/1", write_entry(description), is_update=False)
    with capture_logs() as said:
        found = await check(namespace(primary), namespace(secondary), "harm", OPTIONS)
    assert found.lock_s == {"harm/x-servicebus-transfer/0": 60.0, "harm/x-servicebus-transfer/1": 10.0}
    warnings = [each for each in said if each["log_level"] == "warning"]
    assert {each["queue"] for each in warnings} == {"harm/x-servicebus-transfer/1"}
    told = " ".join(each["event"] for each in warnings)
    for word in ("MaxDeliveryCount", "partitioned", "DefaultMessageTimeToLive"):
        assert word in told
    assert (await described(secondary, "harm/x-servicebus-transfer/1"))["LockDuration"] == "PT10S"


async def test_a_key_that_may_only_listen_is_enough_if_the_queues_are_there(primary, secondary):
    await check(namespace(primary), namespace(secondary), "known", OPTIONS)
    found = await check(as_(primary, "sender"), as_(secondary, "listener"), "known", OPTIONS)
    assert found.lock_s == dict.fromkeys(found.queues, 60.0)


@pytest.mark.parametrize(
    ("login", "name", "text"),
    [
        (
            ("listener", None),
            "unknown",
            "unknown/x-servicebus-transfer/. is missing in the secondary, and was not made",
        ),
        ((KEY_NAME, "wrong"), "known", "the secondary refuses the key"),
        (("sender", None), "known", "has no right to listen|refuses the key"),
        (("nobody", None), "known", "the secondary refuses the key"),
    ],
)
async def test_keys_that_do_not_suffice_are_told(primary, secondary, login, name, text):
    await check(namespace(primary), namespace(secondary), "known", OPTIONS)
    with pytest.raises(InvalidPairing, match=text):
        await check(namespace(primary), as_(secondary, *login), name, OPTIONS)


async def test_a_wrong_key_of_the_primary_is_told_and_a_primary_that_is_away_is_not(primary, secondary):
    with pytest.raises(InvalidPairing, match="the primary refuses the key"):
        await check(as_(primary, KEY_NAME, "wrong"), namespace(secondary), "known", OPTIONS)
    port = free_ports(1)[0]
    away = Namespace(
        f"Endpoint=sb://localhost:{port};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY};UseDevelopmentEmulator=true"
    )
    assert (await check(away, namespace(secondary), "known", OPTIONS)).lease_s == 60.0
    with pytest.raises(InvalidPairing, match="the secondary cannot be reached"):
        await check(namespace(primary), away, "known", OPTIONS)


async def test_one_namespace_is_no_pair(primary):
    with pytest.raises(InvalidPairing, match="the secondary is the primary"):
        await check(namespace(primary), namespace(primary), "known", OPTIONS)
    other_name = Namespace(primary.connection_string.replace("localhost", "127.0.0.1"), http=namespace(primary).http)
    with pytest.raises(InvalidPairing, match="the secondary is the primary"):
        await check(namespace(primary), other_name, "known", OPTIONS)


@pytest.mark.parametrize("rate", [0, -1, float("nan"), float("inf"), -float("inf")])
def test_a_rate_that_makes_no_sense_is_refused(rate):
    with pytest.raises(InvalidPairing, match=r"the rate is .*; it must be a number of messages per second above 0"):
        SyphonOptions(rate=rate)
