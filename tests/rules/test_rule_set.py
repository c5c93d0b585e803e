from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from broker.rules import (
    CorrelationFilter,
    FalseFilter,
    FilterError,
    InvalidRule,
    MessageView,
    Rule,
    RuleSet,
    TrueFilter,
    compile_action,
    compile_filter,
)
from protocol.codec import Decimal64, Described, Float, Int, Long, Symbol, Timestamp, UInt
from tests.examples import examples

ACTION = compile_action("SET a = 1")
MESSAGE = MessageView(
    ["m", None, "to", "label", "reply", "c", Symbol("type"), None, None, None, "s", None, "rs"],
    {"color": "red", "Quantity": Int(2), "urgent": True, "text": "2", "nothing": None},
)

# --- one correlation filter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {"correlation_id": "c"},
        {"message_id": "m"},
        {"to": "to"},
        {"reply_to": "reply"},
        {"label": "label"},
        {"session_id": "s"},
        {"reply_to_session_id": "rs"},
        {"content_type": "type"},
        {"properties": {"color": "red"}},
        {"properties": {"COLOR": "red"}},
        {"properties": {"quantity": 2.0}},
        {"properties": {"quantity": Long(2), "urgent": True}},
        {"properties": {"missing": None}},
        {"label": "label", "properties": {"Nothing": None, "color": "red"}},
        {"correlation_id": "c", "message_id": "m", "to": "to", "label": "label", "properties": {"color": "red"}},
    ],
)
def test_a_correlation_filter_matches_what_is_equal(fields):
    assert CorrelationFilter(**fields).matches(MESSAGE)


@pytest.mark.parametrize(
    "fields",
    [
        {"label": "Label"},
        {"label": ""},
        {"label": "label", "to": "other"},
        {"properties": {"color": "RED"}},
        {"properties": {"quantity": "2"}},
        {"properties": {"text": 2}},
        {"properties": {"urgent": 1}},
        {"properties": {"COLOR": None}},
        {"properties": {"missing": None, "color": "blue"}},
        {"properties": {"urgent": "true"}},
        {"properties": {"nothing": "x"}},
        {"properties": {"missing": "x"}},
        {"properties": {"color": "red", "missing": "x"}},
        {"label": "label", "properties": {"color": "blue"}},
    ],
)
def test_a_correlation_filter_matches_nothing_else(fields):
    assert not CorrelationFilter(**fields).matches(MESSAGE)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "needs at least one condition"),
        ({"properties": {}}, "needs at least one condition"),
        ({"label": 5}, "Label of a correlation filter is a string, not an integer"),
        ({"properties": {"a": None, "A": None}}, "has the property A twice"),
        ({"properties": {"a": None, "A": 1}}, "has the property A twice"),
        ({"properties": {"a": float("nan")}}, "no value equals"),
        ({"properties": {"a": [1]}}, "no value equals"),
        ({"properties": {"a": 1, "A": 1}}, "has the property A twice"),
    ],
)
def test_a_correlation_filter_that_cannot_be(fields, text):
    with pytest.raises(InvalidRule, match=text):
        CorrelationFilter(**fields)


KINDS_OF_VALUES = [
    1, 2, Int(2), UInt(2), Float(2.0), 2.0, 0.5, Float(0.5), 2**60 + 1, float(2**60), True, False, "2", "", "red",
    "RED", Symbol("red"), b"red", UUID(int=2), Timestamp(2), Described(Symbol("com.microsoft:timespan"), Long(2)),
    Decimal64((397 << 53 | 5).to_bytes(8, "big")), Decimal64((398 << 53 | 2).to_bytes(8, "big")),
]  # fmt: skip


