"""The client with the real broker: tokens and rights, locks, management, what an operator needs."""

import asyncio
import ssl
import time
from pathlib import Path
from uuid import UUID

import pytest

from protocol.client.connection import connect, connect_to
from protocol.client.connection_string import Plain, SharedAccessKey, SharedAccessSignature
from protocol.client.errors import (
    AuthenticationFailed,
    ClientError,
    ConnectionLost,
    LinkDetached,
    MessageRefused,
    RequestFailed,
    SettlementRefused,
)
from protocol.client.messages import Message
from protocol.client.requests import QueueCounts
from protocol.codec import Timestamp, array
from protocol.message.batches import pack_batch
from protocol.nodes.sas_tokens import generate
from protocol.symbols import SCHEDULED_ENQUEUE_TIME
from tests.brokers import KEY, KEY_NAME, Broker
from tests.patience import PATIENCE_S
from tests.ports import free_ports

CERTIFICATE = Path(__file__).with_name("localhost.pem")
DEAD = "/$deadletterqueue"
NAMES = ["counted", "in-sessions", "keyed", "locks", "outcomes", "purged", "q", "small/one", "talks"]


def numbered(count):
    return [Message.of(b"%d" % number, message_id=str(number)).encode() for number in range(count)]


async def take_all(connection, address):
    """Complete all that is there; their contents."""
    contents = []
    async with await connection.receiver(address, credit=0) as receiver:
        while taken := await receiver.fetch(100):
            contents += [received.message().content() for received in taken]
            await asyncio.gather(*map(receiver.accept, taken))
    return contents


async def test_a_batch_is_stored_as_its_messages(broker):
    async with await connect_to(broker.connection_string) as connection:
        sender = await connection.sender("q")
        await sender.send(pack_batch(numbered(300)), is_batch=True)
        await sender.send(Message.of(b"last").encode())
        assert await take_all(connection, "q") == [b"%d" % number for number in range(300)] + [b"last"]


async def test_messages_go_through(broker):
    async with await connect_to(broker.connection_string) as connection:
        sender = await connection.sender("q")
        assert await sender.send_all(numbered(500)) == 500
        receiver = await connection.receiver("q", credit=50)
        seen = []
        answers = []
        async for received in receiver:
            seen.append(received.message().message_id)
            answers.append(receiver.accept(received))
            if len(seen) == 500:
                break
        await asyncio.gather(*answers)
        assert seen == [str(number) for number in range(500)]
        await receiver.close()
        assert await take_all(connection, "q") == []


async def test_one_dead_letter_is_locked_by_its_number(broker):
    async with await connect_to(broker.connection_string) as connection:
        await (await connection.sender("q")).send_all(numbered(3))
        async with await connection.receiver("q", credit=0) as receiver:
            await asyncio.gather(*(receiver.reject(each, "bad") for each in await receiver.fetch(3)))
        management = await connection.management("q" + DEAD)
        number = Message.decode((await management.peek(3))[1]).sequence_number or 0
        with pytest.raises(RequestFailed, match="no unlocked deferred message") as refused:
            await management.lock_deferred([number])
        assert refused.value.status == 404
        [token] = await management.lock_deferred([number], active=True)
        with pytest.raises(RequestFailed, match="no unlocked deferred or active message"):
            await management.lock_deferred([number], active=True)
        completed = {"disposition-status": "completed", "lock-tokens": array(UUID, [token])}
        await management.request("com.microsoft:update-disposition", completed)
        assert await take_all(connection, "q" + DEAD) == [b"0", b"2"]


async def test_receive_and_delete(broker):
    async with await connect_to(broker.connection_string) as connection:
        await (await connection.sender("q")).send_all(numbered(3))
        async with await connection.receiver("q", credit=0, receive_and_delete=True) as receiver:
            assert [received.settled for received in await receiver.fetch(10)] == [True] * 3
        assert await take_all(connection, "q") == []


async def test_abandoned_released_deferred_and_dead_lettered(broker):
    async with await connect_to(broker.connection_string) as connection:
        await (await connection.sender("outcomes")).send_all(numbered(4))
        receiver = await connection.receiver("outcomes", credit=0)
        abandoned, released, deferred, dead = await receiver.fetch(4)
        await receiver.modify(abandoned, properties={"step": "two"})
        await receiver.release(released)
        await receiver.modify(deferred, undeliverable_here=True)
        await receiver.reject(dead, "bad", "very bad", {"code": 7})
        again = [received.message() for received in await receiver.fetch(4)]
        assert [(message.content(), message.delivery_count) for message in again] == [(b"0", 1), (b"1", 0)]
        assert again[0].application_properties == {"step": "two"}
        management = await connection.management("outcomes")
        states = [Message.decode(each).annotations["x-opt-message-state"] for each in await management.peek(10)]
        assert states == [0, 0, 1]
        async with await connection.receiver("outcomes" + DEAD, credit=0) as dead_letters:
            (received,) = await dead_letters.fetch(5, timeout_s=PATIENCE_S)
            assert received.message().application_properties == {
                "DeadLetterReason": "bad",
                "DeadLetterErrorDescription": "very bad",
                "code": 7,
            }
            await dead_letters.accept(received)


