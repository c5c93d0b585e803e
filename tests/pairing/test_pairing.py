"""A pairing of two real brokers: failover, the backlog, pings, and the way back."""

import asyncio
import dataclasses
import time

import pytest

from broker.administration.address import Address
from broker.administration.client import HttpClient
from broker.atom.client_documents import settings
from broker.pairing.health import State
from broker.pairing.options import InvalidPairing, PairingOptions
from broker.pairing.pairing import Namespace, Pairing
from protocol.client.connection import connect_to
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkDetached, MessageRefused
from protocol.client.messages import Message
from tests.brokers import KEY, KEY_NAME, Broker
from tests.pairing.conftest import QUEUES, contents, namespace
from tests.patience import PATIENCE_S, until
from tests.ports import free_ports

FAST = PairingOptions(
    backlog_queue_count=3, failover_interval_ms=500, ping_interval_ms=500, attempt_timeout_ms=400, busy_wait_ms=100
)
SOON_S = 5.0  # what lasts half a second here, on a busy machine; by default it would last ten


def nowhere() -> Namespace:
    """A namespace that is not there."""
    port, http_port = free_ports(2)
    return Namespace(
        f"Endpoint=sb://localhost:{port};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY};UseDevelopmentEmulator=true",
        http=Address("http", "localhost", http_port),
    )


def message(body: bytes = b"x", **values) -> bytes:
    return Message.of(body, **values).encode()


async def backlog(broker, queues):
    return [body for queue in queues for body in await contents(broker, queue)]


async def test_while_the_primary_is_well_all_goes_there(primary, secondary):
    async with await Pairing.open(namespace(primary), namespace(secondary), FAST) as pairing:
        sender = pairing.sender("orders")
        await asyncio.gather(*(sender.send(message(b"%d" % n, message_id=f"well {n}")) for n in range(50)))
        await pairing.sender("news").send(message(b"n"))
        assert pairing.health("ORDERS") is State.HEALTHY
        assert (pairing.counters.sent_to_primary, pairing.counters.sent_to_backlog) == (51, 0)
        assert len(await contents(primary, "orders")) == 50
        assert await backlog(secondary, pairing.queues) == []


async def test_the_backlog_queues_are_as_the_cloud_makes_them_and_existing_ones_stay(primary, secondary):
    target = namespace(secondary)
    async with await Pairing.open(namespace(primary), target, FAST, primary_name="contoso") as pairing:
        assert pairing.queues == [f"contoso/x-servicebus-transfer/{n}" for n in range(3)]
        async with target.management() as client:
            found = settings((await client.get("contoso/x-servicebus-transfer/1")).description)
            assert found["MaxDeliveryCount"] == 2**31 - 1
            assert found["LockDuration"] == "PT1M"
            assert found["MaxSizeInMegabytes"] == 5120
            assert found["DeadLetteringOnMessageExpiration"] is True
            assert found["DefaultMessageTimeToLive"] is found["AutoDeleteOnIdle"] is None
            await client.delete("contoso/x-servicebus-transfer/1")
            await create(client, "contoso/x-servicebus-transfer/1", LockDuration="PT10S")
    more = PairingOptions(backlog_queue_count=1)
    for options in (more, FAST):
        pairing = await Pairing.open(namespace(primary), target, options, primary_name="contoso")
        await pairing.close()
    async with target.management() as client:
        kept = settings((await client.get("contoso/x-servicebus-transfer/1")).description)
        assert kept["LockDuration"] == "PT10S"
        assert settings((await client.get("contoso/x-servicebus-transfer/2")).description)


async def create(client: HttpClient, path: str, **values: str) -> None:
    from broker.atom.client_documents import change, new_description, write_entry

    description = new_description("QueueDescription")
    change("queue", description, values)
    await client.put(path, write_entry(description), is_update=False)


