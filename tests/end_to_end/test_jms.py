"""What clients of JMS say on the wire, as Qpid JMS does it: delivery delays, subscribers, temporary entities."""

import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from protocol.codec import Array, Described, Int, Long, Symbol, UInt, ULong, array
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, Broker
from tests.end_to_end.raw_peer import (
    ATTACH,
    DETACH,
    DISPOSITION,
    END,
    NULL,
    TRANSFER,
    Frame,
    RawPeer,
    body_of,
    error_of,
    message,
)
from tests.end_to_end.raw_requests import Node
from tests.patience import PATIENCE_S, eventually
from tests.sessions.raw_sessions import annotations_of

CONFIG = """
partitions = 4

[amqp]
max_temporary_entities_per_connection = 3

[[security.authorization_rules]]
key_name = "listens"
primary_key = "key-that-listens"
rights = ["Listen"]

[[security.authorization_rules]]
key_name = "sends"
primary_key = "key-that-sends"
rights = ["Send"]

[[queues]]
name = "plain"

[[queues]]
name = "spread"
enable_partitioning = true

[[topics]]
name = "news"

  [[topics.subscriptions]]
  name = "all"

  [[topics.subscriptions]]
  name = "twice"

[[topics]]
name = "more-news"

  [[topics.subscriptions]]
  name = "twice"

  [[topics.authorization_rules]]
  key_name = "manages-more-news"
  primary_key = "key-of-more-news"
  rights = ["Listen", "Send", "Manage"]

[[queues]]
name = "news/Subscriptions/a/b"

[[topics]]
name = "news/Subscriptions/a/c"

  [[topics.subscriptions]]
  name = "d"

[[topics]]
name = "spread-news"
enable_partitioning = true
"""

DELAYED_DELIVERY = "DELAYED_DELIVERY"
# As Qpid JMS says it in its open.
DESIRED = ("sole-connection-for-container", DELAYED_DELIVERY, "ANONYMOUS-RELAY", "SHARED-SUBS")
DELIVERY_TIME, STATE = Symbol("x-opt-delivery-time"), Symbol("x-opt-message-state")
WAS_SCHEDULED = 2


@pytest.fixture(scope="module")
def jms_broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(tmp_path_factory.mktemp("jms"), CONFIG) as broker:
        yield broker


@pytest.fixture
def peer(jms_broker: Broker) -> Iterator[RawPeer]:
    with RawPeer.connect(jms_broker.amqp_port, desired=DESIRED) as peer:
        yield peer


def send(peer: RawPeer, to: str, *payloads: bytes) -> None:
    handle = peer.attach_sender(to)
    for payload in payloads:
        peer.transfer(payload, handle)
        assert peer.expect(DISPOSITION).fields[4].descriptor == 0x24
    peer.detach(handle)


def receive(peer: RawPeer, handle: int, count: int = 1) -> list[Frame]:
    """So many messages, completed; the link needs credit."""
    frames = [peer.expect(TRANSFER) for _ in range(count)]
    for frame in frames:
        peer.settle(frame.fields[1], settled=True)
    return frames


# --- delivery delays --------------------------------------------------------------------------------------------------


def now_ms() -> int:
    return int(time.time() * 1000)


def offered(opened: Frame) -> list[str]:
    found = opened.fields[7] if len(opened.fields) > 7 else None
    return [str(each) for each in found] if isinstance(found, Array) else [] if found is None else [str(found)]


@pytest.mark.parametrize("desired", [(DELAYED_DELIVERY,), DESIRED])
def test_delayed_delivery_is_offered_to_who_asks_for_it(jms_broker: Broker, desired: tuple[str, ...]) -> None:
    with RawPeer(jms_broker.amqp_port, desired=desired) as peer:
        peer.sasl_plain()
        assert DELAYED_DELIVERY in offered(peer.open())


@pytest.mark.parametrize("desired", [(), ("ANONYMOUS-RELAY",)])
def test_others_are_offered_nothing(jms_broker: Broker, desired: tuple[str, ...]) -> None:
    with RawPeer(jms_broker.amqp_port, desired=desired) as peer:
        peer.sasl_plain()
        assert offered(peer.open()) == []


