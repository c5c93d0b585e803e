"""Answers to flows that proton leaves unanswered: `echo`, and a drain that finds no credit to give back (2.6.7, 2.7.4).

Proton answers a drain that uses up credit. For the other flows, a change of the session's window makes proton write a
flow of the session, to which `protocol.engine.proton.outgoing` adds the fields of the link.
"""

from collections.abc import Iterable, Mapping
from typing import Protocol, TypeVar

from protocol.engine.proton.incoming import Flow
from protocol.engine.proton.library import Pointer, lib
from protocol.engine.proton.outgoing import OutputWalk

# Arriving messages are taken out of the engine at once, so a session's window can stay wide open. A change from one of
# these windows to the other makes proton write a flow. They are bytes, of which proton keeps 31 bits and tells the peer
# the number of whole frames; so they differ by the largest possible frame.
_OPEN_WINDOWS = (0x7FFF_0000, 0x7FEF_0000)


class Session(Protocol):
    """A session, as it is answered here."""

    pointer: Pointer


class Link(Protocol):
    """A link, as it is answered here; `protocol.engine.links.Link` says what its attributes are."""

    is_sender: bool
    closed: bool
    own_handle: tuple[int, int] | None
    drain_limit: int | None

    @property
    def session(self) -> Session: ...

    @property
    def credit(self) -> int: ...

    @property
    def queued(self) -> int: ...

    def grant(self, credit: int) -> None: ...

    def drained(self) -> None: ...


AnyLink = TypeVar("AnyLink", bound=Link)


class FlowAnswers:
    """`saying` are the sessions whose flow is in the next output; the caller clears it when it takes the output."""

    def __init__(self, output: OutputWalk) -> None:
        self._output = output
        self.saying: set[Session] = set()

    def answer(
        self, flows: Iterable[Flow], links: Mapping[tuple[int, int], Link], sessions: Mapping[int, Session]
    ) -> None:
        """Answer these flows. Links are by the peer's channel and handle, sessions by its channel."""
        for flow in flows:
            if flow.handle is None:
                session = sessions.get(flow.channel)
                if session is not None:
                    self._say(session)
                continue
            link = links.get((flow.channel, flow.handle))
            if link is not None and not link.closed:
                self._answer(flow, link)

    def _answer(self, flow: Flow, link: Link) -> None:
        if not link.is_sender:
            if not flow.drain:  # this flow is the peer's answer to our drain and needs no answer
                link.grant(0)
                self._say(link.session)
            return
        credit = link.credit
        if flow.drain:
            link.drain_limit = flow.limit if credit > 0 else None
            if credit > 0:
                return
        self._tell(link, (flow.limit - credit) & 0xFFFFFFFF, max(credit, 0), flow.drain)

    def answer_used_up(self, links: Iterable[AnyLink]) -> list[AnyLink]:
        """Answer drains that have ended, once the deliveries before that are written.

        Proton does not answer those whose credit was used up by deliveries. Returns the links of which a delivery still
        waits for the session's window.
        """
        waiting = []
        for link in links:
            if link.closed:
                continue
            if link.queued:
                waiting.append(link)
            elif link.credit > 0:
                link.drained()
            elif link.drain_limit is not None:
                self._tell(link, link.drain_limit, 0, True)
                link.drain_limit = None
        return waiting

    def _tell(self, link: Link, delivery_count: int, credit: int, drain: bool) -> None:
        if link.own_handle is not None:
            self._say(link.session)
            self._output.tell_link(link.own_handle, delivery_count, credit, drain)

    def _say(self, session: Session) -> None:
        if session in self.saying:
            return
        self.saying.add(session)
        first, second = _OPEN_WINDOWS
        capacity = lib.pn_session_get_incoming_capacity(session.pointer)
        lib.pn_session_set_incoming_capacity(session.pointer, second if capacity == first else first)
