"""Single frames through a `Through`, where counting them is intricate."""

import pytest

from broker.pairing.sidecar.frames import write
from broker.pairing.sidecar.through import MAX_PENDING_TOKENS, MAX_UNATTACHED, Through
from protocol.client.messages import Message
from protocol.codec import Described, Int, Symbol, UByte, UInt, ULong, UShort, decode, encode
from protocol.engine.frames import HEADER_BYTES, walk
from protocol.engine.sasl import SASL_HEADER
from protocol.errors import ProtocolError
from protocol.symbols import AMQP_HEADER, Descriptor

OPEN = write(0, Descriptor.OPEN, ["client", "host", UInt(65536)])
ACCEPTED = Described(ULong(Descriptor.ACCEPTED), [])
MASK = (1 << 32) - 1


class Owner:
    """Notes what it is told. Entities in `here` have failed over."""

    def __init__(self):
        self.here: set[str] = set()
        self.local = b""
        self.events = []

    def is_here(self, path):
        return path in self.here

    def to_local(self, data):
        self.local += data

    def on_key(self, key_name, key, accepted):
        self.events.append(("key", key_name, key, accepted))

    def on_token(self, audience, token):
        self.events.append(("token", audience, token))

    def on_unread_token(self):
        self.events.append(("unread",))

    def on_sender(self, path, error, began_ms):
        self.events.append(("sender", path, error and error.condition, began_ms))

    def on_taken(self, path, count):
        self.events.append(("taken", path, count))

    def on_refused(self, path, error, began_ms):
        self.events.append(("refused", path, error.condition, began_ms))


def attach(name, handle, address, *, sender=True):
    source, target = Described(ULong(Descriptor.SOURCE), [name]), Described(ULong(Descriptor.TARGET), [address])
    return write(0, Descriptor.ATTACH, [name, UInt(handle), not sender, None, None, source, target])


def attached(name, handle, address):
    """The primary's answer to a sender."""
    source, target = Described(ULong(Descriptor.SOURCE), [name]), Described(ULong(Descriptor.TARGET), [address])
    return write(0, Descriptor.ATTACH, [name, UInt(handle), True, None, None, source, target])


def sent(handle, number, *, more=False, aborted=None):
    number = None if number is None else UInt(number)
    fields = [UInt(handle), number, b"t", UInt(0), False, more, None, None, None, aborted]
    return write(0, Descriptor.TRANSFER, fields, b"x")


def settled(first, last, state=ACCEPTED):
    return write(0, Descriptor.DISPOSITION, [True, UInt(first), UInt(last), True, state])


def detached(handle, condition=None):
    error = None if condition is None else Described(ULong(Descriptor.ERROR), [Symbol(condition), "text"])
    return write(0, Descriptor.DETACH, [UInt(handle), True, error])


def ids(output):
    """Delivery ids of the transfers in what is written to the primary."""
    found = []
    for start, _, _, code in walk(output):
        if code == Descriptor.TRANSFER:
            performative, _ = decode(output, start + HEADER_BYTES)
            found.append((*performative.value, None)[1])
    return found


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def through(owner):
    through = Through(owner, "primary")
    through.from_client(AMQP_HEADER + OPEN + write(0, Descriptor.BEGIN, [None, UInt(0), UInt(99), UInt(99)]), 0)
    through.from_primary(AMQP_HEADER + OPEN + write(0, Descriptor.BEGIN, [UShort(0), UInt(0), UInt(99), UInt(99)]))
    for handle, name in enumerate(("one", "two", "three")):
        through.from_client(attach(name, handle, name), 10)
        through.from_primary(attached(name, handle, name))
    owner.events.clear()
    return through


def test_deliveries_whose_frames_take_turns_keep_their_ids_after_a_split(owner, through):
    owner.here.add("here")
    through.from_client(attach("h", 7, "here"), 20)
    assert ids(through.from_client(sent(0, 0) + sent(7, 1), 20)) == [0]
    output = through.from_client(
        sent(0, 2, more=True) + sent(1, 3, more=True) + sent(0, 2, more=True) + sent(1, 3) + sent(0, 2) + sent(2, 4), 20
    )
    assert ids(output) == [1, 2, 1, 2, 1, 3]


def test_a_delivery_that_was_begun_before_a_split_goes_on_with_its_id(owner, through):
    assert ids(through.from_client(sent(0, 0, more=True) + sent(1, 1, more=True), 20)) == [0, 1]
    owner.here.add("here")
    through.from_client(attach("h", 7, "here") + sent(7, 2), 20)
    assert ids(through.from_client(sent(0, 0) + sent(1, 1) + sent(0, 3), 20)) == [0, 1, 2]


