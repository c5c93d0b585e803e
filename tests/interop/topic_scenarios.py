"""The scenarios on topics: publishing, subscriptions and rules. Programs know the subscriptions by their names here."""

from collections.abc import Mapping

from tests.interop.scenario import Scenario

_MANY_MS = 3_600_000


def _subscription(name: str, **settings: object) -> Mapping[str, object]:
    return {"name": name, **settings}


def _rule(name: str, filter_: Mapping[str, object], action: str | None = None) -> Mapping[str, object]:
    return {"name": name, "filter": filter_, **({} if action is None else {"action": {"expression": action}})}


def _sql(expression: str, **parameters: object) -> Mapping[str, object]:
    values = {f"@{name}": value for name, value in parameters.items()}
    return {"kind": "sql", "expression": expression, **({"parameters": values} if values else {})}


def _correlation(**fields: object) -> Mapping[str, object]:
    return {"kind": "correlation", **fields}


def _selecting(name: str, filter_: Mapping[str, object]) -> Mapping[str, object]:
    """A subscription with one rule, of the same name."""
    return _subscription(name, rules=[_rule(name, filter_)])


def _topic(*subscriptions: Mapping[str, object], **settings: object) -> Mapping[str, object]:
    return {**settings, "subscriptions": subscriptions}


_A, _B = _subscription("a"), _subscription("b")
_EVERY: Mapping[str, object] = {"kind": "true"}


def _scenario(id_: str, sentence: str, topic: Mapping[str, object] | None, *seeds: str) -> Scenario:
    return Scenario(id_, sentence, seeds, queue=None, topic=topic)


SCENARIOS = (
    _scenario(
        "topic-publish",
        "A message published reaches every subscription that wants it, as a copy with a sequence number of its own, "
        "settled on its own.",
        _topic(_A, _B, _selecting("second", _correlation(label="second"))),
        "ST8",
    ),
    _scenario(
        "topic-batch",
        "A batch of 100 published is in every subscription, in order, with consecutive sequence numbers.",
        _topic(_A, _B),
        "ST1",
    ),
    _scenario(
        "topic-schedule",
        "Of messages scheduled at a topic the one cancelled there arrives nowhere, the others in every subscription "
        "and not before their time; a second cancel is an error.",
        _topic(_A, _B),
    ),
    _scenario(
        "topic-time-to-live",
        "The shorter time to live of topic and subscription counts for each copy by itself; one that expired is "
        "dead-lettered where the subscription says so.",
        _topic(
            _subscription("brief", default_message_time_to_live_ms=1_000, dead_lettering_on_message_expiration=True),
            _subscription("dropped", default_message_time_to_live_ms=1_000),
            _subscription("long", default_message_time_to_live_ms=2 * _MANY_MS),
            default_message_time_to_live_ms=_MANY_MS,
        ),
        "DL4",
        "DL6",
    ),
    _scenario(
        "topic-disabled",
        "A disabled topic is the SDK's entity-disabled error for senders; its subscriptions can be received from.",
        _topic(_A, status="Disabled"),
    ),
    _scenario(
        "topic-not-allowed",
        "Receiving from a topic and sending to a subscription are refused as not allowed, at once.",
        _topic(_A),
    ),
    _scenario(
        "unknown-topic",
        "A topic or a subscription that does not exist is the SDK's not-found error, at once.",
        _topic(_A),
        "ST1",
    ),
    _scenario(
        "subscription-settle",
        "Each subscription counts deliveries by itself: an abandoned message comes again in one, and in another, where "
        "one delivery is allowed, is dead-lettered.",
        _topic(_A, _subscription("strict", max_delivery_count=1)),
        "ST7",
        "ST9",
        "DL5",
    ),
    _scenario(
        "subscription-defer",
        "A message deferred in a subscription is received there by its number, completed, and then not found; "
        "the other subscription delivers it.",
        _topic(_A, _B),
        "ST11",
    ),
    _scenario(
        "subscription-dead-letter",
        "A message dead-lettered in a subscription is in its dead-letter queue with reason, description and source; "
        "in the other subscription it is as sent.",
        _topic(_A, _B),
        "ST10",
        "DL1",
        "DL4",
    ),
    _scenario(
        "subscription-lock",
        "A message is locked as long as its subscription says, and longer when renewed.",
        _topic(_subscription("a", lock_duration_ms=5_000), _subscription("b", lock_duration_ms=60_000)),
        "ST5",
        "ST14",
    ),
    _scenario(
        "subscription-peek",
        "Browsing a subscription shows its messages in order, from a sequence number on too, and locks none.",
        _topic(_A, _B),
        "ST5",
    ),
    _scenario(
        "subscription-receive-and-delete",
        "What was received so is gone from its subscription, and from no other.",
        _topic(_A, _B),
        "ST4",
    ),
    _scenario(
        "subscription-disabled",
        "A disabled subscription is the SDK's entity-disabled error for receivers; the topic can be sent to, and its "
        "other subscriptions be received from.",
        _topic(_A, _subscription("off", status="Disabled")),
    ),
    _scenario(
        "sql-filter",
        "SQL filters select by application and system properties, and by those that are missing.",
        _topic(
            _selecting("dear", _sql("price > @limit AND color = 'red'", limit=100)),
            _selecting("named", _sql("sys.Label LIKE 'a%' OR sys.MessageId IN ('x', 'y')")),
            _selecting("bare", _sql("color IS NULL AND NOT EXISTS(price)")),
        ),
    ),
    _scenario(
        "correlation-filter",
        "Correlation filters select by system properties and by application properties: numbers by value, whatever "
        "their type, and strings in the same case.",
        _topic(
            _selecting("labelled", _correlation(label="a", correlation_id="c")),
            _selecting("red", _correlation(properties={"color": "red"})),
            _selecting("seven", _correlation(properties={"count": 7})),
        ),
    ),
    _scenario(
        "filter-error",
        "A message for which a filter cannot be computed is dead-lettered as FilterException where the subscription "
        "says so, else dropped for it; other subscriptions get it.",
        _topic(
            _selecting("kept", _sql("amount / parts > 1")),
            _subscription(
                "dropped",
                rules=[_rule("dropped", _sql("amount / parts > 1"))],
                dead_lettering_on_filter_evaluation_exceptions=False,
            ),
            _A,
        ),
        "DL7",
    ),
    _scenario(
        "rule-action",
        "A rule's action changes application and system properties of its copy, which names the rule; the copy of "
        "another subscription is as sent.",
        _topic(
            _subscription(
                "half",
                rules=[
                    _rule("half", _sql("price > 100"), "SET price = price / 2; SET sys.Label = 'cheap'; REMOVE color")
                ],
            ),
            _A,
        ),
    ),
    _scenario(
        "rule-copies",
        "Rules without an action that match make one copy together, each with an action one of its own.",
        _topic(
            _subscription(
                "a",
                rules=[
                    _rule("plain", _EVERY),
                    _rule("plain too", _sql("color = 'red'")),
                    _rule("one", _EVERY, "SET number = 1"),
                    _rule("two", _sql("color = 'red'"), "SET number = 2"),
                    _rule("other", _sql("color = 'blue'"), "SET number = 3"),
                ],
            ),
        ),
    ),
    _scenario(
        "rule-default",
        "A new subscription has the rule $Default, for every message; without it none arrives, until there is a rule.",
        _topic(_A),
    ),
    _scenario(
        "rule-manager",
        "Rules of each kind are added, listed as they were added, removed, and decide what arrives from then on.",
        _topic(_A),
    ),
    _scenario(
        "rule-errors",
        "A rule's name that is there already, a missing rule and a wrong expression are the SDK's errors, the last "
        "with the place; the rules stay as they were.",
        _topic(_A),
    ),
)

