"""A topic against a plain model: random publishing, rules, subscriptions that come and go, settlements and restarts.

After each step each subscription and its dead-letter queue show what the model has, each body is referred to by as
many entries as is recorded and by one at least, and the topic's size is that of its bodies and copies. What a deleted
subscription left behind is freed in steps, between which all of that holds, too. The topic may detect duplicates, and
what is published and settled may be a transaction.
"""

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from broker import requests
from broker.partition.settings import PartitionSettings
from broker.wire import Extra, Operation, Outcome, SendOperation, SettleOperation
from protocol.codec import Long, decode_exactly, encode
from protocol.symbols import DELAY
from storage.records import Field
from tests.models import model_settings
from tests.partition.accounts import assert_counted_rightly
from tests.partition.topic_driver import (
    TOPIC,
    TOPIC_ENTITY,
    A,
    B,
    C,
    D,
    TopicDriver,
    assert_shared_rightly,
    event,
    text,
)
from tests.partition.topic_driver import rule as rule_document

NEVER = 1 << 62
WINDOW_MS = 20_000
WRITTEN = st.tuples(
    st.sampled_from(["red", "blue", None]),
    st.sampled_from([0, 1, None]),
    st.sampled_from([None, None, 500, 5_000]),
    st.sampled_from([0, 0, 0, 30, 700]),
    st.sampled_from([None, None, "1", "2", "3"]),
)
# What is drawn of a message: color, n, time to live, the wait until it is scheduled, message id.
Drawn = tuple[str | None, int | None, int | None, int, str | None]
SUBSCRIPTIONS = st.sampled_from([A, B, C, D])
RULES = {
    "all": rule_document("all"),
    "red": rule_document("red", sql="color = 'red'"),
    "blue": rule_document("blue", correlation={"properties": {"color": "blue"}}),
    "div": rule_document("div", sql="1 / n > 0"),
    "mark": rule_document("mark", action="SET mark = 'x'; REMOVE color"),
    "bad": rule_document("bad", sql="color = 'red'", action="SET n = 7 / n"),
    "none": rule_document("none", kind="false"),
}


@dataclass(frozen=True)
class Message:
    body: str
    color: str | None
    n: int | None
    ttl_ms: int | None


class Written(NamedTuple):
    """A message, the time it is scheduled for (or 0), its id, and how it comes in."""

    message: Message
    scheduled_ms: int
    message_id: str | None
    made: list[Any]


@dataclass(frozen=True)
class Copy:
    """`changes` are application properties set since, decoded; `first_number` is that at the topic, or before."""

    body: str
    number: int
    expires_ms: int
    changes: dict[str, Any] = field(default_factory=dict)
    count: int = 0
    first_number: int | None = None
    deferred: bool = False
    returns_ms: int = 0  # it was abandoned with a delay

    @property
    def available(self) -> bool:
        return not (self.deferred or self.returns_ms)


@dataclass
class Subscription:
    rules: list[str]
    ttl_ms: int | None
    dead_letter_failed: bool
    main: list[Copy] = field(default_factory=list)
    dead: list[Copy] = field(default_factory=list)
    next_number: int = 1
    next_dead: int = 1


