"""The rights of one connection: those of its key and of the tokens that it has put."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

from broker.errors import Unauthorized
from broker.keys import EMULATOR_KEY
from broker.namespace.entities import AuthorizationRule, Right
from protocol import error_texts
from protocol.addresses import parse_audience, reaches
from protocol.nodes import sas_tokens
from protocol.nodes.sas_tokens import Claim, KeyRule

_FOREVER = float("inf")
# The most rights of one connection; clients put a token for each entity that they use.
MAX_PATHS = 2000
NOT_THE_EMULATORS = (
    "This is the Service Bus emulator's well-known key, and the broker has another: take the connection string that "
    "`peeklock connection-string` prints. For development on one machine the broker has this key with --emulator."
)


def entity_of(path: str) -> str | None:
    """The queue or topic whose rules count at the path of a token; None at the namespace. Raises InvalidAddress.

    A subscription has the rules of its topic.
    """
    return parse_audience(path).owner or None


def key_rules(rules: Iterable[AuthorizationRule]) -> list[KeyRule]:
    """Return the rules in the form in which tokens are verified with them."""
    return [
        KeyRule(tuple(key for key in (each.primary_key, each.secondary_key) if key is not None), frozenset(each.rights))
        for each in rules
    ]


class Proof(NamedTuple):
    """What a client has shown to get rights: the key of a rule with this name."""

    key_name: str
    key: str


class _Granted(NamedTuple):
    rights: frozenset[str]
    until_s: float
    proof: Proof | None  # None for rights of the client's certificate


# (path, proof) -> the rights that this proof gives at this path now.
GrantedNow = Callable[[str, Proof | None], frozenset[str]]


class Rights:
    """Rights by path. Times are Unix seconds; a right ends at the instant its token expires."""

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._granted: dict[str, _Granted] = {}

    def grant(self, path: str, rights: Iterable[str], proof: Proof | None, until_s: float = _FOREVER) -> None:
        if len(self._granted) >= MAX_PATHS and path not in self._granted:
            del self._granted[next(iter(self._granted))]  # the oldest
        self._granted[path] = _Granted(frozenset(rights), until_s, proof)

    def put(self, claim: Claim) -> None:
        """Take the claim of a verified token; a later one for the same path replaces an earlier one (amqp.md 2.7)."""
        self.grant(claim.path, claim.rights, Proof(claim.key_name, claim.key), claim.expires_s)

    def refresh(self, granted_now: GrantedNow) -> bool:
        """Rules have changed: drop the rights that are not given any more. True if there were any."""
        dropped = False
        for path, granted in list(self._granted.items()):
            rights = granted.rights & granted_now(path, granted.proof)
            if rights != granted.rights:
                dropped = True
                if rights:
                    self._granted[path] = granted._replace(rights=rights)
                else:
                    del self._granted[path]
        return dropped

    def allows(self, path: str, right: Right, now_s: float) -> bool:
        """`path` is an address's, in lower case. Manage implies Send and Listen."""
        return self._everything or any(
            until_s > now_s and (right in rights or Right.MANAGE in rights) and reaches(scope, path)
            for scope, (rights, until_s, _) in self._granted.items()
        )

    def require(self, path: str, right: Right, now_s: float) -> None:
        """Check that the right is there now. Raises Unauthorized."""
        if not self.allows(path, right, now_s):
            raise Unauthorized(error_texts.claim_required(right, f"sb://peeklock/{path}"))

    def expired_s(self, path: str, right: Right, now_s: float) -> float:
        """The time when the right for this ended, Unix seconds; `now_s` if there never was one."""
        ends = [
            until_s
            for scope, (rights, until_s, _) in self._granted.items()
            if until_s <= now_s and (right in rights or Right.MANAGE in rights) and reaches(scope, path)
        ]
        return max(ends, default=now_s)

    @property
    def is_empty(self) -> bool:
        return not self._everything and not self._granted

    def next_expiry_s(self, now_s: float) -> float | None:
        """The time when the next of the rights held now ends."""
        ends = [each.until_s for each in self._granted.values() if now_s < each.until_s < _FOREVER]
        return min(ends, default=None)


def explained(
    error: sas_tokens.TokenError, token: str, audience: str, is_host: sas_tokens.IsHost
) -> sas_tokens.TokenError:
    """The error for the client: what to do about the emulator's key, and about a host that is not known as one."""
    if not isinstance(error, sas_tokens.InvalidSignature | sas_tokens.InvalidAudience):
        return error
    if isinstance(error, sas_tokens.InvalidSignature) and sas_tokens.is_signed_with(token, EMULATOR_KEY):
        return sas_tokens.InvalidSignature(NOT_THE_EMULATORS)
    # Of an audience most are an entity's path; of a resource that does not cover it, few.
    advice = host_advice(audience, is_host)
    if isinstance(error, sas_tokens.InvalidAudience):
        advice = _advice(sas_tokens.unknown_host(sas_tokens.resource_of(token), is_host)) or advice
    return type(error)(f"{error.reason}{advice}")


def host_advice(audience: str, is_host: sas_tokens.IsHost) -> str:
    """What to do if the audience was meant to begin with a host; empty if it was not."""
    name = sas_tokens.unknown_host(audience, is_host)
    return _advice(name) if name is not None and "." in name else ""


def _advice(name: str | None) -> str:
    if name is None:
        return ""
    return (
        f" Without a scheme, '{name[:100]}' is the name of an entity: if it is the broker's host, put it into the "
        "setting security.host_names."
    )
