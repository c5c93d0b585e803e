"""Messages that come into an entity with sessions from a topic, or from an entity that forwards to it."""

import pytest

from broker import requests
from broker.errors import NotAllowed, QuotaExceeded
from broker.wire import Extra, Outcome
from protocol.codec import encode
from storage.queue_ids import Part
from storage.records import Field, Place, unpack_session_entry_key
from storage.store import Table
from tests.partition.accounts import problems
from tests.partition.driver import LOCK_MS
from tests.partition.forwarding_driver import Partitions
from tests.partition.session_driver import accepted_by
from tests.partition.session_model import Sent
from tests.partition.topic_driver import TOPIC, A, B, TopicDriver, event, rule, text

GROUP_ID = 10
NULL = "Session ID is null."
WHY = "Session enabled entity doesn't allow a message whose session identifier is null."
NOT_SET = (
    "The SessionId was not set on a message, and it cannot be sent to the entity. Entities that have session support "
    "enabled can only receive messages that have the SessionId set to a valid value."
)


@pytest.fixture
def news():
    return TopicDriver()


def published(news, *bodies, session, **given):
    news.publish(*[event(body, system={GROUP_ID: session}, **given) for body in bodies])


def receive(news, queue, receiver, session=None, count=10):
    """What there is of a session, or of any; the receiver keeps its lock."""
    news.partition.open_receiver(receiver, queue, False, news.now_ms, [session, 0])
    got = accepted_by(news.partition, news.now_ms)[receiver]
    news._limits[receiver] = 0
    return got, [text(delivery.body) for delivery in news.receive(count, receiver, queue)]


def listed(store, queue):
    keys = [unpack_session_entry_key(key) for key, _ in store.scan(Table.SESSION_ENTRIES, b"\0", b"\xff" * 400, 1000)]
    return sorted((place, session.decode(), number) for at, place, session, number in keys if at == queue)


def dead(news, queue):
    return [
        (text(each.body), each.properties.get("DeadLetterReason"), each.properties.get("DeadLetterErrorDescription"))
        for each in news.peek(queue | Part.DEAD_LETTER)
    ]


def test_a_subscription_has_sessions_of_its_own(news):
    news.subscribe(A, requires_session=True)
    news.subscribe(B)
    published(news, "1", "2", session="a")
    published(news, "3", session="b")
    assert news.texts(B) == ["1", "2", "3"]
    assert receive(news, A, "x") == ("a", ["1", "2"])
    assert receive(news, A, "y") == ("b", ["3"])
    with pytest.raises(NotAllowed):
        news.open("z", A)


def test_messages_published_while_a_session_is_received_are_received(news):
    news.subscribe(A, requires_session=True)
    assert receive(news, A, "x", "a") == ("a", [])
    news.grant(5, "x")
    published(news, "1", session="a")
    published(news, "2", session="b")
    assert [text(each.body) for each in news.pump()["x"]] == ["1"]


def test_published_without_session_it_is_dead_lettered_where_sessions_are_required(news):
    news.subscribe(A, requires_session=True)
    news.subscribe(B)
    news.publish("1")
    published(news, "2", session="a")
    assert dead(news, A) == [("1", NULL, WHY)]
    assert news.texts(A) == ["2"]
    assert news.texts(B) == ["1", "2"]
    assert listed(news.store, A) == [(Place.AVAILABLE, "a", 1)]
    [letter] = news.receive(5, "d", A | Part.DEAD_LETTER)
    assert news.settle(Outcome.ACCEPTED, letter, queue=A | Part.DEAD_LETTER) == [None]
    tally = news.partition.tallies()[A]
    assert (tally["incoming"], tally["dead_lettered"]) == (2, {NULL: 1})


def test_an_action_says_of_which_session_its_copy_is(news):
    by_size = rule("set", action="SET sys.SessionId = region", sql="region IS NOT NULL")
    none = rule("none", action="SET sys.SessionId = NULL", sql="lost = 1")
    news.subscribe(A, by_size, none, rule("rest", sql="plain = 1"), requires_session=True)
    published(news, "1", session="a", region="north")
    published(news, "2", session="a", plain=1)
    published(news, "3", session="a", lost=1)
    published(news, "4", session=None, region="south")
    published(news, "5", session="a", region="😀" * 128)
    assert listed(news.store, A) == [
        (Place.AVAILABLE, "a", 2),
        (Place.AVAILABLE, "north", 1),
        (Place.AVAILABLE, "south", 3),
    ]
    assert [letter[:2] for letter in dead(news, A)] == [("3", NULL), ("5", NULL)]
    assert receive(news, A, "x", "south") == ("south", ["4"])


