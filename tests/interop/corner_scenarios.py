"""The scenarios on corners that the SDKs' own tests look into: counts, states, sizes, and what moves by itself."""

from collections.abc import Mapping

from tests.interop.scenario import ENTITY_PREFIX, Scenario

_FORWARDED = "expiry-forwarded"
_DELAY_S = 3  # what programs wait for


def _rule(name: str, filter_: Mapping[str, object], action: Mapping[str, object]) -> Mapping[str, object]:
    return {"name": name, "rules": [{"name": name, "filter": filter_, "action": action}]}


SCENARIOS = (
    Scenario(
        "deferral-count",
        "A deferral counts as a delivery, as each later deferral and abandon does; the one that reaches the limit "
        "dead-letters the message as MaxDeliveryCountExceeded.",
        ("ST11", "DL5"),
        {"max_delivery_count": 3},
    ),
    Scenario(
        "message-states",
        "A received message says whether it had been scheduled, is deferred or active; first-acquirer comes back as "
        "sent.",
        (),
    ),
    Scenario(
        "large-requests",
        "A message that may be sent may be scheduled, and is browsed; one beyond the limit is the SDK's size error, at "
        "once.",
        (),
        {"max_message_size_kb": 256},
    ),
    Scenario(
        "long-reason",
        "A message is dead-lettered with a reason of 40,000 characters, of which the first 4,096 are kept.",
        ("DL4",),
    ),
    Scenario("null-data", "Data that is null is stored and arrives, as null.", ()),
    Scenario(
        "empty-batch",
        "An empty batch is refused as not allowed, at once, and the next message is stored.",
        (),
    ),
    Scenario(
        _FORWARDED,
        "A message that expires where nobody receives, and where dead letters are forwarded, arrives there as "
        "TTLExpiredException.",
        ("DL4", "DL6"),
        {
            "default_message_time_to_live_ms": 1_000,
            "dead_lettering_on_message_expiration": True,
            "forward_dead_lettered_messages_to": f"{ENTITY_PREFIX}{_FORWARDED}-1",
        },
        others=1,
    ),
    Scenario(
        "rule-conversions",
        "A rule joins a text and a number, in its filter and its action, gives a number to a property that is a text, "
        "and a text to the time to live.",
        (),
        None,
        {
            "subscriptions": [
                _rule(
                    "a",
                    {"kind": "sql", "expression": "sys.Label = 'n-' + number"},
                    {
                        "expression": "SET sys.CorrelationId = number; SET joined = 'n-' + number; "
                        "SET sys.TimeToLive = '00:10:00'"
                    },
                )
            ]
        },
    ),
    Scenario(
        "action-delay",
        "An action that sets the enqueue time delays its copy, which says until when, and no other copy.",
        (),
        None,
        {
            "subscriptions": [
                _rule(
                    "later",
                    {"kind": "true"},
                    {
                        "expression": "SET sys.ScheduledEnqueueTimeUtc = sys.EnqueuedTimeUtc + @delay",
                        "parameters": {"@delay": {"type": "duration", "value": f"PT{_DELAY_S}S"}},
                    },
                ),
                {"name": "now"},
            ]
        },
    ),
    Scenario(
        "session-by-number",
        "A deferred message of a session is received by its number over a connection that does not hold the session, "
        "while another does.",
        ("ST11",),
        {"requires_session": True},
    ),
    Scenario(
        "session-pages",
        "Sessions are listed page by page, from where the answer says, or behind the last one; each comes once.",
        (),
        {"requires_session": True},
    ),
)

_JMS_MANAGEMENT = "needs the $management node, of which JMS knows nothing"
_NO_ANNOTATIONS = "JMS shows no annotations"
_NO_NULL = "the SDK cannot send null as data"
_BY_HOLDER = "the SDK asks only over the connection that holds the session"
_NO_LIST = "the SDK does not list sessions"
_SENDS_NONE = "the SDK does not send it"

_SDK = {"null-data": _NO_NULL, "session-by-number": _BY_HOLDER, "session-pages": _NO_LIST}

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "python-7.14.3": {**_SDK, "empty-batch": _SENDS_NONE},
    "python-7.15.0": {**_SDK, "empty-batch": _SENDS_NONE},
    "javascript": _SDK,
    "go": {**_SDK, "empty-batch": _SENDS_NONE},
    "java": {**_SDK, "empty-batch": _SENDS_NONE},
    "dotnet": {**_SDK, "empty-batch": _SENDS_NONE},
    "jms": {
        "deferral-count": _JMS_MANAGEMENT,
        "message-states": _NO_ANNOTATIONS,
        "large-requests": _JMS_MANAGEMENT,
        "long-reason": "JMS cannot give a reason",
        "null-data": "JMS cannot send null as data",
        "empty-batch": "JMS has no batches",
        "session-by-number": _JMS_MANAGEMENT,
        "session-pages": _JMS_MANAGEMENT,
    },
    "rhea": {},
    "amqpnetlite": {
        "null-data": "the library cannot send null as data",
        "empty-batch": "the library cannot send a message without a body",
    },
    "proton": {
        "empty-batch": "the library cannot set the message format",
    },
}

NOTES: dict[str, dict[str, str]] = {
    "javascript": {"empty-batch": "as its time-out error, since the SDK does not hear that the link has ended"},
    "java": {"message-states": "with first-acquirer only where it is true, since the SDK shows no value for false"},
    "dotnet": {"long-reason": "as a property, since the SDK refuses such a reason"},
    "jms": {"action-delay": "without annotations, which JMS does not show"},
}