@pytest.mark.parametrize("wanted", KINDS_OF_VALUES, ids=repr)
@pytest.mark.parametrize("present", KINDS_OF_VALUES, ids=repr)
def test_a_correlation_filter_and_an_equal_sign_agree(wanted, present):
    message = MessageView(None, {"a": present})
    sql = compile_filter("a = @wanted", {"@wanted": wanted})
    assert CorrelationFilter(properties={"a": wanted}).matches(message) is sql.matches(message)
    assert compile_filter("a IN (@wanted)", {"@wanted": wanted}).matches(message) is sql.matches(message)


# --- the rules of a topic ---------------------------------------------------------------------------------------------


def topic(*rules):
    """Of (subscription, name, filter or expression[, action])."""
    result = RuleSet()
    for subscription, name, filter_, *action in rules:
        result.add(subscription, Rule(name, compile_filter(filter_) if isinstance(filter_, str) else filter_, *action))
    return result


def outcome(match):
    return match.subscription, match.is_plain, [each.name for each in match.changed]


def outcomes(rules, message=MESSAGE):
    return [outcome(match) for match in rules.match(message)]


def test_no_match_is_nothing():
    assert outcomes(RuleSet()) == []
    assert outcomes(topic((1, "a", FalseFilter()), (2, "b", "1 = 0"), (3, "c", CorrelationFilter(label="x")))) == []


def test_rules_without_action_make_one_copy_together_and_each_with_an_action_its_own():
    rules = topic(
        (1, "plain 1", TrueFilter()),
        (1, "changed 1", CorrelationFilter(label="label"), ACTION),
        (1, "plain 2", "color = 'red'"),
        (1, "not this", "color = 'blue'", ACTION),
        (1, "changed 2", "1 = 1", ACTION),
        (1, "plain 3", CorrelationFilter(to="to")),
    )
    assert outcomes(rules) == [(1, True, ["changed 1", "changed 2"])]
    assert next(iter(rules.match(MESSAGE))).changed[0].action is ACTION


def test_an_action_alone_makes_no_plain_copy():
    assert outcomes(topic((1, "a", TrueFilter(), ACTION))) == [(1, False, ["a"])]


def test_a_blank_action_counts_as_none():
    assert outcomes(topic((1, "a", TrueFilter(), compile_action(" ")))) == [(1, True, [])]


def test_matches_come_in_the_order_of_subscriptions_whichever_rule_matched():
    rules = topic(
        ("z", "$Default", "color = 'red'"),
        ("a", "$Default", TrueFilter()),
        ("m", "$Default", CorrelationFilter(label="label")),
        ("z", "second", TrueFilter(), ACTION),
    )
    assert outcomes(rules) == [("z", True, ["second"]), ("a", True, []), ("m", True, [])]


def test_an_error_is_the_subscriptions_own():
    rules = topic(
        (1, "a", TrueFilter()),
        (2, "fails", "color - 1 = 2"),
        (3, "fails too", "1 / 0 = 1"),
        (3, "matches", CorrelationFilter(label="label")),
        (3, "changes", TrueFilter(), ACTION),
    )
    first, second, third = rules.match(MESSAGE)
    assert outcome(first) == (1, True, [])
    assert first.errors == ()
    assert outcome(second) == (2, False, [])
    assert [(each.name, str(error)) for each, error in second.errors] == [
        ("fails", "a string - an integer is not defined")
    ]
    assert outcome(third) == (3, True, ["changes"])
    assert [each.name for each, _ in third.errors] == ["fails too"]


def test_a_message_that_cannot_be_read_fails_the_rules_that_read_it():
    rules = topic(
        (1, "true", TrueFilter()),
        (2, "correlation", CorrelationFilter(properties={"a": 1})),
        (3, "sql", "a = 1"),
        (4, "other section", CorrelationFilter(label="label")),
    )
    matches = rules.match(MessageView([None, None, None, "label"], b"\xff"))
    assert [(match.subscription, match.is_plain, len(match.errors)) for match in matches] == [
        (1, True, 0),
        (2, False, 1),
        (3, False, 1),
        (4, True, 0),
    ]
    assert all(isinstance(error, FilterError) for match in matches for _, error in match.errors)


