"""The rights of one connection: those of its key and of the tokens that it has put."""

from collections.abc import Iterable

from broker.errors import Unauthorized
from broker.namespace.entities import Right
from protocol import error_texts
from protocol.nodes.sas_tokens import Claim

_FOREVER = float("inf")
# The most rights of one connection; clients put a token for each entity that they use.
MAX_PATHS = 2000


def _covers(scope: str, path: str) -> bool:
    """Rights at an entity cover its sub-queues and subscriptions, but not other entities below its path."""
    return not scope or path == scope or path.startswith((f"{scope}/$", f"{scope}/subscriptions/"))


class Rights:
    """Rights by path. Times are Unix seconds; a right ends at the instant its token expires."""

    def __init__(self, everything: bool = False) -> None:
        self._everything = everything
        self._granted: dict[str, tuple[frozenset[str], float]] = {}

    def grant(self, path: str, rights: Iterable[str], until_s: float = _FOREVER) -> None:
        if len(self._granted) >= MAX_PATHS and path not in self._granted:
            del self._granted[next(iter(self._granted))]  # the oldest
        self._granted[path] = (frozenset(rights), until_s)

    def put(self, claim: Claim) -> None:
        """Take the claim of a verified token; a later one for the same path replaces an earlier one (amqp.md 2.7)."""
        self.grant(claim.path, claim.rights, claim.expires_s)

    def allows(self, path: str, right: Right, now_s: float) -> bool:
        """`path` is an address's, in lower case. Manage implies Send and Listen."""
        return self._everything or any(
            until_s > now_s and (right in rights or Right.MANAGE in rights) and _covers(scope, path)
            for scope, (rights, until_s) in self._granted.items()
        )

    def require(self, path: str, right: Right, now_s: float) -> None:
        """Raises Unauthorized."""
        if not self.allows(path, right, now_s):
            raise Unauthorized(error_texts.claim_required(right, f"sb://peeklock/{path}"))

    def expired_s(self, path: str, right: Right, now_s: float) -> float:
        """The time when the right for this ended, Unix seconds; `now_s` if there never was one."""
        ends = [
            until_s
            for scope, (rights, until_s) in self._granted.items()
            if until_s <= now_s and (right in rights or Right.MANAGE in rights) and _covers(scope, path)
        ]
        return max(ends, default=now_s)

    @property
    def is_empty(self) -> bool:
        return not self._everything and not self._granted

    def next_expiry_s(self, now_s: float) -> float | None:
        """The time when the next of the rights held now ends."""
        ends = [until_s for _, until_s in self._granted.values() if now_s < until_s < _FOREVER]
        return min(ends, default=None)
