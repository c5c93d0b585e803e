"""Receiving: credit, waiting, settling with confirmation, draining."""

import asyncio

import pytest

from protocol.client.errors import LinkDetached, SettlementRefused
from protocol.client.messages import Message
from protocol.engine.deliveries import (
    ACCEPTED,
    MODIFIED,
    REJECTED,
    RELEASED,
    forget,
    modification,
    reject,
    rejection,
    settle,
)
from protocol.engine.proton.library import ffi, lib
from tests.patience import PATIENCE_S, until


def message(number=0):
    return Message.of(b"%d" % number).encode()


async def test_a_message_is_received_and_its_completion_confirmed(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        received = await receiver.receive()
        assert (received.payload, received.tag, received.settled) == (message(), b"t" * 16, False)
        assert received.lock_token.bytes_le == b"t" * 16
        await receiver.accept(received)
        assert received.settled
        assert peer.outcomes == [(ACCEPTED, False)]


@pytest.mark.parametrize(
    ("settle", "state"), [("accept", ACCEPTED), ("release", RELEASED), ("modify", MODIFIED), ("reject", REJECTED)]
)
async def test_each_outcome_is_confirmed_by_the_same(peer, settle, state):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        await getattr(receiver, settle)(await receiver.receive())
        assert peer.outcomes == [(state, False)]


@pytest.mark.parametrize("settle", ["accept", "release", "modify", "reject"])
async def test_a_refused_outcome_is_an_error_with_its_reason(peer, settle):
    peer.on_outcome = lambda link, delivery, state: reject(delivery, "com.microsoft:message-lock-lost", "too late")
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        with pytest.raises(SettlementRefused, match="too late") as caught:
            await getattr(receiver, settle)(await receiver.receive())
        assert caught.value.condition == "com.microsoft:message-lock-lost"


async def test_another_outcome_than_the_one_told_is_a_refusal(peer):
    peer.on_outcome = lambda link, delivery, state: settle(delivery, RELEASED)
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        with pytest.raises(SettlementRefused, match="another outcome"):
            await receiver.accept(await receiver.receive())


async def test_an_answer_without_an_outcome_leaves_ours(peer):
    peer.on_outcome = lambda link, delivery, state: forget(delivery)
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        await receiver.accept(await receiver.receive())


async def test_a_message_is_settled_once(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        received = await receiver.receive()
        await receiver.accept(received)
        with pytest.raises(ValueError, match="settled already"):
            receiver.release(received)


async def test_a_delivery_that_the_peer_has_settled_cannot_be_settled(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        delivery = peer.send("q", message())
        received = await receiver.receive()
        forget(delivery)
        peer.flush()
        await connection.sender("any")  # its answer comes after the settlement
        with pytest.raises(SettlementRefused, match="itself"):
            await receiver.accept(received)


async def test_reason_and_properties_travel_with_a_rejection(peer):
    told = []
    peer.on_outcome = lambda link, delivery, state: (
        told.append(rejection(delivery)),
        settle(delivery, state),
    )
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        await receiver.reject(await receiver.receive(), "bad", "very bad", {"attempts": 3})
        info = {"DeadLetterReason": "bad", "DeadLetterErrorDescription": "very bad", "attempts": 3}
        assert told == [("com.microsoft:dead-letter", "very bad", info)]


async def test_properties_travel_with_a_modification(peer):
    told = []
    peer.on_outcome = lambda link, delivery, state: (
        told.append(modification(delivery)),
        settle(delivery, state),
    )
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        for tag in (b"1" * 16, b"2" * 16):
            peer.send("q", message(), tag)
        await receiver.modify(await receiver.receive(), properties={"step": "two"})
        await receiver.modify(await receiver.receive(), undeliverable_here=True)
        assert told == [(False, {"step": "two"}), (True, {})]


async def test_a_peer_that_settles_first_gets_the_outcome_settled(peer):
    """It offers rcv-settle-mode first only: there is no confirmation to wait for."""

    def accept_first(link):
        from cproton_ffi import lib

        lib.pn_link_set_rcv_settle_mode(link.pointer, lib.PN_RCV_FIRST)
        lib.pn_terminus_copy(lib.pn_link_source(link.pointer), lib.pn_link_remote_source(link.pointer))
        lib.pn_link_open(link.pointer)

    peer.on_attach = accept_first
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        await receiver.accept(await receiver.receive())
        await until(lambda: peer.outcomes)
        assert peer.outcomes == [(ACCEPTED, True)]


async def test_settlements_may_be_pipelined(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=20)
        for number in range(20):
            peer.send("q", message(number), b"%016d" % number)
        answers = [receiver.accept(await receiver.receive()) for _ in range(20)]
        await asyncio.gather(*answers)
        assert peer.outcomes == [(ACCEPTED, False)] * 20


async def test_many_are_settled_at_once_and_the_refused_ones_are_told(peer):
    def answer(link, delivery, state):
        if len(peer.outcomes) % 3 == 0:
            reject(delivery, "com.microsoft:message-lock-lost", "too late")
        else:
            settle(delivery, state)

    peer.on_outcome = answer
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=20)
        for number in range(6):
            peer.send("q", message(number), b"%016d" % number)
        taken = [await receiver.receive() for _ in range(6)]
        refused = await receiver.accept_all(taken[:3])
        assert [each.payload for each in refused] == [message(2)]
        refused = await receiver.release_all(taken[3:])
        assert [each.payload for each in refused] == [message(5)]
        assert peer.outcomes == [(ACCEPTED, False)] * 3 + [(RELEASED, False)] * 3
        assert await receiver.accept_all([]) == []


async def test_the_end_of_the_link_is_told_to_who_waits_for_many(peer):
    peer.on_outcome = lambda link, delivery, state: None
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        for number in range(2):
            peer.send("q", message(number), b"%016d" % number)
        taken = [await receiver.receive(), await receiver.receive()]
        answer = receiver.accept_all(taken)
        await until(lambda: len(peer.outcomes) == 2)
        peer.link("q").detach("com.microsoft:message-lock-lost", "the end")
        peer.flush()
        with pytest.raises(LinkDetached, match="the end"):
            await answer


async def test_all_that_came_is_taken_at_once(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=4)
        changes = []
        receiver.watch(lambda: changes.append(len(changes)))
        assert receiver.take_all() == []
        for number in range(3):
            peer.send("q", message(number), b"%016d" % number)
        await until(lambda: len(changes) == 3)
        assert [each.payload for each in receiver.take_all()] == [message(number) for number in range(3)]
        assert receiver.take_all() == []
        await until(lambda: peer.link("q").credit == 4)
        peer.link("q").detach("amqp:link:detach-forced", "the end")
        peer.flush()
        await until(lambda: len(changes) == 4)
        with pytest.raises(LinkDetached, match="the end"):
            receiver.take_all()


async def test_many_are_deferred_at_once_without_a_failed_delivery(peer):
    told = []
    peer.on_outcome = lambda link, delivery, state: (told.append(modification(delivery)), settle(delivery, state))
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        assert await receiver.defer_all([await receiver.receive()]) == []
        assert (peer.outcomes, told) == ([(MODIFIED, False)], [(True, {})])


async def test_receive_and_delete_needs_no_outcome(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", receive_and_delete=True)
        assert peer.link("q").settled_by_sender
        peer.send("q", message(), settled=True)
        received = await receiver.receive()
        assert received.settled
        with pytest.raises(ValueError, match="settled"):
            receiver.accept(received)


async def test_no_message_in_time_is_none(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        assert await receiver.receive(timeout_s=0.01) is None
        peer.send("q", message())
        await until(lambda: connection.engine.links)
        assert (await receiver.receive(timeout_s=PATIENCE_S)).payload == message()


async def test_several_may_wait_and_each_gets_another_message(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        waiting = [asyncio.create_task(receiver.receive()) for _ in range(3)]
        await asyncio.sleep(0)  # all wait
        waiting[1].cancel()
        for number in range(2):
            peer.send("q", message(number), b"%016d" % number)
        first, second = await asyncio.gather(waiting[0], waiting[2])
        assert {first.payload, second.payload} == {message(0), message(1)}


async def test_the_window_is_kept_filled_as_messages_are_taken(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=4)
        link = peer.link("q")
        await until(lambda: link.credit == 4)
        for number in range(4):
            peer.send("q", message(number), b"%016d" % number)
        await receiver.receive()
        await connection.sender("any")
        assert link.credit == 0  # one is free, and flows are for halves
        await receiver.receive()
        await until(lambda: link.credit == 2)


async def test_without_a_window_only_what_is_granted_comes(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=0)
        link = peer.link("q")
        await connection.sender("any")
        assert link.credit == 0
        receiver.grant(2)
        await until(lambda: link.credit == 2)
        peer.send("q", message())
        await receiver.receive()
        await connection.sender("other")
        assert link.credit == 1


async def test_a_drain_takes_the_credit_back_and_keeps_what_came_before(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=10)

        def send_one_and_drain(link):
            if link.drain and link.credit:
                link.send(b"t" * 16, message(), b"", 0, False)
                link.drained()

        peer.on_flow = send_one_and_drain
        await receiver.drain()
        assert peer.link("q").credit == 0
        assert (await receiver.receive(timeout_s=0)).payload == message()
        await connection.sender("any")
        assert peer.link("q").credit == 0  # the window has ended
        await receiver.drain()


async def test_a_drain_that_messages_use_up_ends_as_well(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=2)

        def use_up(link):
            if link.drain and link.credit:
                for number in range(2):
                    link.send(b"%016d" % number, message(number), b"", 0, False)

        peer.on_flow = use_up
        await receiver.drain()
        assert [(await receiver.receive()).payload for _ in range(2)] == [message(0), message(1)]


async def test_a_drain_that_is_not_answered_times_out(peer):
    peer.on_flow = lambda link: None
    async with peer, await peer.connect(timeout_s=0.1) as connection:
        receiver = await connection.receiver("q", credit=2)
        with pytest.raises(TimeoutError, match="q does not answer"):
            await receiver.drain()


async def test_fetch_takes_what_is_there(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=0)

        def offer(count):
            def send(link):
                for number in range(min(count, link.credit)):
                    link.send(b"%016d" % number, message(number), b"", 0, False)
                if link.drain and link.credit:
                    link.drained()

            return send

        peer.on_flow = lambda link: link.drained() if link.drain else None
        assert await receiver.fetch(5) == []
        assert await receiver.fetch(5, timeout_s=0.01) == []
        peer.on_flow = offer(3)
        assert len(await receiver.fetch(2)) == 2
        peer.on_flow = lambda link: link.drain and (offer(1)(link), link.drained())
        assert len(await receiver.fetch(3)) == 1
        assert peer.link("q").credit == 0


async def test_fetch_waits_for_the_first_only(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=0)
        fetching = asyncio.create_task(receiver.fetch(10, timeout_s=PATIENCE_S))
        await until(lambda: peer.link("q").credit == 10)
        peer.send("q", message())
        assert [received.payload for received in await fetching] == [message()]


async def test_a_detach_is_told_to_who_waits_and_ends_the_locks(peer):
    peer.on_outcome = lambda link, delivery, state: None
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        for number in range(3):
            peer.send("q", message(number), b"%016d" % number)
        taken, settling = await receiver.receive(), await receiver.receive()
        answer = receiver.accept(settling)
        peer.link("q").detach("com.microsoft:message-lock-lost", "the end")
        peer.flush()
        with pytest.raises(LinkDetached, match="the end"):
            await answer
        with pytest.raises(LinkDetached, match="the end"):
            await receiver.receive()
        with pytest.raises(LinkDetached, match="the end"):
            receiver.accept(taken)


async def test_received_and_deleted_messages_can_be_taken_after_the_end(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", receive_and_delete=True)
        peer.send("q", message(), settled=True)
        peer.link("q").detach("amqp:link:detach-forced", "the end")
        peer.flush()
        await receiver.detached.wait()
        assert (await receiver.receive()).payload == message()
        with pytest.raises(LinkDetached, match="the end"):
            await receiver.receive()


async def test_closing_gives_back_what_nobody_took(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        for number in range(3):
            peer.send("q", message(number), b"%016d" % number)
        await receiver.receive()
        await receiver.close()
        assert peer.outcomes == [(RELEASED, True)] * 2
        assert [taken async for taken in receiver] == []


async def test_iteration_ends_with_why_the_link_ended(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q")
        peer.send("q", message())
        taken = []

        async def take():
            async for received in receiver:
                taken.append(received.payload)
                peer.link("q").detach("amqp:link:detach-forced", "the end")
                peer.flush()

        with pytest.raises(LinkDetached, match="the end"):
            await take()
        assert taken == [message()]


async def test_deliveries_that_the_peer_gives_up_do_not_use_up_the_window(peer):
    async with peer, await peer.connect() as connection:
        receiver = await connection.receiver("q", credit=4)
        link = peer.link("q")
        for number in range(10):
            await until(lambda: link.credit > 0)
            tag = ffi.new("pn_delivery_tag_t *", {"size": 1, "start": ffi.from_buffer(b"%d" % number)})
            delivery = lib.pn_delivery(link.pointer, tag[0])
            lib.pn_link_send(link.pointer, b"half", 4)
            peer.flush()
            lib.pn_delivery_abort(delivery)
            peer.flush()
        await until(lambda: link.credit > 0)
        peer.send("q", message())
        assert (await receiver.receive()).payload == message()