def test_a_delivery_that_was_aborted_is_over_and_waits_for_no_answer(owner, through):
    owner.here.add("here")
    through.from_client(attach("h", 7, "here") + sent(7, 0), 20)
    output = through.from_client(sent(0, 1, more=True) + sent(0, 1, aborted=True) + sent(0, 2), 20)
    assert ids(output) == [1, 1, 2]  # the first may be any
    through.from_primary(settled(2, 2))
    assert owner.events == [("taken", "one", 1)]
    assert [*through.unanswered(100)] == []


def test_ids_wrap_around(owner, through):
    through.from_client(sent(0, MASK - 1) + sent(0, MASK) + sent(0, 0) + sent(0, 1), 20)
    through.from_primary(settled(MASK - 1, 0))
    assert owner.events == [("taken", "one", 3)]
    assert [*through.unanswered(100)] == [("one", 20)]
    through.from_primary(settled(2, 1))  # all ids there are
    assert [*through.unanswered(100)] == []


def test_a_link_that_ends_while_nothing_is_on_its_way_says_nothing_of_the_entity(owner, through):
    """Service Bus ends links that are not used."""
    through.from_client(sent(0, 0), 20)
    through.from_primary(settled(0, 0))
    owner.events.clear()
    through.from_primary(detached(0, "amqp:link:detach-forced"))
    assert owner.events == []


def test_a_link_that_ends_with_a_message_on_its_way_is_a_failed_send(owner, through):
    through.from_client(sent(0, 0), 20)
    through.from_client(sent(0, 1), 30)
    through.from_primary(detached(0, "amqp:internal-error"))
    assert owner.events == [("refused", "one", "amqp:internal-error", 20)]
    assert [*through.unanswered(100)] == []


def test_a_sender_that_is_refused_has_failed_since_it_was_attached(owner, through):
    through.from_client(attach("four", 4, "four"), 50)
    through.from_primary(write(0, Descriptor.ATTACH, ["four", UInt(4), True]) + detached(4, "com.microsoft:timeout"))
    assert owner.events == [("sender", "four", "com.microsoft:timeout", 50)]


def performatives(output):
    """Code and fields of each frame, padded with None."""
    found = []
    for start, _, _, code in walk(output):
        performative, _ = decode(output, start + HEADER_BYTES)
        found.append((code, performative.value + [None] * 12))
    return found


def flow(incoming, window, outgoing, *link):
    return write(0, Descriptor.FLOW, [UInt(incoming), UInt(window), UInt(outgoing), UInt(50), *link])


@pytest.fixture
def split(owner, through):
    """Deliveries 0 and 2 are in the primary, as 0 and 1; delivery 1 is here."""
    owner.here.add("here")
    through.from_client(attach("h", 7, "here"), 20)
    assert ids(through.from_client(sent(0, 0) + sent(7, 1) + sent(0, 2), 20)) == [0, 1]
    return through


def test_outcomes_of_the_primary_come_with_the_clients_ids(owner, split):
    assert [(fields[1], fields[2]) for _, fields in performatives(split.from_primary(settled(0, 1)))] == [
        (0, 0),
        (2, 2),
    ]
    assert owner.events == [("taken", "one", 2)]
    split.from_client(sent(1, 3), 20)
    [(code, fields)] = performatives(split.from_primary(settled(2, 2)))
    assert (code, fields[1], fields[2]) == (Descriptor.DISPOSITION, 3, 3)


def test_windows_count_what_is_here_for_the_client_and_not_for_the_primary(split):
    [(_, fields)] = performatives(split.from_primary(flow(2, 99, 0)))
    assert fields[:3] == [3, 99, 0]  # of three transfers of the client
    [(_, fields)] = performatives(split.from_client(flow(0, 99, 3), 20))
    assert fields[:3] == [0, 99, 2]  # of which the primary has two


def test_credit_of_the_engine_here_comes_with_the_session_that_the_client_sees(owner, split):
    split.from_primary(flow(1, 77, 5))
    split.from_primary(write(0, Descriptor.TRANSFER, [UInt(9), UInt(0), b"t"], b"x"))
    here = AMQP_HEADER + OPEN + write(0, Descriptor.BEGIN, [UShort(0), UInt(0), UInt(99), UInt(99)])
    assert split.from_local(here) == b""
    engine = [UInt(55), UInt(66), UInt(77), UInt(88), UInt(0), UInt(1), UInt(10)]
    [(_, fields)] = performatives(split.from_local(write(0, Descriptor.FLOW, engine)))
    assert fields[:7] == [2, 77, 1, 50, MASK, 1, 10]


