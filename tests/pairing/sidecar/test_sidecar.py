"""A sidecar between two real brokers: what goes through, what fails over, and what comes back."""

import asyncio
import time

import pytest

from broker.pairing.sidecar.service import START_SECONDS
from protocol.client.connection import connect_to
from protocol.client.errors import ClientError, LinkDetached, RequestFailed
from protocol.client.messages import Message
from protocol.message.batches import pack_batch
from tests.brokers import KEY, Broker
from tests.pairing.again import Again
from tests.pairing.conftest import QUEUES, contents, set_status, taken
from tests.pairing.sidecar.conftest import PATIENT, Pair, message, until_it_holds
from tests.patience import PATIENCE_S, eventually, until

SOON_S = 5.0  # what lasts half a second here, on a busy machine; by default it would last ten


async def test_all_goes_through_while_the_primary_is_well(tmp_path, primary, secondary):
    with Pair(tmp_path, primary, secondary, "well") as pair:
        async with await connect_to(pair.connection_string()) as connection:
            sender = await connection.sender("orders")
            await asyncio.gather(*(sender.send(message(n)) for n in range(200)))
            receiver = await connection.receiver("orders", credit=50)
            for number in range(200):
                received = await receiver.receive(PATIENCE_S)
                assert received is not None
                assert received.message().content() == b"%d" % number
                await receiver.accept(received)
            assert await (await connection.management("orders")).peek(1) == []
        assert pair.metric("messages_sent_to_primary_total") == 200
        assert pair.metric("messages_sent_to_backlog_total") == 0
        assert pair.sidecar.get("/readyz")[0] == 200


async def test_sends_go_to_the_backlog_while_the_primary_is_away_and_come_back(tmp_path, secondary):
    away = Broker(tmp_path / "primary", QUEUES)
    with away, Pair(tmp_path, away, secondary, "away") as pair:
        async with Again(pair.connection_string()) as client:
            await client.send("orders", message(b"before"))
            await asyncio.to_thread(away.kill)
            began = time.monotonic()
            await client.send("orders", message(b"during"))
            assert 0.5 <= time.monotonic() - began < SOON_S
            began = time.monotonic()
            await asyncio.gather(*(client.send("orders", message(n)) for n in range(50)))
            assert time.monotonic() - began < SOON_S
            stored = [each for queue in pair.queues for each in await taken(secondary, queue)]
            assert sorted(each.content() for each in stored) == sorted([b"during", *(b"%d" % n for n in range(50))])
            assert {each.application_properties["x-ms-path"] for each in stored} == {"orders"}
            assert pair.sidecar.get("/readyz")[0] == 200
            assert pair.metric('entity_state{entity="orders",state="failed_over"}') == 1
            await asyncio.to_thread(away.start)
            began = time.monotonic()

            async def is_back() -> bool:
                return pair.metric("failbacks_total") >= 1

            await until_it_holds(is_back)
            assert time.monotonic() - began < SOON_S
            await client.send("orders", message(b"after"))
        assert await contents(away, "orders") == [b"before", b"after"]


async def test_receivers_wait_for_the_primary_and_find_it(tmp_path, secondary):
    away = Broker(tmp_path / "primary", QUEUES)
    with away, Pair(tmp_path, away, secondary, "receivers") as pair:
        async with Again(pair.connection_string()) as client:
            await client.send("orders", message(b"stored"))
        await asyncio.to_thread(away.kill)
        async with await connect_to(pair.connection_string()) as connection:
            with pytest.raises(LinkDetached) as refused:
                await connection.receiver("orders", credit=1)
            assert refused.value.condition == "com.microsoft:timeout"
            management = await connection.management("orders")  # some SDKs do not send without it
            with pytest.raises(RequestFailed) as failed:
                await management.peek(1)
            assert (failed.value.status, failed.value.condition) == (408, "com.microsoft:timeout")
            await asyncio.to_thread(away.start)
            async with asyncio.timeout(PATIENCE_S):
                lost = await connection.wait_closed()  # it is told to connect again
            assert lost.condition == "amqp:connection:forced"
        async with await connect_to(pair.connection_string()) as connection:
            receiver = await connection.receiver("orders", credit=1)
            received = await receiver.receive(PATIENCE_S)
            assert received is not None
            assert received.message().content() == b"stored"
            await receiver.accept(received)


