"""Errors as HTTP statuses: the one place where a gateway translates them (management.md 1.15).

SDKs try again after 408, 429 and 5xx, so what fails again and again has none of these. The sub code is a part of the
text, and some SDKs choose their exception by it.
"""

from typing import NamedTuple

from broker import errors
from broker.gateway.conditions import CONDITION
from protocol import conditions
from protocol.client.errors import ClientError
from protocol.errors import ProtocolError
from protocol.nodes import sas_tokens


class Status(NamedTuple):
    http: int
    sub_code: int


_BAD_REQUEST = Status(400, 40000)
_UNAUTHORIZED = Status(401, 40100)
_BUSY = Status(503, 50004)

STATUS: dict[type[errors.BrokerError], Status] = {
    errors.EntityNotFound: Status(404, 40400),
    errors.EntityAlreadyExists: Status(409, 40900),
    errors.EntityDisabled: Status(403, 40301),
    errors.NotAllowed: _BAD_REQUEST,
    errors.SessionIdMissing: _BAD_REQUEST,
    errors.Unauthorized: _UNAUTHORIZED,
    errors.QuotaExceeded: Status(403, 40300),
    errors.MessageTooLarge: Status(403, 40300),
    errors.InvalidArgument: _BAD_REQUEST,
    errors.InvalidFilter: _BAD_REQUEST,
    errors.DestinationNotFound: Status(400, 40400),
    errors.PreconditionFailed: Status(412, 41200),
    errors.OutOfRange: _BAD_REQUEST,
    errors.LockLost: Status(404, 40400),
    errors.MessageNotFound: Status(404, 40400),
    errors.SessionCannotBeLocked: Status(409, 40901),
    errors.SessionLockLost: Status(404, 40400),
    errors.SessionTakenOver: Status(404, 40400),
    errors.SessionNotFound: Status(404, 40400),
    errors.OperationTimeout: Status(408, 40800),
    errors.ServerBusy: _BUSY,
    errors.EntityMoving: _BUSY,
    errors.PartitionParked: Status(500, 50000),
    errors.OutcomeUnknown: Status(504, 50400),
    errors.TransactionUnknown: _BAD_REQUEST,
    errors.TransactionRollback: _BAD_REQUEST,
    errors.TransactionTimeout: _BAD_REQUEST,
    errors.NotImplementedByBroker: Status(501, 50100),
    errors.InternalError: Status(500, 50000),
}

_TOKEN: dict[type[sas_tokens.TokenError], Status] = {
    sas_tokens.MissingToken: Status(401, 40102),
    sas_tokens.InvalidSignature: Status(401, 40103),
    sas_tokens.InvalidAudience: Status(401, 40104),
    sas_tokens.MalformedToken: Status(401, 40105),
    sas_tokens.ExpiredToken: Status(401, 40106),
}


_OF_CONDITION: dict[str, Status] = {
    condition: STATUS[kind] for kind, condition in reversed(CONDITION.items()) if kind is not errors.OutcomeUnknown
}


class RequestRefused(Exception):
    """What a link of the gateway's own was answered (`broker.gateway.web.inside`)."""

    def __init__(self, error: ClientError) -> None:
        super().__init__(error.description or str(error))
        self.status = _OF_CONDITION.get(error.condition, STATUS[errors.InternalError])
        if error.condition == conditions.NOT_FOUND:
            self.status = Status(410, 41000)  # 404 is for messages and locks (management.md 2)


def status_of(error: Exception) -> Status:
    """The status for a BrokerError, or for a ProtocolError in what a client has sent."""
    if isinstance(error, RequestRefused):
        return error.status
    if isinstance(error, errors.BrokerError):
        return STATUS[type(error)]
    if isinstance(error, sas_tokens.TokenError):
        return _TOKEN[type(error)]
    assert isinstance(error, ProtocolError)
    return _BAD_REQUEST
