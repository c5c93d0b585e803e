"""Who may do what: keys, tokens and their ends, limits on time and numbers, on a real broker."""

import re
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from uuid import UUID

import pytest

from protocol.codec import Array, Int, Long, Symbol, UInt
from protocol.engine.sasl import SASL_HEADER, plain_response
from protocol.nodes.sas_tokens import generate
from protocol.symbols import AMQP_HEADER
from tests.brokers import KEY, KEY_NAME
from tests.end_to_end.health import metrics
from tests.end_to_end.raw_peer import (
    ACCEPTED,
    ATTACH,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    OPEN,
    TRANSFER,
    RawPeer,
    error_of,
    message,
    performative,
)
from tests.end_to_end.raw_requests import Node, put_token, token_for
from tests.end_to_end.raw_transactions import Coordinator
from tests.patience import eventually

PEEK = "com.microsoft:peek-message"
ENDED_WITHIN_S = 30.0  # a busy machine included; the tokens end after two seconds
PEEK_BODY = {"from-sequence-number": Long(0), "message-count": Int(1)}
UNAUTHORIZED = "amqp:unauthorized-access"


@pytest.fixture
def stranger(broker):
    """A peer without any right."""
    with RawPeer.anonymous(broker.amqp_port) as peer:
        yield peer


# --- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key_name", "key"),
    [
        ("RootManageSharedAccessKey", "wrong"),
        ("RootManageSharedAccessKey", ""),
        ("nobody", "SAS_KEY_VALUE"),
        ("", ""),
        ("rootmanagesharedaccesskey", "SAS_KEY_VALUE"),
        ("x" * 1500, "y" * 1500),
        ("sends", "key-that-listens"),
    ],
    ids=["key", "no key", "name", "nothing", "case", "long", "another rule's"],
)
def test_a_wrong_key_gets_outcome_1_and_the_socket_is_closed(broker, key_name, key):
    before = metrics(broker)["peeklock_authentication_failures_total",]
    with RawPeer(broker.amqp_port) as peer:
        assert peer.sasl_plain(key_name, key).fields[0] == 1
        assert peer.wait_closed() == []
    assert metrics(broker)["peeklock_authentication_failures_total",] == before + 1
    assert '"authentication failed"' in broker.log()


@pytest.mark.parametrize(
    "response",
    [b"", b"\0", b"name", b"\0a\0b\0c", b"other\0sends\0key-that-sends", b"\0\xff\xfe\0key", b"\0" * 3000],
    ids=repr,
)
def test_a_plain_response_that_is_none_gets_outcome_1(broker, response):
    with RawPeer(broker.amqp_port) as peer:
        assert peer.sasl("PLAIN", response).fields[0] == 1
        assert peer.wait_closed() == []


def test_external_without_a_certificate_is_refused(broker):
    with RawPeer(broker.amqp_port) as peer:
        assert peer.sasl("EXTERNAL", b"root").fields[0] == 1


def test_a_key_with_listen_cannot_send(broker):
    with RawPeer.connect(broker.amqp_port, key_name="listens", key="key-that-listens") as peer:
        peer.attach(sender=True, address="orders")
        condition, description = peer.refusal()
        assert condition == UNAUTHORIZED
        assert "'Send' claim(s) are required" in description
        peer.attach_receiver("orders")


def test_a_key_with_send_cannot_receive_or_peek_but_schedules(broker):
    with RawPeer.connect(broker.amqp_port, key_name="sends", key="key-that-sends") as peer:
        peer.attach(sender=False, address="orders")
        condition, description = peer.refusal()
        assert condition == UNAUTHORIZED
        assert "'Listen' claim(s) are required" in description
        node = Node(peer, "orders/$management")
        for operation, body in (
            (PEEK, PEEK_BODY),
            ("com.microsoft:renew-lock", {"lock-tokens": Array(UUID, (UUID(int=1),))}),
            (
                "com.microsoft:receive-by-sequence-number",
                {"sequence-numbers": Array(Long, (Long(1),)), "receiver-settle-mode": UInt(1)},
            ),
            (
                "com.microsoft:update-disposition",
                {"disposition-status": "completed", "lock-tokens": Array(UUID, (UUID(int=1),))},
            ),
            ("com.microsoft:batch-delete-messages", {"message-count": Int(1), "enqueued-time-utc": Long(1)}),
        ):
            response = node.ask(operation, body)
            assert (response.status, response.condition) == (401, UNAUTHORIZED), operation
        scheduled = node.ask("com.microsoft:schedule-message", {"messages": [{"message": message(b"later")}]})
        assert scheduled.status == 200


