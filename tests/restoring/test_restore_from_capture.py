"""A broker that is killed, and whose data directory is gone, comes back from its capture."""

import asyncio
import shutil

import pytest

from protocol.client.messages import Message
from storage.capture.reading import captured
from storage.maintenance import verify
from tests.brokers import Broker
from tests.patience import PATIENCE_S
from tests.restoring.capture_and_restore import as_it_was, capture, capture_all, restore
from tests.restoring.everything import CONFIG, connected, load, made, names_in, seen, settled

ACTIVE, DEFERRED = 0, 1  # of the annotation x-opt-message-state


def state_of(message: Message) -> int:
    return int(message.annotations.get("x-opt-message-state", ACTIVE))


@pytest.mark.parametrize("workers", [0, 2])
def test_all_that_was_accepted_is_there_after_the_data_directory_is_gone(tmp_path, workers):
    with Broker(tmp_path, CONFIG, workers=workers) as broker:
        accepted, scheduled = asyncio.run(load(broker))
        before = asyncio.run(settled(broker))
        assert names_in(before) == accepted
        capture_all(broker, tmp_path, "mark")
        before = asyncio.run(seen(broker))
        broker.kill()
        shutil.rmtree(broker.data_dir)
        told = restore(broker, tmp_path)
        assert f"captured from the broker with the id {captured(str(tmp_path / 'captured')).namespace_id}\n" in told
        assert verify(broker.data_dir).ok
        broker.start()
        with capture(broker, tmp_path, "--once") as another:  # it has a new id, which the folder has not
            assert another.process.wait(PATIENCE_S) == 1, another.err
            assert "has the rows of another broker of the namespace" in another.err
        after = asyncio.run(seen(broker))
        for place, messages in before.items():
            assert {number: as_it_was(each) for number, each in after[place].items()} == {
                number: as_it_was(each) for number, each in messages.items()
            }, (place, told)
        asyncio.run(use(broker, after, scheduled))


async def use(broker, messages, scheduled) -> None:
    """Everything can be received and settled, and new messages have higher numbers."""
    highest = {place: max(each, default=0) for place, each in messages.items()}
    async with await connected(broker) as client:
        await (await client.management("news")).cancel_scheduled(scheduled)
        for entity in ("orders", "ids", "to", "wide"):
            there = messages[entity]
            deferred = [number for number, each in there.items() if state_of(each) == DEFERRED]
            if deferred:
                management = await client.management(entity)
                found = await management.receive_deferred(deferred)
                assert len(found) == len(deferred)
            waiting = {number for number, each in there.items() if state_of(each) == ACTIVE}
            receiver = await client.receiver(entity, credit=500)
            received = await receiver.fetch(len(waiting), PATIENCE_S)
            assert {each.message().sequence_number for each in received} == waiting
            await receiver.accept_all(received)
            async with await client.sender(entity) as sender:
                await sender.send(made(f"{entity}-new"))
            [new] = await receiver.fetch(1, PATIENCE_S)
            number = new.message().sequence_number or 0
            of_fragment = [each for each in there if each >> 48 == number >> 48]
            assert number > max(of_fragment, default=0)
            receiver.accept(new)
        async with await client.sender("ids") as sender:
            await sender.send(made("ids-3"))  # a duplicate of one that was accepted before
        management = await client.management("talks")
        for session_id, state in (("b", b"a state"), ("c", None)):
            session = await client.accept_session("talks", session_id)
            assert await management.session_state(session_id) == state
            await session.close()
        session = await client.accept_session("talks", "a")
        assert len(await session.fetch(10, PATIENCE_S)) == 10
    after = await seen(broker)
    assert not [each for each in after["ids"].values() if each.message_id == "ids-3"]
    assert highest["orders"] > 0