async def test_a_refused_message_tells_its_size(broker):
    async with await connect_to(broker.connection_string) as connection:
        sender = await connection.sender("small/one")
        with pytest.raises(MessageRefused) as caught:
            await sender.send(Message.of(bytes(2000)).encode())
        assert caught.value.condition == "amqp:link:message-size-exceeded"


async def test_an_unknown_queue_is_not_found(broker):
    async with await connect_to(broker.connection_string) as connection:
        with pytest.raises(LinkDetached) as caught:
            await connection.receiver("nowhere")
        assert caught.value.condition == "amqp:not-found"


async def test_plain_credentials_need_no_token(broker):
    async with await connect("127.0.0.1", broker.amqp_port, Plain(KEY_NAME, KEY)) as connection:
        await (await connection.sender("q")).send(numbered(1)[0])
        assert await take_all(connection, "q") == [b"0"]


async def test_a_wrong_key_is_an_authentication_failure(broker):
    async with await connect_to(broker.connection_string_for(KEY_NAME, "wrong")) as connection:
        with pytest.raises(AuthenticationFailed, match="InvalidSignature") as caught:
            await connection.sender("q")
        assert caught.value.condition == "amqp:unauthorized-access"


async def test_a_ready_made_signature_is_used_as_it_is(broker):
    token = generate("sb://localhost/q", KEY_NAME, KEY, int(time.time()) + 60)
    async with await connect("127.0.0.1", broker.amqp_port, SharedAccessSignature(token)) as connection:
        await connection.sender("q")
        with pytest.raises(AuthenticationFailed, match="InvalidAudience"):
            await connection.sender("counted")


async def test_an_entitys_key_has_its_rights_there_only(broker):
    async with await connect_to(broker.connection_string_for("sender", "send-key")) as connection:
        await connection.sender("keyed")
        with pytest.raises(LinkDetached, match="Listen") as caught:
            await connection.receiver("keyed")
        assert caught.value.condition == "amqp:unauthorized-access"
        with pytest.raises(AuthenticationFailed):
            await connection.sender("q")


async def test_a_token_is_put_again_before_it_expires(broker):
    """The broker ends links whose token has expired; this one lives for two seconds at most."""
    credentials = SharedAccessKey(KEY_NAME, KEY, lifetime_s=1.0)
    async with await connect("127.0.0.1", broker.amqp_port, credentials) as connection:
        receiver = await connection.receiver("counted")
        assert await receiver.receive(timeout_s=3.0) is None


async def test_a_token_that_is_not_renewed_ends_the_link(broker):
    token = generate("sb://localhost/q", KEY_NAME, KEY, int(time.time()) + 2)
    async with await connect("127.0.0.1", broker.amqp_port, SharedAccessSignature(token)) as connection:
        receiver = await connection.receiver("q")
        with pytest.raises(LinkDetached, match="ExpiredToken"):
            await receiver.receive()


async def test_a_lost_lock_is_told(broker):
    async with await connect_to(broker.connection_string) as connection:
        await (await connection.sender("locks")).send(numbered(1)[0])
        receiver = await connection.receiver("locks", credit=0)
        (received,) = await receiver.fetch(1, timeout_s=PATIENCE_S)
        management = await connection.management("locks")
        await management.request(
            "com.microsoft:update-disposition",
            {"disposition-status": "completed", "lock-tokens": [received.lock_token]},
        )
        with pytest.raises(SettlementRefused) as caught:
            await receiver.accept(received)
        assert caught.value.condition == "com.microsoft:message-lock-lost"


async def test_locks_are_renewed(broker):
    async with await connect_to(broker.connection_string) as connection:
        await (await connection.sender("locks")).send(numbered(1)[0])
        receiver = await connection.receiver("locks", credit=0)
        (received,) = await receiver.fetch(1, timeout_s=PATIENCE_S)
        management = await connection.management("locks")
        (until_ms,) = await management.renew_locks([received.lock_token])
        assert until_ms > received.message().annotations["x-opt-locked-until"]
        await receiver.accept(received)


