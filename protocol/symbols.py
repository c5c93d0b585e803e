"""The names that Service Bus gave to annotations, properties, filters and the like, and AMQP's numbers of types.

Error conditions are in `protocol.conditions`. Keys of annotations and of attach properties are symbols, and keys of
application properties are strings, which are different types on the wire.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import Final

from protocol.codec import Symbol


class Descriptor(IntEnum):
    """Descriptor codes of AMQP 1.0 (2.7, 2.8, 3.2, 3.4, 3.5, 4.5)."""

    OPEN = 0x10
    BEGIN = 0x11
    ATTACH = 0x12
    FLOW = 0x13
    TRANSFER = 0x14
    DISPOSITION = 0x15
    DETACH = 0x16
    END = 0x17
    CLOSE = 0x18
    ERROR = 0x1D
    RECEIVED = 0x23
    ACCEPTED = 0x24
    REJECTED = 0x25
    RELEASED = 0x26
    MODIFIED = 0x27
    SOURCE = 0x28
    TARGET = 0x29
    COORDINATOR = 0x30
    DECLARE = 0x31
    DISCHARGE = 0x32
    DECLARED = 0x33
    TRANSACTIONAL_STATE = 0x34
    SASL_MECHANISMS = 0x40
    SASL_INIT = 0x41
    SASL_CHALLENGE = 0x42
    SASL_RESPONSE = 0x43
    SASL_OUTCOME = 0x44
    HEADER = 0x70
    DELIVERY_ANNOTATIONS = 0x71
    MESSAGE_ANNOTATIONS = 0x72
    PROPERTIES = 0x73
    APPLICATION_PROPERTIES = 0x74
    DATA = 0x75
    AMQP_SEQUENCE = 0x76
    AMQP_VALUE = 0x77
    FOOTER = 0x78


# Descriptors may be spelled as symbols, too (1.5).
DESCRIPTOR_OF: Final[Mapping[str, Descriptor]] = {
    "amqp:open:list": Descriptor.OPEN,
    "amqp:begin:list": Descriptor.BEGIN,
    "amqp:attach:list": Descriptor.ATTACH,
    "amqp:flow:list": Descriptor.FLOW,
    "amqp:transfer:list": Descriptor.TRANSFER,
    "amqp:disposition:list": Descriptor.DISPOSITION,
    "amqp:detach:list": Descriptor.DETACH,
    "amqp:end:list": Descriptor.END,
    "amqp:close:list": Descriptor.CLOSE,
    "amqp:error:list": Descriptor.ERROR,
    "amqp:received:list": Descriptor.RECEIVED,
    "amqp:accepted:list": Descriptor.ACCEPTED,
    "amqp:rejected:list": Descriptor.REJECTED,
    "amqp:released:list": Descriptor.RELEASED,
    "amqp:modified:list": Descriptor.MODIFIED,
    "amqp:source:list": Descriptor.SOURCE,
    "amqp:target:list": Descriptor.TARGET,
    "amqp:coordinator:list": Descriptor.COORDINATOR,
    "amqp:declare:list": Descriptor.DECLARE,
    "amqp:discharge:list": Descriptor.DISCHARGE,
    "amqp:declared:list": Descriptor.DECLARED,
    "amqp:transactional-state:list": Descriptor.TRANSACTIONAL_STATE,
    "amqp:sasl-mechanisms:list": Descriptor.SASL_MECHANISMS,
    "amqp:sasl-init:list": Descriptor.SASL_INIT,
    "amqp:sasl-challenge:list": Descriptor.SASL_CHALLENGE,
    "amqp:sasl-response:list": Descriptor.SASL_RESPONSE,
    "amqp:sasl-outcome:list": Descriptor.SASL_OUTCOME,
    "amqp:header:list": Descriptor.HEADER,
    "amqp:delivery-annotations:map": Descriptor.DELIVERY_ANNOTATIONS,
    "amqp:message-annotations:map": Descriptor.MESSAGE_ANNOTATIONS,
    "amqp:properties:list": Descriptor.PROPERTIES,
    "amqp:application-properties:map": Descriptor.APPLICATION_PROPERTIES,
    "amqp:data:binary": Descriptor.DATA,
    "amqp:amqp-sequence:list": Descriptor.AMQP_SEQUENCE,
    "amqp:amqp-value:*": Descriptor.AMQP_VALUE,
    "amqp:footer:map": Descriptor.FOOTER,
}

AMQP_HEADER: Final = b"AMQP\x00\x01\x00\x00"  # the protocol header (2.2)
HEARTBEAT: Final = bytes.fromhex("0000000802000000")  # a frame without a body (2.4.5)

BATCH_FORMAT: Final = 0x80013700  # message-format of a transfer whose data sections are messages

# Message annotations
SEQUENCE_NUMBER: Final = Symbol("x-opt-sequence-number")  # long
ENQUEUED_TIME: Final = Symbol("x-opt-enqueued-time")  # timestamp
LOCKED_UNTIL: Final = Symbol("x-opt-locked-until")  # timestamp
ENQUEUE_SEQUENCE_NUMBER: Final = Symbol("x-opt-enqueue-sequence-number")  # long
PARTITION_KEY: Final = Symbol("x-opt-partition-key")  # string
VIA_PARTITION_KEY: Final = Symbol("x-opt-via-partition-key")  # string
SCHEDULED_ENQUEUE_TIME: Final = Symbol("x-opt-scheduled-enqueue-time")  # timestamp
DELIVERY_TIME: Final = Symbol("x-opt-delivery-time")  # long or timestamp, of clients of JMS
DEADLETTER_SOURCE: Final = Symbol("x-opt-deadletter-source")  # string
MESSAGE_STATE: Final = Symbol("x-opt-message-state")  # int: 0 active, 1 deferred, 2 scheduled
PARTITION_ID: Final = Symbol("x-opt-partition-id")  # short

# Delivery annotation of messages embedded in answers of $management
LOCK_TOKEN: Final = Symbol("x-opt-lock-token")  # uuid
# Never on the wire: the key under which a stored message has its sender's delivery annotations.
STORED_DELIVERY_ANNOTATIONS: Final = Symbol("x-opt-peeklock-delivery-annotations")
# Never on the wire: the key among those under which a stored message has the first-acquirer of its sender's header.
STORED_FIRST_ACQUIRER: Final = Symbol("x-opt-peeklock-first-acquirer")  # boolean

# Application properties of a dead-lettered message
DEAD_LETTER_REASON: Final = "DeadLetterReason"
DEAD_LETTER_ERROR_DESCRIPTION: Final = "DeadLetterErrorDescription"

# A property of a message that is abandoned, where `delivery.abandon_delays` is on: it is not stored, and the message is
# available again so many milliseconds later
DELAY: Final = "peeklock:delay-ms"

# Whether the request receive-by-sequence-number is for active messages, too: boolean
ACTIVE: Final = "peeklock:active"

# Capabilities of a connection that clients of JMS ask for
DELAYED_DELIVERY: Final = Symbol("DELAYED_DELIVERY")  # DELIVERY_TIME schedules
SHARED_SUBSCRIPTIONS: Final = Symbol("SHARED-SUBS")

# Capabilities of sources and targets, by which clients of JMS say what they mean
SHARED: Final = Symbol("shared")  # a subscription with several consumers
TOPIC_CAPABILITIES: Final = frozenset((Symbol("topic"), Symbol("temporary-topic")))
TEMPORARY_TOPIC: Final = Symbol("temporary-topic")

# Content type of a ping, which is accepted and not stored
PING_CONTENT_TYPE: Final = "application/vnd.ms-servicebus-ping"

# Filter of a receiver's source: the session that it asks for
SESSION_FILTER: Final = Symbol("com.microsoft:session-filter")  # string or null, in some clients described
# The same of a session that can be taken over: a described list of the session id or null, and a lock token or null.
NON_EXCLUSIVE_SESSION_FILTER: Final = Symbol("com.microsoft:non-exclusive-session-filter")
NON_EXCLUSIVE_SESSION_FILTER_OF_PREVIEWS: Final = Symbol("com.microsoft:non-exclusive-session-filter:list")

# Link properties
# Of an open, in azure-servicebus-jms: long, the idle time after which a subscription that it makes is deleted
SUBSCRIBER_IDLE_SECONDS: Final = Symbol("com.microsoft:subscriber-auto-delete-on-idle-duration-in-seconds")
ENTITY_TYPE: Final = Symbol("com.microsoft:entity-type")  # int: 0 queue, 1 topic, 2 subscription
PEEK_MODE: Final = Symbol("com.microsoft:peek-mode")  # boolean: the receiver only browses
TIMEOUT: Final = Symbol("com.microsoft:timeout")  # uint, milliseconds
TRANSFER_DESTINATION_ADDRESS: Final = Symbol("com.microsoft:transfer-destination-address")  # string
LOCKED_UNTIL_UTC: Final = Symbol("com.microsoft:locked-until-utc")  # ticks, long

# Values as .NET and Java encode them: a described number of ticks, 100 ns each
TICKS_PER_MS: Final = 10_000
EPOCH_TICKS: Final = 621_355_968_000_000_000  # 1970 in ticks since the year 1
TIMESPAN: Final = Symbol("com.microsoft:timespan")  # a duration
DATETIME_OFFSET: Final = Symbol("com.microsoft:datetime-offset")  # since the year 1

# Our names of the message fields that a correlation filter compares
CORRELATION_FIELDS: Final = (
    "correlation_id",
    "message_id",
    "to",
    "reply_to",
    "label",
    "session_id",
    "reply_to_session_id",
    "content_type",
)
