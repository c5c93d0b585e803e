"""Typed exceptions for requests of users that cannot be done.

The code that refuses a request raises them. They are translated to an AMQP condition in `broker.gateway.conditions`,
and to an HTTP status in `broker.gateway.web.statuses`. Between gateway and workers an error travels as its class name
and its text.
"""


class BrokerError(Exception):
    """A request that cannot be done. The text names what is wrong and is shown to the user."""


class EntityNotFound(BrokerError): ...


class EntityAlreadyExists(BrokerError): ...


class EntityDisabled(BrokerError): ...


class NotAllowed(BrokerError):
    """This kind of entity does not allow the operation; for example a receiver without session on a session queue."""


class SessionIdMissing(BrokerError):
    """A message without a session is forwarded to an entity that requires sessions."""


class Unauthorized(BrokerError): ...


class QuotaExceeded(BrokerError):
    """The entity, the partition's store, or a count is at its limit; a retry helps once there is room."""


class MessageTooLarge(BrokerError): ...


class InvalidArgument(BrokerError): ...


class InvalidFilter(BrokerError):
    """A filter of a receiver's source cannot be read."""


class DestinationNotFound(BrokerError):
    """An entity is to forward to a queue or topic that does not exist."""


class PreconditionFailed(BrokerError):
    """The entity is not in the state that the client's request supposes."""


class OutOfRange(BrokerError): ...


class LockLost(BrokerError): ...


class MessageNotFound(BrokerError): ...


class SessionCannotBeLocked(BrokerError):
    """Another receiver holds the session."""


class SessionLockLost(BrokerError): ...


class SessionTakenOver(BrokerError):
    """Another receiver has named the lock token of the session, whose locks go on. To clients it is SessionLockLost."""


class SessionNotFound(BrokerError): ...


class OperationTimeout(BrokerError):
    """There was no result within the given time."""


class ServerBusy(BrokerError):
    """The operation cannot be done now: a partition is down or overloaded. A retry helps."""


class EntityMoving(BrokerError):
    """The entity does not live on the partition that was asked: it is being moved, or was. A retry helps."""


class PartitionParked(BrokerError):
    """The partition is out of service until an operator has restored its damaged store."""


class OutcomeUnknown(BrokerError):
    """The partition ended before it answered, so the operation may have been done or not. The client may try again."""


class TransactionUnknown(BrokerError):
    """The transaction was never declared on this connection, or has ended."""


class TransactionRollback(BrokerError):
    """The transaction cannot be committed; nothing of it was done."""


class TransactionTimeout(BrokerError):
    """The transaction was rolled back because it took too long."""


class NotImplementedByBroker(BrokerError): ...


class InternalError(BrokerError): ...


BY_NAME: dict[str, type[BrokerError]] = {kind.__name__: kind for kind in BrokerError.__subclasses__()}