def test_names_of_rules_are_unique_in_a_subscription():
    rules = topic((1, "a", TrueFilter()), (2, "a", FalseFilter()))
    with pytest.raises(KeyError):
        rules.add(1, Rule("a", FalseFilter()))
    assert len(rules) == 2
    assert outcomes(rules) == [(1, True, [])]


def test_removing_rules():
    filters = [TrueFilter(), FalseFilter(), CorrelationFilter(label="label"), compile_filter("color = 'red'")]
    rules = topic(*((1, f"rule {at}", each) for at, each in enumerate(filters)))
    assert [each.name for each in rules.rules(1)] == ["rule 0", "rule 1", "rule 2", "rule 3"]
    for at, each in enumerate(filters):
        assert rules.remove(1, f"rule {at}").filter is each
        assert outcomes(rules) == ([(1, True, [])] if at < 3 else [])
    assert list(rules.rules(1)) == []
    with pytest.raises(KeyError):
        rules.remove(1, "rule 0")
    with pytest.raises(KeyError):
        rules.remove(2, "rule 0")


def test_removing_a_subscription_leaves_nothing_of_it():
    rules = topic(
        *((at % 10, f"rule {at}", CorrelationFilter(label=f"{at}")) for at in range(100)),
        *((at % 10, f"guarded {at}", f"color = '{at}' AND sys.To > 'a' OR size = {at}") for at in range(100)),
        *((at % 10, f"unguarded {at}", f"size > {at}") for at in range(100)),
        (1, "t", TrueFilter()),
        (1, "never", "color = NULL"),
    )
    for subscription in range(10):
        rules.remove_subscription(subscription)
        assert outcomes(rules, MessageView([None, None, None, f"{subscription}"])) == (
            [(1, True, [])] if subscription == 0 else []
        )
    rules.remove_subscription("never there")
    assert len(rules) == 0
    assert (rules._shapes, rules._always, rules._places) == ({}, [], {})
    assert (rules.tried, rules._readers, rules._steps) == (0, {}, 0)


def test_a_subscription_keeps_its_place_while_its_rules_change():
    rules = topic((1, "a", TrueFilter()), (2, "a", TrueFilter()))
    rules.remove(1, "a")
    rules.add(1, Rule("b", CorrelationFilter(label="label")))
    assert outcomes(rules) == [(1, True, []), (2, True, [])]


# --- the index against trying each ------------------------------------------------------------------------------------

TEXTS = st.sampled_from(["a", "A", "b", ""])
VALUES = TEXTS | st.sampled_from([0, 1, Int(1), 1.0, True, False, 0.5, UUID(int=1), Timestamp(1), Symbol("a")])
EXPRESSIONS = [
    "x = 'a'",
    "1 = 1",
    "1 = 0",
    "y / x = 1",
    "sys.To LIKE '%a%'",
    "x IS NULL",
    "x = 1 OR y > 0 AND sys.Label = 'a'",
    "sys.Label = 'a' AND x = 'b' AND y IN (1, 'a', 0.5)",
    "sys.To = 'a' AND y <> 'a'",
    "x IN ('a', 1, TRUE, NULL)",
    "y = NULL OR sys.To IN ('', 'b')",
    "sys.Label > 'A' AND (x = 'a' OR 1.0 = y)",
    "x = 'a' AND x = 'b'",
]
FILTERS = (
    st.builds(TrueFilter)
    | st.builds(FalseFilter)
    | st.builds(compile_filter, st.sampled_from(EXPRESSIONS))
    | st.builds(
        lambda label, to, properties: (label, to, properties),
        st.none() | TEXTS, st.none() | TEXTS, st.dictionaries(st.sampled_from("xyX"), VALUES, max_size=2),
    )
    .filter(lambda each: each[0] is not None or each[1] is not None or each[2])
    .filter(lambda each: not {"x", "X"} <= each[2].keys())
    .map(lambda each: CorrelationFilter(label=each[0], to=each[1], properties=each[2]))
)  # fmt: skip
INVALID = st.just(b"\xff")  # a section
MESSAGES = st.builds(
    MessageView,
    st.builds(lambda label, to: [None, None, to, label], st.none() | TEXTS, st.none() | TEXTS) | INVALID,
    st.dictionaries(st.sampled_from("xyX"), VALUES | st.none(), max_size=3) | INVALID,
)


