"""What one client has shown, and the primary has accepted: a key, or tokens."""

import time
from typing import Final, NamedTuple

from broker.pairing.sidecar.trust import OTHER_TOKEN_SECONDS, Signer, Trust, expiry_of
from protocol.addresses import reaches
from protocol.nodes import sas_tokens

MAX_TOKENS: Final = 2000  # the oldest are forgotten
CLOCKS_SECONDS: Final = 300.0  # by which the primary's clock may be behind: so long it may take a token that is over


class _Token(NamedTuple):
    signer: Signer
    until_s: float  # Unix time


class Credentials:
    """The key and the tokens of one connection."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._key: Signer | None = None
        self._tokens: dict[str, _Token] = {}  # by the path of the audience, in lower case
        self._is_complete = True  # the primary knows no more of the client than we do

    @property
    def are_none(self) -> bool:
        return self._key is None and not self._tokens

    def has_key(self, key_name: str, key: str) -> None:
        self._key = self._trust.signer_of_key(key_name, key)

    def has_token(self, audience: str, token: str) -> None:
        """It takes the place of an earlier one for the same path, as in the primary (amqp.md 2.7)."""
        path = sas_tokens.resource_path(audience, self._trust.is_host)
        self._tokens.pop(path, None)
        if len(self._tokens) >= MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
            self._is_complete = False
        until_s = expiry_of(token) or time.time() + OTHER_TOKEN_SECONDS
        self._tokens[path] = _Token(self._trust.signer_of_token(token), until_s)

    def has_more(self) -> None:
        """The client may have shown the primary what we do not know."""
        self._is_complete = False

    def may_send(self, path: str) -> bool:
        """Whether somebody who has shown himself may send to the entity, as far as that is known here."""
        now_s = time.time()
        key = path.lower()
        return self._trust.may_send(self._signers(key, now_s), key, now_s)

    def sender_answered(self, path: str, accepted: bool) -> None:
        """The primary has attached a sender, or has refused the right."""
        now_s = time.time()
        key = path.lower()
        if self._is_complete or not accepted:
            self._trust.sender_answered(self._signers(key, now_s - CLOCKS_SECONDS), key, accepted, now_s)

    def _signers(self, path: str, since_s: float) -> set[Signer]:
        """Return the signers whose credentials reach the entity, and had not expired at this time."""
        found = {each.signer for scope, each in self._tokens.items() if each.until_s > since_s and reaches(scope, path)}
        return found if self._key is None else found | {self._key}