def test_a_scheduled_message_is_published_into_its_session(news):
    news.subscribe(A, requires_session=True)
    published(news, "1", session="a", scheduled_ms=news.now_ms + 50)
    news.publish(event("2", scheduled_ms=news.now_ms + 50))
    assert listed(news.store, A) == []
    news.wait(50)
    assert receive(news, A, "x") == ("a", ["1"])
    assert dead(news, A) == [("2", NULL, WHY)]


def test_the_time_to_live_of_a_subscription_with_sessions_is_its_own(news):
    news.subscribe(A, requires_session=True, default_message_time_to_live_ms=1000)
    published(news, "1", session="a")
    published(news, "2", session="a", ttl_ms=100)
    news.now_ms += 100
    assert receive(news, A, "x") == ("a", ["1"])
    news.close("x")
    news.wait(900)
    assert news.texts(A) == []
    assert listed(news.store, A) == []


def test_states_of_a_subscription_count_for_its_topic_and_go_with_it(news):
    news.subscribe(A, requires_session=True)
    published(news, "1", session="a")
    before = news.counts(TOPIC)[3]
    receive(news, A, "x", "a")
    news.request("set-session-state", "x", "a", b"s" * 70, queue=A)
    assert news.counts(TOPIC)[3] == before + 70
    news.unsubscribe(A)
    news.wait(100)
    assert news.counts(TOPIC)[3] == 0
    for table in (Table.SESSION_ENTRIES, Table.SESSIONS, Table.SESSION_STATES):
        assert news.store.scan(table, b"\0", b"\xff" * 400, 10) == []


def test_a_state_does_not_make_the_topic_larger_than_it_may_be(news):
    news.put_topic(max_size_mb=1)
    news.subscribe(A, requires_session=True)
    receive(news, A, "x", "a")
    news.request("set-session-state", "x", "a", b"s" * 600_000, queue=A)
    with pytest.raises(QuotaExceeded, match="maximum entity size"):
        news.request("set-session-state", "x", "a", b"s" * 1_048_577, queue=A)
    news.request("set-session-state", "x", "a", b"s" * 1_048_576, queue=A)


# -- forwarding

HERE, THERE = 0, 1


def forwarded(body, session=None):
    return event(body, system={GROUP_ID: session})


@pytest.mark.parametrize("home", [HERE, THERE])
def test_forwarded_to_an_entity_with_sessions_a_message_is_in_its_session(home):
    net = Partitions(2)
    target = net.queue("target", home, requires_session=True)
    source = net.queue("source", HERE, forward_to="target")
    net.send(source, forwarded("1", "a"), forwarded("2", "b"), forwarded("3", "a"))
    net.run()
    assert listed(net.stores[home], target) == [
        (Place.AVAILABLE, "a", 1),
        (Place.AVAILABLE, "a", 3),
        (Place.AVAILABLE, "b", 2),
    ]
    partition = net.partitions[home]
    partition.open_receiver("r", target, False, net.now_ms, [None, 0])
    assert accepted_by(partition, net.now_ms) == {"r": "a"}
    partition.grant("r", 5)
    assert [text(each.body) for each in net.turn(home)["r"]] == ["1", "3"]


@pytest.mark.parametrize("home", [HERE, THERE])
def test_forwarded_without_session_it_is_a_dead_letter_of_its_source_where_sessions_are_required(home):
    net = Partitions(2)
    target = net.queue("target", home, requires_session=True)
    source = net.queue("source", HERE, forward_to="target")
    net.send(source, forwarded("1", "a"), forwarded("2"), forwarded("3", "a"), forwarded("4"))
    net.run()
    assert listed(net.stores[home], target) == [(Place.AVAILABLE, "a", 1), (Place.AVAILABLE, "a", 2)]
    assert_refused(net, source | Part.DEAD_LETTER, "source", "2", "4")
    assert net.counts(source) == [0, 0, 0, 0, 0]
    assert net.counts(target)[:3] == [2, 0, 0]
    assert net.counts(target | Part.DEAD_LETTER)[:3] == [0, 0, 0]
    assert net.partitions[HERE].tallies()[source]["dead_lettered"] == {NULL: 2}


