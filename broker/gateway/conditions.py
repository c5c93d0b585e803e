"""Errors as AMQP conditions: the one place where a gateway translates them."""

from broker import errors
from protocol import conditions
from protocol.addresses import InvalidAddress
from protocol.codec import Symbol
from protocol.errors import (
    DecodeError,
    EmptyBatch,
    HeaderTooLarge,
    InvalidField,
    LimitExceeded,
    ProtocolError,
    UnequalKeys,
)

CONDITION: dict[type[errors.BrokerError], Symbol] = {
    errors.EntityNotFound: conditions.NOT_FOUND,
    errors.EntityAlreadyExists: conditions.ENTITY_ALREADY_EXISTS,
    errors.EntityDisabled: conditions.ENTITY_DISABLED,
    errors.NotAllowed: conditions.NOT_ALLOWED,
    errors.SessionIdMissing: conditions.NOT_ALLOWED,
    errors.Unauthorized: conditions.UNAUTHORIZED_ACCESS,
    errors.QuotaExceeded: conditions.RESOURCE_LIMIT_EXCEEDED,
    errors.MessageTooLarge: conditions.LINK_MESSAGE_SIZE_EXCEEDED,
    errors.InvalidArgument: conditions.ARGUMENT_ERROR,
    errors.InvalidFilter: conditions.INVALID_FIELD,
    errors.DestinationNotFound: conditions.ARGUMENT_ERROR,
    errors.PreconditionFailed: conditions.PRECONDITION_FAILED,
    errors.OutOfRange: conditions.ARGUMENT_OUT_OF_RANGE,
    errors.LockLost: conditions.MESSAGE_LOCK_LOST,
    errors.MessageNotFound: conditions.MESSAGE_NOT_FOUND,
    errors.SessionCannotBeLocked: conditions.SESSION_CANNOT_BE_LOCKED,
    errors.SessionLockLost: conditions.SESSION_LOCK_LOST,
    errors.SessionTakenOver: conditions.SESSION_LOCK_LOST,
    errors.SessionNotFound: conditions.SESSION_NOT_FOUND,
    errors.OperationTimeout: conditions.TIMEOUT,
    errors.ServerBusy: conditions.SERVER_BUSY,
    errors.EntityMoving: conditions.SERVER_BUSY,
    errors.PartitionParked: conditions.INTERNAL_ERROR,
    # SDKs document it as "may or may not have been done", and try again.
    errors.OutcomeUnknown: conditions.TIMEOUT,
    errors.TransactionUnknown: conditions.TRANSACTION_UNKNOWN_ID,
    errors.TransactionRollback: conditions.TRANSACTION_ROLLBACK,
    errors.TransactionTimeout: conditions.NOT_ALLOWED,  # as in Service Bus; .NET makes an invalid operation of it
    errors.NotImplementedByBroker: conditions.NOT_IMPLEMENTED,
    errors.InternalError: conditions.INTERNAL_ERROR,
}

# A peer's mistakes in the content of a message; the first class that matches counts.
PROTOCOL_CONDITION: tuple[tuple[type[ProtocolError], Symbol], ...] = (
    (HeaderTooLarge, conditions.ARGUMENT_ERROR),
    (LimitExceeded, conditions.ARGUMENT_ERROR),
    (UnequalKeys, conditions.NOT_ALLOWED),  # as other errors of keys (PE5 of Service Bus)
    (InvalidField, conditions.ARGUMENT_ERROR),
    (InvalidAddress, conditions.ARGUMENT_ERROR),
    (EmptyBatch, conditions.NOT_ALLOWED),
    (DecodeError, conditions.DECODE_ERROR),
    (ProtocolError, conditions.DECODE_ERROR),
)


def condition_of(error: Exception) -> Symbol:
    """The condition for a BrokerError or a ProtocolError."""
    if isinstance(error, errors.BrokerError):
        return CONDITION[type(error)]
    return next(condition for kind, condition in PROTOCOL_CONDITION if isinstance(error, kind))