class TopicModel(RuleBasedStateMachine):
    @initialize(
        step=st.sampled_from([1, 3, 100]),
        window=st.sampled_from([2, 100]),
        ttl_ms=st.sampled_from([None, 3_000]),
        detects_duplicates=st.booleans(),
        turn_work=st.sampled_from([1, 5, 10_000]),
        commit_bytes=st.sampled_from([0, 1 << 20]),
    )
    def start(self, step, window, ttl_ms, detects_duplicates, turn_work, commit_bytes):
        self.driver = TopicDriver(
            settings=PartitionSettings(
                step=step, window=window, turn_work=turn_work, commit_bytes=commit_bytes, abandon_delays=True
            ),
            default_message_time_to_live_ms=ttl_ms,
            requires_duplicate_detection=detects_duplicates,
            duplicate_detection_history_time_window_ms=WINDOW_MS,
        )
        self.detects_duplicates = detects_duplicates
        self.ids: dict[str, tuple[int, int]] = {}  # of messages published: end of the window, number
        self.topic_ttl_ms = ttl_ms
        self.subscriptions: dict[int, Subscription] = {}
        self.scheduled: dict[int, tuple[int, Message]] = {}  # number: time, message
        self.next_number = 1
        self.published = 0
        for queue_id in (A, B):
            self.subscribe(queue_id, None, None, True)

    @property
    def now_ms(self) -> int:
        return self.driver.now_ms

    # -- what the model knows

    def fan_out(self, message: Message, first_number: int | None) -> None:
        for subscription in self.subscriptions.values():
            self.give(subscription, message, first_number)

    def give(self, subscription: Subscription, message: Message, first_number: int | None) -> None:
        failure = None
        plain = False
        changed: list[dict[str, Any]] = []
        for name in subscription.rules:
            if name == "div" and message.n == 0:
                failure = failure or "FilterException"
            elif name == "mark":
                removed = {} if message.color is None else {"color": None}
                changed.append({**removed, "mark": "x", "RuleName": "mark"})
            elif name == "bad" and message.color == "red":
                if message.n == 0:
                    continue
                changed.append({"n": None if message.n is None else 7 // message.n, "RuleName": "bad"})
            else:
                plain = plain or name == "all" or name == message.color or (name == "div" and message.n == 1)
        if "bad" in subscription.rules and message.color == "red" and message.n == 0:
            failure = failure or "RuleActionException"
        limits = [ttl for ttl in (message.ttl_ms, self.topic_ttl_ms, subscription.ttl_ms) if ttl is not None]
        expires_ms = self.now_ms + min(limits) if limits else NEVER
        for changes in [{}] * plain + changed:
            copy = Copy(message.body, subscription.next_number, expires_ms, changes, first_number=first_number)
            subscription.main.append(copy)
            subscription.next_number += 1
        if failure and subscription.dead_letter_failed:
            changes = {"DeadLetterReason": failure}
            subscription.dead.append(
                Copy(message.body, subscription.next_dead, NEVER, changes, first_number=first_number)
            )
            subscription.next_dead += 1

    def turn(self) -> None:
        """What is due happens; in the partition step by step, with everything true in between."""
        while (due_ms := self.driver.partition.next_timer_ms()) is not None and due_ms <= self.now_ms:
            self.driver.partition.advance(self.now_ms)
            self.driver.partition.commit()
            self.check_references()
        due = sorted((time_ms, number) for number, (time_ms, _) in self.scheduled.items() if time_ms <= self.now_ms)
        self.next_number += len(due)  # each has another when it is due
        for _, number in due:
            self.fan_out(self.scheduled.pop(number)[1], number)
        for subscription in self.subscriptions.values():
            for copies in (subscription.main, subscription.dead):
                copies[:] = [replace(c, returns_ms=0) if c.returns_ms <= self.now_ms else c for c in copies]
            subscription.main = [c for c in subscription.main if c.deferred or c.expires_ms > self.now_ms]

    # -- and what must be true of it

    @invariant()
    def subscriptions_show_what_the_model_has(self):
        if not hasattr(self, "driver"):
            return
        for queue_id, subscription in self.subscriptions.items():
            for part, copies in ((queue_id, subscription.main), (queue_id | 1, subscription.dead)):
                shown = self.driver.peek(part, count=1000)
                assert [(text(d.body), d.number, d.delivery_count, read(d.properties)) for d in shown] == [
                    (c.body, c.number, c.count, c.changes) for c in copies
                ]
                assert [d.overlay.get(Field.ENQUEUE_SEQUENCE_NUMBER) for d in shown] == [c.first_number for c in copies]
                available, deferred = sum(c.available for c in copies), sum(c.deferred for c in copies)
                assert self.driver.held(part) == [available, deferred, len(copies) - available - deferred, 0]
            names = [found["name"] for found in self.driver.request("enumerate-rules", 0, 100, queue=queue_id)]
            assert names == sorted(subscription.rules, key=str.lower)
        assert self.driver.held(TOPIC) == [0, 0, len(self.scheduled), 0]
        self.check_references()

    def check_references(self) -> None:
        assert_counted_rightly(self.driver.partition, self.driver.store, self.now_ms)
        core = self.driver.partition._core
        freed = {each for each, deleted in core.entities.deleted.items() if deleted.topic_id == TOPIC_ENTITY}
        assert_shared_rightly(
            self.driver.store, {TOPIC_ENTITY: {queue_id >> 3 for queue_id in self.subscriptions} | freed}
        )

    # -- what users do

    def written(
        self, color: str | None, n: int | None, ttl_ms: int | None, wait: int, message_id: str | None
    ) -> Written:
        self.published += 1
        message = Message(f"m{self.published}", color, n, ttl_ms)
        properties: dict[str, Any] = {name: value for name, value in (("color", color), ("n", n)) if value is not None}
        scheduled_ms = self.now_ms + wait if wait else 0
        made = event(message.body, ttl_ms=ttl_ms, scheduled_ms=scheduled_ms, **properties)
        if message_id is not None:
            made[3] = {**(made[3] or {}), Extra.MESSAGE_ID: encode(message_id)}
        return Written(message, scheduled_ms, message_id, made)

    def take(self, written: Written, reserved: int | None = None) -> None:
        """The topic accepts it, under a number that was told, or the next."""
        message, scheduled_ms, message_id, _ = written
        number = self.next_number if reserved is None else reserved
        if message_id is not None and self.detects_duplicates:
            if self.ids.get(message_id, (0, 0))[0] > self.now_ms:
                return
            self.ids[message_id] = (self.now_ms + WINDOW_MS, number)
        self.next_number = max(self.next_number, number + 1)
        if scheduled_ms:
            self.scheduled[number] = (scheduled_ms, message)
        else:
            self.fan_out(message, None)

    @rule(sent=st.lists(WRITTEN, min_size=1, max_size=5))
    def publish(self, sent: list[Drawn]) -> None:
        batch = [self.written(*each) for each in sent]
        self.driver.publish(*[each.made for each in batch])
        for each in batch:
            self.take(each)
        self.turn()  # what was too much for one turn is published by the next

    @rule(
        queue_id=SUBSCRIPTIONS,
        outcome=st.sampled_from([Outcome.ACCEPTED, Outcome.ABANDONED, Outcome.DEFERRED, Outcome.DEAD_LETTERED]),
        sent=st.lists(WRITTEN, max_size=3),
        told=st.lists(WRITTEN, max_size=2),
        commit=st.sampled_from([True, True, False]),
    )
    def transact(self, queue_id: int, outcome: Outcome, sent: list[Drawn], told: list[Drawn], commit: bool) -> None:
        """Settle what a subscription has first, publish, and schedule: all of it or nothing."""
        existing = self.existing(queue_id)
        if existing is None:
            return
        queue_id = existing
        partition, subscription = self.driver.partition, self.subscriptions[queue_id]
        chosen = [copy for copy in subscription.main if copy.available][:2]
        tokens = [each.token for each in self.driver.receive(2, "receiver", queue_id)]
        assert len(tokens) == len(chosen)
        batch = [self.written(*each) for each in sent]
        later = [self.written(color, n, ttl, wait or 30, name) for color, n, ttl, wait, name in told]
        work: list[Operation] = [
            SettleOperation(queue_id, False, tokens, outcome, None),
            SendOperation(TOPIC, False, [[each.made for each in batch]]),
        ]
        partition.transact("t", True, work, self.now_ms)
        numbers = partition.request_in("t", False, TOPIC, requests.Schedule([each.made for each in later]), self.now_ms)
        assert numbers == [*range(self.next_number, self.next_number + len(later))]
        self.next_number += len(later)
        partition.discharge("t", commit, self.now_ms)
        if commit:
            self.settled(subscription, subscription.main, chosen, outcome)
            for each in batch:
                self.take(each)
            for number, each in zip(numbers, later, strict=True):
                self.take(each, number)
        else:
            assert partition.settle(queue_id, tokens, Outcome.RELEASED, None, self.now_ms) == [None] * len(tokens)
        partition.commit()
        self.driver.close("receiver")
        self.turn()

    @rule(pick=st.integers(0, 20))
    def cancel(self, pick):
        if self.scheduled:
            number = list(self.scheduled)[pick % len(self.scheduled)]
            self.driver.request("cancel-scheduled", [number], queue=TOPIC)
            del self.scheduled[number]

    @rule(
        queue_id=SUBSCRIPTIONS,
        rules=st.none() | st.lists(st.sampled_from([*RULES]), unique=True, max_size=4),
        ttl_ms=st.sampled_from([None, None, 1_000]),
        dead_letter_failed=st.booleans(),
    )
    def subscribe(self, queue_id, rules, ttl_ms, dead_letter_failed):
        if queue_id in self.subscriptions or queue_id >> 3 in self.driver.partition._core.entities.deleted:
            return
        properties = {
            "default_message_time_to_live_ms": ttl_ms,
            "dead_lettering_on_filter_evaluation_exceptions": dead_letter_failed,
        }
        self.driver.subscribe(queue_id, no_rules=rules is not None, **properties)
        subscription = self.subscriptions[queue_id] = Subscription([], ttl_ms, dead_letter_failed)
        if rules is None:
            subscription.rules.append("$Default")
            self.change_rules(queue_id, "all", "$Default")
        for name in rules or []:
            self.change_rules(queue_id, name, None)

    def existing(self, queue_id: int) -> int | None:
        """This subscription, or another one if it does not exist."""
        if queue_id in self.subscriptions or not self.subscriptions:
            return queue_id if self.subscriptions else None
        return list(self.subscriptions)[queue_id // 8 % len(self.subscriptions)]

    def change_rules(self, queue_id: int, added: str | None, removed: str | None) -> None:
        subscription = self.subscriptions[queue_id]
        if added is not None:
            self.driver.now_ms += 1  # so that the order in which they were made is known
            self.driver.request("add-rule", RULES[added], queue=queue_id)
            subscription.rules.append(added)
        if removed is not None:
            self.driver.request("remove-rule", removed, queue=queue_id)
            subscription.rules.remove(removed)
        self.turn()

    @rule(queue_id=SUBSCRIPTIONS, name=st.sampled_from([*RULES]))
    def add_rule(self, queue_id, name):
        queue_id = self.existing(queue_id)
        if queue_id and name not in self.subscriptions[queue_id].rules:
            self.change_rules(queue_id, name, None)

    @rule(queue_id=SUBSCRIPTIONS, pick=st.integers(0, 6))
    def remove_rule(self, queue_id, pick):
        queue_id = self.existing(queue_id)
        if queue_id and (rules := self.subscriptions[queue_id].rules):
            self.change_rules(queue_id, None, rules[pick % len(rules)])

    @rule(queue_id=SUBSCRIPTIONS, at_once=st.booleans())
    def unsubscribe(self, queue_id, at_once):
        if self.subscriptions.pop(queue_id, None) is not None:
            self.driver.unsubscribe(queue_id)
            if at_once:
                self.turn()

    @rule(
        queue_id=SUBSCRIPTIONS,
        dead=st.booleans(),
        count=st.integers(1, 4),
        outcome=st.sampled_from(Outcome),
        delay_ms=st.sampled_from([0, 0, 30, 700, WINDOW_MS]),
    )
    def receive(self, queue_id, dead, count, outcome, delay_ms):
        queue_id = self.existing(queue_id)
        if queue_id is None or (dead and outcome == Outcome.DEAD_LETTERED):
            return
        subscription = self.subscriptions[queue_id]
        copies = subscription.dead if dead else subscription.main
        chosen = [copy for copy in copies if copy.available][:count]
        part = queue_id | dead
        received = self.driver.receive(count, "receiver", part)
        assert [text(d.body) for d in received] == [copy.body for copy in chosen]
        properties = {DELAY: encode(Long(delay_ms))} if outcome == Outcome.ABANDONED else None
        assert self.driver.settle(outcome, *received, properties=properties, queue=part) == [None] * len(chosen)
        self.driver.close("receiver")
        self.settled(subscription, copies, chosen, outcome, delay_ms)

    def settled(self, subscription, copies, chosen, outcome, delay_ms=0):
        dead = copies is subscription.dead
        for copy in chosen:
            at = copies.index(copy)
            match outcome:
                case Outcome.ACCEPTED:
                    del copies[at]
                case Outcome.ABANDONED | Outcome.DEFERRED:
                    counted = replace(copy, count=copy.count + (not dead))
                    if counted.count == 10 and not dead:
                        del copies[at]
                        self.dead_letter(subscription, counted, {"DeadLetterReason": "MaxDeliveryCountExceeded"})
                    elif outcome == Outcome.DEFERRED:
                        copies[at] = replace(counted, deferred=True)
                    else:
                        returns_ms = min(self.now_ms + delay_ms, copy.expires_ms) if delay_ms else 0
                        copies[at] = replace(counted, returns_ms=returns_ms)
                case Outcome.DEAD_LETTERED:
                    self.dead_letter(subscription, copies.pop(at), {})

    def dead_letter(self, subscription: Subscription, copy: Copy, changes: dict[str, Any]) -> None:
        subscription.dead.append(
            replace(
                copy,
                number=subscription.next_dead,
                expires_ms=NEVER,
                changes=copy.changes | changes,
                first_number=copy.first_number or copy.number,
            )
        )
        subscription.next_dead += 1

    @rule(queue_id=SUBSCRIPTIONS, dead=st.booleans())
    def receive_deferred(self, queue_id, dead):
        queue_id = self.existing(queue_id)
        if queue_id is None:
            return
        subscription = self.subscriptions[queue_id]
        copies = subscription.dead if dead else subscription.main
        alive = [c for c in copies if c.deferred and c.expires_ms > self.now_ms]
        if alive:
            self.driver.request("receive-deferred", [alive[0].number], True, queue=queue_id | dead)
            copies.remove(alive[0])

    @rule(queue_id=SUBSCRIPTIONS)
    def purge(self, queue_id):
        queue_id = self.existing(queue_id)
        if queue_id:
            while self.driver.request("purge", queue=queue_id):
                self.check_references()
            self.subscriptions[queue_id].main.clear()

    @rule(ms=st.sampled_from([1, 30, 500, 1_000, 5_000, WINDOW_MS]))
    def wait(self, ms):
        self.driver.now_ms += ms
        self.turn()

    @rule(uncommitted=st.booleans())
    def restart(self, uncommitted):
        if uncommitted:
            self.driver.partition.send(TOPIC, [event("lost", color="red", n=1)], self.now_ms)
            for queue_id in self.subscriptions:
                self.driver.partition.request(queue_id, requests.Purge(), self.now_ms)
            self.driver.partition.advance(self.now_ms)
            self.driver.store.abort()
        self.driver.restart()
        self.next_number = self.driver.stored_counts(TOPIC).next_sequence_number
        self.turn()


def read(properties: dict[str, Any]) -> dict[str, Any]:
    """As the model has them; a description's text is not its business."""
    return {
        name: decode_exactly(value) if isinstance(value, bytes) else value
        for name, value in properties.items()
        if name != "DeadLetterErrorDescription"
    }


TopicModel.TestCase.settings = model_settings(examples=60, steps=40)
TestTopicModel = TopicModel.TestCase