@pytest.mark.parametrize(("to", "at"), [("plain", "plain"), ("spread", "spread"), ("news", "news/Subscriptions/all")])
def test_a_message_with_a_delivery_time_comes_then(peer: RawPeer, to: str, at: str) -> None:
    due_ms = now_ms() + 300
    send(peer, to, message(b"later", annotations={DELIVERY_TIME: Long(due_ms)}), message(b"at once"))
    handle = peer.attach_receiver(at, credit=2)
    first, second = receive(peer, handle, 2)
    assert [body_of(first.payload), body_of(second.payload)] == [b"at once", b"later"]
    assert now_ms() >= due_ms
    annotations = annotations_of(second.payload)
    assert annotations[DELIVERY_TIME] == due_ms  # the client shows it
    assert annotations[STATE] == WAS_SCHEDULED
    peer.detach(handle)


def test_a_message_with_a_delivery_time_is_scheduled_and_can_be_cancelled(peer: RawPeer) -> None:
    send(peer, "plain", message(b"m", annotations={DELIVERY_TIME: Long(now_ms() + 3_600_000)}))
    node = Node(peer, "plain/$management")
    peeked = node.ask("com.microsoft:peek-message", {"from-sequence-number": Long(0), "message-count": Int(9)})
    [entry] = peeked.body["messages"]
    number = annotations_of(entry["message"])[Symbol("x-opt-sequence-number")]
    assert annotations_of(entry["message"])[STATE] == WAS_SCHEDULED
    node.ask("com.microsoft:cancel-scheduled-message", {"sequence-numbers": Array(Long, (Long(number),))})


@pytest.mark.parametrize("ago_ms", [1, 1 << 40])
def test_a_delivery_time_that_is_over_delays_nothing(peer: RawPeer, ago_ms: int) -> None:
    send(peer, "plain", message(b"m", annotations={DELIVERY_TIME: Long(now_ms() - ago_ms)}))
    handle = peer.attach_receiver("plain", credit=1)
    [frame] = receive(peer, handle)
    assert STATE not in annotations_of(frame.payload)
    peer.detach(handle)


# --- subscribers ------------------------------------------------------------------------------------------------------

CLIENT = "client-1"
NOT_FOUND, UNAUTHORIZED = "amqp:not-found", "amqp:unauthorized-access"
LISTENS = {"key_name": "listens", "key": "key-that-listens"}
SENDS = {"key_name": "sends", "key": "key-that-sends"}

Connect = Callable[..., RawPeer]


@pytest.fixture
def connect(jms_broker: Broker) -> Iterator[Connect]:
    """Connections, with the container ids that are given: with Qpid JMS they are client ids."""
    peers: list[RawPeer] = []

    def connected(container: str = "ID:generated:1", **options: Any) -> RawPeer:
        peers.append(RawPeer.connect(jms_broker.amqp_port, desired=DESIRED, container=container, **options))
        return peers[-1]

    yield connected
    for peer in peers:
        peer.socket.close()


def topic_source(
    topic: str, *capabilities: str, durable: bool = False, temporary: bool = False, filters: Any = None
) -> Described:
    """As Qpid JMS makes the source of a consumer on a topic."""
    expiry = Symbol("never" if durable else "link-detach")
    kind = "temporary-topic" if temporary else "topic"
    wanted = array(Symbol, map(Symbol, (kind, *capabilities)))
    mode = Symbol("copy") if durable else None
    fields = [topic, UInt(2 if durable else 0), expiry, UInt(0), False, None, mode, filters, None, None, wanted]
    return Described(ULong(0x28), fields)


def subscribe(peer: RawPeer, topic: str, name: str, *capabilities: str, credit: int = 10, **options: Any) -> int:
    """A consumer on a topic, as `topic_source` says; `name` is the link's."""
    handle = peer.attach(sender=False, name=name, source_=topic_source(topic, *capabilities, **options))
    attached = peer.expect(ATTACH)
    assert attached.fields[5] is not None, error_of(peer.expect(DETACH))
    assert attached.fields[5].value[0] == topic
    peer.flow(handle, credit)
    return handle


def refused_subscriber(peer: RawPeer, topic: str, name: str, *capabilities: str, **options: Any) -> tuple[str, str]:
    peer.attach(sender=False, name=name, source_=topic_source(topic, *capabilities, **options))
    return peer.refusal()


def bodies(peer: RawPeer, handle: int, count: int = 1) -> list[bytes]:
    return [body_of(frame.payload) for frame in receive(peer, handle, count)]