async def test_a_primary_that_hangs_is_failed_over(tmp_path, secondary):
    with Broker(tmp_path / "primary", QUEUES) as hung, Pair(tmp_path, hung, secondary, "hung") as pair:
        async with Again(pair.connection_string()) as client:
            await client.send("orders", message(b"before"))
            stopped = hung.processes()
            for process in stopped:
                process.suspend()
            try:
                began = time.monotonic()
                await client.send("orders", message(b"during"))
                assert time.monotonic() - began < 2 + SOON_S  # a new connection waits for the primary
            finally:
                for process in stopped:
                    process.resume()
            await client.send("orders", message(b"after"))
        stored = [body for queue in pair.queues for body in await contents(secondary, queue)]
        assert b"during" in stored


async def test_a_sidecar_that_starts_while_the_primary_is_frozen_takes_sends(tmp_path, secondary):
    with Broker(tmp_path / "primary", QUEUES) as frozen:
        pair = Pair(tmp_path, frozen, secondary, "frozen")
        stopped = frozen.processes()
        for process in stopped:
            process.suspend()
        try:
            began = time.monotonic()
            with pair:
                assert pair.sidecar.get("/readyz")[0] == 200
                assert time.monotonic() - began < START_SECONDS + 5  # of which a busy machine starts a process
                async with Again(pair.connection_string()) as client:
                    await client.send("orders", message(b"during"))
                    for process in stopped:
                        process.resume()

                    async def is_back() -> bool:
                        await client.send("orders", message(b"after"))
                        return pair.metric("messages_sent_to_primary_total") >= 1

                    await until_it_holds(is_back)
        finally:
            for process in stopped:
                process.resume()
        stored = [body for queue in pair.queues for body in await contents(secondary, queue)]
        assert b"during" in stored


async def test_one_entity_fails_over_while_the_others_of_the_same_session_stay(tmp_path, secondary):
    config = QUEUES + '[[queues]]\nname = "other"\n[[queues]]\nname = "more"\n'
    primary = Broker(tmp_path / "primary", config)
    with primary, Pair(tmp_path, primary, secondary, "partly", *PATIENT) as pair:
        async with Again(pair.connection_string()) as client:
            for entity in ("orders", "other", "more"):
                await client.send(entity, message(b"before"))
            connection = client._connection
            assert connection is not None
            receiver = await connection.receiver("more", credit=5)
            await set_status(primary, "orders", "SendDisabled")
            await client.send("orders", message(b"during"))
            assert pair.metric("failovers_total") == 1
            assert not connection.closed  # so all of this was in one session
            # Deliveries to both places take turns, and so do those to the client.
            for n in range(300):
                await asyncio.gather(
                    client.send("orders", message(n)),
                    client.send("other", message(n)),
                    client.send("more", message(n)),
                )
                received = await receiver.receive(PATIENCE_S)
                assert received is not None
                await receiver.accept(received)
            await asyncio.gather(
                *(client.send(("orders", "other")[n % 2], message(b"many %d" % n)) for n in range(2000))
            )
            assert not connection.closed
            await set_status(primary, "orders", "Active")

            async def is_back() -> bool:
                return pair.metric("failbacks_total") >= 1

            async def is_told() -> bool:
                return client._senders["orders"].closed

            await until_it_holds(is_back)
            await until_it_holds(is_told)
            await client.send("orders", message(b"after"))
            assert not connection.closed
            await receiver.close()
        stored = [body for queue in pair.queues for body in await contents(secondary, queue)]
        assert len(stored) == 1 + 300 + 1000
        assert await contents(primary, "orders") == [b"before", b"after"]
        assert len(await contents(primary, "other")) == 1 + 300 + 1000
        assert len(await contents(primary, "more")) == 1