def test_a_key_with_listen_cannot_schedule_or_purge(broker):
    with RawPeer.connect(broker.amqp_port, key_name="listens", key="key-that-listens") as peer:
        node = Node(peer, "orders/$management")
        scheduled = node.ask("com.microsoft:schedule-message", {"messages": [{"message": message(b"later")}]})
        assert (scheduled.status, scheduled.condition) == (401, UNAUTHORIZED)
        purged = node.ask("peeklock:purge", {})
        assert (purged.status, purged.condition) == (401, UNAUTHORIZED)
        assert node.ask(PEEK, PEEK_BODY).status in (200, 204)


def test_an_entitys_key_is_good_for_that_entity_only(broker):
    with RawPeer.connect(broker.amqp_port, key_name="invoices-only", key="key-of-invoices") as peer:
        peer.attach_sender("invoices")
        peer.attach_receiver("invoices")
        peer.attach_receiver("invoices/$DeadLetterQueue")
        peer.attach(sender=True, address="orders")
        assert peer.refusal()[0] == UNAUTHORIZED
        peer.attach(sender=False, address="invoices2")
        assert peer.refusal()[0] == UNAUTHORIZED  # and not: there is none
        peer.attach(sender=False, address="orders/$management")
        assert peer.refusal()[0] == UNAUTHORIZED


# --- tokens -----------------------------------------------------------------------------------------------------------


def test_a_stranger_can_do_nothing_but_put_a_token(stranger):
    for sender in (True, False):
        for address in ("orders", "orders/$DeadLetterQueue", "orders/$management", "nothing", "$management"):
            handle = stranger.attach(sender=sender, address=address)
            assert stranger.refusal()[0] == UNAUTHORIZED, address
            stranger.detach(handle)
    node = Node(stranger, "$cbs")
    assert put_token(node, "orders", token_for("orders")).status == 202
    stranger.attach_sender("orders")
    stranger.attach_receiver("orders")


