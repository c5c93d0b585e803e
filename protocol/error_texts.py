"""Texts of errors as clients know them: a sentence, then ids that identify the occurrence in the logs.

Some SDKs decide by these texts. Java and JavaScript take `amqp:not-found` for a missing entity only if the text has
"The messaging entity '...' could not be found".
"""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from uuid import UUID

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def entity_tracker(namespace: str, name: str, kind: str = "Queue") -> str:
    """The system tracker of an entity. `kind` is Queue, Topic or Subscription."""
    return f"{namespace}:{kind}:{name}"


def tracked(
    text: str,
    tracking_id: UUID,
    now_ms: int,
    system_tracker: str = "NoSystemTracker",
    gateway: int = 0,
    partition: int = 0,
) -> str:
    """`text` with tracking id (G: gateway, B: backend, our partition), system tracker, and the time, UTC."""
    time = (_EPOCH + timedelta(milliseconds=now_ms)).strftime("%Y-%m-%dT%H:%M:%S")
    return f"{text} TrackingId:{tracking_id}_G{gateway}_B{partition}, SystemTracker:{system_tracker}, Timestamp:{time}"


def too_many(what: str, limit: int, of: str) -> str:
    return f"{what} may have {limit} {of}, and has them."


def rule_exists(name: str, subscription: str) -> str:
    return f"The messaging entity '{subscription}/Rules/{name}' already exists."


def rule_not_found(name: str, subscription: str) -> str:
    """A rule counts as an entity: by this text SDKs know that it does not exist."""
    return f"The messaging entity '{subscription}/Rules/{name}' could not be found."


# --- on attach --------------------------------------------------------------------------------------------------------


def entity_not_found(namespace: str, name: str, kind: str = "Queue") -> str:
    return (
        f"The messaging entity '{namespace}:{kind.lower()}:{name}' could not be found. "
        "To know more visit https://aka.ms/sbResourceMgrExceptions."
    )


def resource_not_found(uri: str) -> str:
    """The text for a token whose entity does not exist: as on attach, with the name in the client's audience."""
    return (
        f"The messaging entity '{uri}' could not be found. To know more visit https://aka.ms/sbResourceMgrExceptions."
    )


def token_expired(expires_s: float) -> str:
    """`expires_s` is Unix seconds. Some clients look for these words."""
    time = (_EPOCH + timedelta(seconds=int(expires_s))).strftime("%Y-%m-%d %H:%M:%SZ")
    return f"The token is expired. Expiration time: '{time}'."


def cbs_link_exists(connection: str) -> str:
    return f"A link to connection '{connection}' $cbs node has already been opened."


def entity_disabled(name: str, status: str) -> str:
    """`status` is Disabled, SendDisabled or ReceiveDisabled."""
    return f"The messaging entity '{name}' is not enabled for this operation: its status is {status}."


def receive_disabled(name: str) -> str:
    return f"Messaging entity '{name}' is currently disabled for receiving."


def send_disabled(name: str) -> str:
    return f"Messaging entity '{name}' is currently disabled for sending."


def other_kind_of_entity(name: str, kind: str, asked: str) -> str:
    return f"'{name}' is a {kind}, and the link asks for a {asked}."


def receiver_on_topic(name: str) -> str:
    return f"A topic has no messages to receive: attach to one of the subscriptions of '{name}'."


def subscription_to_make(topic: str, name: str) -> str:
    return (
        f"Unauthorized access. The topic '{topic}' has no subscription '{name[:100]}', and to make one for this link "
        "needs the right Manage on the topic."
    )


def subscription_to_end(path: str) -> str:
    return f"Unauthorized access. To end the subscription '{path}' needs the right Manage on its topic."


def no_subscription_to_end(name: str, client_id: str) -> str:
    of = f"the client id '{client_id[:100]}'" if client_id else "clients without an id"
    return (
        f"The link names no entity. If it is to end a subscription: no topic has a subscription '{name[:100]}' of "
        f"{of}, or just '{name[:100]}'."
    )


def subscriptions_of_one_name(name: str, paths: Sequence[str]) -> str:
    return (
        f"Several topics have a subscription '{name[:100]}' ({', '.join(sorted(paths)[:5])}), and none was made for "
        "this client: delete the one that is meant by the administration API."
    )


TEMPORARY_TO_MAKE = (
    "Unauthorized access. To make a temporary queue or topic (a dynamic address) needs the right Manage on the "
    "namespace."
)


def temporary_of_another(name: str) -> str:
    return f"'{name}' is temporary, and only the connection that it was made for may receive from it."


def too_many_temporary(most: int) -> str:
    return (
        f"The connection has {most} temporary queues and topics and subscriptions that are not durable, as many as the "
        "setting amqp.max_temporary_entities_per_connection allows."
    )


def receiver_on_forwarding(name: str, to: str) -> str:
    return (
        f"Cannot create a message receiver on an entity with auto-forwarding enabled: '{name}' forwards to '{to}'. "
        "Receive from there."
    )


def sender_on_subscription(name: str) -> str:
    return f"A subscription cannot be sent to: send to the topic of '{name}'."