def assert_refused(net, queue, source, *bodies):
    letters = net.peek(queue)
    assert [text(each.body) for each in letters] == [*bodies]
    for each in letters:
        reasons = {name: value for name, value in each.properties.items() if name.startswith("DeadLetter")}
        assert reasons == {"DeadLetterReason": NULL, "DeadLetterErrorDescription": NOT_SET}
        assert each.overlay[Field.DEAD_LETTER_SOURCE] == source
        assert Field.SESSION not in each.overlay


@pytest.mark.parametrize("home", [HERE, THERE])
def test_a_subscription_and_an_entity_with_sessions_have_their_messages_without_one_back(home):
    net = Partitions(2)
    net.queue("target", home, requires_session=True)
    topic = net.topic("news", HERE)
    plain = net.subscription("news", "plain", forward_to="target")
    action = rule("set", action="SET sys.SessionId = NULL", sql="lost = 1")
    in_sessions = net.subscription("news", "sessions", [action], requires_session=False, forward_to="target")
    lost = event("1", system={GROUP_ID: "a"}, lost=1)
    net.send(topic, forwarded("2"), lost)
    net.run()
    assert_refused(net, plain | Part.DEAD_LETTER, "news/Subscriptions/plain", "2")
    assert_refused(net, in_sessions | Part.DEAD_LETTER, "news/Subscriptions/sessions", "1")


@pytest.mark.parametrize("home", [HERE, THERE])
def test_a_dead_letter_without_session_that_cannot_be_forwarded_does_not_go_round(home):
    net = Partitions(2)
    net.queue("target", home, requires_session=True)
    source = net.queue("source", HERE, max_delivery_count=1, forward_dead_lettered_messages_to="target")
    net.send(source, forwarded("1"))
    partition = net.partitions[HERE]
    partition.open_receiver("r", source, False, net.now_ms)
    partition.grant("r", 1)
    [delivery] = net.turn(HERE)["r"]
    partition.settle(source, [delivery.token], Outcome.ABANDONED, None, net.now_ms)
    net.turn(HERE)
    net.run()
    [letter] = net.peek(source | Part.TRANSFER_DEAD_LETTER)
    assert letter.properties["DeadLetterReason"] == NULL
    assert net.counts(source | Part.DEAD_LETTER)[:3] == [0, 0, 0]


def test_forwarded_to_fragments_with_sessions_it_is_a_dead_letter_of_its_source():
    net = Partitions(3)
    target = net.fragments("target", (0, 1, 2), requires_session=True)
    source = net.queue("source", HERE, forward_to="target")
    net.send(source, *[forwarded(str(number)) for number in range(6)], forwarded("in a session", "a"))
    net.run()
    letters = net.peek(source | Part.DEAD_LETTER)
    assert sorted(text(each.body) for each in letters) == [str(number) for number in range(6)]
    assert {each.properties["DeadLetterReason"] for each in letters} == {NULL}
    assert sum(len(listed(store, target)) for store in net.stores) == 1


@pytest.mark.parametrize("home", [HERE, THERE])
def test_forwarded_to_a_topic_it_keeps_its_session(home):
    net = Partitions(2)
    net.topic("news", home)
    subscription = net.subscription("news", "s", requires_session=True)
    source = net.queue("source", HERE, forward_to="news")
    net.send(source, forwarded("1", "a"), forwarded("2"))
    net.run()
    assert listed(net.stores[home], subscription) == [(Place.AVAILABLE, "a", 1)]
    [letter] = net.peek(subscription | Part.DEAD_LETTER)
    assert letter.properties["DeadLetterReason"] == NULL