async def test_messages_go_to_the_backlog_while_the_primary_is_away_and_come_back_by_a_ping(tmp_path, secondary):
    away = Broker(tmp_path, QUEUES)
    async with await Pairing.open(namespace(away), namespace(secondary), FAST, primary_name="away") as pairing:
        senders = [pairing.sender("orders") for _ in range(12)]
        began = time.monotonic()
        await asyncio.gather(*(each.send(message(b"%d" % n, message_id=str(n))) for n, each in enumerate(senders)))
        assert 0.5 <= time.monotonic() - began < SOON_S
        assert pairing.health("orders") is State.FAILED_OVER
        assert pairing.health("news") is State.HEALTHY
        await senders[0].send(message(b"12"))
        by_queue = [await contents(secondary, queue) for queue in pairing.queues]
        assert sorted(int(body) for bodies in by_queue for body in bodies) == list(range(13))
        assert sum(map(bool, by_queue)) > 1  # each sender has chosen one at random
        await asyncio.to_thread(away.start)
        try:
            began = time.monotonic()
            path = pairing.availability.path("orders")
            if path.health.has_failed_over:  # else it has come back while the broker was being waited for
                await path.changed
            assert time.monotonic() - began < SOON_S
            await senders[0].send(message(b"back", message_id="back"))
            assert await contents(away, "orders") == [b"back"]  # and no ping
            async with await connect_to(away.connection_string) as connection:
                management = await connection.management("orders")
                assert await management.peek(10) == []
            assert pairing.counters.pings >= 1
        finally:
            await asyncio.to_thread(away.kill)


async def test_a_primary_that_hangs_is_failed_over_and_what_was_on_its_way_is_sent_to_the_backlog(tmp_path, secondary):
    with Broker(tmp_path, QUEUES, workers=0) as hung:
        async with await Pairing.open(namespace(hung), namespace(secondary), FAST, primary_name="hung") as pairing:
            sender = pairing.sender("orders")
            await sender.send(message(b"first"))
            hung.gateway().suspend()
            try:
                began = time.monotonic()
                await asyncio.gather(*(sender.send(message(b"%d" % n, message_id=str(n))) for n in range(20)))
                assert time.monotonic() - began < SOON_S
            finally:
                hung.gateway().resume()
            stored = await backlog(secondary, pairing.queues)
            assert sorted(map(int, stored)) == list(range(20))
            path = pairing.availability.path("orders")
            if path.health.has_failed_over:
                await path.changed
            # The primary may have what was on its way; duplicate detection will drop it when the backlog comes.
            assert set(await contents(hung, "orders")) <= {b"first", *stored}


async def test_the_way_into_the_backlog_is_closed_to_what_cannot_go_there(secondary):
    async with await Pairing.open(nowhere(), namespace(secondary), FAST, primary_name="away") as pairing:
        sender = pairing.sender("orders")
        await sender.send(message())
        with pytest.raises(MessageRefused, match="it takes 1048576") as refused:
            await sender.send(message(bytes(2**20 - 20)))
        assert refused.value.condition == "amqp:link:message-size-exceeded"
        with pytest.raises(Exception, match="reserved"):
            await sender.send(message(application_properties={"x-ms-path": "y"}))
        assert pairing.counters.backlog_queues_pulled == 0


async def test_a_backlog_queue_that_fails_is_pulled_for_all_senders(secondary):
    target = namespace(secondary)
    async with await Pairing.open(nowhere(), target, FAST, primary_name="pulled") as pairing:
        senders = [pairing.sender("orders") for _ in range(20)]
        async with target.management() as client:
            await client.delete(pairing.queues[0])
            await client.delete(pairing.queues[2])
        await asyncio.gather(*(each.send(message(b"%d" % n)) for n, each in enumerate(senders)))
        assert len(await contents(secondary, pairing.queues[1])) == 20
        assert pairing.counters.backlog_queues_pulled >= 2