def publish(broker: Broker, topic: str, *payloads: bytes) -> None:
    with RawPeer.connect(broker.amqp_port) as peer:
        send(peer, topic, *map(message, payloads))


def end(peer: RawPeer, handle: int, closed: bool = True) -> None:
    peer.detach(handle, closed)
    peer.expect(DETACH)


def unsubscribe(peer: RawPeer, name: str) -> tuple[str, str]:
    """As Qpid JMS does it. Returns the error; two empty texts if there is none."""
    handle = peer.attach(sender=False, name=name, source_=NULL)
    attached = peer.expect(ATTACH)
    if attached.fields[5] is None:
        return error_of(peer.expect(DETACH))
    peer.detach(handle)
    return error_of(peer.expect(DETACH))


def is_there(broker: Broker, path: str) -> bool:
    """Whether there is such an entity, for whoever asks."""
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach(sender=True, address=path)
        attached = peer.expect(ATTACH)
        if attached.fields[6] is not None:
            return True
        condition, _ = error_of(peer.expect(DETACH))
        assert condition in (NOT_FOUND, "amqp:not-allowed")  # nobody sends to a subscription
        return condition != NOT_FOUND


@pytest.mark.parametrize(
    ("name", "capabilities", "durable"),
    [
        ("all", (), True),  # createDurableConsumer, and Spring's @JmsListener(subscription = "all")
        ("all|global", ("shared", "global"), True),  # createSharedDurableConsumer
        ("all|global3", ("shared", "global"), True),
        ("all|2", ("shared",), True),  # with a client id
        ("ALL", (), True),
        ("all|volatile1", ("shared",), False),  # createSharedConsumer
        ("all|global-volatile2", ("shared", "global"), False),
    ],
)
def test_a_link_that_names_a_subscription_of_the_topic_receives_from_it(
    jms_broker: Broker, connect: Connect, name: str, capabilities: tuple[str, ...], durable: bool
) -> None:
    peer = connect(CLIENT, **LISTENS)  # it needs no right to manage
    publish(jms_broker, "news", b"1")
    handle = subscribe(peer, "news", name, *capabilities, durable=durable)
    assert bodies(peer, handle) == [b"1"]
    end(peer, handle, closed=not durable)
    assert not is_there(jms_broker, f"news/Subscriptions/all${CLIENT}$D")


def test_a_link_of_any_client_may_name_a_subscription(jms_broker: Broker, connect: Connect) -> None:
    peer = connect(**LISTENS)
    publish(jms_broker, "news", b"1")
    handle = peer.attach_receiver("news", credit=1, name="all")
    assert bodies(peer, handle) == [b"1"]


def test_a_durable_subscriber_gets_what_came_while_it_was_away(jms_broker: Broker, connect: Connect) -> None:
    first = connect(CLIENT)
    end(first, subscribe(first, "news", "sub1", durable=True), closed=False)
    assert is_there(jms_broker, f"news/Subscriptions/sub1${CLIENT}$D")
    publish(jms_broker, "news", b"1")
    handle = subscribe(first, "news", "sub1", durable=True)  # in the same session under the same name
    assert bodies(first, handle) == [b"1"]
    first.socket.close()
    publish(jms_broker, "news", b"2")
    second = connect(CLIENT, **LISTENS)
    assert bodies(second, subscribe(second, "news", "sub1", durable=True)) == [b"2"]
    assert unsubscribe(connect(CLIENT), "sub1") == ("", "")
    assert not is_there(jms_broker, f"news/Subscriptions/sub1${CLIENT}$D")


def test_each_client_id_has_durable_subscriptions_of_its_own(jms_broker: Broker, connect: Connect) -> None:
    peers = [connect(f"client-{number}") for number in (1, 2)]
    handles = [subscribe(peer, "news", "own", durable=True) for peer in peers]
    publish(jms_broker, "news", b"1")
    assert [bodies(peer, handle) for peer, handle in zip(peers, handles, strict=True)] == [[b"1"], [b"1"]]
    assert unsubscribe(connect("client-1"), "own") == ("", "")
    detached = peers[0].expect(DETACH)  # whoever receives from it
    assert error_of(detached)[0] == NOT_FOUND
    assert is_there(jms_broker, "news/Subscriptions/own$client-2$D")
    assert unsubscribe(connect("client-2"), "own") == ("", "")