SESSION_RECEIVER_REQUIRED = (
    "It is not possible for an entity that requires sessions to create a non-sessionful message receiver."
)

SESSION_RECEIVER_NOT_SUPPORTED = (
    "A sessionful message receiver cannot be created on an entity that does not require sessions. "
    "Ensure RequiresSession is set to true when creating a Queue or Subscription to enable sessionful behavior."
)


def session_cannot_be_locked(session_id: str) -> str:
    return (
        f"The requested session '{session_id}' cannot be accepted. It may be locked by another receiver. "
        "For more information please see https://aka.ms/ServiceBusExceptions ."
    )


def timed_out(wait_ms: int) -> str:
    """No session became available in this time."""
    return (
        f"The operation did not complete within the allotted timeout of {_duration(wait_ms)}. "
        "The time allotted to this operation may have been a portion of a longer timeout. For more information on "
        "exception types and proper exception handling, please refer to https://aka.ms/ServiceBusExceptions"
    )


def _duration(ms: int) -> str:
    """The form of .NET: [days.]hours:minutes:seconds[.fraction]"""
    seconds, ms = divmod(ms, 1000)
    days, seconds = divmod(seconds, 86_400)
    text = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
    return f"{f'{days}.' if days else ''}{text}{f'.{ms:03}0000' if ms else ''}"


def claim_required(right: str, resource: str) -> str:
    """`right` is Send, Listen or Manage; `resource` a URI such as sb://host/entity."""
    return f"Unauthorized access. '{right}' claim(s) are required to perform this operation. Resource: '{resource}'."


# --- on sending -------------------------------------------------------------------------------------------------------


def message_too_large(delivery_id: int, size_bytes: int, limit_bytes: int) -> str:
    return (
        f"The received message (delivery-id:{delivery_id}, size:{size_bytes} bytes) exceeds the limit "
        f"({limit_bytes} bytes) currently allowed on the link."
    )


def empty_batch(container: str, link: str, number: int) -> str:
    """SDKs show it to their users, as a link that was detached with amqp:not-allowed: an invalid operation."""
    return (
        f"The link '{container}:{link}' is force detached by the broker because publisher(link{number}) received a "
        "batch message with no data in it. Detach origin: Publisher."
    )


def session_id_missing(name: str) -> str:
    return (
        f"The message has no session id, and the messaging entity '{name}' requires sessions: "
        "set the session id (group-id) of the message."
    )


SESSION_ID_NOT_SET = (
    "The SessionId was not set on a message, and it cannot be sent to the entity. Entities that have session support "
    "enabled can only receive messages that have the SessionId set to a valid value."
)

SEVERAL_PARTITION_KEYS = (
    "The messages of a batch or transaction have different partition keys. On a partitioned entity all of them need "
    "the same session id, or else the same partition key."
)

SEVERAL_ENTITIES = (
    "Local transactions cannot span multiple entities or partitions. To send to other entities, use a client with "
    "EnableCrossEntityTransactions, or a link to the first entity that names its destination "
    "(com.microsoft:transfer-destination-address)."
)

SEVERAL_TOP_LEVEL_ENTITIES = "Local transactions cannot span multiple top-level entities such as queue or topic."

TRANSACTION_UNKNOWN = "Transaction hasn't been declared yet, or has already been discharged"


def transaction_timed_out(transaction_id: bytes, time_out_ms: int) -> str:
    return (
        f"No active Transaction was found for ID 'txn:{transaction_id.hex()}'. The Transaction may have timed out or "
        "attempted to span multiple top-level entities such as Queue or Topic. The server Transaction timeout is: "
        f"{_duration(time_out_ms)}."
    )


PARTITION_KEY_MISSING = (
    "A message that is sent to a partitioned entity in a transaction needs a partition key: set its session id or its "
    "partition key."
)

SERVER_BUSY = (
    "The request was terminated because the entity is being throttled. Error code : 50009. "
    "Please wait 2 seconds and try again."
)

_AWAY = "away or does not answer now. Please wait 2 seconds and try again."


def partition_away(partition: int) -> str:
    return f"Partition {partition} is {_AWAY}"


def fragment_away(name: str, partition: int) -> str:
    """The text for messages whose key is that of this fragment of the entity."""
    return f"The fragment of '{name}' on partition {partition} is {_AWAY}"


def fragments_away(name: str) -> str:
    return f"Every fragment of '{name}' is {_AWAY}"


OUTCOME_UNKNOWN = (
    "The partition ended before it answered, so it is not known whether the operation was done. Please try again."
)


# --- on settling ------------------------------------------------------------------------------------------------------

LOCK_LOST = (
    "The lock supplied is invalid. Either the lock expired, or the message has already been removed from the queue."
)


def invalid_filter_type(link_name: str) -> str:
    """.NET's SDK knows by this, from the last quote on, that sessions which are not exclusive are not offered."""
    text = "contains invalid filter type. System only support Jms or Apache selector filter type."
    return f"The link '{link_name}' {text}"


SESSION_LOCK_LOST = "The session lock has expired on the MessageSession. Accept a new MessageSession."


UNFINISHED_TOO_MUCH = "Too many large messages are being sent at once. Send this one again."