@pytest.mark.parametrize("home", [HERE, THERE])
def test_dead_letters_of_an_entity_with_sessions_move_on_as_plain_messages(home):
    net = Partitions(2)
    target = net.queue("target", home)
    net.queue("source", HERE, requires_session=True)
    source = net.queue(
        "source", HERE, requires_session=True, forward_dead_lettered_messages_to="target", max_delivery_count=1
    )
    partition = net.partitions[HERE]
    net.send(source, forwarded("1", "a"))
    partition.open_receiver("r", source, False, net.now_ms, ["a", 0])
    partition.grant("r", 5)
    [delivery] = net.turn(HERE)["r"]
    partition.settle(source, [delivery.token], Outcome.ABANDONED, None, net.now_ms)
    net.turn(HERE)
    net.run()
    assert [text(each.body) for each in net.peek(target)] == ["1"]
    assert listed(net.stores[HERE], source) == []
    assert net.partitions[HERE].next_timer_ms() == net.now_ms + LOCK_MS


def identified(body, message_id, session=None, scheduled_ms=0):
    made = event(body, system={0: message_id, GROUP_ID: session}, scheduled_ms=scheduled_ms)
    made[3] = {**(made[3] or {}), Extra.MESSAGE_ID: encode(message_id)}
    return made


@pytest.mark.parametrize("home", [HERE, THERE])
def test_ids_of_messages_without_session_are_not_known(home):
    """The messages were never there."""
    net = Partitions(2)
    window = {"requires_duplicate_detection": True, "duplicate_detection_history_time_window_ms": 20_000}
    net.queue("target", home, requires_session=True, **window)
    source = net.queue("source", HERE, forward_to="target")
    for message_id in "121":
        net.send(source, identified(f"none {message_id}", message_id))
        net.run()
    assert [text(each.body) for each in net.peek(source | Part.DEAD_LETTER)] == ["none 1", "none 2", "none 1"]
    assert problems(net.stores[home]) == []
    for table in (Table.DUPLICATE_LOG, Table.DUPLICATE_RUNS, Table.DUPLICATE_CHUNKS, Table.DUPLICATE_FILTERS):
        assert net.stores[home].scan(table, b"\0", b"\xff" * 40, 10) == []


def test_a_message_without_session_leaves_no_id_for_later_ones():
    net = Partitions(1)
    target = net.queue("target", HERE, requires_session=True, requires_duplicate_detection=True)
    source = net.queue("source", HERE, forward_to="target")
    net.send(source, identified("none", "1"), identified("some", "2", "a"))
    later = [identified(f"later {message_id}", message_id, "a", net.now_ms + 500) for message_id in "123"]
    assert net.partitions[HERE].request(target, requests.Schedule(later), net.now_ms) == [2, 1, 3]


@pytest.mark.parametrize("home", [HERE, THERE])
@pytest.mark.parametrize("has_sessions", [True, False])
def test_an_action_may_part_the_session_from_the_partition_key_before_duplicates_are_looked_for(home, has_sessions):
    net = Partitions(2)
    terms = {"requires_duplicate_detection": True, "requires_session": has_sessions}
    target = net.queue("target", home, **terms)
    topic = net.topic("news", HERE)
    net.subscription("news", "s", [rule("set", action="SET sys.SessionId = 'b'")], forward_to="target")
    for body in ("first", "again"):
        net.send(topic, Sent(body, "a", message_id="1", has_key=True).incoming())
        net.run()
    assert [text(each.body) for each in net.peek(target)] == ["first"]
    assert listed(net.stores[home], target) == ([(Place.AVAILABLE, "b", 1)] if has_sessions else [])


@pytest.mark.parametrize(
    ("action", "arrived"),
    [
        ("SET sys.SessionId = 'b'", ["m"]),
        ("SET b = big", ["m"]),
        ("SET b = big; SET c = big", []),
    ],
)
def test_a_message_changed_by_actions_comes_through_a_second_topic(action, arrived):
    """There it becomes a part of the message: one that nobody could send so."""
    net = Partitions(2)
    target = net.queue("target", THERE, requires_duplicate_detection=True)
    for name, home, rules, to in (
        ("second", THERE, None, "target"),
        ("first", HERE, [rule("set", action=action)], "second"),
    ):
        net.topic(name, home)
        net.subscription(name, "s", rules, forward_to=to)
    sent = event("m", system={0: "1", GROUP_ID: "a"}, big="x" * 30_000)
    if "Session" in action:
        sent = Sent("m", "a", message_id="1", has_key=True).incoming()
    for _ in range(2):
        net.send(net.entities["first"].queue, sent)
        net.run()
    assert [text(each.body) for each in net.peek(target)] == arrived