@pytest.mark.parametrize("topic", ["news", "spread-news"])
def test_consumers_of_a_shared_durable_subscription_share_its_messages(
    jms_broker: Broker, connect: Connect, topic: str
) -> None:
    one, other = connect("ID:one:1"), connect("ID:other:1")
    of_one = [
        subscribe(one, topic, name, "shared", "global", durable=True, credit=1) for name in ("s|global", "s|global2")
    ]
    of_other = subscribe(other, topic, "s|global", "shared", "global", durable=True, credit=1)
    publish(jms_broker, topic, b"1", b"2", b"3")
    found = bodies(one, of_one[0], 2) + bodies(other, of_other)
    assert sorted(found) == [b"1", b"2", b"3"]
    assert is_there(jms_broker, f"{topic}/Subscriptions/s$$D")
    one.socket.close()
    other.socket.close()
    assert unsubscribe(connect(), "s|global") == ("", "")
    assert not is_there(jms_broker, f"{topic}/Subscriptions/s$$D")


def test_consumers_that_begin_together_share_what_the_first_has_made(jms_broker: Broker, connect: Connect) -> None:
    peers = [connect(f"ID:{number}:1") for number in range(4)]
    for peer in peers:
        peer.attach(sender=False, name="t|global", source_=topic_source("news", "shared", "global", durable=True))
    for peer in peers:
        assert peer.expect(ATTACH).fields[5] is not None
    assert unsubscribe(connect(), "t|global") == ("", "")


def test_a_subscriber_that_is_not_durable_gets_what_comes_while_it_is_there(
    jms_broker: Broker, connect: Connect
) -> None:
    peer = connect(CLIENT)
    publish(jms_broker, "news", b"before")
    handles = [subscribe(peer, "news", f"qpid-jms:receiver:ID:{number}:news") for number in range(2)]
    publish(jms_broker, "news", b"1")
    assert [body_of(frame.payload) for frame in receive(peer, handles[0], 2)] == [b"1", b"1"]  # both get it
    found = [first, _] = names(jms_broker, "news/Subscriptions/nondurable-")
    other = connect("another")
    other.attach(sender=False, address=first)
    assert other.refusal()[0] == UNAUTHORIZED
    end(peer, handles[0])
    eventually(lambda: len(names(jms_broker, "news/Subscriptions/nondurable-")) == 1, "one is gone")
    peer.socket.close()
    eventually(lambda: not any(is_there(jms_broker, path) for path in found), "both are gone")


def test_a_shared_subscription_that_is_not_durable_goes_with_its_last_consumer(
    jms_broker: Broker, connect: Connect
) -> None:
    one, other = connect("ID:one:1"), connect("ID:other:1")
    of_one = subscribe(one, "news", "v|global-volatile1", "shared", "global", credit=1)
    of_other = subscribe(other, "news", "v|global-volatile1", "shared", "global", credit=1)
    publish(jms_broker, "news", b"1", b"2")
    assert sorted(bodies(one, of_one) + bodies(other, of_other)) == [b"1", b"2"]
    end(one, of_one)
    of_one = subscribe(one, "news", "v|global-volatile2", "shared", "global", credit=1)
    other.socket.close()
    publish(jms_broker, "news", b"3")
    assert bodies(one, of_one) == [b"3"]
    end(one, of_one)
    eventually(lambda: not is_there(jms_broker, "news/Subscriptions/v$$ND"), "it is gone")


@pytest.mark.parametrize(
    ("name", "capabilities", "durable"),
    [("missing", (), True), ("missing|global", ("shared", "global"), True), ("qpid-jms:receiver:1:news", (), False)],
)
def test_to_make_a_subscription_needs_the_right_to_manage_the_topic(
    connect: Connect, name: str, capabilities: tuple[str, ...], durable: bool
) -> None:
    condition, text = refused_subscriber(connect(CLIENT, **LISTENS), "news", name, *capabilities, durable=durable)
    assert condition == UNAUTHORIZED
    assert "to make one for this link needs the right Manage on the topic" in text
    manages = {"key_name": "manages-more-news", "key": "key-of-more-news"}
    peer = connect(CLIENT, **manages)
    subscribe(peer, "more-news", name, *capabilities, durable=durable)
    other = connect(CLIENT, **manages)
    assert refused_subscriber(other, "news", name, *capabilities, durable=durable)[0] == UNAUTHORIZED
    if durable:
        assert unsubscribe(connect(CLIENT, **manages), name) == ("", "")