async def test_a_message_that_may_be_in_the_primary_is_told_as_repeated_however_the_backlog_fails_then(secondary):
    async with await Pairing.open(nowhere(), namespace(secondary), FAST, primary_name="away") as pairing:
        async with namespace(secondary).management() as client:
            for queue in pairing.queues[1:]:
                await client.delete(queue)
        senders = [pairing.sender("orders") for _ in range(20)]
        sent = await asyncio.gather(*(each.send(message(b"x")) for each in senders))
        assert pairing.counters.backlog_queues_pulled >= 1
        assert all(each.is_repeated and each.is_in_backlog for each in sent)
        assert not (await senders[0].send(message(b"later"))).is_repeated


async def test_configuration_errors_are_told_and_never_fail_over(primary, secondary):
    wrong = namespace(primary, primary.connection_string_for(KEY_NAME, "wrong"))
    async with await Pairing.open(wrong, namespace(secondary), FAST) as pairing:
        for _ in range(3):
            with pytest.raises(AuthenticationFailed):
                await pairing.sender("orders").send(message(), timeout_s=PATIENCE_S)
        assert pairing.health("orders") is State.HEALTHY
    async with await Pairing.open(namespace(primary), namespace(secondary), FAST) as pairing:
        with pytest.raises(LinkDetached, match="could not be found"):
            await pairing.sender("nothing").send(message(), timeout_s=PATIENCE_S)
        with pytest.raises(MessageRefused, match="session"):
            await pairing.sender("sessions").send(message(), timeout_s=PATIENCE_S)
        with pytest.raises(MessageRefused, match="1024"):
            await pairing.sender("small").send(message(bytes(2000)), timeout_s=PATIENCE_S)
        assert pairing.counters.failures == 0


async def test_a_send_waits_no_longer_than_its_own_time_out(secondary):
    slow = PairingOptions(backlog_queue_count=1, failover_interval_ms=60_000)
    async with await Pairing.open(nowhere(), namespace(secondary), slow, primary_name="away") as pairing:
        began = time.monotonic()
        with pytest.raises(ConnectionLost, match="cannot connect"):
            await pairing.sender("orders").send(message(), timeout_s=0.7)
        assert 0.7 <= time.monotonic() - began < SOON_S
        assert pairing.health("orders") is State.SUSPECT
        pairing.mark_path_healthy("orders")
        assert pairing.health("orders") is State.HEALTHY


async def test_without_a_secondary_either_the_senders_error_says_what_failed(secondary, tmp_path):
    gone = Broker(tmp_path)
    await asyncio.to_thread(gone.start)
    async with await Pairing.open(nowhere(), namespace(gone), FAST, primary_name="away") as pairing:
        await asyncio.to_thread(gone.kill)
        with pytest.raises(ConnectionLost, match=f"port {gone.amqp_port}"):
            await pairing.sender("orders").send(message(), timeout_s=1.5)
        await asyncio.to_thread(gone.start)
        await pairing.sender("orders").send(message(), timeout_s=PATIENCE_S)
    await asyncio.to_thread(gone.kill)


async def test_what_cannot_be_paired_is_refused(primary, secondary):
    with pytest.raises(InvalidPairing, match="the secondary is the primary"):
        await Pairing.open(namespace(primary), namespace(primary))
    by_address = namespace(primary, primary.connection_string.replace("localhost", "127.0.0.1"))
    with pytest.raises(InvalidPairing, match="the secondary is the primary"):
        await Pairing.open(namespace(primary), by_address)
    with pytest.raises(InvalidPairing, match="cannot connect"):
        await Pairing.open(namespace(primary), nowhere())
    unknown = namespace(secondary, secondary.connection_string_for("nobody", "key"))
    with pytest.raises(InvalidPairing, match="does not give localhost/x-servicebus-transfer/0"):
        await Pairing.open(namespace(primary), unknown)


