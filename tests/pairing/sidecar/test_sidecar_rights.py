"""Who may send through a sidecar: the namespaces behind it say so; what they have said counts while they are away."""

import asyncio
import time

import pytest

from protocol.client.connection import connect, connect_to
from protocol.client.connection_string import Credentials, Plain, SharedAccessSignature
from protocol.client.errors import AuthenticationFailed, ClientError, ConnectionLost, LinkDetached
from protocol.nodes import sas_tokens
from tests.brokers import KEY, KEY_NAME, Broker
from tests.pairing.conftest import QUEUES, contents
from tests.pairing.sidecar.conftest import Pair, message
from tests.patience import PATIENCE_S

OTHER_KEY = "b3RoZXItb3RoZXItb3RoZXItb3RoZXItb3RoZXItb3Q="
KEYS = f"""
[[security.authorization_rules]]
key_name = "writer"
rights = ["Send"]
primary_key = "{OTHER_KEY}"
[[security.authorization_rules]]
key_name = "reader"
rights = ["Listen"]
primary_key = "{OTHER_KEY}"
"""


def plain(pair: Pair, name: str, key: str):
    return connect("localhost", pair.sidecar.port, Plain(name, key), timeout_s=3)


async def test_the_primary_says_who_may_send_and_a_stranger_is_refused(tmp_path, primary, secondary):
    with Pair(tmp_path, primary, secondary, "rights") as pair:
        with pytest.raises(AuthenticationFailed):
            await plain(pair, KEY_NAME, OTHER_KEY)
        async with await connect_to(pair.connection_string(key=OTHER_KEY)) as connection:
            with pytest.raises((AuthenticationFailed, LinkDetached)):
                await connection.sender("orders")


async def test_while_the_primary_is_away_its_earlier_answers_count(tmp_path, secondary):
    away = Broker(tmp_path / "primary", KEYS + QUEUES)
    with away, Pair(tmp_path, away, secondary, "earlier") as pair:
        async with await plain(pair, "writer", OTHER_KEY) as connection:
            await (await connection.sender("orders")).send(message(b"before"))
        async with await plain(pair, "reader", OTHER_KEY) as connection:
            with pytest.raises(LinkDetached) as refused:
                await connection.sender("orders")
            assert refused.value.condition == "amqp:unauthorized-access"
        await asyncio.to_thread(away.kill)
        # Its key has been accepted, and so has a sender to this entity, but none to another.
        async with await plain(pair, "writer", OTHER_KEY) as connection:
            await (await connection.sender("orders")).send(message(b"1"))
            with pytest.raises(LinkDetached) as refused:
                await connection.sender("news")
            assert refused.value.condition == "com.microsoft:timeout"
        async with await plain(pair, "reader", OTHER_KEY) as connection:
            with pytest.raises(LinkDetached):
                await connection.sender("orders")
        # The sidecar's own key can be verified here; a wrong one is refused for good.
        async with await plain(pair, KEY_NAME, KEY) as connection:
            await (await connection.sender("news")).send(message(b"2"))
        with pytest.raises(AuthenticationFailed):
            await plain(pair, KEY_NAME, OTHER_KEY)
        # Only the primary can verify this one, so it is no final answer.
        with pytest.raises(ConnectionLost):
            await plain(pair, "writer", KEY)
        stored = [body for queue in pair.queues for body in await contents(secondary, queue)]
        assert sorted(stored) == [b"1", b"2"]


async def test_tokens_are_taken_and_end_while_the_primary_is_away(tmp_path, secondary):
    away = Broker(tmp_path / "primary", KEYS + QUEUES)
    with Pair(tmp_path, away, secondary, "tokens") as pair:
        until = int(time.time()) + 5  # a busy machine sends within that
        token = sas_tokens.generate("sb://localhost/orders", KEY_NAME, KEY, until)
        credentials = SharedAccessSignature(token)
        async with await connect("localhost", pair.sidecar.port, credentials, timeout_s=PATIENCE_S) as connection:
            sender = await connection.sender("orders")
            async with asyncio.timeout(PATIENCE_S):
                await sender.send(message(b"in time"))
            await asyncio.sleep(until - time.time() + 1)
            with pytest.raises(LinkDetached) as ended:
                await sender.send(message(b"too late"))
            assert ended.value.condition == "amqp:unauthorized-access"
        for name, key, audience in (
            (KEY_NAME, OTHER_KEY, "sb://localhost/orders"),
            (KEY_NAME, KEY, "sb://localhost/news"),
            ("writer", OTHER_KEY, "sb://localhost/orders"),
        ):
            wrong = SharedAccessSignature(sas_tokens.generate(audience, name, key, int(time.time()) + 60))
            async with await connect("localhost", pair.sidecar.port, wrong, timeout_s=3) as connection:
                with pytest.raises(ClientError):
                    await connection.sender("orders")
        stored = [body for queue in pair.queues for body in await contents(secondary, queue)]
        assert stored == [b"in time"]


async def test_without_credentials_nobody_sends_while_the_primary_is_away(tmp_path, secondary):
    away = Broker(tmp_path / "primary", QUEUES)
    with Pair(tmp_path, away, secondary, "nobody") as pair:
        async with await connect("localhost", pair.sidecar.port, timeout_s=3) as connection:
            with pytest.raises(LinkDetached) as refused:
                await connection.sender("orders")
            assert refused.value.condition == "amqp:unauthorized-access"


SAME_NAMES = """
[[security.authorization_rules]]
key_name = "reader"
rights = ["Listen"]
primary_key = "r"
[[queues]]
name = "tenant1.inbox"
authorization_rules = [
    {key_name = "send", primary_key = "1", rights = ["Send"]},
    {key_name = "RootManageSharedAccessKey", primary_key = "not-the-root-key", rights = ["Send"]},
]
[[queues]]
name = "payroll"
authorization_rules = [{key_name = "send", primary_key = "2", rights = ["Send"]}]
"""


async def test_no_right_grows_while_the_primary_is_away(tmp_path, secondary):
    """By the name of a rule, by a token for one queue, or by what the primary has said of others."""
    away = Broker(tmp_path / "primary", SAME_NAMES)

    async def expect(rights: list[tuple[Credentials, bool, bool]]) -> None:
        for credentials, *may in rights:
            async with await connect("localhost", pair.sidecar.port, credentials, timeout_s=PATIENCE_S) as connection:
                for path, is_allowed in zip(("tenant1.inbox", "payroll"), may, strict=True):
                    try:
                        await connection.sender(path)
                    except (AuthenticationFailed, LinkDetached):
                        assert not is_allowed, (credentials, path)
                    else:
                        assert is_allowed, (credentials, path)

    def token(resource, name=KEY_NAME, key=KEY):
        return SharedAccessSignature(sas_tokens.generate(resource, name, key, int(time.time()) + 600))

    with away, Pair(tmp_path, away, secondary, "names") as pair:
        known = [
            (Plain("send", "1"), True, False),
            (Plain("send", "2"), False, True),
            (Plain(KEY_NAME, "not-the-root-key"), True, False),
            (Plain(KEY_NAME, KEY), True, True),
            (Plain("reader", "r"), False, False),
            (token("sb://localhost/tenant1.inbox", "send", "1"), True, False),
            (token("sb://localhost/payroll", "send", "2"), False, True),
            (token("sb://localhost/", KEY_NAME, "not-the-root-key"), True, False),
            (token("tenant1.inbox"), True, False),
        ]
        await expect(known)
        await asyncio.to_thread(away.kill)
        await expect(known)
        await expect([(token("tenant1.inbox"), True, False), (token("sb://localhost/"), True, True)])