def tried_one_by_one(subscriptions, message):
    """The outcomes with errors by name, of {subscription: [rule]} in order."""
    result = []
    for subscription, rules in subscriptions.items():
        plain, changed, errors = False, [], []
        for each in rules:
            try:
                matches = each.filter.matches(message)
            except FilterError:
                errors.append(each.name)
                continue
            if matches and each.action is None:
                plain = True
            elif matches:
                changed.append(each.name)
        if plain or changed or errors:
            result.append((subscription, plain, changed, errors))
    return result


class Topic(RuleBasedStateMachine):
    @initialize()
    def create(self) -> None:
        self.kept = RuleSet()
        self.subscriptions: dict[int, list[Rule]] = {}

    @rule(subscription=st.integers(0, 4), name=st.sampled_from("abcdef"), filter_=FILTERS, acts=st.booleans())
    def add(self, subscription, name, filter_, acts):
        present = self.subscriptions.setdefault(subscription, [])
        each = Rule(name, filter_, ACTION if acts else None)
        if any(other.name == name for other in present):
            with pytest.raises(KeyError):
                self.kept.add(subscription, each)
        else:
            self.kept.add(subscription, each)
            present.append(each)

    @precondition(lambda self: any(self.subscriptions.values()))
    @rule(data=st.data())
    def remove(self, data):
        filled = [subscription for subscription, rules in self.subscriptions.items() if rules]
        subscription = data.draw(st.sampled_from(filled))
        each = data.draw(st.sampled_from(self.subscriptions[subscription]))
        assert self.kept.remove(subscription, each.name) is each
        self.subscriptions[subscription].remove(each)

    @rule(subscription=st.integers(0, 4))
    def remove_subscription(self, subscription):
        self.kept.remove_subscription(subscription)
        self.subscriptions.pop(subscription, None)

    @rule(message=MESSAGES)
    def publish(self, message):
        found = [
            (*outcome(match), [each.name for each, _ in match.errors]) for match in self.kept.match(message)
        ]  # fmt: skip
        assert found == tried_one_by_one(self.subscriptions, message)

    @invariant()
    def counts(self):
        assert len(self.kept) == sum(map(len, self.subscriptions.values()))


Topic.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=25)
TestTopic = Topic.TestCase


@settings(max_examples=examples(100))
@given(st.lists(FILTERS, max_size=20), st.lists(MESSAGES, min_size=1, max_size=4))
def test_the_index_finds_what_trying_each_finds(filters, messages):
    rules = RuleSet()
    subscriptions = {}
    for at, filter_ in enumerate(filters):
        subscriptions[at] = [Rule("r", filter_, ACTION if at % 3 == 0 else None)]
        rules.add(at, subscriptions[at][0])
    for message in messages:
        found = [(*outcome(match), [each.name for each, _ in match.errors]) for match in rules.match(message)]
        assert found == tried_one_by_one(subscriptions, message)


def test_thousands_of_correlation_filters_cost_a_look_up_not_a_trial_each():
    rules = RuleSet()
    for at in range(3000):
        rules.add(at, Rule("r", CorrelationFilter(properties={"tenant": at, "kind": "order"})))
    reads = []

    class Counted(dict):
        def get(self, name, default=None):
            reads.append(name)
            return super().get(name, default)

    message = MessageView()
    message.user = Counted(tenant=1234, kind="order")
    assert outcomes(rules, message) == [(1234, True, [])]
    assert sorted(reads) == ["kind", "tenant"]
