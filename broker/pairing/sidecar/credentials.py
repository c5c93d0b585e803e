"""What one client has shown, and the primary has accepted: a key, or tokens."""

import time
from typing import NamedTuple

from broker.pairing.sidecar.trust import Trust, expiry_of, signer_of
from protocol.nodes import sas_tokens

MAX_TOKENS = 2000  # the oldest are forgotten


class _Token(NamedTuple):
    signer: str
    path: str  # of its audience, in lower case
    until_s: float  # Unix time


class Credentials:
    """Of one connection."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._key_name: str | None = None
        self._tokens: dict[str, _Token] = {}

    @property
    def are_none(self) -> bool:
        return self._key_name is None and not self._tokens

    def has_key(self, key_name: str) -> None:
        self._key_name = key_name

    def has_token(self, audience: str, token: str) -> None:
        self._tokens.pop(audience, None)
        if len(self._tokens) >= MAX_TOKENS:
            del self._tokens[next(iter(self._tokens))]
        path = sas_tokens.resource_path(audience).lower()
        self._tokens[audience] = _Token(signer_of(token), path, expiry_of(token) or float("inf"))

    def may_send(self, path: str) -> bool:
        """Whether somebody who has shown himself may send to the entity, as far as that is known here."""
        now_s = time.time()
        key = path.lower()
        trust = self._trust
        return trust.needs_nothing or any(trust.may_send(signer, key, now_s) for signer in self._signers(key, now_s))

    def sender_answered(self, path: str, accepted: bool) -> None:
        """The primary has attached a sender, or has refused the right."""
        now_s = time.time()
        key = path.lower()
        for signer in self._signers(key, now_s):
            self._trust.sender_answered(signer, key, accepted, now_s)

    def _signers(self, path: str, now_s: float) -> list[str]:
        found = [
            each.signer for each in self._tokens.values() if each.until_s > now_s and sas_tokens.covers(each.path, path)
        ]
        return found if self._key_name is None else [self._key_name, *found]