def test_credit_of_the_primary_for_a_link_that_was_moved_is_kept_from_the_client(owner, through):
    moved = through.move("ONE", "failed over")
    assert [(code, fields[:2]) for code, fields in performatives(moved.to_client)] == [(Descriptor.DETACH, [0, True])]
    assert [(code, fields[:2]) for code, fields in performatives(moved.to_primary)] == [(Descriptor.DETACH, [0, True])]
    [(_, fields)] = performatives(through.from_primary(flow(0, 99, 0, UInt(0), UInt(0), UInt(10))))
    assert fields[4:7] == [None] * 3
    [(_, fields)] = performatives(through.from_primary(flow(0, 99, 0, UInt(1), UInt(0), UInt(10))))
    assert fields[4:7] == [1, 0, 10]
    # Both answers stay here: each side has seen a detach of the other already.
    assert through.from_client(sent(0, 0) + detached(0), 20) == b""
    assert through.from_primary(detached(0)) == b""
    assert ids(through.from_client(sent(1, 1), 20)) == [1]


def test_what_the_primary_says_of_a_moved_links_deliveries_is_kept_from_the_client(owner, through):
    """It has not heard of the detach yet when it answers, or settles what it has not answered."""
    through.from_client(sent(1, 0) + sent(0, 1) + sent(1, 2) + sent(0, 3) + sent(0, 4), 20)
    through.move("one", "failed over")
    told = [(fields[1], fields[2]) for _, fields in performatives(through.from_primary(settled(0, 3)))]
    assert told == [(0, 0), (2, 2)]
    assert through.from_primary(settled(4, 4, None)) == b""
    through.from_client(sent(1, 5), 30)
    [(_, fields)] = performatives(through.from_primary(settled(5, 5)))
    assert fields[1:3] == [5, 5]


def test_the_engine_here_waits_until_the_primary_has_begun_the_session(owner):
    owner.here.add("here")
    through = Through(owner, "primary")
    begin = write(0, Descriptor.BEGIN, [None, UInt(0), UInt(99), UInt(99)])
    through.from_client(AMQP_HEADER + OPEN + begin + attach("h", 7, "here"), 20)
    begun = write(0, Descriptor.BEGIN, [UShort(0), UInt(0), UInt(99), UInt(99)])
    engine = AMQP_HEADER + OPEN + begun + attached("h", 0, "here")
    assert through.from_local(engine) == b""
    codes = [(code, fields[1]) for code, fields in performatives(through.from_primary(OPEN + begun))[1:]]
    assert codes == [(Descriptor.BEGIN, 0), (Descriptor.ATTACH, MASK)]


# --- what the primary has said of whom


def plain(name, key, kind=1):
    return write(0, Descriptor.SASL_INIT, [Symbol("PLAIN"), b"\0%b\0%b" % (name, key), "host"], kind=kind)


@pytest.mark.parametrize("kind", [0, 1])
def test_a_key_behind_the_one_that_the_primary_accepts_is_not_remembered(owner, kind):
    through = Through(owner, "primary")
    through.from_client(SASL_HEADER + plain(b"send", b"good"), 0)
    with pytest.raises(ProtocolError):
        through.from_client(plain(b"app", b"forged", kind), 0)
    through.from_primary(SASL_HEADER + write(0, Descriptor.SASL_OUTCOME, [UByte(0)], kind=1))
    assert owner.events == [("key", "send", "good", True)]


@pytest.mark.parametrize("response", [b"", b"x\0send\0key", b"\0send\0\xff", b"\0send\0key\0more", b"\0send"])
def test_what_is_no_key_is_not_remembered(owner, response):
    through = Through(owner, "primary")
    through.from_client(SASL_HEADER + write(0, Descriptor.SASL_INIT, [Symbol("PLAIN"), response], kind=1), 0)
    through.from_primary(SASL_HEADER + write(0, Descriptor.SASL_OUTCOME, [UByte(0)], kind=1))
    assert owner.events == []


def test_a_link_that_takes_the_name_and_handle_of_another_does_not_take_its_answer(owner, through):
    through.from_client(attach("x", 7, "mine") + detached(7) + attach("x", 7, "payroll"), 20)
    through.from_primary(attached("x", 7, "mine") + detached(7))
    assert owner.events == [("sender", "mine", None, 20)]
    through.from_primary(write(0, Descriptor.ATTACH, ["x", UInt(7), True]) + detached(7, "amqp:unauthorized-access"))
    assert owner.events == [
        ("sender", "mine", None, 20),
        ("sender", "payroll", "amqp:unauthorized-access", 20),
    ]


