"""The scenarios on sessions. Where one needs other sessions beside "a", programs name them "b", "c" and so on."""

from collections.abc import Mapping

from tests.interop.scenario import Scenario

_SESSIONS: Mapping[str, object] = {"requires_session": True}
_SHORT_LOCK: Mapping[str, object] = {"requires_session": True, "lock_duration_ms": 5_000}


def _scenario(id_: str, sentence: str, queue: Mapping[str, object] = _SESSIONS) -> Scenario:
    return Scenario(id_, sentence, (), queue)


SCENARIOS = (
    _scenario(
        "session-accept",
        "A session accepted by its name is locked as long as the queue says and gives its messages in order, with its "
        "id, and none of another session.",
        {**_SESSIONS, "lock_duration_ms": 60_000},
    ),
    _scenario(
        "session-next",
        "Accepting any session gives the one that has had messages for the longest and that nobody has, and waits "
        "until there is one.",
    ),
    _scenario(
        "session-timeout",
        "Accepting any session where there is none ends with the SDK's time-out error when the time is up.",
    ),
    _scenario(
        "session-taken",
        "A session that somebody has is refused with the SDK's session-cannot-be-locked error, at once; others can be "
        "accepted.",
    ),
    _scenario(
        "session-close",
        "Closing a receiver gives its session to the next at once; a message it held comes again and counts no "
        "delivery.",
    ),
    _scenario(
        "session-connection-lost",
        "A process killed while it holds a session loses it: the next gets it at once, the message with one delivery "
        "more.",
    ),
    _scenario(
        "session-renew",
        "Renewing moves the end of the session's lock: a message is completed after the first lock would have ended.",
        _SHORT_LOCK,
    ),
    _scenario(
        "session-auto-renew",
        "The SDK's own renewer keeps the session while a message is worked on.",
        _SHORT_LOCK,
    ),
    _scenario(
        "session-lock-lost",
        "After the session's lock has ended settling, renewing and the state fail with the SDK's session-lock-lost "
        "error; the message comes to the next receiver with one delivery more.",
        _SHORT_LOCK,
    ),
    _scenario(
        "session-state",
        "A state is set, read, replaced, and cleared by nothing or by an empty one; it outlives the receiver and the "
        "messages, and alone does not make the session available.",
    ),
    _scenario(
        "session-state-limit",
        "A state above the queue's limit is refused with an error, and the one before stays.",
        {**_SESSIONS, "max_message_size_kb": 64},
    ),
    _scenario(
        "session-abandon",
        "An abandoned message comes again before the next of its session, with one delivery more.",
    ),
    _scenario(
        "session-defer",
        "A deferred message is delivered no more, is received by its number in its session, and completed.",
    ),
    _scenario(
        "session-dead-letter",
        "A message dead-lettered in a session is read from the dead-letter queue by an ordinary receiver, with its "
        "session id.",
    ),
    _scenario(
        "session-schedule",
        "Of messages scheduled into a session the one cancelled does not arrive, the other at its time, and its "
        "session is available then.",
    ),
    _scenario(
        "session-peek",
        "Browsing in a session shows its messages in order, from a sequence number on too, and none of others.",
    ),
    _scenario(
        "session-receive-and-delete",
        "What was received so in a session is gone without a settlement.",
    ),
    _scenario(
        "session-wait",
        "A wait for messages of a session as long as its lock lasts ends quietly, though the lock ends before it.",
        _SHORT_LOCK,
    ),
    _scenario(
        "session-push",
        "The SDK's handler or iterator receives and completes the messages of a session as they are sent, in order.",
    ),
    _scenario(
        "session-processor",
        "The SDK's processor completes all messages of 10 sessions, some at a time, each session in order.",
    ),
    _scenario(
        "session-many",
        "A client that holds 20 sessions at once, one receiver each, receives and completes the messages of all, sent "
        "in turns, in order.",
    ),
    _scenario(
        "session-list",
        "Sessions with messages or a state are listed, more than one page of them, and those whose state was set "
        "after a time.",
    ),
    _scenario(
        "session-receiver-required",
        "A receiver without a session is refused as not allowed where sessions are required.",
    ),
    _scenario(
        "session-id-required",
        "A message without a session id is refused as not allowed where sessions are required, alone and in a batch; "
        "the next with one is stored.",
    ),
    _scenario(
        "session-not-required",
        "Accepting a session is refused as not allowed where there are none; a message with a session id is as any "
        "other there.",
        {},
    ),
    Scenario(
        "session-subscription",
        "Sessions of a subscription are accepted by name and as the next, have a state, and each has all messages "
        "published for it, in order; at the same time a session of the same name is accepted in another subscription.",
        (),
        queue=None,
        topic={"subscriptions": [{"name": "a", **_SESSIONS}, {"name": "b", **_SESSIONS}, {"name": "plain"}]},
    ),
    _scenario(
        "session-take-over",
        "Who names the lock token of a session that is not exclusive takes it over, settles what the other receiver "
        "was given, in a transaction, too, and receives what comes then; the other one has lost its lock. Without the "
        "token, or where it is exclusive, the session cannot be locked.",
    ),
)

