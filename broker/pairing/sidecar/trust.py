"""What the sidecar can say of a client's credentials without the primary.

It knows the key that it was given, and remembers what the primary has accepted: tokens until they expire, keys for a
day. It also remembers which signers got the right to send, or were refused it, and where. It never knows a signer by
its name alone, because rules of several entities may have the same: a signer is a name with the digest of its key, or
of its token. The key of the digests is random and never leaves the process.
"""

import hmac
import secrets
from collections import OrderedDict
from collections.abc import Collection
from typing import Final, NamedTuple

from protocol.client.connection_string import Anonymous, ConnectionString, SharedAccessKey
from protocol.errors import ProtocolError
from protocol.host_names import DEFAULT_HOST_NAMES, HostNames
from protocol.nodes import sas_tokens
from protocol.nodes.sas_tokens import IsHost, KeyRule, TokenError

MAX_REMEMBERED: Final = 10_000
KEY_SECONDS: Final = 24 * 3600.0
OTHER_TOKEN_SECONDS: Final = 3600.0  # of a token whose expiry we cannot read


class Unverifiable(ProtocolError):
    """Only the primary can say whether these credentials are good."""

    def __init__(self) -> None:
        super().__init__("The primary namespace is away, and only it can verify this key. Please try again later.")


class Signer(NamedTuple):
    """A client that has shown the key of this name, or a token that says that a key of this name has signed it."""

    name: str
    digest: bytes


class _Memory:
    """Digests with the time until which they count; the oldest are forgotten when there are too many."""

    def __init__(self, digest: "_Digest") -> None:
        self._digest = digest
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, *parts: str | bytes, until_s: float) -> None:
        digest = self._digest(*parts)
        self._until[digest] = until_s
        self._until.move_to_end(digest)
        if len(self._until) > MAX_REMEMBERED:
            self._until.popitem(last=False)

    def remove(self, *parts: str | bytes) -> None:
        self._until.pop(self._digest(*parts), None)

    def has(self, *parts: str | bytes, now_s: float) -> bool:
        return self._until.get(self._digest(*parts), 0.0) > now_s


class _Digest:
    """Digests of several texts together, which differ wherever one of them does."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def __call__(self, *parts: str | bytes) -> bytes:
        encoded = [part if isinstance(part, bytes) else part.encode(errors="surrogatepass") for part in parts]
        return hmac.digest(self._key, b"".join(len(each).to_bytes(8, "big") + each for each in encoded), "sha256")


class Trust:
    """Times are Unix seconds, paths in lower case."""

    def __init__(self, primary: ConnectionString, is_host: IsHost | None = None) -> None:
        """`is_host` tells hosts from paths in resources and audiences without a scheme (`protocol.host_names`)."""
        self.is_host = is_host or HostNames([*DEFAULT_HOST_NAMES, primary.host]).has
        credentials = primary.credentials
        self._own = credentials if isinstance(credentials, SharedAccessKey) else None
        self.needs_nothing = isinstance(credentials, Anonymous)  # the primary wants no credentials at all
        self._digest = _Digest()
        self._tokens = _Memory(self._digest)
        self._keys = _Memory(self._digest)
        self._senders = _Memory(self._digest)
        self._refused = _Memory(self._digest)
        self._own_signer = None if self._own is None else self.signer_of_key(self._own.name, self._own.key)
        self._own_is_refused = False  # the primary has another key by now

    def signer_of_key(self, key_name: str, key: str) -> Signer:
        return Signer(key_name, self._digest("key", key_name, key))

    def signer_of_token(self, token: str) -> Signer:
        """The sidecar's own key if that has signed the token. Other keys are not known here, so the token stands for
        itself."""
        try:
            name = sas_tokens.parse(token).key_name
            own = self._own
            if own is not None and name == own.name and sas_tokens.is_signed_with(token, own.key):
                return self.signer_of_key(own.name, own.key)
        except TokenError:
            name = ""
        return Signer(name, self._digest("token", token))

    # -- what the primary has said

    def token_accepted(self, audience: str, token: str, now_s: float) -> None:
        self._tokens.add(audience, token, until_s=expiry_of(token) or now_s + OTHER_TOKEN_SECONDS)

    def key_answered(self, key_name: str, key: str, accepted: bool, now_s: float) -> None:
        if self.signer_of_key(key_name, key) == self._own_signer:
            self._own_is_refused = not accepted
        if accepted:
            self._keys.add(key_name, key, until_s=now_s + KEY_SECONDS)
        else:
            self._keys.remove(key_name, key)

    def sender_answered(self, signers: Collection[Signer], path: str, accepted: bool, now_s: float) -> None:
        """Remember whether the primary attached a sender to the entity for a client that has shown all these signers.

        If it did, one of them has the right, and it is not known which. If it did not, none of them has.
        """
        if not signers:
            return
        together, until_s = _together(signers), now_s + KEY_SECONDS
        if accepted:
            self._senders.add(path, *together, until_s=until_s)
            if len(signers) == 1:
                self._refused.remove(path, *together)
            return
        self._senders.remove(path, *together)
        for each in signers:
            self._senders.remove(path, *each)
            self._refused.add(path, *each, until_s=until_s)

    # -- without the primary

    def check_token(self, audience: str, token: str, now_s: float) -> None:
        """Check a token. Raises a TokenError if it is not good, Unverifiable if that is not known."""
        if self.needs_nothing or self._tokens.has(audience, token, now_s=now_s):
            return
        own = self._own
        if own is None or self._own_is_refused or not token.startswith(sas_tokens.PREFIX):
            raise Unverifiable
        if sas_tokens.parse(token).key_name != own.name:
            raise Unverifiable
        rules = (KeyRule((own.key,), frozenset()),)
        sas_tokens.verify(token, audience, lambda name, path: rules, now_s, self.is_host)

    def check_key(self, key_name: str, key: str, now_s: float) -> bool:
        """Decide whether the key is good. Raises Unverifiable if that is not known."""
        if self.needs_nothing or self._keys.has(key_name, key, now_s=now_s):
            return True
        own = self._own
        if own is not None and key_name == own.name:
            is_own = hmac.compare_digest(key.encode(errors="surrogatepass"), own.key.encode())
            return is_own and not self._own_is_refused
        raise Unverifiable

    def may_send(self, signers: Collection[Signer], path: str, now_s: float) -> bool:
        """Return whether the primary has allowed this before, to one of these signers or to all of them together. The
        sidecar's own key may send unless that was refused."""
        if self.needs_nothing:
            return True
        shown: list[Collection[Signer]] = [[each] for each in signers]
        if len(signers) > 1:
            shown.append(signers)
        if any(self._senders.has(path, *_together(each), now_s=now_s) for each in shown):
            return True
        own = self._own_signer
        if own is None or own not in signers or self._own_is_refused:
            return False
        return not self._refused.has(path, *own, now_s=now_s)


def _together(signers: Collection[Signer]) -> list[str | bytes]:
    return [part for signer in sorted(set(signers)) for part in signer]


def expiry_of(token: str) -> float | None:
    """When a shared access signature ends; None for other tokens."""
    try:
        return float(sas_tokens.parse(token).expires)
    except TokenError:
        return None
