"""The $cbs node: takes tokens for the connection (amqp.md 2)."""

import time

from broker.errors import EntityNotFound
from broker.gateway.nodes.request_links import Answer, RequestLink
from broker.gateway.rights import entity_of, explained, host_advice, key_rules
from protocol import error_texts
from protocol.addresses import parse_audience
from protocol.errors import ProtocolError
from protocol.nodes import cbs, sas_tokens
from protocol.nodes.request_message import Request
from protocol.nodes.sas_tokens import Claim, KeyRule, TokenError


class _Missing(cbs.EntityMissing):
    """`tracker` is host and path, as in the cloud."""

    def __init__(self, audience: str, advice: str) -> None:
        host, _, path = audience.rpartition("://")[2].partition("/")
        super().__init__(f"{error_texts.resource_not_found(f'sb://{host}/{path}')}{advice}")
        self.tracker = f"{host}:{path}"


class CbsRequests(RequestLink):
    """The $cbs node: takes tokens for the connection."""

    def handle(self, request: Request, answer: Answer) -> None:
        connection = self.connection
        now_s = time.time()
        try:
            put = cbs.parse_put_token(request)
            claim = self._verified(put.token, put.audience, now_s)
            self._require_entity(put.audience, claim.path)
        except ProtocolError as error:
            if isinstance(error, TokenError):
                connection.gateway.metrics.authentication_failures += 1
                connection.gateway.denials.happened(str(error)[:200], client=connection.client_name[:100])
            if isinstance(error, _Missing):
                connection.key_shown()
            tracker = error.tracker if isinstance(error, _Missing) else "NoSystemTracker"
            answer(cbs.encode_refused(request, error, connection.tracked(str(error), tracker)))
            return
        connection.put_claim(claim, now_s)
        answer(cbs.encode_accepted(request))

    def fail(self, request: Request, error: Exception, answer: Answer) -> None:
        text = self.connection.tracked(str(error))
        answer(cbs.encode_refused(request, cbs.BadCbsRequest(text)))

    def _verified(self, token: str, audience: str, now_s: float) -> Claim:
        """Verify a token for the audience, and return what it allows. Raises a TokenError."""
        try:
            return sas_tokens.verify(token, audience, self._lookup, now_s, self._is_host)
        except TokenError as error:
            raise explained(error, token, audience, self._is_host) from None

    def _require_entity(self, audience: str, path: str) -> None:
        """Raises EntityMissing. Call it after the token is verified, so that only holders of keys learn of entities."""
        address = parse_audience(path)
        if not address.path:
            return
        try:
            self.connection.gateway.namespace.find(address)
        except EntityNotFound:
            raise _Missing(audience, host_advice(audience, self._is_host)) from None

    def _is_host(self, name: str) -> bool:
        return self.connection.gateway.host_names.has(name)

    def _lookup(self, key_name: str, path: str) -> list[KeyRule]:
        """The rules of that name at the entity of `path` and of the namespace. Raises InvalidAddress."""
        return key_rules(self.connection.gateway.keyring.rules(key_name, entity_of(path)))