async def test_when_one_side_is_closed_the_other_faults_unless_it_is_closed_soon(primary, secondary, monkeypatch):
    monkeypatch.setattr("broker.pairing.pairing.CLOSE_SECONDS", 0.2)
    pairing = await Pairing.open(namespace(primary), namespace(secondary), FAST)
    sender = pairing.sender("orders")
    await sender.send(message())
    await pairing.secondary.close()
    await sender.send(message())  # within the time
    await pairing.primary.closed.wait()
    with pytest.raises(ClientError, match="the secondary of the pairing has ended, and the primary was not closed"):
        await sender.send(message(), timeout_s=0.2)
    await pairing.close()


async def test_pings_are_one_for_each_interval_and_entity(secondary):
    async with await Pairing.open(nowhere(), namespace(secondary), FAST, primary_name="away") as pairing:
        await asyncio.gather(*(pairing.sender(path).send(message()) for path in ("orders", "news") for _ in range(3)))
        began = time.monotonic()
        await asyncio.sleep(1.7)  # it pings three times meanwhile
        intervals = (time.monotonic() - began) / 0.5
        assert pairing.counters.pings <= 2 * int(intervals + 1)
        await until(lambda: pairing.counters.pings >= 4)


DRAINING = dataclasses.replace(FAST, runs_syphon=True)


async def test_a_process_runs_no_syphon_unless_it_is_told_to(primary, secondary):
    async with await Pairing.open(namespace(primary), namespace(secondary), FAST, primary_name="without") as pairing:
        assert pairing.syphon is None


async def test_a_process_that_runs_the_syphon_brings_what_it_sent_to_the_backlog(tmp_path, secondary):
    away = Broker(tmp_path, QUEUES)
    ends = namespace(away), namespace(secondary)
    async with await Pairing.open(*ends, DRAINING, primary_name="own-syphon") as pairing:
        assert pairing.syphon is not None
        sender = pairing.sender("orders")
        for number in range(5):
            await sender.send(message(b"%d" % number, message_id=str(number)))
        assert pairing.counters.sent_to_backlog == 5
        await asyncio.to_thread(away.start)
        try:
            await until(lambda: pairing.syphon.snapshot()["completed"] == 5)
            assert pairing.syphon.problem() == ""
            assert sorted(await contents(away, "orders")) == [b"0", b"1", b"2", b"3", b"4"]
            before = asyncio.get_running_loop().time()
            await pairing.close()
            assert asyncio.get_running_loop().time() - before < SOON_S
            # Its leases are free, and another process takes them at once.
            async with await Pairing.open(*ends, DRAINING, primary_name="own-syphon") as other:
                await until(lambda: all(q["is_leased"] for q in other.syphon.snapshot()["queues"].values()))
        finally:
            await asyncio.to_thread(away.kill)


async def test_the_syphon_of_a_pairing_ends_with_it_when_a_side_faults(primary, secondary, monkeypatch):
    monkeypatch.setattr("broker.pairing.pairing.CLOSE_SECONDS", 0.2)
    ends = namespace(primary), namespace(secondary)
    async with await Pairing.open(*ends, DRAINING, primary_name="faulting") as pairing:
        await until(lambda: pairing.syphon.problem() == "")
        await pairing.primary.close()
        await until(lambda: pairing._draining.done())


async def test_a_syphon_that_may_not_listen_keeps_nobody_from_sending(tmp_path, primary):
    rule = '[[security.authorization_rules]]\nkey_name = "s"\nprimary_key = "s"\nrights = ["Send"]\n'
    with Broker(tmp_path, f'[security]\nroot_key = "{KEY}"\n{rule}', arguments=()) as strict:
        made = await Pairing.open(namespace(primary), namespace(strict), FAST)
        await made.close()
        poor = namespace(strict, strict.connection_string_for("s", "s"))
        pairing = Pairing(namespace(primary), poor, "localhost", DRAINING)
        pairing.begin_syphon()
        async with pairing:
            await until(lambda: "no right to listen" in pairing.syphon.problem())
            await pairing.sender("orders").send(message(b"goes"))
            assert (await contents(primary, "orders"))[-1] == b"goes"