async def test_a_session_is_held_by_one_receiver_and_has_a_state(broker):
    async with await connect_to(broker.connection_string) as connection:
        management = await connection.management("in-sessions")
        async with await connection.accept_session("in-sessions", "a") as receiver:
            await (await connection.sender("in-sessions")).send(Message.of(b"x", group_id="a").encode())
            [received] = await receiver.fetch(5, timeout_s=PATIENCE_S)
            until_ms = await management.renew_session_lock("a")
            assert 0 < until_ms - time.time() * 1000 <= 5000
            await management.set_session_state("a", b"half")
            async with await connect_to(broker.connection_string) as other:
                with pytest.raises(LinkDetached) as taken:
                    await other.accept_session("in-sessions", "a")
                assert taken.value.condition == "com.microsoft:session-cannot-be-locked"
                await other.accept_session("in-sessions", "b")
            await receiver.accept(received)
        async with await connection.accept_session("in-sessions", "a"):
            assert await management.session_state("a") == b"half"
            await management.set_session_state("a", None)
            assert await management.session_state("a") is None
        with pytest.raises(RequestFailed):
            await management.renew_session_lock("a")


async def test_deferred_messages_are_settled_by_the_tokens_of_their_locks(broker):
    async with await connect_to(broker.connection_string) as connection:
        await (await connection.sender("locks")).send_all(numbered(3))
        receiver = await connection.receiver("locks", credit=3)
        taken = [received for _ in range(3) if (received := await receiver.receive()) is not None]
        numbers = [received.message().sequence_number or 0 for received in taken]
        await asyncio.gather(*(receiver.modify(each, undeliverable_here=True) for each in taken))
        management = await connection.management("locks")
        [first, second, third] = await management.receive_deferred(numbers)
        assert Message.decode(second[1]).content() == b"1"
        with pytest.raises(RequestFailed):
            await management.receive_deferred(numbers[:1])
        await management.abandon([first[0]])
        await management.complete([second[0]])
        await management.dead_letter([third[0]], "why", "because")
        [again] = await management.receive_deferred(numbers[:1])
        await management.complete([again[0]])
        peeked = await management.peek(10, omit_body=True)
        assert peeked == []
        [dead] = await (await connection.receiver("locks" + DEAD, credit=0)).fetch(5)
        assert dead.message().application_properties["DeadLetterReason"] == "why"
    async with await connect_to(broker.connection_string) as connection:
        await take_all(connection, "locks" + DEAD)


async def test_messages_are_scheduled_and_cancelled(broker):
    due = Timestamp((time.time() + 3600) * 1000)
    async with await connect_to(broker.connection_string) as connection:
        management = await connection.management("q")
        message = Message.of(b"later", message_id="s", annotations={SCHEDULED_ENQUEUE_TIME: due})
        (number,) = await management.schedule([message])
        (peeked,) = await management.peek(1, number)
        assert Message.decode(peeked).annotations["x-opt-message-state"] == 2
        await management.cancel_scheduled([number])
        with pytest.raises(RequestFailed) as caught:
            await management.cancel_scheduled([number])
        assert (caught.value.status, caught.value.condition) == (404, "com.microsoft:message-not-found")


async def test_many_requests_may_be_under_way(broker):
    async with await connect_to(broker.connection_string) as connection:
        management = await connection.management("q")
        answers = await asyncio.gather(*(management.peek(1) for _ in range(300)))
        assert answers == [[]] * 300
        assert await connection.management("q") is not management
        assert await connection.requests("q/$management") is await connection.requests("q/$management")


# --- purge, counts ----------------------------------------------------------------------------------------------------


async def test_purge_deletes_everything_that_is_not_locked(broker):
    due = Timestamp((time.time() + 3600) * 1000)
    async with await connect_to(broker.connection_string) as connection:
        sender = await connection.sender("purged")
        management = await connection.management("purged")
        await sender.send_all(numbered(5000))
        await management.schedule([Message.of(b"later", annotations={SCHEDULED_ENQUEUE_TIME: due})])
        receiver = await connection.receiver("purged", credit=0)
        locked, dead = await receiver.fetch(2, timeout_s=PATIENCE_S)
        await receiver.reject(dead)
        assert await management.purge() == 4999
        assert await management.purge() == 0
        await receiver.accept(locked)
        assert await management.counts() == QueueCounts(0, 0, 0, 0, 1, (await management.counts()).size_bytes)
        dead_letters = await connection.management("purged" + DEAD)
        assert await dead_letters.purge() == 1
        assert await management.counts() == QueueCounts(0, 0, 0, 0, 0, 0)


