"""A client's connection through to the primary: bytes in, bytes out, for both sides; no I/O.

    client  --from_client-->  primary
            <-from_primary--
            <--from_local---  the engine here, for entities that have failed over (`to_local` of the owner)

Frames pass as they are. Only three things are looked at on the way: what becomes of sends, which says how entities
fare; credentials that the primary accepts; and the open, whose hostname becomes the primary's. A link to an entity that
has failed over is answered by an engine here (`split_session`).
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from broker.pairing.sidecar.frames import (
    SASL_TYPE,
    Frame,
    Incoming,
    Transfer,
    outcomes,
    read,
    transfer,
    write,
)
from broker.pairing.sidecar.split_session import SessionLink, SplitSession, within
from protocol import conditions
from protocol.addresses import InvalidAddress, Node, Part, parse
from protocol.amqp_error import amqp_error
from protocol.client.errors import ClientError, LinkDetached, MessageRefused, MessageReturned
from protocol.client.messages import Message
from protocol.codec import Described, UInt
from protocol.engine.frames import HEAD
from protocol.engine.proton.incoming import IllegalState
from protocol.engine.sasl import PLAIN, parse_plain
from protocol.errors import LimitExceeded, ProtocolError
from protocol.nodes import request_message
from protocol.symbols import AMQP_HEADER, DESCRIPTOR_OF, Descriptor

MAX_SESSIONS: Final = 65_536
MAX_PENDING_TOKENS: Final = 1000
MAX_TOKEN_CHARACTERS: Final = 16_384  # with its audience
MAX_UNATTACHED: Final = 10_000  # links of a session
_TRANSFER: Final = int(Descriptor.TRANSFER)
_MASK: Final = (1 << 32) - 1
_OUTCOME_OK: Final = 0
_STATUS_GOOD: Final = (200, 202)


class Owner(Protocol):
    """Is told what goes on, and decides where links go. Paths are as the client has written them."""

    def is_here(self, path: str) -> bool:
        """True if a sender to the entity is to be answered here."""

    def to_local(self, data: bytes) -> None:
        """Bytes for the engine here, which is made for the first ones."""

    def on_key(self, key_name: str, key: str, accepted: bool) -> None: ...

    def on_token(self, audience: str, token: str) -> None:
        """The primary has accepted the token."""

    def on_unread_token(self) -> None:
        """The client may have shown the primary a token that we do not know."""

    def on_sender(self, path: str, error: ClientError | None, began_ms: int) -> None:
        """The primary has attached a sender, or has refused it with this error."""

    def on_taken(self, path: str, count: int) -> None:
        """The primary has accepted so many messages of the entity."""

    def on_refused(self, path: str, error: ClientError, began_ms: int) -> None:
        """The primary has not accepted a message that was sent at `began_ms`, or has ended its link before it did."""


class _Offer(NamedTuple):
    """A token that the primary has not answered yet, or several with one message id, which are not told apart.

    `token` is None if it is not known.
    """

    audience: str
    token: str | None
    unanswered: int


class Moved(NamedTuple):
    """What to write so that links end which are to be attached again."""

    to_client: bytes
    to_primary: bytes


class Through:
    """`hostname` is the primary's. The client has sent its open: `is_open`; the primary too: `is_answered`.

    `is_closed`: the primary has closed the connection.
    """

    def __init__(self, owner: Owner, hostname: str) -> None:
        self._owner = owner
        self._hostname = hostname
        self._from_client = Incoming()
        self._from_primary = Incoming()
        self._from_local = Incoming()
        self._sessions: dict[int, SplitSession] = {}  # by the client's channel
        self._by_primary: dict[int, SplitSession] = {}
        self._by_local: dict[int, SplitSession] = {}
        self._has_init = False  # the client has said how it shows who it is
        self._offer: tuple[str, str] | None = None  # key name and key that the client shows
        self._pending: dict[object, _Offer] = {}  # by message id
        self._has_unread_tokens = False
        self._has_local = False
        self._client_open: Frame | None = None
        self.is_open = False
        self.is_answered = False
        self.is_closed = False

    # -- frames of the client

    def from_client(self, data: bytes, now_ms: int) -> bytes:
        """What to write to the primary. Raises ProtocolError for bytes that are no AMQP."""
        incoming = self._from_client
        data = incoming.feed(data)
        pieces: list[bytes] = []
        kept = 0
        for start, end, channel, code in incoming.frames(data):
            if code == _TRANSFER:
                changed = self._client_transfer(data, start, end, channel, now_ms)
            elif code:
                changed = self._client_frame(data, start, end, code, now_ms)
            else:
                continue
            if changed is not None:
                pieces += (data[kept:start], changed)
                kept = end
        return incoming.rest_of(data, kept, pieces)

    def _client_transfer(self, data: bytes, start: int, end: int, channel: int, now_ms: int) -> bytes | None:
        session = self._sessions.get(channel)
        if session is None:
            return None
        seen = transfer(data, start, end)
        link = session.links.get(seen.handle)
        if link is None:
            return None  # the primary says what is wrong with it
        number = link.unfinished
        if number is None:
            number = session.last_id = seen.delivery_id or 0
        changed = None
        if link.is_here or link.is_moved:
            session.take_here()
            if link.is_here:
                self._owner.to_local(data[start:end])
            changed = b""
        else:
            if link.path is not None:
                _note_send(session, link, seen, number, now_ms)
            elif link.is_claims:
                self._token_offered(data, start, end)
            frame = read(data, start, end) if session.is_split else None
            if frame is not None:
                changed = session.transfer_to_primary(frame, link)
            elif link.unfinished is None:
                link.unfinished_id = number
        link.unfinished = None if seen.is_last else number
        return changed

    def _client_frame(self, data: bytes, start: int, end: int, code: int, now_ms: int) -> bytes | None:
        if code in (Descriptor.FLOW, Descriptor.DISPOSITION):
            session = self._sessions.get(HEAD.unpack_from(data, start)[3])
            if session is None or not session.is_split:
                return None
        frame = read(data, start, end)
        if frame is None:
            return None
        session = self._sessions.get(frame.channel)
        match frame.code:
            case Descriptor.SASL_INIT:
                return self._client_init(frame)
            case Descriptor.OPEN:
                return self._client_opens(frame)
            case Descriptor.CLOSE:
                self.is_open = False
            case Descriptor.BEGIN:
                if len(self._sessions) < MAX_SESSIONS:
                    self._sessions[frame.channel] = SplitSession(frame.channel, data[start:end], frame)
        if session is None:
            return None
        match frame.code:
            case Descriptor.ATTACH:
                return self._client_attaches(session, frame, data[start:end], now_ms)
            case Descriptor.DETACH:
                return self._client_detaches(session, frame, data[start:end])
            case Descriptor.FLOW:
                link = session.links.get(frame.field(4))
                if link is not None and link.is_here:
                    self._owner.to_local(data[start:end])
                return session.flow_to_primary(frame, link is None or not (link.is_here or link.is_moved))
            case Descriptor.DISPOSITION:
                told = outcomes(frame)
                if told.by_receiver:
                    return None
                if session.is_local_begun:
                    self._owner.to_local(data[start:end])
                return session.settled_to_primary(frame, told)
            case Descriptor.END:
                if session.is_local_begun:
                    self._owner.to_local(data[start:end])
                del self._sessions[frame.channel]
        return None

    def _client_init(self, frame: Frame) -> bytes | None:
        if self._has_init:  # of two, nobody could tell which the primary has accepted (5.3.3.2)
            raise IllegalState("the client has sent a second sasl-init")
        self._has_init = True
        fields = list(frame.fields)
        response = frame.field(1)
        if frame.field(0) == PLAIN and isinstance(response, bytes):
            self._offer = parse_plain(response)
        if frame.field(2) is None:
            return None
        fields[2] = self._hostname
        return write(0, frame.code, fields, kind=SASL_TYPE)

    def _client_opens(self, frame: Frame) -> bytes | None:
        self.is_open = True
        self._client_open = frame
        self._from_primary.limit(frame.field(2))
        if frame.field(1) in (None, self._hostname):
            return None
        fields = list(frame.fields)
        fields[1] = self._hostname
        return write(frame.channel, frame.code, fields)

    def _client_attaches(self, session: SplitSession, frame: Frame, raw: bytes, now_ms: int) -> bytes | None:
        handle, name, role = frame.field(1), frame.field(0), frame.field(2)
        if not isinstance(handle, int) or not isinstance(name, str) or not isinstance(role, bool):
            return None  # the primary says what is wrong with it
        link = SessionLink(int(handle), str(name), not role, now_ms)
        session.links[link.handle] = link
        if self._is_answered_here(link, _address(frame.field(6 if link.is_sender else 5))):
            self._begin_here(session)
            self._owner.to_local(raw)
            return b""
        if len(session.unattached) >= MAX_UNATTACHED:
            raise LimitExceeded("number of links that the primary has not answered", MAX_UNATTACHED)
        session.unattached.append(link)
        return None

    def _is_answered_here(self, link: SessionLink, address: str | None) -> bool:
        """Note what the link is for."""
        if address is None:
            return False
        try:
            parsed = parse(address)
        except InvalidAddress:
            return False
        if parsed.node is Node.CBS:
            link.is_claims = True
        elif link.is_sender and parsed.node is Node.ENTITY and parsed.part is Part.MAIN and parsed.subscription is None:
            link.path = parsed.path
            link.is_here = self._owner.is_here(parsed.path)
        return link.is_here

    def _begin_here(self, session: SplitSession) -> None:
        session.split()
        if not self._has_local:
            self._has_local = True
            client = self._client_open
            size = client.field(2) if client is not None else None
            fields = ["client", None, size if isinstance(size, int) else UInt((1 << 32) - 1)]
            self._owner.to_local(AMQP_HEADER + write(0, Descriptor.OPEN, fields))
        if not session.is_local_begun:
            session.is_local_begun = True
            self._owner.to_local(session.begin)

    def _client_detaches(self, session: SplitSession, frame: Frame, raw: bytes) -> bytes | None:
        link = session.links.pop(frame.field(0), None)
        if link is None:
            return None
        session.forget(link)
        if link.is_here:
            self._owner.to_local(raw)
        return b"" if link.is_here or link.is_moved else None

    # -- frames of the primary

    def from_primary(self, data: bytes) -> bytes:
        """What to write to the client. Raises ProtocolError."""
        incoming = self._from_primary
        data = incoming.feed(data)
        pieces: list[bytes] = []
        kept = 0
        for start, end, channel, code in incoming.frames(data):
            if code == _TRANSFER:
                session = self._by_primary.get(channel)
                if session is not None:
                    session.received += 1
                    if self._pending:
                        self._token_answered(session, data, start, end)
                continue
            if not code:
                continue
            changed = self._primary_frame(data, start, end)
            if changed is not None:
                pieces += (data[kept:start], changed)
                kept = end
        return incoming.rest_of(data, kept, pieces)

    def _primary_frame(self, data: bytes, start: int, end: int) -> bytes | None:
        frame = read(data, start, end)
        if frame is None:
            return None
        match frame.code:
            case Descriptor.SASL_OUTCOME:
                if self._offer is not None:
                    self._owner.on_key(*self._offer, accepted=frame.field(0) == _OUTCOME_OK)
            case Descriptor.OPEN:
                self.is_answered = True
                self._from_client.limit(frame.field(2))
            case Descriptor.CLOSE:
                self.is_closed = True
            case Descriptor.BEGIN:
                return self._primary_begins(frame)
        session = self._by_primary.get(frame.channel)
        if session is None:
            return None
        match frame.code:
            case Descriptor.ATTACH:
                self._primary_attaches(session, frame)
            case Descriptor.DETACH:
                return self._primary_detaches(session, frame)
            case Descriptor.FLOW:
                session.primary_flow(frame)
                if session.is_split:
                    link = session.in_primary.get(frame.field(4))
                    return session.flow_to_client(frame, link is None or not link.is_moved)
            case Descriptor.DISPOSITION:
                return self._primary_settles(session, frame)
            case Descriptor.END:
                del self._by_primary[frame.channel]
                if session.is_local_begun and self._sessions.get(session.channel) is session:
                    self._owner.to_local(write(session.channel, Descriptor.END, []))
        return None

    def _primary_begins(self, frame: Frame) -> bytes | None:
        session = self._sessions.get(frame.field(0))
        if session is None:
            return None
        session.primary_begun(frame.channel, frame)
        self._by_primary[frame.channel] = session
        waiting, session.waiting = session.waiting, []
        if not waiting:
            return None
        return write(frame.channel, frame.code, frame.fields) + b"".join(
            self._engine_frame(session, each) for each in waiting
        )

    def _primary_attaches(self, session: SplitSession, frame: Frame) -> None:
        name, handle, role = frame.field(0), frame.field(1), frame.field(2)
        # The client may have attached another one by the same name meanwhile: the answers keep the order.
        link = next((each for each in session.unattached if each.name == name and each.is_sender is role), None)
        if link is None:
            return
        session.unattached.remove(link)
        link.peers_handle = int(handle)
        session.in_primary[link.peers_handle] = link
        if link.path is not None and frame.field(6) is not None:  # else its detach tells why it is refused
            link.is_accepted = True
            if _names_entity(frame.field(6), link.path):
                self._owner.on_sender(link.path, None, link.began_ms)

    def _primary_detaches(self, session: SplitSession, frame: Frame) -> bytes | None:
        link = session.in_primary.pop(frame.field(0), None)
        if link is None:
            return None
        if link.is_moved:
            return b""
        link.peers_handle = None
        error = _error_in(frame.field(2))
        if link.path is not None:
            lost = session.forget(link)
            ended = LinkDetached(*(error or ("", "the primary has ended the link")))
            if lost:
                self._owner.on_refused(link.path, ended, lost[0])
            elif not link.is_accepted:
                self._owner.on_sender(link.path, ended, link.began_ms)
        return None

    def _primary_settles(self, session: SplitSession, frame: Frame) -> bytes | None:
        told = outcomes(frame)
        if not told.by_receiver:
            return None
        ranges = session.answered_ranges(told)
        unanswered = session.unanswered
        taken: dict[str, int] = {}
        error = _error_of(told.state)
        for first, last in ranges:
            for number in within(first, last, unanswered):
                link, sent_ms = unanswered.pop(number)
                assert link.path is not None
                if error is None:
                    taken[link.path] = taken.get(link.path, 0) + 1
                else:
                    self._owner.on_refused(link.path, error, sent_ms)
        for path, count in taken.items():
            self._owner.on_taken(path, count)
        if ranges == [(told.first, told.last)]:
            return None
        return b"".join(
            write(frame.channel, frame.code, [frame.fields[0], UInt(first), UInt(last), *frame.fields[3:]])
            for first, last in ranges
        )

    # -- tokens

    def _token_offered(self, data: bytes, start: int, end: int) -> None:
        """Remember a token until the primary has answered."""
        frame = read(data, start, end)
        if frame is None or self._has_unread_tokens:
            return
        try:
            request = request_message.parse(frame.payload)
        except ProtocolError:
            self._lose_track()  # it may be a part of one
            return
        audience, token = request.properties.get("name"), request_message.text(request.body)
        if not isinstance(audience, str) or token is None or len(audience) + len(token) > MAX_TOKEN_CHARACTERS:
            audience, token = "", None
        number = _id_of(request.message_id)
        known = self._pending.get(number)
        if known is not None:
            audience, token = "", None
        self._pending[number] = _Offer(audience, token, 1 if known is None else known.unanswered + 1)
        if len(self._pending) > MAX_PENDING_TOKENS:
            self._lose_track()

    def _lose_track(self) -> None:
        """Give up telling which token an answer is about."""
        self._has_unread_tokens = True
        self._pending.clear()
        self._owner.on_unread_token()

    def _token_answered(self, session: SplitSession, data: bytes, start: int, end: int) -> None:
        link = session.in_primary.get(transfer(data, start, end).handle)
        if link is None or not link.is_claims:
            return
        frame = read(data, start, end)
        if frame is None:
            return
        try:
            answer = Message.decode(frame.payload)
        except (ProtocolError, IndexError, TypeError, ValueError, OverflowError):
            return  # it is no message, which is the client's business
        number = _id_of(answer.correlation_id)
        offered = self._pending.get(number)
        if offered is None:
            return
        if offered.unanswered > 1:
            self._pending[number] = offered._replace(unanswered=offered.unanswered - 1)
        else:
            del self._pending[number]
        if (answer.application_properties or {}).get("status-code") in _STATUS_GOOD:
            if offered.token is None:
                self._owner.on_unread_token()
            else:
                self._owner.on_token(offered.audience, offered.token)

    # -- frames of the engine here

    def from_local(self, data: bytes) -> bytes:
        """What to write to the client."""
        incoming = self._from_local
        data = incoming.feed(data)
        pieces = []
        for start, end, _, code in incoming.frames(data):
            frame = read(data, start, end) if code else None
            if frame is not None:
                pieces.append(self._local_frame(frame))
        incoming.rest_of(data, 0, [])
        return b"".join(pieces)

    def _local_frame(self, frame: Frame) -> bytes:
        if frame.code == Descriptor.CLOSE:
            return write(0, frame.code, frame.fields)  # it has found a fault in what the client has sent
        if frame.code == Descriptor.BEGIN:
            begun = self._sessions.get(frame.field(0))
            if begun is not None:
                self._by_local[frame.channel] = begun
            return b""
        session = self._by_local.get(frame.channel)
        if session is None:
            return b""
        if frame.code == Descriptor.END:
            del self._by_local[frame.channel]
            return b""
        if session.primary_channel is None:
            session.waiting.append(frame)
            return b""
        return self._engine_frame(session, frame)

    def _engine_frame(self, session: SplitSession, frame: Frame) -> bytes:
        channel = session.primary_channel
        assert channel is not None
        fields = list(frame.fields)
        match frame.code:
            case Descriptor.ATTACH:
                fields[1] = UInt(session.visible(fields[1]))
            case Descriptor.DETACH:
                fields[0] = UInt(session.visible(fields[0]))
            case Descriptor.FLOW:
                return session.engine_flow_to_client(frame) if frame.field(4) is not None else b""
        return write(channel, frame.code, fields)

    # -- how sends fare

    def paths(self) -> set[str]:
        """The entities that senders in the primary send to."""
        return {
            link.path
            for session in self._sessions.values()
            for link in session.links.values()
            if link.path is not None and not link.is_here and not link.is_moved
        }

    def accepted_paths(self) -> set[str]:
        """The entities to which the primary lets senders send now."""
        return {
            link.path
            for session in self._sessions.values()
            for link in session.links.values()
            if link.path is not None and link.is_accepted and link.peers_handle is not None and not link.is_moved
        }

    def unanswered(self, until_ms: int) -> Iterator[tuple[str, int]]:
        """Entities with deliveries sent at this time or earlier that have no answer, and when the first was sent."""
        for session in self._sessions.values():
            oldest: dict[str, int] = {}
            first = next(iter(session.unanswered.values()), None)
            if first is None or first[1] > until_ms:
                continue
            for link, sent_ms in session.unanswered.values():
                if link.path is not None and sent_ms <= until_ms:
                    oldest[link.path] = min(sent_ms, oldest.get(link.path, sent_ms))
            yield from oldest.items()

    def move(self, path: str, reason: str) -> Moved:
        """End the links of senders to the entity in the primary, so that the client attaches them again."""
        to_client, to_primary = [], []
        for session in self._sessions.values():
            for link in session.links.values():
                is_there = link.peers_handle is not None and not link.is_here and not link.is_moved
                if not is_there or link.path is None or link.path.lower() != path.lower():
                    continue
                assert session.primary_channel is not None
                assert link.peers_handle is not None
                detach = [UInt(link.peers_handle), True, amqp_error(conditions.LINK_DETACH_FORCED, reason)]
                to_client.append(write(session.primary_channel, Descriptor.DETACH, detach))
                to_primary.append(write(session.channel, Descriptor.DETACH, [UInt(link.handle), True]))
                session.move(link)
        return Moved(b"".join(to_client), b"".join(to_primary))


def _note_send(session: SplitSession, link: SessionLink, seen: Transfer, number: int, now_ms: int) -> None:
    if seen.aborted:
        session.unanswered.pop(number, None)
    elif not seen.settled:
        session.unanswered.setdefault(number, (link, now_ms))


def _address(terminus: object) -> str | None:
    if not isinstance(terminus, Described) or not isinstance(terminus.value, list) or not terminus.value:
        return None
    code = terminus.descriptor
    code = DESCRIPTOR_OF.get(code) if isinstance(code, str) else code
    address = terminus.value[0]
    return address if code in (Descriptor.SOURCE, Descriptor.TARGET) and isinstance(address, str) else None


def _names_entity(target: object, path: str) -> bool:
    """Return False if the target is another entity's. Clients need not repeat the address when they attach."""
    address = _address(target)
    if address is None:
        return True
    try:
        return parse(address).path.lower() == path.lower()
    except InvalidAddress:
        return False


def _error_in(error: object) -> tuple[str, str] | None:
    """Condition and description of an error; None if there is none."""
    if not isinstance(error, Described) or not isinstance(error.value, list) or not error.value:
        return None
    condition, description = (*error.value, None)[:2]
    return str(condition or ""), str(description or "")


def _error_of(state: Described | None) -> ClientError | None:
    """What an outcome says of a send; None if the message was taken, or is a part of a transaction."""
    if state is None:
        return None
    code = DESCRIPTOR_OF.get(state.descriptor) if isinstance(state.descriptor, str) else state.descriptor
    if code == Descriptor.REJECTED:
        value = state.value if isinstance(state.value, list) else []
        error = _error_in(value[0]) if value else None
        return MessageRefused(*(error or ("", "the primary has rejected the message")))
    if code in (Descriptor.RELEASED, Descriptor.MODIFIED):
        return MessageReturned("", "the primary has returned the message")
    return None


def _id_of(message_id: object) -> object:
    """Ids are compared by type and value."""
    return type(message_id).__name__, message_id
