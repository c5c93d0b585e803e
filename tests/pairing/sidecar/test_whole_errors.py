"""Each error that a sidecar writes has all of its fields, and so has each frame for peers that read by position.

The peer fails at the first frame that lacks any (`tests.whole_frames`).
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from protocol.codec import UInt, ULong
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, Broker
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    OPEN,
    PYTHON,
    REJECTED,
    Closed,
    RawPeer,
    coordinator,
    error_of,
    message,
    outcome,
    performative,
)
from tests.end_to_end.raw_requests import Node, put_token
from tests.pairing.conftest import QUEUES, set_status
from tests.pairing.sidecar.conftest import PATIENT, Pair
from tests.patience import PATIENCE_S

FORCED = "amqp:connection:forced"
TIMEOUT = "com.microsoft:timeout"
UNAUTHORIZED = "amqp:unauthorized-access"


@pytest.fixture(params=["any", PYTHON])
def product(request) -> str:
    return request.param


@pytest.fixture
def away(tmp_path) -> Iterator[Broker]:
    broker = Broker(tmp_path / "primary", QUEUES + '[[queues]]\nname = "other"\n')
    with broker:
        yield broker


@pytest.fixture
def pair(tmp_path, away, secondary, request) -> Iterator[Pair]:
    with Pair(tmp_path, away, secondary, f"whole-{abs(hash(request.node.name)) % 10**6}") as pair:
        yield pair


@pytest.fixture
def patient(tmp_path, away, secondary) -> Iterator[Pair]:
    with Pair(tmp_path, away, secondary, "patient", *PATIENT) as pair:
        yield pair


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> Iterator[dict[bool, Pair]]:
    """By whether the primary is away."""
    directory = tmp_path_factory.mktemp("shared")
    here, nobody = Broker(directory / "here", QUEUES), Broker(directory / "nobody", QUEUES)
    with (
        Broker(directory / "secondary") as secondary,
        here,
        Pair(directory / "one", here, secondary, "one") as one,
        Pair(directory / "two", nobody, secondary, "two") as two,
    ):
        yield {False: one, True: two}


def peer_of(pair: Pair, product: str, **options) -> RawPeer:
    return RawPeer.connect(pair.sidecar.port, product=product, **options)


def closed(peer: RawPeer) -> tuple[str, str]:
    """The error of the close; nothing else has one."""
    return error_of(peer.expect(CLOSE))


def kill(pair: Pair, away: Broker, product: str) -> None:
    """The primary, and wait until the sidecar has noticed."""
    with peer_of(pair, product) as witness:
        away.kill()
        assert closed(witness)[0] == FORCED


def test_when_the_primary_dies_clients_are_told_to_connect_again(pair, away, product):
    with peer_of(pair, product) as sender, peer_of(pair, product) as receiver, peer_of(pair, product) as idle:
        sender.transfer(message(b"1"), sender.attach_sender("orders"))
        assert sender.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        receiver.attach_receiver("orders", credit=1)
        away.kill()
        for peer in (sender, receiver, idle):
            condition, description = closed(peer)
            assert condition == FORCED
            assert "connect again" in description


def test_when_the_primary_is_back_clients_are_told_to_connect_again(pair, away, product):
    kill(pair, away, product)
    with peer_of(pair, product) as peer:
        peer.transfer(message(b"1"), peer.attach_sender("orders"))
        assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
        away.start()
        condition, description = closed(peer)
        assert condition == FORCED
        assert "is back" in description


def test_when_the_sidecar_stops(pair, away, product):
    with peer_of(pair, product) as through:
        kill(pair, away, product)
        assert through.wait_closed()[-1].code == CLOSE
        with peer_of(pair, product) as here:
            pair.sidecar.stop()
            assert closed(here)[0] == FORCED
    pair.sidecar.start()


def test_what_only_the_primary_has_is_refused_while_it_is_away(shared, product):
    pair = shared[True]
    with peer_of(pair, product) as peer:
        attempts: list[dict[str, Any]] = [
            {"sender": False, "address": "orders"},
            {"sender": True, "address": "orders/$deadletterqueue"},
            {"sender": True, "target_": coordinator()},
            {"sender": True, "address": "a//b"},
        ]
        for options in attempts:
            handle = peer.attach(**options)
            condition, description = peer.refusal()
            assert condition == TIMEOUT
            assert description
            peer.detach(handle)
        node = Node(peer, "orders/$management")
        answer = node.ask("com.microsoft:peek-message", {"from-sequence-number": ULong(0), "message-count": UInt(1)})
        assert (answer.status, answer.condition) == (408, TIMEOUT)
    with RawPeer.anonymous(pair.sidecar.port) as stranger:
        stranger.attach(sender=True, address="orders")
        assert stranger.refusal()[0] == UNAUTHORIZED
        assert put_token(Node(stranger, "$cbs"), "orders", "SharedAccessSignature sr=x").status == 401
        unknown = generate("sb://localhost/orders", "nobody", "x", int(time.time()) + 60)
        assert put_token(Node(stranger, "$cbs"), "orders", unknown).status == 503


def test_messages_that_nobody_takes_are_rejected_with_a_whole_error(shared, product):
    with peer_of(shared[True], product) as peer:
        handle = peer.attach_sender("orders")
        for payload, condition in (
            (b"no message", "amqp:invalid-field"),
            (message(b"x", application={"x-ms-path": "elsewhere"}), "amqp:not-allowed"),
            (message(b"x" * (1100 << 10)), "amqp:link:message-size-exceeded"),
        ):
            for at in range(0, len(payload), 60_000):
                peer.transfer(payload[at : at + 60_000], handle, more=at + 60_000 < len(payload), first=at == 0)
            told = peer.expect(DISPOSITION)
            assert told.fields[4].descriptor == REJECTED
            assert error_of(told)[0] == condition
        peer.transfer(message(b"x"), handle, state=outcome(0x34, b"transaction"))
        assert error_of(peer.expect(DISPOSITION))[0] == TIMEOUT


def test_who_loses_his_right_is_told_so(shared, product):
    with RawPeer(shared[True].sidecar.port, product=product) as peer:
        peer.sasl("ANONYMOUS", b"")
        peer.open()
        peer.begin()
        token = generate("sb://localhost/orders", KEY_NAME, KEY, int(time.time()) + 2)
        assert put_token(Node(peer, "$cbs"), "orders", token).status == 202
        peer.attach_sender("orders")
        assert error_of(peer.expect(DETACH))[0] == UNAUTHORIZED


FAULTS = {
    "a session twice": performative(0, BEGIN, [None, UInt(0), UInt(9), UInt(9)]),
    "a handle twice": performative(0, ATTACH, ["x", UInt(0), False]) * 2,
    "a field of a wrong type": performative(0, FLOW, ["x"]),
    "another open": performative(0, OPEN, ["again"]),
    "no frame": b"\0\0\0\7" + b"x" * 20,
    "a frame that is too large": (100 << 20).to_bytes(4, "big") + b"\2\0\0\0" + b"x" * 20,
    "no performative": bytes.fromhex("0000000c02000000005399c0"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("is_away", [False, True])
def test_a_fault_of_the_client_is_told(shared, product, fault, is_away):
    """By the primary, or by the sidecar."""
    with peer_of(shared[is_away], product) as peer:
        peer.attach_sender("orders")
        with suppress(ConnectionError, Closed):
            peer.send(FAULTS[fault])
        found = [frame for frame in peer.wait_closed() if frame.code in (CLOSE, END, DETACH)]
        assert found
        assert all(error_of(frame)[0] for frame in found)


async def test_an_entity_that_fails_over_and_comes_back(patient, away, product):
    """In a session of which all else goes to the primary."""
    with peer_of(patient, product) as peer:
        orders, other = peer.attach_sender("orders"), peer.attach_sender("other")
        receiver = peer.attach_receiver("other", credit=10)
        peer.transfer(message(b"1"), orders)
        peer.expect(DISPOSITION)
        await set_status(away, "orders", "SendDisabled")

        def fail_over() -> None:
            deadline = time.monotonic() + PATIENCE_S
            while time.monotonic() < deadline:
                peer.transfer(message(b"2"), orders)
                with suppress(TimeoutError):
                    if error_of(peer.expect(DETACH, 0.1))[0] == "amqp:link:detach-forced":
                        return
            raise AssertionError("it does not fail over")

        await asyncio.to_thread(fail_over)
        peer.detach(orders)
        peer.drop(DISPOSITION)
        again = peer.attach_sender("orders", name="again")
        for number in range(5):
            peer.transfer(message(b"3"), again)
            peer.transfer(message(b"4"), other)
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
            assert peer.expect(DISPOSITION).fields[4].descriptor == ACCEPTED
            peer.flow(receiver, credit=10, delivery_count=number, echo=True)
            peer.expect(FLOW)
        peer.transfer(b"no message", again)
        assert error_of(peer.expect(DISPOSITION))[0] == "amqp:invalid-field"
        await set_status(away, "orders", "Active")
        assert error_of(peer.expect(DETACH))[0] == "amqp:link:detach-forced"
        peer.say(END)
        peer.expect(END)
