"""The scenarios every SDK runs, in one table; and which SDK cannot run which, with the reason.

Those on topics are in `topic_scenarios.py`, those on sessions in `session_scenarios.py`, those of administration
clients in `administration_scenarios.py`, those on corners that the SDKs' own tests look into in `corner_scenarios.py`,
and those on what only partitioned entities have in `partitioned_scenarios.py`, which also says which of the others do
not hold there. What a program does for an id is the sentence here in its SDK's own words: a program asserts values, not
only that nothing was raised.
"""

from collections.abc import Iterable

from tests.interop import (
    administration_scenarios,
    corner_scenarios,
    partitioned_scenarios,
    session_scenarios,
    topic_scenarios,
)
from tests.interop.scenario import Scenario

SHORT_LOCK = {"lock_duration_ms": 5_000}

QUEUE_SCENARIOS = (
    Scenario(
        "send-complete",
        "A message sent is received under a lock, and gone once completed.",
        ("ST1", "ST5", "ST8"),
    ),
    Scenario(
        "properties",
        "Message id, subject, correlation id and the other standard properties arrive as sent; sequence number, "
        "enqueued time and lock end are there.",
        ("ST15",),
    ),
    Scenario(
        "application-properties",
        "Application properties arrive with the types the SDK can send.",
        (),
    ),
    Scenario(
        "bodies",
        "Binary, empty, value and sequence bodies arrive as sent.",
        (),
    ),
    Scenario(
        "batch",
        "A batch of 100 is stored in order with consecutive sequence numbers.",
        ("ST1",),
    ),
    Scenario(
        "large-message",
        "A message of 900 KiB arrives unchanged.",
        (),
    ),
    Scenario(
        "pipelined",
        "2,000 messages, many in flight at once, each arrive once and can all be completed.",
        ("ST1", "ST2"),
    ),
    Scenario(
        "presettled-send",
        "Messages sent settled are stored without an answer.",
        ("ST3",),
    ),
    Scenario(
        "receive-and-delete",
        "What was received so is gone without a settlement.",
        ("ST4",),
    ),
    Scenario(
        "abandon",
        "An abandoned message comes again at once, before the next one, with the same id and one delivery more.",
        ("ST6", "ST9", "ST15"),
    ),
    Scenario(
        "abandon-properties",
        "Properties set while abandoning are on the message when it comes again.",
        ("ST9",),
    ),
    Scenario(
        "defer",
        "A deferred message is delivered no more, is received by its number, completed, and then not found.",
        ("ST11",),
    ),
    Scenario(
        "dead-letter",
        "A dead-lettered message is in the dead-letter queue with reason, description and properties.",
        ("ST10", "DL1", "DL4"),
    ),
    Scenario(
        "dead-letter-queue",
        "The dead-letter queue is received from, abandoned in and completed in like any; abandoning counts no "
        "delivery, and time to live ends nothing in it.",
        ("DL2", "DL3"),
    ),
    Scenario(
        "max-delivery-count",
        "A message abandoned as often as allowed is dead-lettered as MaxDeliveryCountExceeded.",
        ("ST7", "DL4", "DL5"),
        {"max_delivery_count": 2},
    ),
    Scenario(
        "lock-expiry",
        "A message nobody settles comes again after its lock, with one delivery more.",
        ("ST5", "ST6", "ST9"),
        SHORT_LOCK,
    ),
    Scenario(
        "renew-lock",
        "A renewed lock lasts longer: the message is completed after its first lock would have ended.",
        ("ST14",),
        SHORT_LOCK,
    ),
    Scenario(
        "auto-renew",
        "The SDK's own renewer keeps the lock while a message is worked on.",
        ("ST14",),
        SHORT_LOCK,
    ),
    Scenario(
        "auto-renew-many",
        "The SDK's own renewer keeps the locks of 300 messages at once, by threads and by tasks where it has both.",
        ("ST14",),
        {"lock_duration_ms": 45_000},
    ),
    Scenario(
        "send-again",
        "A received message can be sent again as the SDK gives it, and arrives with what it had.",
        (),
    ),
    Scenario(
        "lock-lost",
        "Settling after the lock ended fails with the SDK's lock-lost error, and the message comes again.",
        ("ST12",),
        SHORT_LOCK,
    ),
    Scenario(
        "peek",
        "Browsing shows messages in order, from a sequence number on too, and locks none; of a locked one it shows "
        "until when.",
        ("ST5",),
    ),
    Scenario(
        "browse",
        "A link that asks for copies shows all messages, in order, as often as it is asked, also from the dead-letter "
        "queue, and settled by either side; receivers get all of them afterwards, as never delivered.",
        ("ST5",),
    ),
    Scenario(
        "selector",
        "A receiver with a selector of JMS gets what it selects by properties and headers, and a browser with one "
        "shows that; the rest stays for others, as never delivered. A wrong selector is the library's error.",
        (),
    ),
    Scenario(
        "schedule",
        "A scheduled message can be browsed, arrives at its time and not before.",
        (),
    ),
    Scenario(
        "cancel-scheduled",
        "Of two scheduled messages only the one not cancelled arrives; a second cancel is an error.",
        (),
    ),
    Scenario(
        "time-to-live",
        "An expired message is not delivered.",
        ("DL6",),
    ),
    Scenario(
        "time-to-live-dead-letter",
        "Where the queue says so an expired message is dead-lettered as TTLExpiredException.",
        ("DL4", "DL6"),
        {"dead_lettering_on_message_expiration": True},
    ),
    Scenario(
        "settle-elsewhere",
        "A message received on a link now closed is settled by its lock token on another.",
        ("ST8",),
    ),
    Scenario(
        "prompt-return",
        "Receiving returns in time: empty from an empty queue, and with fewer than asked; "
        "credit left over loses nothing.",
        (),
    ),
    Scenario(
        "prefetch",
        "With prefetch all messages arrive once, in order, and can be completed.",
        (),
    ),
    Scenario(
        "push-receive",
        "The SDK's handler or iterator receives and completes messages as they are sent.",
        (),
    ),
    Scenario(
        "competing",
        "Three receivers of one queue get disjoint sets that make the whole.",
        ("ST5",),
    ),
    Scenario(
        "connection-reuse",
        "Senders and receivers opened, closed and opened again on one client all work.",
        (),
    ),
    Scenario(
        "close-unsettled",
        "A message held by a receiver that closes is there for the next one, with one delivery more.",
        ("ST6", "ST9"),
        SHORT_LOCK,
    ),
    Scenario(
        "connection-lost",
        "A process killed while it holds a message loses the lock: the next gets it at once, with one delivery more.",
        ("ST12",),
        {"lock_duration_ms": 300_000},
    ),
    Scenario(
        "batch-delete",
        "Messages are deleted in bulk by number or until the queue is empty.",
        (),
    ),
    Scenario(
        "unknown-queue",
        "A queue that does not exist is the SDK's not-found error, at once.",
        ("ST1",),
        None,
    ),
    Scenario(
        "wrong-key",
        "A wrong key is the SDK's authentication error.",
        (),
    ),
    Scenario(
        "signature",
        "A connection string with a signature for the bare host, in place of the key, is as good as the key.",
        (),
    ),
    Scenario(
        "missing-right",
        "A key that may only listen cannot send, and one that may only send cannot receive: "
        "the SDK's unauthorized error.",
        (),
    ),
    Scenario(
        "oversized",
        "A message above the queue's limit is the SDK's size error; the next, small enough, is stored.",
        ("ST1",),
        {"max_message_size_kb": 64},
    ),
    Scenario(
        "disabled",
        "A disabled queue is the SDK's entity-disabled error for senders and receivers.",
        (),
        {"status": "Disabled"},
    ),
    Scenario(
        "send-disabled",
        "A queue disabled for sending refuses senders with the SDK's entity-disabled error and can be received from.",
        (),
        {"status": "SendDisabled"},
    ),
    Scenario(
        "receive-disabled",
        "A queue disabled for receiving refuses receivers with the SDK's entity-disabled error and can be sent to.",
        (),
        {"status": "ReceiveDisabled"},
    ),
    Scenario(
        "duplicates",
        "Of messages with the same id only the first is stored where the queue detects duplicates; the others are "
        "accepted all the same.",
        (),
        {"requires_duplicate_detection": True},
    ),
    Scenario(
        "transactions",
        "Sends and completes of a transaction are done at its commit and not before; rolled back, none of it was done.",
        ("PE8",),
    ),
    Scenario(
        "transactions-across",
        "Completing a message of one queue and sending to queues on other partitions is one transaction: at its commit "
        "all of it is done; rolled back, nothing.",
        (),
        others=3,
    ),
)