@pytest.mark.parametrize("name", ["a/b", "a/c/Subscriptions/d"])
def test_the_name_of_a_link_leads_to_no_entity_of_others(connect: Connect, name: str) -> None:
    """The rights on a topic are none on an entity whose name begins with that of one of its subscriptions."""
    peer = connect(**LISTENS)
    peer.attach_receiver("news", name=name)  # to peek
    peer.flow(0, 1)
    assert error_of(peer.expect(DETACH))[0] == "amqp:not-allowed"
    assert refused_subscriber(connect(CLIENT, **LISTENS), "news", name, durable=True)[0] == UNAUTHORIZED


def test_a_subscriber_on_a_topic_that_is_not_there_is_told_so(connect: Connect) -> None:
    assert refused_subscriber(connect(CLIENT), "old-news", "sub", durable=True)[0] == NOT_FOUND


@pytest.mark.parametrize("name", ["a b", "a/b", "n" * 51, "-"])
def test_a_name_that_no_subscription_may_have_is_refused(connect: Connect, name: str) -> None:
    condition, text = refused_subscriber(connect(CLIENT), "news", name, durable=True)
    assert condition == "com.microsoft:argument-error"
    assert "1 to 50 letters, digits" in text


def test_the_library_of_azure_says_when_a_subscription_is_idle(jms_broker: Broker, connect: Connect) -> None:
    idle = Symbol("com.microsoft:subscriber-auto-delete-on-idle-duration-in-seconds")
    peer = connect("azure", properties={Symbol("com.microsoft:is-client-provider"): True, idle: Long(3600)})
    end(peer, subscribe(peer, "news", "idle", durable=True), closed=False)
    _, shown = over_http(jms_broker, "GET", "news/Subscriptions/idle$azure$D?api-version=2021-05")
    assert "<AutoDeleteOnIdle>PT1H</AutoDeleteOnIdle>" in shown
    assert unsubscribe(peer, "idle") == ("", "")


def test_no_local_of_a_subscriber_is_ignored_and_a_selector_selects(jms_broker: Broker, connect: Connect) -> None:
    filters = {
        Symbol("no-local"): Described(Symbol("apache.org:no-local-filter:list"), "NoLocalFilter{}"),
        Symbol("jms-selector"): Described(Symbol("apache.org:selector-filter:string"), "colour = 'red'"),
    }
    peer = connect(CLIENT)
    handle = subscribe(peer, "news", "qpid-jms:receiver:2:news", filters=filters)
    coloured = [message(colour.encode(), application={"colour": colour}) for colour in ("blue", "red")]
    with RawPeer.connect(jms_broker.amqp_port) as sender:
        send(sender, "news", *coloured)
    assert bodies(peer, handle) == [b"red"]


# --- the end of subscriptions -----------------------------------------------------------------------------------------


def test_what_is_not_there_cannot_be_ended(connect: Connect) -> None:
    condition, text = unsubscribe(connect(CLIENT), "never-made")
    assert condition == NOT_FOUND
    assert f"no topic has a subscription 'never-made' of the client id '{CLIENT}'" in text


def test_a_subscription_that_others_have_made_is_ended_if_its_name_is_the_only_one(
    jms_broker: Broker, connect: Connect
) -> None:
    peer = connect(CLIENT)
    condition, text = unsubscribe(peer, "twice")
    assert condition == "com.microsoft:argument-error"
    assert (
        "Several topics have a subscription 'twice' (more-news/Subscriptions/twice, news/Subscriptions/twice)" in text
    )
    manages = connect(CLIENT, key_name="manages-more-news", key="key-of-more-news")
    assert unsubscribe(manages, "all")[0] == UNAUTHORIZED
    assert is_there(jms_broker, "news/Subscriptions/all")


def test_a_client_that_does_not_wait_for_the_end_of_its_subscription_harms_nobody(
    jms_broker: Broker, connect: Connect
) -> None:
    for number in range(3):
        peer = connect(CLIENT)
        end(peer, subscribe(peer, "news", f"hasty{number}", durable=True), closed=False)
        handle = peer.attach(sender=False, name=f"hasty{number}", source_=NULL)
        assert peer.expect(ATTACH).fields[5] is not None
        peer.detach(handle)
        peer.attach(sender=False, name=f"hasty{number}", source_=NULL)  # before the answer
        peer.say(END)
        peer.expect(END)
    paths = [f"news/Subscriptions/hasty{number}${CLIENT}$D" for number in range(3)]
    eventually(lambda: not any(is_there(jms_broker, path) for path in paths), "all are gone")


