"""Which links a session takes that crosses entities, against a model: random attaches and detaches of all kinds."""

import random
from pathlib import Path
from typing import NamedTuple

import pytest

from broker.catalog.catalog import Definition
from broker.gateway.pinning import Pinning
from broker.namespace.entities import Description, QueueDescription, SubscriptionDescription, TopicDescription
from broker.wire import Op
from protocol.codec import Symbol, UByte, UInt
from tests.end_to_end.raw_peer import ATTACH, DETACH, coordinator, error_of, source
from tests.examples import examples
from tests.gateway.in_process import Client, started_gateway

ENTITIES: tuple[Description, ...] = (
    QueueDescription(name="orders"),
    QueueDescription(name="Other"),
    TopicDescription(name="news"),
    SubscriptionDescription(name="one", topic="news"),
    SubscriptionDescription(name="two", topic="news"),
)
QUEUES, TOPICS = ("orders", "Other"), ("news",)
SUBSCRIPTIONS = ("news/Subscriptions/one", "news/Subscriptions/two")
STEPS = 60


class Kind(NamedTuple):
    suffix: str
    is_sender: bool
    consumes: bool = False
    browses: bool = False


SENDER = Kind("", True)
RECEIVERS = (Kind("", False, consumes=True), Kind("/$DeadLetterQueue", False, consumes=True))
PAIR = (Kind("/$management", True), Kind("/$management", False))
BROWSER = Kind("", False, browses=True)
CHOICES = [
    *[(kind, name) for name in QUEUES for kind in (SENDER, *RECEIVERS, *PAIR, BROWSER)],
    *[(kind, name) for name in TOPICS for kind in (SENDER, *PAIR)],
    *[(kind, name) for name in SUBSCRIPTIONS for kind in (*RECEIVERS, *PAIR, BROWSER)],
]


class Held(NamedTuple):
    handle: int
    kind: Kind
    top_level: str


class Model:
    def __init__(self, pinning: Pinning, crosses: bool) -> None:
        self.by_links = pinning is Pinning.BY_LINKS
        self.crosses = crosses
        self.kept: str | None = None
        self.held: list[Held] = []

    def pinned(self) -> str | None:
        if not self.crosses:
            return None
        if self.by_links:
            return self.kept
        return next((each.top_level for each in self.held if each.kind.consumes), None)

    def takes(self, kind: Kind, top_level: str) -> bool:
        return kind.is_sender or kind.browses or self.pinned() in (None, top_level)

    def attach(self, held: Held) -> None:
        self.held.append(held)
        self.kept = self.kept or held.top_level


def attach_coordinator(client: Client) -> int:
    handle = client.next_handle
    client.next_handle += 1
    ends = source("here"), coordinator()
    client.say(ATTACH, f"link-{handle}", UInt(handle), False, UByte(2), UByte(0), *ends, None, None, UInt(0))
    return handle


def detach(client: Client, handle: int) -> None:
    client.say(DETACH, UInt(handle), True)
    assert [frame.code for frame in client.frames()] == [DETACH]


@pytest.mark.parametrize("first_is_coordinator", [True, False])
@pytest.mark.parametrize("pinning", Pinning)
async def test_the_links_of_a_session_are_those_of_the_model(
    tmp_path: Path, pinning: Pinning, first_is_coordinator: bool
) -> None:
    gateway, worker = started_gateway(tmp_path)
    documents = [Definition(number, each, 0, 0, (0,)).document() for number, each in enumerate(ENTITIES, 20)]
    worker.say([Op.CATALOG, 2, documents])
    for seed in range(examples(40)):
        chance = random.Random(seed)
        model = Model(pinning, first_is_coordinator and pinning is not Pinning.NEVER)
        client = Client(gateway)
        client.connect()
        client.connection.pinning = pinning
        if not first_is_coordinator:
            detach_later = client.attach(sender=True, address="$cbs")
            client.frames()
            detach(client, detach_later)
        control = [attach_coordinator(client)]
        client.frames()
        for _ in range(STEPS):
            throw = chance.random()
            if throw < 0.1:
                control.append(attach_coordinator(client))
                client.frames()
            elif throw < 0.15 and control:
                detach(client, control.pop(chance.randrange(len(control))))
            elif throw < 0.45 and model.held:
                held = model.held.pop(chance.randrange(len(model.held)))
                detach(client, held.handle)
            else:
                kind, name = chance.choice(CHOICES)
                top_level = name.split("/")[0].lower()
                address = chance.choice([name, name.upper()]) + kind.suffix
                mode = Symbol("copy") if kind.browses else None
                is_taken = model.takes(kind, top_level)
                handle = client.attach(sender=kind.is_sender, address=address, mode=mode)
                answered, *others = client.frames()
                assert answered.code == ATTACH
                assert (None not in answered.fields[5:7]) is is_taken, (name, kind, model.pinned())
                if is_taken:
                    model.attach(Held(handle, kind, top_level))
                else:
                    [detached] = others
                    assert error_of(detached)[0] == "amqp:not-allowed"
                    client.say(DETACH, UInt(handle), True)
        client.connection.connection_lost(None)