def test_two_links_of_one_name_are_told_apart(owner, through):
    through.from_client(attach("x", 8, "payroll") + attach("x", 9, "mine"), 20)
    refused = write(0, Descriptor.ATTACH, ["x", UInt(8), True])
    through.from_primary(refused + detached(8, "amqp:unauthorized-access") + attached("x", 9, "mine"))
    assert owner.events == [("sender", "payroll", "amqp:unauthorized-access", 20), ("sender", "mine", None, 20)]


def test_an_answer_for_another_entity_says_nothing(owner, through):
    through.from_client(attach("x", 8, "payroll"), 20)
    through.from_primary(attached("x", 8, "mine"))
    assert owner.events == []
    through.from_client(attach("y", 9, "sb://host/Mine"), 20)
    through.from_primary(attached("y", 9, "mine"))
    assert owner.events == [("sender", "Mine", None, 20)]


def put(handle, number, token, *, more=False, message_id=1):
    payload = request(message_id, token)
    part = payload[:20] if more else payload
    fields = [UInt(handle), UInt(number), b"t", UInt(0), True, more]
    return write(0, Descriptor.TRANSFER, fields, part), payload[20:]


def request(message_id, token):
    properties = {"operation": "put-token", "type": "servicebus.windows.net:sastoken", "name": f"sb://x/{token}"}
    body = encode(Described(ULong(Descriptor.AMQP_VALUE), token))
    return Message(body, message_id=ULong(message_id), application_properties=properties).encode()


def answered(number, status, message_id=1):
    body = encode(Described(ULong(Descriptor.AMQP_VALUE), None))
    properties = {"status-code": Int(status)}
    message = Message(body, correlation_id=ULong(message_id), application_properties=properties)
    fields = [UInt(21), UInt(number), b"t", UInt(0), True, False]
    return write(0, Descriptor.TRANSFER, fields, message.encode())


@pytest.fixture
def claims(owner, through):
    """With a sender and a receiver at $cbs."""
    source, target = Described(ULong(Descriptor.SOURCE), ["$cbs"]), Described(ULong(Descriptor.TARGET), ["d"])
    through.from_client(attach("c", 20, "$cbs"), 20)
    through.from_client(write(0, Descriptor.ATTACH, ["d", UInt(21), True, None, None, source, target]), 20)
    through.from_primary(attached("c", 20, "$cbs"))
    through.from_primary(write(0, Descriptor.ATTACH, ["d", UInt(21), False, None, None, source, target]))
    owner.events.clear()
    return through


def test_an_accepted_token_is_remembered(owner, claims):
    claims.from_client(put(20, 0, "one")[0] + put(20, 1, "two", message_id=2)[0], 20)
    claims.from_primary(answered(0, 401, 2) + answered(1, 202))
    assert owner.events == [("token", "sb://x/one", "one")]


@pytest.mark.parametrize("order", [("good", "forged"), ("forged", "good")])
def test_of_tokens_with_one_message_id_none_is_remembered(owner, claims, order):
    """Not even when the first answer has come."""
    for number, token in enumerate(order):
        claims.from_client(put(20, number, token)[0], 20)
    status = {"good": 202, "forged": 401}
    claims.from_primary(answered(0, status[order[0]]))
    claims.from_client(put(20, 2, "forged too")[0], 20)
    claims.from_primary(answered(1, status[order[1]]) + answered(2, 401))
    assert owner.events == [("unread",)]
    claims.from_client(put(20, 3, "again")[0], 20)
    claims.from_primary(answered(3, 202))
    assert owner.events == [("unread",), ("token", "sb://x/again", "again")]


def test_behind_a_token_in_several_frames_none_is_remembered(owner, claims):
    first, rest = put(20, 0, "good", more=True)
    claims.from_client(first, 20)
    claims.from_client(write(0, Descriptor.TRANSFER, [UInt(20), None, None, None, True, False], rest), 20)
    claims.from_client(put(20, 1, "forged")[0], 20)
    claims.from_primary(answered(0, 202) + answered(1, 401))
    assert owner.events == [("unread",)]


def test_too_many_tokens_at_once_are_not_remembered(owner, claims):
    for number in range(MAX_PENDING_TOKENS + 1):
        claims.from_client(put(20, number, "good", message_id=number)[0], 20)
    claims.from_client(put(20, 0, "forged", message_id=0)[0], 20)
    claims.from_primary(answered(0, 202, 0))
    assert owner.events == [("unread",)]


def test_links_that_the_primary_does_not_answer_have_a_limit(through):
    for number in range(MAX_UNATTACHED):
        through.from_client(attach(f"n{number}", 7, "orders"), 20)
    with pytest.raises(ProtocolError, match="links that the primary has not answered"):
        through.from_client(attach("one more", 7, "orders"), 20)