def over_http(broker: Broker, method: str, path: str) -> tuple[int, str]:
    """The status and the body of the answer to who may do everything."""
    token = generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
    url = f"http://localhost:{broker.http_port}/{path}"
    request = urllib.request.Request(url, method=method, headers={"Authorization": token})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            return int(answer.status), answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, ""


def test_what_a_client_has_made_is_an_entity_as_others_for_administration_clients(
    jms_broker: Broker, connect: Connect
) -> None:
    peer = connect(CLIENT)
    end(peer, subscribe(peer, "news", "web", durable=True), closed=False)
    for path in (f"news/Subscriptions/web${CLIENT}$D", f"news/subscriptions/web%24{CLIENT}%24D"):
        assert over_http(jms_broker, "GET", f"{path}?api-version=2021-05")[0] == 200
    publish(jms_broker, "news", b"1")
    assert over_http(jms_broker, "DELETE", f"{path}/messages/head")[0] == 200
    assert over_http(jms_broker, "DELETE", f"{path}?api-version=2021-05")[0] == 200
    assert not is_there(jms_broker, f"news/Subscriptions/web${CLIENT}$D")


def test_a_temporary_queue_takes_messages_over_http_and_gives_none(jms_broker: Broker, connect: Connect) -> None:
    _, address = make(connect())
    assert over_http(jms_broker, "POST", f"{address}/messages")[0] == 201
    assert over_http(jms_broker, "DELETE", f"{address}/messages/head")[0] == 401
    assert over_http(jms_broker, "GET", f"{address}?api-version=2021-05")[0] == 200


def names(broker: Broker, prefix: str) -> list[str]:
    """The paths of entities that begin so."""
    with RawPeer.connect(broker.amqp_port) as peer:
        listed = Node(peer, "$management").ask("peeklock:list-counts", {"after": "", "count": Int(1000)})
        return [path for path in (each["name"] for each in listed.body["entities"]) if path.startswith(prefix)]


# --- temporary queues and topics --------------------------------------------------------------------------------------


def temporary(kind: str) -> Described:
    """As Qpid JMS makes the target of the link by which it makes a temporary queue or topic."""
    lifetime = {Symbol("lifetime-policy"): Described(Symbol("amqp:delete-on-close:list"), [])}
    capabilities = array(Symbol, [Symbol(f"temporary-{kind}")])
    return Described(ULong(0x29), [None, UInt(0), Symbol("link-detach"), UInt(0), True, lifetime, capabilities])


def make(peer: RawPeer, kind: str = "queue") -> tuple[int, str]:
    """The handle of the link that makes it, and its address."""
    handle = peer.attach(sender=True, target_=temporary(kind))
    attached = peer.expect(ATTACH)
    assert attached.fields[6] is not None, error_of(peer.expect(DETACH))
    address, _, _, _, is_dynamic, properties = attached.fields[6].value[:6]
    assert is_dynamic is True
    assert Symbol("lifetime-policy") in properties
    return handle, address


def test_a_temporary_queue_takes_replies_and_goes_with_its_link(jms_broker: Broker, connect: Connect) -> None:
    peer = connect()
    handle, address = make(peer)
    assert address.startswith("temporary-queue.")
    receiver = peer.attach_receiver(address, credit=1)
    with RawPeer.connect(jms_broker.amqp_port, **SENDS) as other:
        send(other, address, message(b"reply"))
    assert bodies(peer, receiver) == [b"reply"]
    end(peer, receiver)
    end(peer, handle)
    eventually(lambda: not is_there(jms_broker, address), "it is deleted")


def test_a_temporary_queue_goes_with_its_connection(jms_broker: Broker, connect: Connect) -> None:
    peer = connect()
    addresses = [make(peer)[1] for _ in range(2)]
    peer.socket.close()
    eventually(lambda: not any(is_there(jms_broker, each) for each in addresses), "both are deleted")