@pytest.mark.parametrize(
    ("path", "token", "text"),
    [
        ("orders", token_for("orders", key="wrong"), "InvalidSignature"),
        ("orders", token_for("orders", key_name="nobody"), "InvalidSignature"),
        ("orders", token_for("orders", valid_s=-1), "ExpiredToken"),
        ("orders", token_for("invoices"), "InvalidAudience"),
        ("orders2", token_for("orders"), "InvalidAudience"),
        ("orders", token_for("invoices", key_name="invoices-only", key="key-of-invoices"), "InvalidSignature"),
        ("orders", token_for("", key_name="invoices-only", key="key-of-invoices"), "InvalidSignature"),
        ("orders", token_for("orders").replace("sig=", "gis="), "MalformedToken"),
        ("orders", token_for("orders").replace("se=", "se=9"), "InvalidSignature"),
        ("orders", "SharedAccessSignature ", "MalformedToken"),
        ("orders", "SharedAccessSignature sr=%ff&sig=%ff&se=99999999999999999999&skn=%ff", ""),
        ("orders", "", "MalformedToken"),
        ("orders", None, "MalformedToken"),
        ("orders", [1, 2], "MalformedToken"),
        ("orders", "a" * 60_000, "MalformedToken"),
        ("orders", "e30.e30.e30", "JWT"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_token_that_is_not_good_gets_401_and_no_right(stranger, path, token, text):
    node = Node(stranger, "$cbs")
    response = put_token(node, path, token)
    assert response.status == 401
    assert text in response.description
    assert "errorCondition" not in response.properties  # Python takes one for a failure of its own
    stranger.attach(sender=False, address=path)
    assert stranger.refusal()[0] == UNAUTHORIZED


@pytest.mark.parametrize(
    "path",
    [
        "nothing",
        "nothing/$DeadLetterQueue",
        "nothing/$management",
        "orders/subscriptions/none",
        "orders/subscriptions/none/$DeadLetterQueue/$management",
        "ORDERS2/",
        "orders%20",
    ],
)
def test_a_token_for_an_entity_that_there_is_not_gets_404(stranger, path):
    node = Node(stranger, "$cbs")
    response = put_token(node, path, token_for(""))
    assert response.status == 404
    assert re.fullmatch(
        rf"The messaging entity 'sb://localhost/{re.escape(path)}' could not be found\. "
        r"To know more visit https://aka\.ms/sbResourceMgrExceptions\. "
        rf"TrackingId:[0-9a-f-]{{36}}_G0_B0, SystemTracker:localhost:{re.escape(path)}, Timestamp:\S+",
        response.description,
    )
    assert put_token(node, path, token_for("", key="wrong")).status == 401  # nobody else is told what there is


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/",
        "$management",
        "$cbs",
        "ORDERS",
        "orders/",
        "orders/$management",
        "orders/$DeadLetterQueue",
        "orders/$deadletterqueue/$Management",
        "orders/$Transfer/$DeadLetterQueue",
        "%6Frders",
    ],
)
@pytest.mark.parametrize("origin", ["sb://localhost/", "amqps://LOCALHOST:5671/", "localhost/", "/", ""])
def test_a_token_for_what_there_is_is_taken_however_it_is_spelled(stranger, path, origin):
    assert put_token(Node(stranger, "$cbs"), path or "/", token_for(""), origin=origin).status == 202


def test_a_connection_whose_tokens_entity_is_not_there_yet_stays_for_the_next_token(broker):
    """Frameworks open a connection, are told that their queue is missing, create it, and go on."""
    with RawPeer.anonymous(broker.amqp_port) as known, RawPeer.anonymous(broker.amqp_port) as stranger:
        node = Node(known, "$cbs")
        assert put_token(node, "nothing", token_for("")).status == 404
        late = Node(stranger, "$cbs")
        assert put_token(late, "nothing", token_for("", key="wrong")).status == 401
        condition, description = error_of(stranger.wait_closed()[-1])
        assert (condition, "no valid token was put in time" in description) == (UNAUTHORIZED, True)
        known.attach(sender=True, address="orders")
        assert known.refusal()[0] == UNAUTHORIZED, "it has no right from that"
        assert put_token(node, "orders", token_for("")).status == 202


def test_an_expired_token_is_told_when_it_ended(stranger):
    node = Node(stranger, "$cbs")
    ended = datetime.now(UTC).replace(microsecond=0) - timedelta(hours=1)
    token = generate("sb://localhost/orders", KEY_NAME, KEY, int(ended.timestamp()))
    response = put_token(node, "orders", token)
    assert response.status == 401
    said = f"ExpiredToken: The token is expired. Expiration time: '{ended:%Y-%m-%d %H:%M:%SZ}'. TrackingId:"
    assert response.description.startswith(said)


def test_a_link_whose_token_ends_is_told_when_it_ended(stranger):
    node = Node(stranger, "$cbs")
    ends = int(time.time()) + 2
    put_token(node, "orders", generate("sb://localhost/orders", KEY_NAME, KEY, ends))
    stranger.attach_sender("orders")
    _, description = error_of(stranger.expect(DETACH, ENDED_WITHIN_S))
    said = f"{datetime.fromtimestamp(ends, UTC):%Y-%m-%d %H:%M:%SZ}"
    assert description.startswith(f"ExpiredToken: The token is expired. Expiration time: '{said}'. TrackingId:")


@pytest.mark.parametrize("sender", [True, False])
def test_a_second_link_to_cbs_is_refused_while_there_is_one(stranger, sender):
    node = Node(stranger, "$cbs")
    stranger.begin(1)
    for channel in (0, 1):
        handle = stranger.attach(sender=sender, address="$cbs", channel=channel, handle=7)
        condition, description = stranger.refusal()
        assert condition == "amqp:not-allowed"
        assert re.match(r"A link to connection '\S+' \$cbs node has already been opened\.", description)
        stranger.detach(handle, channel=channel)
    assert put_token(node, "orders", token_for("orders")).status == 202


@pytest.mark.parametrize("closed", [True, False])
def test_links_to_cbs_may_be_attached_again_when_the_first_are_gone(stranger, closed):
    """As Go does for each token, in a session of its own; and all at once, without waiting for answers."""
    for channel in (1, 2, 3):
        stranger.begin(channel)
        handles = [stranger.attach(sender=sender, address="$cbs", channel=channel) for sender in (True, False)]
        assert all(None not in stranger.expect(ATTACH).fields[5:7] for _ in handles)
        if channel == 3:
            stranger.say(END, channel=channel)
        else:
            for handle in handles:
                stranger.detach(handle, closed=closed, channel=channel)
    stranger.drop(DETACH)
    stranger.drop(FLOW)
    assert put_token(Node(stranger, "$cbs"), "orders", token_for("orders")).status == 202


def test_a_resource_without_a_scheme_grants_what_it_names(stranger):
    """As Go's own signer makes it."""
    node = Node(stranger, "$cbs")
    expires_s = int(time.time()) + 60
    assert put_token(node, "orders", generate("localhost/orders", KEY_NAME, KEY, expires_s)).status == 202
    assert put_token(node, "invoices", generate("localhost/orders", KEY_NAME, KEY, expires_s)).status == 401
    stranger.attach_sender("orders")
    stranger.attach(sender=True, address="invoices")
    assert stranger.refusal()[0] == UNAUTHORIZED
    assert put_token(node, "invoices", generate("localhost", KEY_NAME, KEY, expires_s)).status == 202
    stranger.attach_sender("invoices")


def test_a_resource_that_is_an_entitys_name_is_never_the_host(stranger):
    """Although it looks like one, and the client calls us by it."""
    node = Node(stranger, "$cbs")
    token = generate("v1.orders", KEY_NAME, KEY, int(time.time()) + 60)
    assert put_token(node, "orders", token, origin="sb://v1.orders/").status == 401
    assert put_token(node, "orders", token).status == 401
    assert put_token(node, "", token, origin="sb://v1.orders/").status == 401
    assert put_token(node, "v1.orders", token).status == 202
    stranger.attach_sender("v1.orders")


@pytest.mark.parametrize("name", ["not.made.yet", "orders.gone", "v1.orders/none", "broker.example.com/orders"])
def test_what_a_token_is_for_does_not_depend_on_what_there_is(stranger, name):
    node = Node(stranger, "$cbs")
    token = generate(name, KEY_NAME, KEY, int(time.time()) + 60)
    for path, origin in (("orders", "sb://localhost/"), ("", f"sb://{name}/"), ("$management", ""), ("orders", "")):
        response = put_token(node, path, token, origin=origin)
        assert response.status == 401
        assert response.description.startswith("InvalidAudience: ")
        assert f"'{name.partition('/')[0]}'" in response.description
        assert "security.host_names" in response.description


def test_who_calls_us_by_a_name_that_we_do_not_know_is_told_so(stranger):
    node = Node(stranger, "$cbs")
    response = put_token(node, "orders", token_for("orders"), origin="broker.example.com/")
    assert response.status == 401
    response = put_token(node, "orders", token_for(""), origin="broker.example.com/")
    assert response.status == 404
    assert "could not be found" in response.description
    assert "security.host_names" in response.description
    name = "contoso.servicebus.windows.net"
    token = generate(f"{name}/orders", KEY_NAME, KEY, int(time.time()) + 60)
    assert put_token(node, "orders", token, origin=f"amqps://{name}/").status == 202
    assert put_token(node, "orders", token, origin=f"{name}/").status == 202
    assert put_token(node, "invoices", token).status == 401


@pytest.mark.parametrize(
    ("operation", "properties"),
    [("put-token", {}), ("delete-token", {"name": "sb://localhost/orders"}), (None, {}), (5, {}), ("", {})],
    ids=["no audience", "another operation", "null", "a number", "empty"],
)
def test_a_request_that_is_no_put_token_gets_400(stranger, operation, properties):
    node = Node(stranger, "$cbs")
    assert node.ask(operation, token_for("orders"), **properties).status == 400


def test_nonsense_on_cbs_is_refused_on_its_delivery(stranger):
    node = Node(stranger, "$cbs")
    stranger.transfer(b"\x00\x01nonsense", node.sender)
    assert error_of(stranger.expect(DISPOSITION))[0] == "amqp:decode-error"
    assert put_token(node, "orders", token_for("orders")).status == 202


def test_a_token_grants_the_rights_of_its_key_only(stranger):
    node = Node(stranger, "$cbs")
    assert put_token(node, "orders", token_for("orders", key_name="sends", key="key-that-sends")).status == 202
    stranger.attach_sender("orders")
    stranger.attach(sender=False, address="orders")
    assert stranger.refusal()[0] == UNAUTHORIZED
    stranger.attach(sender=True, address="invoices")
    assert stranger.refusal()[0] == UNAUTHORIZED


def test_when_its_token_expires_a_link_is_detached_and_a_new_token_opens_it_again(stranger):
    node = Node(stranger, "$cbs")
    assert put_token(node, "orders", token_for("orders", valid_s=2)).status == 202
    handle = stranger.attach_sender("orders")
    management = Node(stranger, "orders/$management")
    detached = stranger.expect(DETACH, ENDED_WITHIN_S)
    assert detached.fields[0] == handle
    condition, description = error_of(detached)
    assert condition == UNAUTHORIZED
    assert "ExpiredToken" in description
    stranger.detach(handle)
    assert management.ask(PEEK, PEEK_BODY).status == 401
    stranger.attach(sender=True, address="orders")
    assert stranger.refusal()[0] == UNAUTHORIZED
    assert put_token(node, "orders", token_for("orders")).status == 202
    stranger.attach_sender("orders")
    assert management.ask(PEEK, PEEK_BODY).status in (200, 204)


def test_a_token_that_is_renewed_in_time_keeps_the_link(stranger):
    node = Node(stranger, "$cbs")
    put_token(node, "orders", token_for("orders", valid_s=1))
    handle = stranger.attach_sender("orders")
    put_token(node, "orders", token_for("orders"))
    stranger.nothing_more(DETACH, 1.1)
    stranger.transfer(message(b"still allowed"), handle)
    assert stranger.expect(DISPOSITION).fields[4].descriptor == ACCEPTED


def test_a_token_on_one_connection_is_none_on_another(broker):
    with RawPeer.anonymous(broker.amqp_port) as first, RawPeer.anonymous(broker.amqp_port) as second:
        assert put_token(Node(first, "$cbs"), "orders", token_for("orders")).status == 202
        second.attach(sender=True, address="orders")
        assert second.refusal()[0] == UNAUTHORIZED


def test_a_response_never_goes_to_another_connection(broker):
    """Two clients with the same link names and reply-to (amqp.md 2.1)."""
    with RawPeer.connect(broker.amqp_port) as first, RawPeer.connect(broker.amqp_port) as second:
        one, two = Node(first, "orders/$management"), Node(second, "orders/$management")
        one.say(PEEK, PEEK_BODY)
        assert one.response().status in (200, 204)
        second.nothing_more(TRANSFER)
        assert two.ask(PEEK, PEEK_BODY).status in (200, 204)


# --- time -------------------------------------------------------------------------------------------------------------


def seconds_until_closed(peer: RawPeer) -> float:
    began = time.monotonic()
    peer.wait_closed()
    return time.monotonic() - began


def test_a_peer_that_says_nothing_is_cut_off(broker):
    with RawPeer(broker.amqp_port) as peer:
        assert seconds_until_closed(peer) < 10


def test_a_peer_that_sends_a_byte_now_and_then_is_cut_off_all_the_same(broker):
    with RawPeer(broker.amqp_port) as peer:
        began = time.monotonic()
        with suppress(ConnectionError):
            for byte in SASL_HEADER + bytes(100):
                peer.send(bytes((byte,)))
                time.sleep(0.05)
        assert 0.2 < time.monotonic() - began < 5  # all of them would take longer


def test_a_peer_that_never_opens_is_closed_with_the_reason(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
        peer.send(AMQP_HEADER)
        frames = peer.wait_closed()
        assert [frame.code for frame in frames] == [OPEN, CLOSE]
        assert error_of(frames[-1])[0] == "amqp:connection:forced"


def test_a_peer_that_never_puts_a_token_is_closed_with_the_reason(stranger):
    Node(stranger, "$cbs")
    condition, description = error_of(stranger.wait_closed()[-1])
    assert condition == UNAUTHORIZED
    assert "token" in description


def test_a_token_that_is_refused_does_not_stop_the_clock(stranger):
    put_token(Node(stranger, "$cbs"), "orders", token_for("orders", key="wrong"))
    assert stranger.wait_closed()[-1].code == CLOSE


def test_a_key_needs_no_token(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.nothing_more(CLOSE, 1.8)  # the time for a first token is 1.5 s
        peer.attach_sender("orders")


def test_half_open_connections_go_away(broker):
    peers = [RawPeer(broker.amqp_port) for _ in range(50)]
    for peer in peers[::2]:
        peer.send(SASL_HEADER)
    for peer in peers:
        peer.wait_closed()
        peer.socket.close()
    eventually(lambda: metrics(broker)["peeklock_active_connections",] == 0, "no connection left")


def test_a_silent_peer_is_closed_and_gets_heartbeats_until_then(start_broker):
    with start_broker('[amqp]\nidle_time_out_ms = 1000\n[[queues]]\nname = "witness"\n') as broker:
        silent = RawPeer(broker.amqp_port)
        silent.sasl_plain()
        assert silent.open(idle_time_out_ms=1200).fields[4] == 1000
        began = last = time.monotonic()
        while (frame := silent.receive()).code is None:
            assert time.monotonic() - last < 1.2
            last = time.monotonic()
        assert last > began
        assert frame.code == CLOSE
        assert error_of(frame)[0] == "amqp:resource-limit-exceeded"
        assert 1.9 < time.monotonic() - began < 5  # twice what was advertised
        silent.socket.close()


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_links_of_a_session_have_a_limit_that_the_begin_tells(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        assert peer.begin(1).fields[4] == 7
        handles = [peer.attach_sender("orders") for _ in range(8)]
        peer.attach(sender=True, address="orders")
        condition, description = peer.refusal()
        assert condition == "amqp:resource-limit-exceeded"
        assert "The session has 8 links" in description
        assert "setting amqp.max_links_per_session" in description
        for handle in (handles[0], 8):
            peer.detach(handle)
        peer.expect(DETACH)
        peer.attach_sender("orders")


def test_links_of_a_connection_have_a_limit(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.begin(1)
        for channel in (0, 1):
            for _ in range(6):
                peer.attach_sender("orders", channel=channel)
        peer.attach(sender=True, address="orders")
        condition, description = peer.refusal()
        assert condition == "amqp:resource-limit-exceeded"
        assert "setting amqp.max_links_per_connection" in description


def test_links_that_are_refused_and_never_detached_have_a_limit(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        for _ in range(30):
            peer.attach(sender=True, address="nothing")
        assert error_of(peer.wait_closed()[-1])[0] == "amqp:resource-limit-exceeded"


def test_sessions_have_a_limit_that_the_open_tells(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.sasl_plain()
        assert peer.open().fields[3] == 9
        for channel in range(10):
            peer.begin(channel)
        peer.say(BEGIN, None, UInt(0), UInt(10), UInt(10), channel=10)
        condition, description = error_of(peer.wait_closed()[-1])
        assert condition == "amqp:connection:framing-error"  # 2.7.1
        assert "channel_max 9" in description


def test_connections_have_a_limit_and_those_above_it_are_told(start_broker):
    config = '[amqp]\nmax_connections = 3\n[[queues]]\nname = "witness"\n'
    with start_broker(config) as broker:
        peers = [RawPeer.connect(broker.amqp_port) for _ in range(3)]
        late = RawPeer(broker.amqp_port)
        late.sasl_plain()
        late.open()
        condition, description = error_of(late.expect(CLOSE))
        assert condition == "amqp:resource-limit-exceeded"
        assert "3" in description
        late.socket.close()
        assert eventually(lambda: metrics(broker)["peeklock_connections_refused_total",], "counted") == 1
        for peer in peers:
            peer.close()
            peer.socket.close()


def test_a_connection_without_a_token_has_few_links(start_broker):
    with start_broker('[[queues]]\nname = "witness"\n') as broker, RawPeer.anonymous(broker.amqp_port) as peer:
        for _ in range(20):
            Coordinator(peer)
        peer.attach(sender=True, address="$cbs")
        assert peer.refusal()[0] == "amqp:resource-limit-exceeded"


# --- what is there ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "condition"),
    [
        ("nothing", "amqp:not-found"),
        ("orders/subscriptions/none", "amqp:not-found"),
        ("nothing/$DeadLetterQueue", "amqp:not-found"),
        ("nothing/$management", "amqp:not-found"),
        ("ord\0ers", None),
        ("a" * 10_000, None),
        ("orders//", None),
        ("%ff", None),
        ("sb://host/%ff", None),
        ("$DeadLetterQueue", None),
        ("../../etc/passwd", None),
        ("' OR 1=1 --", None),
        ("😀", "amqp:not-found"),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("sender", [True, False], ids=["send", "receive"])
def test_an_address_of_nothing_is_refused(broker, address, condition, sender):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach(sender=sender, address=address)
        found, description = peer.refusal()
        assert found == condition or (condition is None and found)
        if found == "amqp:not-found":
            assert "The messaging entity '" in description
            assert "could not be found" in description
        peer.attach_sender("orders", name="next")


@pytest.mark.parametrize(
    ("queue", "sender", "allowed"),
    [
        ("disabled", True, False),
        ("disabled", False, False),
        ("send-disabled", True, False),
        ("send-disabled", False, True),
        ("receive-disabled", True, True),
        ("receive-disabled", False, False),
    ],
)
def test_a_disabled_entity_is_refused_for_what_is_disabled(broker, queue, sender, allowed):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach(sender=sender, address=queue)
        if allowed:
            assert None not in peer.expect(ATTACH).fields[5:7]
        else:
            condition, description = peer.refusal()
            assert condition == "com.microsoft:entity-disabled"
            assert queue in description


@pytest.mark.parametrize("queue", ["disabled", "send-disabled"])
def test_nothing_is_scheduled_on_an_entity_that_takes_nothing(broker, queue):
    with RawPeer.connect(broker.amqp_port) as peer:
        node = Node(peer, f"{queue}/$management")
        response = node.ask("com.microsoft:schedule-message", {"messages": [{"message": message(b"later")}]})
        assert (response.status, response.condition) == (400, "com.microsoft:entity-disabled")


@pytest.mark.parametrize("suffix", ["$DeadLetterQueue", "$Transfer/$DeadLetterQueue", "$deadletterqueue"])
def test_nobody_sends_to_a_dead_letter_queue(broker, suffix):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach(sender=True, address=f"orders/{suffix}")
        assert peer.refusal()[0] == "amqp:not-allowed"
        node = Node(peer, f"orders/{suffix}/$management")
        response = node.ask("com.microsoft:schedule-message", {"messages": [{"message": message(b"later")}]})
        assert (response.status, response.condition) == (400, "amqp:not-allowed")


def test_a_queue_with_sessions_has_only_receivers_of_sessions_and_another_has_none(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.attach(sender=False, address="sessions")
        condition, description = peer.refusal()
        assert condition == "amqp:not-allowed"
        assert "requires sessions" in description


def test_plain_before_sasl_is_finished_by_the_pipelined_rest(broker):
    """All of a connection's beginning in one segment (amqp.md 1.1)."""
    init = performative(0, 0x41, [Symbol("PLAIN"), plain_response("sends", "key-that-sends")])
    init = init[:5] + b"\x01" + init[6:]
    with RawPeer(broker.amqp_port) as peer:
        begin = performative(0, BEGIN, [None, UInt(0), UInt(10), UInt(10)])
        peer.send(SASL_HEADER + init + AMQP_HEADER + performative(0, OPEN, ["all at once", "localhost"]) + begin)
        peer.expect(0x44)
        peer._layer_begins = True
        peer.expect(OPEN)
        peer.expect(BEGIN)
        peer.attach_sender("orders")


def test_without_a_sasl_layer_a_peer_is_a_stranger(broker):
    with RawPeer(broker.amqp_port) as peer:
        peer.open()
        peer.begin()
        peer.attach(sender=True, address="orders")
        assert peer.refusal()[0] == UNAUTHORIZED
        assert put_token(Node(peer, "$cbs"), "orders", token_for("orders")).status == 202
        peer.attach_sender("orders")


def test_an_echo_of_a_session_without_links_is_answered(broker):
    with RawPeer.connect(broker.amqp_port) as peer:
        peer.flow(None, echo=True)
        assert set(peer.expect(FLOW).fields[4:]) <= {None}