_NO_PROCESSOR = "the SDK has no session processor"
_NO_LIST = "the SDK has no call for it"
_NO_PROCESSOR_IN_LIBRARY = "the library has no session processor"
_NO_RENEWER_IN_LIBRARY = "the library has no renewer; session-renew shows the request"
_NO_TAKE_OVER = "the SDK has no sessions that can be taken over"
_NO_TAKE_OVER_IN_LIBRARY = "the filter is of the SDK for .NET; tests/sessions has its frames"
_JMS = "JMS cannot ask for a session"
_JMS_CAN = {"session-receiver-required", "session-id-required"}
_LIBRARY = {
    "session-processor": _NO_PROCESSOR_IN_LIBRARY,
    "session-auto-renew": _NO_RENEWER_IN_LIBRARY,
    "session-take-over": _NO_TAKE_OVER_IN_LIBRARY,
}

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "python-7.14.3": {
        "session-processor": _NO_PROCESSOR,
        "session-list": _NO_LIST,
        "session-take-over": _NO_TAKE_OVER,
    },
    "python-7.15.0": {"session-processor": _NO_PROCESSOR, "session-take-over": _NO_TAKE_OVER},
    "javascript": {
        "session-processor": _NO_PROCESSOR,
        "session-list": _NO_LIST,
        "session-take-over": _NO_TAKE_OVER,
    },
    "go": {
        "session-take-over": _NO_TAKE_OVER,
        "session-processor": _NO_PROCESSOR,
        "session-auto-renew": "the SDK has no renewer; session-renew shows the call",
        "session-push": "the SDK has neither handler nor iterator",
    },
    "java": {"session-list": _NO_LIST, "session-take-over": _NO_TAKE_OVER},
    "dotnet": {"session-list": _NO_LIST},
    "jms": {scenario.id: _JMS for scenario in SCENARIOS if scenario.id not in _JMS_CAN},
    "rhea": _LIBRARY,
    "amqpnetlite": _LIBRARY,
    "proton": _LIBRARY,
}

_OWN_CONNECTIONS = "each receiver has a connection of its own"
_TOLD_BY_DETACH = "the SDK is told while it receives, and then says the same to all other calls"
_GENERAL_ERROR = "as the SDK's general error, which names the condition"
_PYTHON_NOTES = {
    "session-lock-lost": _TOLD_BY_DETACH,
    "session-many": _OWN_CONNECTIONS,
    "session-receiver-required": _GENERAL_ERROR,
    "session-id-required": _GENERAL_ERROR,
    "session-not-required": _GENERAL_ERROR,
}

NOTES: dict[str, dict[str, str]] = {
    "python-7.14.3": _PYTHON_NOTES,
    "python-7.15.0": _PYTHON_NOTES,
    "go": {
        "session-lock-lost": "without settling, which the SDK tries again for a minute",
        "session-timeout": "or with the context's end, when that is sooner than the broker's answer",
    },
    "dotnet": {"session-lock-lost": "as ObjectDisposedException, since 7.21.0"},
    "java": {"session-defer": "the SDK shows not-found as an empty answer"},
    "jms": dict.fromkeys(_JMS_CAN, "without receiving the message, since JMS cannot ask for a session"),
    "proton": {"session-id-required": "without a batch, whose format the library cannot set"},
    "javascript": {
        "session-state": "cleared by null, which the SDK stores as JSON",
        "session-receiver-required": _GENERAL_ERROR,
        "session-id-required": _GENERAL_ERROR,
        "session-not-required": _GENERAL_ERROR + "; by name as session-cannot-be-locked, as any refusal of one",
    },
}