def test_a_temporary_topic_has_subscribers_of_its_connection(jms_broker: Broker, connect: Connect) -> None:
    peer = connect()
    handle, address = make(peer, "topic")
    assert address.startswith("temporary-topic.")
    receiver = subscribe(peer, address, f"qpid-jms:receiver:ID:3:{address}", temporary=True)
    publish(jms_broker, address, b"news")
    assert bodies(peer, receiver) == [b"news"]
    assert refused_subscriber(connect(), address, "qpid-jms:receiver:ID:4", temporary=True)[0] == UNAUTHORIZED
    end(peer, handle)
    assert error_of(peer.expect(DETACH))[0] == NOT_FOUND  # its subscriber
    eventually(lambda: not is_there(jms_broker, address), "it is deleted")
    eventually(lambda: not names(jms_broker, address), "its subscriptions are deleted")


def test_a_receiver_makes_a_queue_and_receives_from_it(jms_broker: Broker, connect: Connect) -> None:
    """As `create_receiver(None, dynamic=True)` of Proton and `source: {dynamic: true}` of rhea."""
    peer = connect()
    handle = peer.attach(sender=False, source_=Described(ULong(0x28), [None, UInt(0), None, UInt(0), True]))
    peer.flow(handle, 1)  # at once, as Proton does
    address = peer.expect(ATTACH).fields[5].value[0]
    with RawPeer.connect(jms_broker.amqp_port) as other:
        send(other, address, message(b"reply"))
    assert bodies(peer, handle) == [b"reply"]
    end(peer, handle)
    eventually(lambda: not is_there(jms_broker, address), "it is deleted")


def test_only_its_connection_receives_from_a_temporary_queue(jms_broker: Broker, connect: Connect) -> None:
    _, address = make(connect())
    other = connect()
    for sender, path in (
        (False, address),
        (False, f"{address}/$DeadLetterQueue"),
        (False, f"{address}/$management"),
        (True, f"{address}/$management"),
    ):
        other.attach(sender=sender, address=path)
        condition, text = other.refusal()
        assert condition == UNAUTHORIZED
        assert "only the connection that it was made for" in text


@pytest.mark.parametrize("key", [LISTENS, SENDS])
def test_to_make_a_temporary_queue_needs_the_right_to_manage(connect: Connect, key: dict[str, str]) -> None:
    peer = connect(**key)
    peer.attach(sender=True, target_=temporary("queue"))
    condition, text = peer.refusal()
    assert condition == UNAUTHORIZED
    assert "needs the right Manage on the namespace" in text


def test_to_reply_needs_the_right_to_send(connect: Connect) -> None:
    _, address = make(connect())
    other = connect(**LISTENS)
    other.attach(sender=True, address=address)
    assert other.refusal()[0] == UNAUTHORIZED


def test_a_connection_has_so_many_temporary_entities(connect: Connect) -> None:
    peer = connect()
    handles = [make(peer)[0] for _ in range(2)]
    handles.append(subscribe(peer, "news", "qpid-jms:receiver:ID:5"))
    peer.attach(sender=True, target_=temporary("queue"))
    condition, text = peer.refusal()
    assert condition == "amqp:resource-limit-exceeded"
    assert "amqp.max_temporary_entities_per_connection" in text
    assert refused_subscriber(peer, "news", "qpid-jms:receiver:ID:6")[0] == "amqp:resource-limit-exceeded"
    make(connect())  # another connection has its own
    end(peer, handles[0])
    make(peer)


def test_a_link_that_ends_before_its_queue_is_there_leaves_nothing(jms_broker: Broker, connect: Connect) -> None:
    peer = connect()
    for _ in range(5):
        handle = peer.attach(sender=True, target_=temporary("queue"))
        peer.detach(handle)
        peer.expect(ATTACH)
        peer.expect(DETACH)
    peer.attach(sender=True, target_=temporary("queue"))
    peer.socket.close()
    eventually(lambda: not names(jms_broker, "temporary-"), "all are deleted")


def test_a_receiver_makes_no_topic(connect: Connect) -> None:
    peer = connect()
    capability = array(Symbol, [Symbol("temporary-topic")])
    fields = [None, UInt(0), None, UInt(0), True, None, None, None, None, None, capability]
    peer.attach(sender=False, source_=Described(ULong(0x28), fields))
    assert peer.refusal()[0] == "amqp:not-allowed"
