"""The rights of HTTP requests: each brings a token, or comes from a client whose certificate has rights.

Tokens are signed for URLs of all kinds: the host alone, the entity, or the whole URL of the request in lower case with
its query (management.md 5.2).
"""

import time
from urllib.parse import quote

from aiohttp import web

from broker.errors import Unauthorized
from broker.gateway.rights import explained, key_rules
from broker.keys import Keyring
from broker.namespace.entities import Right
from broker.tls import names_of
from protocol.nodes import sas_tokens
from protocol.nodes.sas_tokens import IsHost, KeyRule, MalformedToken, MissingToken, TokenError

_BEARER = "bearer "
_SIGNATURE = "sharedaccesssignature"


class Access:
    def __init__(self, keyring: Keyring, is_host: IsHost, *, everybody: bool) -> None:
        """With `everybody`, requests need no token."""
        self._keyring = keyring
        self._is_host = is_host
        self._everybody = everybody

    def require(self, request: web.BaseRequest, path: str, entity: str, right: Right | None) -> None:
        """Check that the request may do what needs this right at this path; None is any right.

        `path` is that of the request. `entity` is the name of the queue or topic whose keys count besides those of the
        namespace; empty if there is none. Raises Unauthorized, or a TokenError.
        """
        if not self._everybody:
            self._check(request, request.headers.get("Authorization", ""), path, entity, right)

    def require_also(self, request: web.BaseRequest, header: str, entity: str, right: Right) -> None:
        """Check a right on another entity, as `require` does, by this header's token, or else the request's own."""
        if not self._everybody:
            token = request.headers.get(header, "") or request.headers.get("Authorization", "")
            self._check(request, token, entity, entity, right)

    def _check(self, request: web.BaseRequest, token: str, path: str, entity: str, right: Right | None) -> None:
        rights = self._verified(token, path, entity) if token else self._of_certificate(request, entity)
        if right is not None and right not in rights and Right.MANAGE not in rights:
            raise Unauthorized(f"{right},EntityRead claims required for this operation on '{path}'.")

    def _of_certificate(self, request: web.BaseRequest, entity: str) -> frozenset[str]:
        certificate = None if request.transport is None else request.transport.get_extra_info("peercert")
        grants = self._keyring.of_certificate(names_of(certificate))
        rights = frozenset[str]().union(*(each.rights for each in grants if each.entity in (None, entity.lower())))
        if not rights:
            raise MissingToken("The request has no Authorization header. Its value must be a SharedAccessSignature.")
        return rights

    def _verified(self, text: str, path: str, entity: str) -> frozenset[str]:
        if (
            text[: len(_BEARER)].lower() == _BEARER
        ):  # Python's client has this in front of a signature that it was given
            text = text[len(_BEARER) :].lstrip()
        scheme, _, rest = text.partition(" ")
        if scheme.lower() != _SIGNATURE:
            raise MalformedToken("Only tokens of the kind SharedAccessSignature are accepted.")

        def lookup(key_name: str, _: str) -> list[KeyRule]:
            return key_rules(self._keyring.rules(key_name, entity or None))

        audience = f"sb://namespace/{quote(path)}"
        token = f"{sas_tokens.PREFIX}{rest}"
        try:
            return sas_tokens.verify(token, audience, lookup, time.time(), self._is_host).rights
        except TokenError as error:
            raise explained(error, token, audience, self._is_host) from None
