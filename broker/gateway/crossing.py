"""Sessions whose transactions go beyond one entity, and the entity that each of them is pinned to.

A client asks for it by a link to the coordinator that is the first of all links of the session: so do the SDKs for .NET
and Java with their option for cross-entity transactions, and so do transacted sessions of Qpid JMS. Such a session has
one queue or topic that it may receive from, with its subscriptions, sessions and dead letters. In transactions, what it
sends to others goes through this one (`broker.gateway.transactions`). Which one that is, depends on the client:

| client         | pinned to the entity of                | as long as                  |
|----------------|----------------------------------------|-----------------------------|
| Azure's SDKs   | the first link to any                  | the session lasts           |
| others         | the first link that receives           | it has a link that receives |

Others may send to many entities before they receive from one, and a transacted session of JMS lasts as long as its
user likes. As long as such a session is not pinned, messages of a transaction go through the entity of its first
operation.
"""

from typing import Any

from broker.errors import NotAllowed
from broker.gateway.links.receivers import ClientReceiver
from broker.gateway.links.session_links import SessionReceiver
from broker.gateway.namespace import Entity
from broker.gateway.pinning import Pinning
from protocol import error_texts
from protocol.engine.links import Link, Session


class Crossing:
    """Whether a session crosses entities, and what pins it: the session's context from its first attach on."""

    __slots__ = ("_kept", "_pinning")

    def __init__(self, pinning: Pinning) -> None:
        self._pinning = pinning
        self._kept: Entity | None = None  # as long as the session lasts

    @classmethod
    def of(cls, link: Link, pinning: Pinning) -> "Crossing":
        """Return the crossing of the link's session. If it has none yet, this link was just attached as its first."""
        session = link.session
        if session.context is None:
            session.context = cls(pinning) if link.is_coordinator else _NOT_CROSSING
        crossing: Crossing = session.context
        return crossing

    @property
    def crosses(self) -> bool:
        return self._pinning is not Pinning.NEVER

    def pinned(self, session: Session) -> Entity | None:
        """The entity that the session is pinned to; `session` is the one that this is of."""
        if self._kept is not None or not self.crosses:
            return self._kept
        first = next((link.context for link in session.links if self._pins(link.context)), None)
        if first is None:
            return None
        self._keep(first)
        entity: Entity = first.entity
        return entity

    def _pins(self, bound: Any) -> bool:
        if self._pinning is Pinning.BY_LINKS:
            return getattr(bound, "entity", None) is not None
        return isinstance(bound, ClientReceiver)

    def _keep(self, bound: Any) -> None:
        """This link has pinned the session, unless its attach may still be refused: there is no session for it yet."""
        waits = isinstance(bound, SessionReceiver) and bound.session_id is None
        if self._pinning is Pinning.BY_LINKS and not waits:
            self._kept = bound.entity

    def leave(self, link: Link) -> None:
        """This link is about to end. If it has pinned the session, that stays so."""
        if self.pinned(link.session) is None and self._pins(link.context):
            self._keep(link.context)

    def admit(self, link: Link, entity: Entity) -> None:
        """Check that this link, which is just attached, may be one to the entity. Raises NotAllowed.

        A client may send to any, and browse any by a link: that is no part of transactions.
        """
        if not link.is_sender or link.browses:
            return
        pinned = self.pinned(link.session)
        if pinned is not None and pinned.top_level != entity.top_level:
            raise NotAllowed(error_texts.SEVERAL_TOP_LEVEL_ENTITIES)


_NOT_CROSSING = Crossing(Pinning.NEVER)  # of most sessions; nothing changes it
