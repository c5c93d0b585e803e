"""Typed exceptions for requests of users that cannot be done.

Raised where it happens; translated to an AMQP condition in `broker.gateway.conditions`, and to an HTTP status in
`broker.http`. Between gateway and workers an error travels as its class name and its text.
"""


class BrokerError(Exception):
    """A request that cannot be done. The text names what is wrong and is shown to the user."""


class EntityNotFound(BrokerError): ...


class EntityAlreadyExists(BrokerError): ...


class EntityDisabled(BrokerError): ...


class NotAllowed(BrokerError):
    """The kind of entity does not offer this: a receiver without session on a session queue, and the like."""


class Unauthorized(BrokerError): ...


class QuotaExceeded(BrokerError):
    """The entity, the partition's store, or a count is at its limit; a retry helps once there is room."""


class MessageTooLarge(BrokerError): ...


class InvalidArgument(BrokerError): ...


class OutOfRange(BrokerError): ...


class LockLost(BrokerError): ...


class MessageNotFound(BrokerError): ...


class SessionCannotBeLocked(BrokerError):
    """The session is another receiver's now."""


class SessionLockLost(BrokerError): ...


class SessionNotFound(BrokerError): ...


class OperationTimeout(BrokerError):
    """The wait ended without a result in the time given."""


class ServerBusy(BrokerError):
    """Not now: a partition is down or overloaded. A retry helps."""


class PartitionParked(BrokerError):
    """Its store is damaged, so that nothing of it can be served until an operator has mended it."""


class OutcomeUnknown(BrokerError):
    """The partition ended before it answered: it may have been done or not. A retry tells, or does it."""


class TransactionUnknown(BrokerError):
    """It was never declared on this connection, or has ended."""


class TransactionRollback(BrokerError):
    """It cannot be committed: nothing of it was done."""


class TransactionTimeout(BrokerError):
    """It was rolled back because it took too long."""


class NotImplementedByBroker(BrokerError): ...


class InternalError(BrokerError): ...


BY_NAME: dict[str, type[BrokerError]] = {kind.__name__: kind for kind in BrokerError.__subclasses__()}