SCENARIOS = (
    *QUEUE_SCENARIOS,
    *topic_scenarios.SCENARIOS,
    *session_scenarios.SCENARIOS,
    *administration_scenarios.SCENARIOS,
    *partitioned_scenarios.SCENARIOS,
    *corner_scenarios.SCENARIOS,
)

_NO_PRESETTLED = "the SDK always waits for the outcome"
_NO_BULK = "the SDK has no call for it"

_TRANSACTIONS = ("transactions", "transactions-across")
_NO_TRANSACTIONS = dict.fromkeys(_TRANSACTIONS, "the SDK has no transactions")

_NO_SUCH_LINKS = {
    "browse": "the SDK browses by requests, as peek shows",
    "selector": "the SDK has no selectors; Service Bus has rules of subscriptions",
}

_PYTHON = {
    **_NO_TRANSACTIONS,
    **_NO_SUCH_LINKS,
    "abandon-properties": "abandon_message takes none",
    "settle-elsewhere": "the SDK settles only through the receiver a message came from",
    "presettled-send": _NO_PRESETTLED,
    "batch-delete": _NO_BULK,
}

_NO_TOKENS = "the program gives name and key to SASL; no token is put"
_RENEWERS = ("auto-renew", "auto-renew-many")
_JMS_MANAGEMENT = "needs the $management node, of which JMS knows nothing"

_NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "python-7.14.3": _PYTHON,
    "python-7.15.0": _PYTHON,
    "javascript": {
        **_NO_TRANSACTIONS,
        **_NO_SUCH_LINKS,
        "presettled-send": _NO_PRESETTLED,
        "batch-delete": _NO_BULK,
    },
    "go": {
        **_NO_TRANSACTIONS,
        **_NO_SUCH_LINKS,
        **dict.fromkeys(_RENEWERS, "the SDK has no renewer; renew-lock shows the call"),
        "push-receive": "the SDK has neither handler nor iterator",
        "presettled-send": _NO_PRESETTLED,
        "batch-delete": _NO_BULK,
    },
    "java": {
        **_NO_SUCH_LINKS,
        "presettled-send": _NO_PRESETTLED,
        "batch-delete": _NO_BULK,
    },
    "dotnet": {
        **_NO_SUCH_LINKS,
        "presettled-send": _NO_PRESETTLED,
        "batch-delete": _NO_BULK,
    },
    "jms": {
        "signature": _NO_TOKENS,
        "duplicates": "JMS makes the message ids itself",
        "batch": "JMS has no batches",
        "abandon-properties": "JMS sets no properties while settling",
        "dead-letter-queue": "JMS cannot abandon and peek one message of it; dead-letter receives from it",
        "renew-lock": _JMS_MANAGEMENT,
        **dict.fromkeys(_RENEWERS, _JMS_MANAGEMENT),
        "lock-lost": "JMS settles without waiting for an answer",
        "peek": _JMS_MANAGEMENT,
        "schedule": _JMS_MANAGEMENT,
        "cancel-scheduled": _JMS_MANAGEMENT,
        "settle-elsewhere": _JMS_MANAGEMENT,
        "batch-delete": _JMS_MANAGEMENT,
    },
    "rhea": {
        **dict.fromkeys(_TRANSACTIONS, "the library has no transactions"),
        **dict.fromkeys(_RENEWERS, "the library has no renewer; renew-lock shows the request"),
        "signature": _NO_TOKENS,
    },
    "amqpnetlite": {
        "signature": _NO_TOKENS,
        **dict.fromkeys(_RENEWERS, "the library has no renewer; renew-lock shows the request"),
    },
    "proton": {
        "signature": _NO_TOKENS,
        "batch": "the library cannot set the message format",
        **dict.fromkeys(_RENEWERS, "the library has no renewer; renew-lock shows the request"),
    },
}

_PYTHON_NOTES = {
    "lock-lost": "the SDK refuses to complete by its own clock; the broker is asked by renewing",
    "pipelined": "in batches, since the SDK waits for each send",
    "unknown-queue": "as its authentication error, which it makes of every token that is refused",
}


def _merged(sdk: str, tables: Iterable[dict[str, dict[str, str]]]) -> dict[str, str]:
    return {scenario: text for table in tables for scenario, text in table.get(sdk, {}).items()}


_WITHOUT = (
    _NOT_APPLICABLE,
    topic_scenarios.NOT_APPLICABLE,
    session_scenarios.NOT_APPLICABLE,
    administration_scenarios.NOT_APPLICABLE,
    partitioned_scenarios.NOT_APPLICABLE,
    corner_scenarios.NOT_APPLICABLE,
)
NOT_APPLICABLE = {sdk: _merged(sdk, _WITHOUT) for sdk in _NOT_APPLICABLE}

# Where a scenario passes with less, or otherwise, than its sentence says.
_NOTES: dict[str, dict[str, str]] = {
    "python-7.14.3": _PYTHON_NOTES,
    "python-7.15.0": _PYTHON_NOTES,
    "javascript": {"prefetch": "the SDK prefetches only for a handler, as many as it may work on at once"},
    "go": {"prefetch": "the SDK has none; all are asked for at once"},
    "java": {
        "defer": "the SDK shows not-found as an empty answer",
        "cancel-scheduled": "the SDK shows not-found as success",
    },
    "dotnet": {
        "auto-renew": "with a processor; receivers have no renewer",
        "auto-renew-many": "with a processor; receivers have no renewer",
    },
    "amqpnetlite": {"lock-lost": "settled by a request, since the library waits for no answer to a settlement"},
    "jms": {
        "properties": "without annotations, which JMS does not show",
        "defer": "without receiving it by number",
        "dead-letter": "without reason and description, which JMS cannot give",
    },
}

_NOTED = (
    _NOTES,
    topic_scenarios.NOTES,
    session_scenarios.NOTES,
    administration_scenarios.NOTES,
    partitioned_scenarios.NOTES,
    corner_scenarios.NOTES,
)
NOTES = {sdk: _merged(sdk, _NOTED) for sdk in NOT_APPLICABLE}

SDKS = tuple(NOT_APPLICABLE)


def applicable(sdk: str, *, partitioned: bool) -> list[Scenario]:
    """What this SDK runs on the broker with plain entities, or on the one with partitioned ones."""
    others = partitioned_scenarios.NOT_PARTITIONED_WITH.get(sdk, {})
    without = {*NOT_APPLICABLE[sdk], *(others if partitioned else partitioned_scenarios.ONLY_PARTITIONED)}
    return [scenario for scenario in SCENARIOS if scenario.id not in without]
