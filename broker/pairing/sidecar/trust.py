"""What the sidecar can say of a client's credentials without the primary.

It knows the key that it was given, and remembers what the primary has accepted: tokens until they expire, keys for a
day, and as digests only, whose key is random and never leaves the process. It also remembers which keys the primary
has given the right to send, or refused it, and where.
"""

import hmac
import secrets
from collections import OrderedDict
from hashlib import sha256
from typing import Final

from protocol.client.connection_string import Anonymous, ConnectionString, SharedAccessKey
from protocol.errors import ProtocolError
from protocol.nodes import sas_tokens
from protocol.nodes.sas_tokens import KeyRule, TokenError

MAX_REMEMBERED: Final = 10_000
KEY_SECONDS: Final = 24 * 3600.0
OTHER_TOKEN_SECONDS: Final = 3600.0  # of a token whose expiry we cannot read


class Unverifiable(ProtocolError):
    """Only the primary can say whether these credentials are good."""

    def __init__(self) -> None:
        super().__init__("The primary namespace is away, and only it can verify this key. Please try again later.")


class _Memory:
    """Digests with the time until which they count; the oldest are forgotten when there are too many."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, *parts: str, until_s: float) -> None:
        digest = self._digest(parts)
        self._until[digest] = until_s
        self._until.move_to_end(digest)
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)

    def remove(self, *parts: str) -> None:
        self._until.pop(self._digest(parts), None)

    def has(self, *parts: str, now_s: float) -> bool:
        return self._until.get(self._digest(parts), 0.0) > now_s

    def _digest(self, parts: tuple[str, ...]) -> bytes:
        whole = b"".join(
            len(text).to_bytes(8, "big") + text for text in (part.encode(errors="surrogatepass") for part in parts)
        )
        return hmac.digest(self._key, whole, "sha256")


class Trust:
    """Times are Unix seconds, paths in lower case. A `signer` is the name of a key, or what `signer_of` says."""

    def __init__(self, primary: ConnectionString) -> None:
        credentials = primary.credentials
        self._own = credentials if isinstance(credentials, SharedAccessKey) else None
        self.needs_nothing = isinstance(credentials, Anonymous)  # the primary wants no credentials at all
        self._tokens = _Memory()
        self._keys = _Memory()
        self._senders = _Memory()
        self._refused = _Memory()

    # -- what the primary has said

    def token_accepted(self, audience: str, token: str, now_s: float) -> None:
        self._tokens.add(audience, token, until_s=expiry_of(token) or now_s + OTHER_TOKEN_SECONDS)

    def key_answered(self, key_name: str, key: str, accepted: bool, now_s: float) -> None:
        if accepted:
            self._keys.add(key_name, key, until_s=now_s + KEY_SECONDS)
        else:
            self._keys.remove(key_name, key)

    def sender_answered(self, signer: str, path: str, accepted: bool, now_s: float) -> None:
        """The primary has attached a sender to the entity, or has refused the right."""
        there, elsewhere = (self._senders, self._refused) if accepted else (self._refused, self._senders)
        there.add(signer, path, until_s=now_s + KEY_SECONDS)
        elsewhere.remove(signer, path)

    # -- without the primary

    def check_token(self, audience: str, token: str, now_s: float) -> None:
        """Raises a TokenError if the token is not good, Unverifiable if that is not known."""
        if self.needs_nothing or self._tokens.has(audience, token, now_s=now_s):
            return
        own = self._own
        if own is None or not token.startswith(sas_tokens.PREFIX) or sas_tokens.parse(token).key_name != own.name:
            raise Unverifiable
        rules = (KeyRule((own.key,), frozenset()),)
        sas_tokens.verify(token, audience, lambda name, path: rules, now_s)

    def check_key(self, key_name: str, key: str, now_s: float) -> bool:
        """Raises Unverifiable if it is not known."""
        if self.needs_nothing:
            return True
        own = self._own
        if own is not None and key_name == own.name:
            return hmac.compare_digest(key.encode(errors="surrogatepass"), own.key.encode())
        if self._keys.has(key_name, key, now_s=now_s):
            return True
        raise Unverifiable

    def may_send(self, signer: str, path: str, now_s: float) -> bool:
        """True for what the primary has allowed before, and for the sidecar's own key unless that was refused."""
        if self.needs_nothing or self._senders.has(signer, path, now_s=now_s):
            return True
        return self._own is not None and signer == self._own.name and not self._refused.has(signer, path, now_s=now_s)


def expiry_of(token: str) -> float | None:
    """When a shared access signature ends; None for other tokens."""
    try:
        return float(sas_tokens.parse(token).expires)
    except TokenError:
        return None


def signer_of(token: str) -> str:
    """The name of the key that a token says has signed it; for other tokens a name of their own."""
    try:
        return sas_tokens.parse(token).key_name
    except TokenError:
        return "token " + sha256(token.encode(errors="surrogatepass")).hexdigest()
