"""The $cbs node: clients put tokens, one per audience, and read whether they were accepted.

Names differ from $management: `status-code` and `status-description`, and no condition. Python takes an
`error-condition` for a failure, even if it is empty.
"""

import re
from dataclasses import dataclass
from typing import Final

from protocol.codec import Int
from protocol.errors import ProtocolError
from protocol.nodes.request_message import Request, encode_response, text
from protocol.nodes.sas_tokens import PREFIX, MalformedToken

ACCEPTED: Final = 202
BAD_REQUEST: Final = 400
UNAUTHORIZED: Final = 401
NOT_FOUND: Final = 404

_JWT: Final = re.compile(r"[\w-]+\.[\w-]+\.[\w-]*", re.ASCII)


class BadCbsRequest(ProtocolError):
    """The request is no put-token request; answered with 400."""


class EntityMissing(ProtocolError):
    """The audience names an entity that does not exist; answered with 404."""


class UnsupportedToken(ProtocolError):
    """The token is of a kind that the broker does not accept; answered with 401."""


_STATUS: Final[dict[type[ProtocolError], int]] = {BadCbsRequest: BAD_REQUEST, EntityMissing: NOT_FOUND}


@dataclass(frozen=True, slots=True)
class PutToken:
    """`audience` is the resource that the token is for, as the client spelled it; `token` a shared access signature."""

    audience: str
    token: str


def parse_put_token(request: Request) -> PutToken:
    """The token in `request`. Its text tells its kind, because Python always declares `jwt`.

    The request's `expiration` does not matter, because a token has its own expiry. Raises BadCbsRequest,
    UnsupportedToken, or MalformedToken for a body that is no token.
    """
    operation = text(request.properties.get("operation"))
    if operation != "put-token":
        raise BadCbsRequest(f"The operation '{(operation or '')[:100]}' is not offered by $cbs: 'put-token' is.")
    audience = text(request.properties.get("name"))
    if not audience:
        raise BadCbsRequest("The application property 'name', the audience of the token, is missing.")
    token = text(request.body)
    if token is None:
        raise MalformedToken("The body is not a string.")
    if token.startswith(PREFIX):
        return PutToken(audience, token)
    if _JWT.fullmatch(token):
        raise UnsupportedToken(
            "Tokens of Microsoft Entra ID (JWT) are not accepted here: use a shared access signature."
        )
    raise MalformedToken("The body is not a shared access signature.")


def encode_accepted(request: Request) -> bytes:
    return _encode(request, ACCEPTED, "Accepted")


def encode_refused(request: Request, error: ProtocolError, description: str | None = None) -> bytes:
    """The answer to a request that failed with `error`; `description` replaces its text, with tracking."""
    status = next((status for kind, status in _STATUS.items() if isinstance(error, kind)), UNAUTHORIZED)
    return _encode(request, status, description or str(error))


def _encode(request: Request, status: int, description: str) -> bytes:
    return encode_response(request, {"status-code": Int(status), "status-description": description}, None)
