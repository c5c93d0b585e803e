"""The AMQP error conditions that the broker answers with or understands: the only module that spells them.

AMQP 1.0 2.8.15 to 2.8.17 and 4.5.8 (amqp:...), Service Bus (com.microsoft:...).
"""

from protocol.codec import Symbol

# Shared by all scopes (2.8.15)
INTERNAL_ERROR = Symbol("amqp:internal-error")
NOT_FOUND = Symbol("amqp:not-found")
UNAUTHORIZED_ACCESS = Symbol("amqp:unauthorized-access")
DECODE_ERROR = Symbol("amqp:decode-error")
RESOURCE_LIMIT_EXCEEDED = Symbol("amqp:resource-limit-exceeded")
NOT_ALLOWED = Symbol("amqp:not-allowed")
INVALID_FIELD = Symbol("amqp:invalid-field")
NOT_IMPLEMENTED = Symbol("amqp:not-implemented")
PRECONDITION_FAILED = Symbol("amqp:precondition-failed")
ILLEGAL_STATE = Symbol("amqp:illegal-state")

# Connection (2.8.16)
CONNECTION_FORCED = Symbol("amqp:connection:forced")
CONNECTION_FRAMING_ERROR = Symbol("amqp:connection:framing-error")

# Session (2.8.17)
SESSION_HANDLE_IN_USE = Symbol("amqp:session:handle-in-use")

# Link (2.8.18)
LINK_DETACH_FORCED = Symbol("amqp:link:detach-forced")
LINK_MESSAGE_SIZE_EXCEEDED = Symbol("amqp:link:message-size-exceeded")
LINK_STOLEN = Symbol("amqp:link:stolen")

# Transactions (4.5.8)
TRANSACTION_UNKNOWN_ID = Symbol("amqp:transaction:unknown-id")
TRANSACTION_ROLLBACK = Symbol("amqp:transaction:rollback")
TRANSACTION_TIMEOUT = Symbol("amqp:transaction:timeout")

# Service Bus
TIMEOUT = Symbol("com.microsoft:timeout")
SERVER_BUSY = Symbol("com.microsoft:server-busy")
MESSAGE_LOCK_LOST = Symbol("com.microsoft:message-lock-lost")
SESSION_LOCK_LOST = Symbol("com.microsoft:session-lock-lost")
SESSION_CANNOT_BE_LOCKED = Symbol("com.microsoft:session-cannot-be-locked")
STORE_LOCK_LOST = Symbol("com.microsoft:store-lock-lost")
MESSAGE_NOT_FOUND = Symbol("com.microsoft:message-not-found")
SESSION_NOT_FOUND = Symbol("com.microsoft:session-not-found")
ENTITY_DISABLED = Symbol("com.microsoft:entity-disabled")
ENTITY_ALREADY_EXISTS = Symbol("com.microsoft:entity-already-exists")
ARGUMENT_ERROR = Symbol("com.microsoft:argument-error")
ARGUMENT_OUT_OF_RANGE = Symbol("com.microsoft:argument-out-of-range")
AUTH_FAILED = Symbol("com.microsoft:auth-failed")
PUBLISHER_REVOKED = Symbol("com.microsoft:publisher-revoked")
NO_MATCHING_SUBSCRIPTION = Symbol("com.microsoft:no-matching-subscription")
PARTITION_NOT_OWNED = Symbol("com.microsoft:partition-not-owned")

# Not an error: names the outcome of a receiver's request to dead-letter.
DEAD_LETTER = Symbol("com.microsoft:dead-letter")