async def test_purge_ends_although_messages_come_in(broker):
    """It deletes as many as there were at first, not whatever comes meanwhile for ever."""
    async with await connect_to(broker.connection_string) as connection:
        sender = await connection.sender("purged", max_in_flight=100)
        await sender.send_all(numbered(2000))

        async def keep_sending():
            while True:
                await sender.send_all(numbered(500))

        sending = asyncio.create_task(keep_sending())
        management = await connection.management("purged")
        assert await management.purge() >= 2000
        sending.cancel()
        await asyncio.wait([sending])
        await management.purge()


@pytest.mark.parametrize(("name", "key"), [("sender", "send-key"), ("listener", "listen-key")])
async def test_purge_needs_manage(broker, name, key):
    async with await connect_to(broker.connection_string_for(name, key)) as connection:
        management = await connection.management("keyed")
        with pytest.raises(RequestFailed, match="Manage") as caught:
            await management.purge()
        assert (caught.value.status, caught.value.condition) == (401, "amqp:unauthorized-access")


async def test_manage_at_the_entity_is_enough_to_purge_it(broker):
    async with await connect_to(broker.connection_string_for("manager", "manage-key")) as connection:
        assert await (await connection.management("keyed")).purge() == 0
        assert await (await connection.management("keyed" + DEAD)).purge() == 0


async def test_counts_say_what_is_where(broker):
    due = Timestamp((time.time() + 3600) * 1000)
    async with await connect_to(broker.connection_string) as connection:
        sender = await connection.sender("counted")
        management = await connection.management("counted")
        await sender.send_all(numbered(6))
        await management.schedule([Message.of(b"later", annotations={SCHEDULED_ENQUEUE_TIME: due})])
        receiver = await connection.receiver("counted", credit=0)
        _locked, deferred, dead = await receiver.fetch(3, timeout_s=PATIENCE_S)
        await receiver.modify(deferred, undeliverable_here=True)
        await receiver.reject(dead)
        counts = await management.counts()
        assert (counts.active, counts.locked, counts.deferred) == (5, 1, 1)
        assert (counts.scheduled, counts.dead_lettered) == (1, 1)
        assert counts.size_bytes > 0
        everything = await connection.counts()
        assert everything["counted"] == counts
        assert list(everything) == sorted(everything) == NAMES


async def test_counts_of_all_come_in_pages(broker, monkeypatch):
    monkeypatch.setattr("protocol.client.connection.MAX_COUNTS_PER_REQUEST", 2)
    async with await connect_to(broker.connection_string) as connection:
        assert list(await connection.counts()) == NAMES


async def test_counts_of_all_need_manage_on_the_namespace(broker):
    async with await connect("127.0.0.1", broker.amqp_port, Plain("manager", "manage-key")) as connection:
        with pytest.raises(LinkDetached, match="Manage") as caught:
            await connection.counts()
        assert caught.value.condition == "amqp:unauthorized-access"


@pytest.mark.parametrize(("node", "operation"), [("q", "peeklock:list-counts"), ("", "peeklock:purge"), ("", "x")])
async def test_each_node_refuses_the_operations_of_others(broker, node, operation):
    async with await connect_to(broker.connection_string) as connection:
        management = await connection.management(node)
        with pytest.raises(RequestFailed) as caught:
            await management.request(operation, {"count": 1})
        assert (caught.value.status, caught.value.condition) == (501, "amqp:not-implemented")


async def test_tls_is_verified(tmp_path):
    """With a certificate made for this test: a key of its own, for localhost, valid for a hundred years."""
    (port,) = free_ports(1)
    config = f"""
        [amqp]
        tls_port = {port}
        [tls]
        certificate = "{CERTIFICATE}"
        key = "{CERTIFICATE}"
        [[queues]]
        name = "q"
    """
    target = f"Endpoint=sb://localhost:{port};SharedAccessKeyName={KEY_NAME};SharedAccessKey={KEY}"
    with Broker(tmp_path, config):
        trusting = ssl.create_default_context(cafile=CERTIFICATE)
        async with await connect_to(target, tls=trusting) as connection:
            await (await connection.sender("q")).send_all(numbered(100))
            assert len(await take_all(connection, "q")) == 100
        with pytest.raises(ConnectionLost, match="certificate verify failed"):
            await connect_to(target)


async def test_a_broker_that_dies_wakes_everybody(tmp_path):
    with Broker(tmp_path, '[[queues]]\nname = "q"') as own:
        connection = await connect_to(own.connection_string)
        receiver = await connection.receiver("q")
        waiting = asyncio.create_task(receiver.receive())
        await asyncio.to_thread(own.kill)
        with pytest.raises(ClientError):
            await waiting
        with pytest.raises(ClientError):
            await connection.sender("q")
        await connection.close()
