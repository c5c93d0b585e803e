"""All scenarios on partitioned entities, with two gateways: which do not hold there, and what only these entities have.

Beside the scenarios of its own, this has tables about the others: those whose messages need a partition key, and those
that run on plain entities there, too, or not at all, with the reason.
"""

from collections.abc import Mapping

from tests.interop.scenario import Scenario

# These depend on the order of messages, which is kept within a key, or are transactions. On partitioned entities the
# programs give all messages of one of them the same key. The messages of all others have none, so they are on all
# fragments.
KEYED = frozenset(
    {
        "abandon",
        "bodies",
        "browse",
        "peek",
        "prefetch",
        "presettled-send",
        "push-receive",
        "receive-and-delete",
        "subscription-peek",
        "subscription-receive-and-delete",
        "topic-publish",
        "transactions",
        "transactions-across",
    }
)

# These have plain entities there, too.
PLAIN = {
    "batch-delete": "the cloud does not delete in bulk from partitioned entities",
    "session-next": "sessions of different fragments come in any order; partitioned-sessions shows what holds",
}

_LARGE_NUMBERS = "not on partitioned entities: the SDK cannot send their sequence numbers, which need 64 bits, again"

# Not on the second broker with this SDK.
NOT_PARTITIONED_WITH: dict[str, dict[str, str]] = {
    "python-7.14.3": {"send-again": _LARGE_NUMBERS},
    "python-7.15.0": {"send-again": _LARGE_NUMBERS},
}


def _scenario(id_: str, sentence: str, *seeds: str, queue: Mapping[str, object] | None = None) -> Scenario:
    return Scenario(id_, sentence, seeds, {} if queue is None else queue)


SCENARIOS = (
    _scenario(
        "partitioned-spread",
        "Messages without a key are on several partitions, which their sequence numbers name, and arrive once each; "
        "browsing shows all of them in the order of these numbers, from any of them on.",
        "PE4",
        "PE6",
        "PE11",
        "PE12",
    ),
    _scenario(
        "partitioned-keys",
        "Messages of eight partition keys, sent in turns, arrive in order within each key, and those of one key are on "
        "one partition; a batch with two keys is refused as not allowed, and nothing of it is stored.",
        "PE4",
        "PE5",
    ),
    _scenario(
        "partitioned-key-mismatch",
        "A message whose partition key differs from its session id is refused; the next, where they are equal, is "
        "stored.",
        "PE5",
    ),
    _scenario(
        "partitioned-numbers",
        "Deferred messages of several partitions are received by their numbers in one call; of messages scheduled on "
        "several partitions those cancelled by number do not arrive, the others do.",
        "PE6",
    ),
    _scenario(
        "partitioned-duplicates",
        "Where duplicates are detected, a message id is known for each partition key by itself, and without a key "
        "wherever the message was sent.",
        "PE5",
        queue={"requires_duplicate_detection": True},
    ),
    _scenario(
        "partitioned-sessions",
        "Sessions on all partitions are accepted as the next available ones, each once, with their messages in order "
        "and a state; one that has messages later is waited for.",
        "PE2",
        "PE5",
        queue={"requires_session": True},
    ),
    Scenario(
        "partitioned-topic",
        "Messages published without a key are in each subscription that wants them, once, and on several partitions.",
        ("PE2", "PE4"),
        queue=None,
        topic={
            "subscriptions": [
                {"name": "a"},
                {
                    "name": "some",
                    "rules": [{"name": "large", "filter": {"kind": "sql", "expression": "number > 9"}}],
                },
            ]
        },
    ),
    _scenario(
        "partitioned-transactions",
        "In a transaction a message without a key, or with another key than those before, is refused, and the "
        "transaction cannot be committed; one whose messages have one key can.",
        "PE8",
    ),
    _scenario(
        "partitioned-annotations",
        "A message says which partition it is on, and by which key that was chosen: its own or, where duplicates are "
        "detected, its message id.",
        "PE5",
        "PE6",
        queue={"requires_duplicate_detection": True},
    ),
)
ONLY_PARTITIONED = frozenset(scenario.id for scenario in SCENARIOS)

_NO_TRANSACTIONS = {"partitioned-transactions": "the SDK has no transactions"}
_JMS_MANAGEMENT = "needs the $management node, of which JMS knows nothing"

NOT_APPLICABLE: dict[str, dict[str, str]] = {
    "python-7.14.3": _NO_TRANSACTIONS,
    "python-7.15.0": _NO_TRANSACTIONS,
    "javascript": _NO_TRANSACTIONS,
    "go": _NO_TRANSACTIONS,
    "rhea": {"partitioned-transactions": "the library has no transactions"},
    "jms": {
        "partitioned-key-mismatch": "JMS has no partition keys but session ids",
        "partitioned-numbers": _JMS_MANAGEMENT,
        "partitioned-duplicates": "JMS makes the message ids itself",
        "partitioned-sessions": "JMS cannot ask for a session",
        "partitioned-annotations": "JMS shows no annotations",
    },
}

_CHECKED_BY_SDK = "by the SDK itself, which does not send it"
_NOT_TOLD = "the SDK does not tell of the refusal; the commit fails"

NOTES: dict[str, dict[str, str]] = {
    "python-7.14.3": {"partitioned-key-mismatch": _CHECKED_BY_SDK},
    "python-7.15.0": {"partitioned-key-mismatch": _CHECKED_BY_SDK},
    "javascript": {"partitioned-key-mismatch": _CHECKED_BY_SDK},
    "java": {"partitioned-key-mismatch": _CHECKED_BY_SDK, "partitioned-transactions": _NOT_TOLD},
    "dotnet": {"partitioned-key-mismatch": _CHECKED_BY_SDK},
    "jms": {
        "partitioned-spread": "without browsing and without sequence numbers, which JMS does not show",
        "partitioned-keys": "with session ids as keys, and without a batch and sequence numbers",
        "partitioned-topic": "without sequence numbers, which JMS does not show",
    },
    "proton": {"partitioned-keys": "without a batch, whose format the library cannot set"},
}