_RULES = ("rule-default", "rule-manager", "rule-errors")


def _no_rules(reason: str) -> dict[str, str]:
    return dict.fromkeys(_RULES, reason)


_NO_RULE_MANAGER = "the SDK manages rules over HTTP only"
_JMS_MANAGEMENT = "needs the $management node, of which JMS knows nothing"

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "python-7.14.3": _no_rules(_NO_RULE_MANAGER),
    "python-7.15.0": _no_rules(_NO_RULE_MANAGER),
    "go": _no_rules(_NO_RULE_MANAGER),
    "jms": {
        "topic-batch": "JMS has no batches",
        "topic-schedule": _JMS_MANAGEMENT,
        "subscription-lock": _JMS_MANAGEMENT,
        "subscription-peek": _JMS_MANAGEMENT,
        **_no_rules(_JMS_MANAGEMENT),
    },
    "proton": {"topic-batch": "the library cannot set the message format"},
}

_GENERAL_ERROR = "as the SDK's general error, which names the condition"
_NO_ANNOTATIONS = "without annotations, which JMS does not show"

_PYTHON_NOTES = {
    "topic-not-allowed": _GENERAL_ERROR,
    "unknown-topic": "as its authentication error, which it makes of every token that is refused",
}

NOTES: dict[str, dict[str, str]] = {
    "python-7.14.3": _PYTHON_NOTES,
    "python-7.15.0": _PYTHON_NOTES,
    "javascript": {"topic-not-allowed": _GENERAL_ERROR, "rule-errors": _GENERAL_ERROR + ", for a wrong expression"},
    "java": {
        "topic-schedule": "the SDK shows not-found as success",
        "subscription-defer": "the SDK shows not-found as an empty answer",
        "rule-manager": "the SDK lists values of a correlation filter as texts",
    },
    "dotnet": {"topic-not-allowed": "an empty answer, since the SDK does not tell of the end of a receiver's link"},
    "jms": {
        "topic-publish": _NO_ANNOTATIONS,
        "subscription-defer": "without receiving it by number",
        "subscription-dead-letter": "without reason and description, which JMS cannot give",
        "sql-filter": "without message ids, which the library makes itself",
        "rule-copies": _NO_ANNOTATIONS,
    },
}