async def test_a_batch_goes_to_the_backlog_message_by_message(tmp_path, secondary):
    away = Broker(tmp_path / "primary", QUEUES)
    with Pair(tmp_path, away, secondary, "batches") as pair:
        async with await connect_to(pair.connection_string()) as connection:
            sender = await connection.sender("sessions")
            batch = pack_batch(Message.of(b"%d" % n, group_id="s").encode() for n in range(3))
            async with asyncio.timeout(PATIENCE_S):
                await sender.send(batch, is_batch=True)
        stored = [each for queue in pair.queues for each in await taken(secondary, queue)]
        assert [each.content() for each in stored] == [b"0", b"1", b"2"]
        assert {each.application_properties["x-ms-sessionid"] for each in stored} == {"s"}


async def test_without_both_namespaces_a_sender_is_told_so_and_nothing_is_accepted(tmp_path):
    nobody, no_one = Broker(tmp_path / "primary", QUEUES), Broker(tmp_path / "secondary")
    with Pair(tmp_path, nobody, no_one, "none") as pair:
        assert pair.sidecar.get("/readyz")[0] == 503
        async with await connect_to(pair.connection_string()) as connection:
            sender = await connection.sender("orders")
            with pytest.raises((ClientError, TimeoutError)):
                async with asyncio.timeout(2):
                    await sender.send(message(b"x"))


async def test_with_a_syphon_of_its_own_it_brings_back_what_it_sent_to_the_backlog(tmp_path, secondary):
    away = Broker(tmp_path / "primary", QUEUES)
    with Pair(tmp_path, away, secondary, "syphoning", "--syphon") as pair:
        async with await connect_to(pair.connection_string()) as connection:
            sender = await connection.sender("orders")
            async with asyncio.timeout(PATIENCE_S):
                for number in range(5):
                    await sender.send(message(number, message_id=str(number)))
            assert pair.metric("messages_sent_to_backlog_total") == 5
            await asyncio.to_thread(away.start)
            try:
                await until(lambda: syphon_metric(pair, "completed_messages_total") == 5)
                assert sorted(await contents(away, "orders")) == [b"0", b"1", b"2", b"3", b"4"]
                assert syphon_metric(pair, "primary_up") == 1
                assert syphon_metric(pair, "lease_held") == 3
            finally:
                await asyncio.to_thread(away.kill)


def syphon_metric(pair: Pair, name: str) -> float:
    """The sum of the samples with this name; -1 if there are none."""
    _, text = pair.sidecar.get("/metrics")
    lines = [line for line in text.splitlines() if line.startswith(f"peeklock_syphon_{name}")]
    return sum(float(line.rpartition(" ")[2]) for line in lines) if lines else -1


def test_without_the_option_it_runs_none(tmp_path, primary, secondary):
    with Pair(tmp_path, primary, secondary, "alone") as pair:
        assert syphon_metric(pair, "primary_up") == -1


def test_a_syphon_that_may_not_listen_is_told_of_and_the_sidecar_serves(tmp_path, primary):
    rule = '[[security.authorization_rules]]\nkey_name = "s"\nprimary_key = "s"\nrights = ["Send"]\n'
    with Broker(tmp_path / "strict", f'[security]\nroot_key = "{KEY}"\n{rule}', arguments=()) as strict:
        with Pair(tmp_path / "first", primary, strict, "poor"):
            pass  # it has made the queues
        poor = ("--secondary", strict.connection_string_for("s", "s"), "--syphon")
        with Pair(tmp_path / "second", primary, strict, "poor", *poor) as pair:
            eventually(lambda: "no right to listen" in pair.sidecar.log_file.read_text(), "the reason")
            assert pair.sidecar.get("/readyz")[0] == 200
