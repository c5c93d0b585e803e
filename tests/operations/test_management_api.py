"""The management API on a real broker, by plain requests as SDKs send them."""

import json
import re
import time
import urllib.error
import urllib.request
from contextlib import closing
from datetime import UTC, datetime, timedelta
from http.client import HTTPConnection
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest
from proton import Message
from proton.utils import BlockingConnection

from broker.atom.values import write_time
from protocol.nodes.sas_tokens import generate
from tests.brokers import KEY, KEY_NAME, Broker, BrokerFailed
from tests.patience import PATIENCE_S

ATOM = "{http://www.w3.org/2005/Atom}"
SERVICE_BUS = "{http://schemas.microsoft.com/netservices/2010/10/servicebus/connect}"
COUNTS = "{http://schemas.microsoft.com/netservices/2011/06/servicebus}"
ENTRY = (
    '<entry xmlns="http://www.w3.org/2005/Atom"><content type="application/xml">'
    '<{0} xmlns="http://schemas.microsoft.com/netservices/2010/10/servicebus/connect" '
    'xmlns:i="http://www.w3.org/2001/XMLSchema-instance">{1}</{0}></content></entry>'
)
RULES = (
    '<AuthorizationRules><AuthorizationRule i:type="SharedAccessAuthorizationRule"><Rights><AccessRights>Send'
    "</AccessRights></Rights><KeyName>{}</KeyName><PrimaryKey>own</PrimaryKey></AuthorizationRule></AuthorizationRules>"
)


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    with Broker(tmp_path_factory.mktemp("broker")) as running:
        yield running


@pytest.fixture
def call(broker):
    """Sends a request with the root key's token. Returns status and body."""

    def send(method, path, body=None, token=None, **headers):
        until_s = int(time.time()) + 60
        given = generate("sb://localhost/", KEY_NAME, KEY, until_s) if token is None else token
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if given:
            headers["Authorization"] = given
        request = urllib.request.Request(
            f"http://localhost:{broker.http_port}{path}",
            None if body is None else body.encode(),
            headers,
            method=method,
        )
        try:
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return send


def connected(broker):
    return BlockingConnection(
        f"amqp://localhost:{broker.amqp_port}", timeout=PATIENCE_S, user=KEY_NAME, password=KEY, allowed_mechs="PLAIN"
    )


def entry(kind, inside=""):
    return ENTRY.format(f"{kind}Description", inside)


def value(text, name):
    return ElementTree.fromstring(text).findtext(f".//{SERVICE_BUS}{name}")


def titles(text):
    return [each.findtext(f"{ATOM}title") for each in ElementTree.fromstring(text).findall(f"{ATOM}entry")]


def test_a_queue_is_created_read_changed_and_deleted(call):
    status, text = call("PUT", "/orders", entry("Queue", "<MaxDeliveryCount>3</MaxDeliveryCount>"))
    assert (status, value(text, "MaxDeliveryCount"), value(text, "LockDuration")) == (201, "3", "PT1M")
    assert call("PUT", "/Orders", entry("Queue"))[0] == 409
    assert call("PUT", "/orders", entry("Topic"))[0] == 409
    changed = entry("Queue", "<LockDuration>PT30S</LockDuration><UserMetadata> a &amp;&#10; b </UserMetadata>")
    assert call("PUT", "/orders", changed, If_Match="*")[0] == 200
    status, text = call("GET", "/orders?api-version=2021-05")
    assert (status, value(text, "LockDuration"), value(text, "UserMetadata")) == (200, "PT30S", " a &\n b ")
    assert value(text, "MaxDeliveryCount") == "10", "what an update omits gets its default"
    assert ElementTree.fromstring(text).findtext(f".//{COUNTS}ActiveMessageCount") == "0"
    assert call("PUT", "/orders", changed, If_Match='"1"')[0] == 412
    status, text = call("PUT", "/orders", entry("Queue", "<RequiresSession>true</RequiresSession>"), If_Match="*")
    assert (status, "RequiresSession is false since its creation" in text) == (400, True)
    assert "The value for the RequiresSession property of an existing Queue cannot be changed" in text
    assert call("DELETE", "/orders")[0] == 200
    assert call("GET", "/orders")[0] == call("DELETE", "/orders")[0] == 404
    assert call("PUT", "/orders", changed, If_Match="*")[0] == 404


def test_entities_say_when_they_were_last_accessed(broker, call):
    def accessed(path):
        return value(call("GET", path)[1], "AccessedAt")

    spread, of = entry("Queue", "<EnablePartitioning>true</EnablePartitioning>"), "/told/Subscriptions/mine"
    for path, body in (("/used", spread), ("/told", entry("Topic")), (of, entry("Subscription"))):
        status, text = call("PUT", path, body)
        assert (status, accessed(path)) == (201, value(text, "AccessedAt"))
        never = value(text, "CreatedAt") if path == of else "0001-01-01T00:00:00Z"
        assert value(text, "AccessedAt") == never, "that of a subscription begins with its creation"
    assert call("GET", f"{of}/Rules")[0] == call("PUT", "/used", spread, If_Match="*")[0] == 200
    assert (accessed("/used"), accessed(of)) == ("0001-01-01T00:00:00Z", never), "looks and changes are none"
    with closing(connected(broker)) as connection:
        for name in ("used", "told"):
            connection.create_sender(name).send(Message(body="x"))
        assert accessed(of) == never
        connection.create_receiver(of[1:])
        for path in ("/used", "/told", of):
            at = datetime.fromisoformat(accessed(path))
            assert timedelta(0) <= datetime.now(UTC) - at < timedelta(seconds=20), path
    for path in ("/used", "/told"):
        assert call("DELETE", path)[0] == 200


def test_an_update_may_forward_to_the_entity_itself_and_a_creation_may_not(call):
    itself = "<ForwardTo>sb://localhost/round</ForwardTo><AutoDeleteOnIdle>PT10M</AutoDeleteOnIdle>"
    assert call("PUT", "/round", entry("Queue", itself))[0] == 400
    assert call("PUT", "/round", entry("Queue"))[0] == 201
    status, text = call("PUT", "/round", entry("Queue", itself), If_Match="*")
    assert (status, value(text, "ForwardTo").endswith("/round")) == (200, True)
    assert value(text, "AutoDeleteOnIdle") == "PT10M", "shown as given, also beside ForwardTo"
    assert call("POST", "/round/messages", "x")[0] == 201
    deadline = time.monotonic() + 20
    while "TransferDeadLetterMessageCount>1<" not in call("GET", "/round")[1]:
        assert time.monotonic() < deadline, "the limit of hops has not ended it"
    assert call("DELETE", "/round")[0] == 200


@pytest.mark.parametrize("spread", ["false", "true"])
@pytest.mark.parametrize("kind", ["Queue", "Topic"])
def test_what_has_no_effect_is_kept(call, kind, spread):
    partitioned = f"<EnablePartitioning>{spread}</EnablePartitioning>"
    status, text = call("PUT", "/kept", entry(kind, partitioned))
    usual = "false" if spread == "true" else "true"
    assert (status, value(text, "EnableExpress"), value(text, "SupportOrdering")) == (201, "false", usual)
    for express, ordering in (("true", "false"), ("true", "true"), ("false", usual)):
        said = f"<EnableExpress>{express}</EnableExpress><SupportOrdering>{ordering}</SupportOrdering>"
        status, text = call("PUT", "/kept", entry(kind, partitioned + said), If_Match="*")
        assert (status, value(text, "EnableExpress"), value(text, "SupportOrdering")) == (200, express, ordering)
        shown = call("GET", "/kept")[1]
        assert (value(shown, "EnableExpress"), value(shown, "SupportOrdering")) == (express, ordering)
    assert value(call("PUT", "/kept", entry(kind, partitioned), If_Match="*")[1], "SupportOrdering") == usual
    assert call("DELETE", "/kept")[0] == 200


@pytest.mark.parametrize(
    ("given", "scheme"),
    [
        ("", "sb"),
        ("sb://localhost/", "sb"),
        ("HTTPS://elsewhere:443/", "https"),
        ("amqps://x/", "amqps"),
        ("http://x/", "http"),
    ],
)
def test_forwarding_keeps_the_scheme_it_was_given(broker, call, given, scheme):
    forwarding = (
        f"<ForwardTo>{given}end</ForwardTo><ForwardDeadLetteredMessagesTo>{given}end</ForwardDeadLetteredMessagesTo>"
    )
    shown = f"{scheme}://localhost:{broker.http_port}/end"
    assert call("PUT", "/end", entry("Queue"))[0] == call("PUT", "/parted", entry("Topic"))[0] == 201
    for kind, path in (("Queue", "/schemes"), ("Subscription", "/parted/subscriptions/s")):
        for body, options in ((forwarding, {}), ("", {"If_Match": "*"}), (forwarding, {"If_Match": "*"})):
            status, text = call("PUT", path, entry(kind, body), **options)
            assert status in (200, 201)
            for found in (text, call("GET", path)[1]):
                assert value(found, "ForwardTo") == (shown if body else None)
                assert value(found, "ForwardDeadLetteredMessagesTo") == (shown if body else None)
    for path in ("/schemes", "/parted", "/end"):
        assert call("DELETE", path)[0] == 200


@pytest.mark.parametrize("spread", ["false", "true"])
def test_an_entity_with_sessions_forwards_in_the_order_of_each(broker, call, spread):
    kept = f"<EnablePartitioning>{spread}</EnablePartitioning>"
    assert call("PUT", "/last", entry("Queue"))[0] == 201
    body = entry("Queue", f"<RequiresSession>true</RequiresSession><ForwardTo>last</ForwardTo>{kept}")
    status, text = call("PUT", "/first", body)
    assert (status, value(text, "ForwardTo").endswith("/last"), value(text, "RequiresSession")) == (201, True, "true")
    with closing(connected(broker)) as connection:
        sender = connection.create_sender("first")
        for number in range(12):
            sender.send(Message(body=str(number), group_id=f"s{number % 3}"))
        receiver = connection.create_receiver("last")
        found = []
        for _ in range(12):
            found.append(receiver.receive(timeout=20))
            receiver.accept()
    for session in ("s0", "s1", "s2"):
        bodies = [int(each.body) for each in found if each.group_id == session]
        assert bodies == list(range(int(session[1]), 12, 3))
    for path in ("/first", "/last"):
        assert call("DELETE", path)[0] == 200


def test_a_limit_of_message_size_of_0_is_none(call):
    """As Java's administration client updates topics."""
    assert (
        call("PUT", "/limited", entry("Topic", "<MaxMessageSizeInKilobytes>100</MaxMessageSizeInKilobytes>"))[0] == 201
    )
    assert value(call("GET", "/limited")[1], "MaxMessageSizeInKilobytes") == "100"
    unlimited = entry("Topic", "<MaxMessageSizeInKilobytes>0</MaxMessageSizeInKilobytes>")
    status, text = call("PUT", "/limited", unlimited, If_Match="*")
    assert (status, value(text, "MaxMessageSizeInKilobytes")) == (200, "1024"), "the limit in force"
    assert call("DELETE", "/limited")[0] == 200


def test_the_limit_in_force_that_comes_back_is_none_of_the_entity(call):
    status, text = call("PUT", "/plain", entry("Queue"))
    assert (status, value(text, "MaxMessageSizeInKilobytes")) == (201, "1024")
    shown = entry("Queue", "<MaxMessageSizeInKilobytes>1024</MaxMessageSizeInKilobytes>")
    first = call("PUT", "/plain", shown, If_Match="*")
    assert (first[0], value(first[1], "MaxMessageSizeInKilobytes")) == (200, "1024")
    assert call("POST", "/plain/messages", "x" * (1 << 20))[0] == 403
    for size in ("500", "1024"):  # a limit of its own, and then another
        body = entry("Queue", f"<MaxMessageSizeInKilobytes>{size}</MaxMessageSizeInKilobytes>")
        status, text = call("PUT", "/plain", body, If_Match="*")
        assert (status, value(text, "MaxMessageSizeInKilobytes")) == (200, size)
    assert call("DELETE", "/plain")[0] == 200


@pytest.mark.parametrize("kind", ["Queue", "Topic"])
def test_a_partitioned_entity_shows_the_size_of_all_its_fragments(call, kind):
    spread = "<EnablePartitioning>true</EnablePartitioning>"
    of = "<MaxSizeInMegabytes>{}</MaxSizeInMegabytes>"
    status, text = call("PUT", "/spread", entry(kind, of.format(2048) + spread))
    assert (status, value(text, "MaxSizeInMegabytes")) == (201, "32768")
    for size, shown in (("32768", "32768"), ("1024", "16384"), ("16384", "16384"), ("81920", str(81920 * 16))):
        status, text = call("PUT", "/spread", entry(kind, of.format(size) + spread), If_Match="*")
        assert (status, value(text, "MaxSizeInMegabytes")) == (200, shown)
        assert value(call("GET", "/spread")[1], "MaxSizeInMegabytes") == shown
    listed = call("GET", f"/$Resources/{kind}s")[1]
    assert f"<MaxSizeInMegabytes>{81920 * 16}<" in listed
    assert call("DELETE", "/spread")[0] == 200
    plain = call("PUT", "/spread", entry(kind, of.format(2048)))[1]
    assert value(plain, "MaxSizeInMegabytes") == "2048"
    assert call("DELETE", "/spread")[0] == 200


STANDARD_SIZES = "1024;2048;3072;4096;5120"


def size_refused(size, sizes=STANDARD_SIZES):
    """The text of the service."""
    return (
        f"SubCode=40000. The specified value {size} is invalid. The property MaxSizeInMegabytes, must be one of the "
        f"following values: {sizes}."
    )


@pytest.mark.parametrize("kind", ["Queue", "Topic"])
def test_an_entity_has_one_of_the_sizes_of_the_service(tmp_path, kind):
    sized = "<MaxSizeInMegabytes>{}</MaxSizeInMegabytes>"
    sizes = f"{STANDARD_SIZES};10240;20480;40960;81920"
    with Broker(tmp_path, 'sku = "premium"\n') as broker:
        call = management_of(broker)
        for wrong in (0, 1, 3, 1023, 6144, 81921, 1 << 40):
            status, text = call("PUT", "/sized", entry(kind, sized.format(wrong)))
            assert (status, size_refused(wrong, sizes) in text) == (400, True), text
        for right in sizes.split(";"):
            status, text = call("PUT", "/sized", entry(kind, sized.format(right)))
            assert (status, value(text, "MaxSizeInMegabytes")) == (201, right)
            assert call("PUT", "/sized", entry(kind, sized.format(3)), If_Match="*")[0] == 400
            assert call("DELETE", "/sized")[0] == 200


def test_a_namespace_without_a_tier_takes_small_entities(call):
    status, text = call("PUT", "/tiny", entry("Queue", SIZE.format(3)))
    assert (status, value(text, "MaxSizeInMegabytes")) == (201, "3")
    assert call("DELETE", "/tiny")[0] == 200


def test_an_entity_of_the_settings_keeps_its_size(tmp_path):
    with Broker(tmp_path, 'sku = "standard"\n[[queues]]\nname = "small"\nmax_size_mb = 3\n') as broker:
        call = management_of(broker)
        same = entry("Queue", SIZE.format(3) + "<MaxDeliveryCount>4</MaxDeliveryCount>")
        status, text = call("PUT", "/small", same, If_Match="*")
        assert (status, value(text, "MaxSizeInMegabytes"), value(text, "MaxDeliveryCount")) == (200, "3", "4")
        assert call("PUT", "/small", entry("Queue", SIZE.format(4)), If_Match="*")[0] == 400
        assert call("PUT", "/small", entry("Queue", SIZE.format(2048)), If_Match="*")[0] == 200
        assert call("PUT", "/small", entry("Queue", SIZE.format(3)), If_Match="*")[0] == 400


def management_of(broker):
    """Sends a request with the root key's token. Returns status and body."""

    def send(method, path, body=None, **headers):
        token = generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + 60)
        headers = {name.replace("_", "-"): value for name, value in headers.items()} | {"Authorization": token}
        with closing(HTTPConnection("localhost", broker.http_port, timeout=20)) as connection:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()

    return send


SIZE, MESSAGE = (
    "<MaxSizeInMegabytes>{}</MaxSizeInMegabytes>",
    "<MaxMessageSizeInKilobytes>{}</MaxMessageSizeInKilobytes>",
)


def test_a_standard_namespace_refuses_the_sizes_of_premium(tmp_path):
    with Broker(tmp_path, 'sku = "standard"\n') as broker:
        call = management_of(broker)
        assert "<MessagingSKU>Standard</MessagingSKU>" in call("GET", "/$namespaceinfo")[1]
        status, text = call("PUT", "/a", entry("Queue", SIZE.format(10240)))
        assert (status, size_refused(10240) in text) == (400, True)
        status, text = call("PUT", "/a", entry("Queue", MESSAGE.format(1024)))
        assert (status, "SubCode=40000. The value for 'Max" in text) == (400, True)
        assert call("PUT", "/a", entry("Queue", SIZE.format(5120)))[0] == 201
        status, text = call("PUT", "/a", entry("Queue", MESSAGE.format(1024)), If_Match="*")
        assert (status, value(text, "MaxMessageSizeInKilobytes")) == (200, "1024"), "it is the value shown"
        assert call("PUT", "/a", entry("Queue", MESSAGE.format(512)), If_Match="*")[0] == 400


def test_a_premium_namespace_has_its_own_ranges(tmp_path):
    with Broker(tmp_path, 'sku = "premium"\npartitions = 4\n') as broker:
        call = management_of(broker)
        text = call("GET", "/$namespaceinfo")[1]
        assert "<MessagingSKU>Premium</MessagingSKU><MessagingUnits>1</MessagingUnits>" in text
        status, text = call("PUT", "/a", entry("Topic", MESSAGE.format(1000)))
        assert status == 400
        assert "value for 'MaxMessageSizeInKilobytes' must be between 1024 and 102400" in text
        assert call("PUT", "/a", entry("Queue", SIZE.format(512)))[0] == 400
        body = SIZE.format(81920) + MESSAGE.format(102400) + "<EnablePartitioning>true</EnablePartitioning>"
        status, text = call("PUT", "/a", entry("Queue", body))
        assert (status, value(text, "MaxSizeInMegabytes")) == (201, str(4 * 81920))
    with pytest.raises(BrokerFailed, match=r"queues\[0\].max_message_size_kb: 5 is no size of the tier in sku"):
        Broker(tmp_path / "refused", 'sku = "premium"\n[[queues]]\nname = "q"\nmax_message_size_kb = 5\n').start()


def test_filters_of_a_topic_are_counted(call):
    assert call("PUT", "/filtered", entry("Topic"))[0] == 201
    for name in ("a", "b"):
        of = f"/filtered/Subscriptions/{name}"
        assert call("PUT", of, entry("Subscription"))[0] == 201
        correlation = '<Filter i:type="CorrelationFilter"><Label>x</Label></Filter>'
        assert call("PUT", f"{of}/Rules/one", entry("Rule", correlation))[0] == 201
    sql = '<Filter i:type="SqlFilter"><SqlExpression>a = 1</SqlExpression></Filter>'
    assert call("PUT", "/filtered/Subscriptions/a/Rules/two", entry("Rule", sql))[0] == 201
    text = call("GET", "/filtered")[1]
    assert (value(text, "SqlFilterCount"), value(text, "CorrelationFilterCount")) == ("3", "2"), "$Default counts"
    assert "<SqlFilterCount>3</SqlFilterCount>" in call("GET", "/$Resources/topics")[1]
    assert call("DELETE", "/filtered")[0] == 200


@pytest.mark.parametrize("origin", ["http://localhost", "HTTPS://Other:99", "wss://x", "http://[::1]:5300"])
def test_the_target_of_a_request_may_be_a_whole_url(broker, origin):
    until_s = int(time.time()) + 60
    with closing(HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)) as connection:
        headers = {"Authorization": generate("sb://localhost/", KEY_NAME, KEY, until_s)}
        for target, status in (
            (f"{origin}/$namespaceinfo?api-version=2021-05", 200),
            (f"{origin}/none", 404),
            (origin, 200),
        ):
            connection.request("GET", target, headers=headers)
            answer = connection.getresponse()
            answer.read()
            assert answer.status == status, target


def test_topics_have_subscriptions_and_these_have_rules(call):
    assert call("PUT", "/news%2Fall", entry("Topic"))[0] == 201
    of = "/news/all/Subscriptions/mine"
    assert call("PUT", of, entry("Subscription"))[0] == 201
    rule = (
        '<Filter i:type="SqlFilter"><SqlExpression>a = @x</SqlExpression><Parameters><KeyValueOfstringanyType>'
        '<Key>@x</Key><Value i:type="d6p1:int" xmlns:d6p1="http://www.w3.org/2001/XMLSchema">3</Value>'
        "</KeyValueOfstringanyType></Parameters></Filter>"
    )
    assert call("PUT", f"{of}/Rules/a%20rule", entry("Rule", rule))[0] == 201
    status, text = call("GET", f"{of}/rules/a%20rule")
    assert (status, value(text, "SqlExpression"), value(text, "Value")) == (200, "a = @x", "3")
    assert call("PUT", f"{of}/Rules/a%20rule", entry("Rule", '<Filter i:type="TrueFilter"/>'), If_Match="*")[0] == 200
    assert value(call("GET", f"{of}/Rules/a%20rule")[1], "SqlExpression") == "1=1"
    assert titles(call("GET", f"{of}/Rules/")[1]) == ["$Default", "a rule"]
    assert titles(call("GET", "/news/all/Subscriptions/")[1]) == ["mine"]
    status, text = call("PUT", f"{of}/Rules/%20a", entry("Rule"))
    assert (status, "no space at either end" in text) == (400, True)
    assert call("DELETE", f"{of}/Rules/$Default", If_Match='"1"')[0] == 412
    assert call("DELETE", f"{of}/Rules/$Default", If_Match="*")[0] == 200
    assert call("DELETE", f"{of}/Rules/$Default")[0] == 404
    assert call("DELETE", "/news/all")[0] == 200
    assert call("GET", of)[0] == 404


@pytest.mark.parametrize(
    ("kind", "given", "shown"),
    [
        ("dateTime", "9999-12-31T23:59:59.9999999Z", "9999-12-31T23:59:59.9999999Z"),
        ("dateTime", "2030-05-06T07:08:52.5478689Z", "2030-05-06T07:08:52.5478689Z"),
        ("dateTime", "2030-05-06T07:08:52.547868912Z", "2030-05-06T07:08:52.5478689Z"),
        ("dateTime", "0001-01-01T00:00:00", "0001-01-01T00:00:00"),
        ("dateTime", "2020-07-05T11:12:13", "2020-07-05T11:12:13"),
        ("dateTime", " 2020-07-05T11:12:13.5 ", "2020-07-05T11:12:13.5"),
        ("dateTime", "2020-07-05T11:12:13Z", "2020-07-05T11:12:13Z"),
        ("dateTime", "2026-01-01T00:00:00.0019999+02:00", "2026-01-01T00:00:00.0019999+02:00"),
        ("dateTime", "2026-W01-1T00:00:00Z", "2025-12-29T00:00:00.000Z"),
        ("duration", "P10675199DT2H48M5.4775807S", "P10675199DT2H48M5.477S"),
        ("duration", "-PT1.5S", "-PT1.5S"),
        ("long", str(-(2**63)), str(-(2**63))),
    ],
)
def test_values_of_rules_come_back_at_the_ends_of_their_ranges(call, kind, given, shown):
    filter_ = (
        '<Filter i:type="CorrelationFilter"><Properties><KeyValueOfstringanyType><Key>x</Key>'
        f'<Value i:type="d6p1:{kind}" xmlns:d6p1="http://www.w3.org/2001/XMLSchema">{given}</Value>'
        "</KeyValueOfstringanyType></Properties></Filter>"
    )
    assert call("PUT", "/extremes", entry("Topic"))[0] == 201
    of = "/extremes/Subscriptions/mine"
    assert call("PUT", of, entry("Subscription"))[0] == 201
    status, text = call("PUT", f"{of}/Rules/rule", entry("Rule", filter_))
    assert (status, value(text, "Value")) == (201, shown)
    assert value(call("GET", f"{of}/Rules?$skip=1")[1], "Value") == shown
    assert call("DELETE", "/extremes")[0] == 200


def test_rules_are_listed_by_name_and_a_property_of_a_correlation_filter_may_be_null(call):
    assert call("PUT", "/nulls", entry("Topic"))[0] == 201
    of = "/nulls/Subscriptions/mine"
    assert call("PUT", of, entry("Subscription"))[0] == 201
    null = '<KeyValueOfstringanyType><Key>gone</Key><Value i:nil="true"/></KeyValueOfstringanyType>'
    filter_ = f'<Filter i:type="CorrelationFilter"><Label>x</Label><Properties>{null}</Properties></Filter>'
    for name in ("z", "B", "a"):
        status, text = call("PUT", f"{of}/Rules/{name}", entry("Rule", filter_))
        assert (status, null in text) == (201, True)
    status, text = call("GET", f"{of}/Rules")
    assert text.count(null) == 3
    assert re.findall("<title[^>]*>([^<]+)</title>", text)[1:] == ["$Default", "a", "B", "z"]
    of_sql = "<SqlExpression>a = @p</SqlExpression><Parameters>" + null.replace("gone", "@p") + "</Parameters>"
    assert call("PUT", f"{of}/Rules/sql", entry("Rule", f'<Filter i:type="SqlFilter">{of_sql}</Filter>'))[0] == 400
    assert call("DELETE", "/nulls")[0] == 200


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        (("long", "2"), ("long", "2")),
        (("long", "+2"), ("long", "2")),
        (("long", str(1 << 40)), ("long", str(1 << 40))),
        (("int", "2"), ("int", "2")),
        (("int", str(-(1 << 40))), ("long", str(-(1 << 40)))),
        (("unsignedInt", "2"), ("int", "2")),
    ],
)
def test_a_whole_number_of_a_rule_keeps_its_type(call, given, shown):
    filter_ = (
        '<Filter i:type="CorrelationFilter"><Properties><KeyValueOfstringanyType><Key>x</Key>'
        f'<Value i:type="d6p1:{given[0]}" xmlns:d6p1="http://www.w3.org/2001/XMLSchema">{given[1]}</Value>'
        "</KeyValueOfstringanyType></Properties></Filter>"
    )
    of = "/numbers/Subscriptions/mine"
    assert call("PUT", "/numbers", entry("Topic"))[0] == call("PUT", of, entry("Subscription"))[0] == 201
    try:
        for status, text in (call("PUT", f"{of}/Rules/rule", entry("Rule", filter_)), call("GET", f"{of}/Rules/rule")):
            assert status in (200, 201)
            assert re.findall(r'<Value i:type="d6p1:(\w+)"[^>]*>([^<]*)<', text) == [shown]
    finally:
        assert call("DELETE", "/numbers")[0] == 200


def test_a_parameter_without_a_zone_comes_back_as_given_and_counts_as_utc(call):
    parameter = (
        "<Parameters><KeyValueOfstringanyType><Key>@p</Key>"
        '<Value i:type="d6p1:dateTime" xmlns:d6p1="http://www.w3.org/2001/XMLSchema">2020-07-05T11:12:13</Value>'
        "</KeyValueOfstringanyType></Parameters>"
    )
    rule = (
        f'<Filter i:type="SqlFilter"><SqlExpression>a = @p</SqlExpression>{parameter}</Filter>'
        f'<Action i:type="SqlRuleAction"><SqlExpression>SET b = @p</SqlExpression>{parameter}</Action>'
    )
    of = "/zones/subscriptions/s"
    assert call("PUT", "/zones", entry("Topic"))[0] == call("PUT", of, entry("Subscription"))[0] == 201
    for options in ({}, {"If_Match": "*"}):
        status, text = call("PUT", f"{of}/rules/r", entry("Rule", rule), **options)
        assert status in (200, 201)
        assert text.count(">2020-07-05T11:12:13<") == 2
    assert call("GET", f"{of}/rules/r")[1].count(">2020-07-05T11:12:13<") == 2
    assert call("DELETE", "/zones")[0] == 200


@pytest.mark.parametrize("time_ms", [-(2**63), -62_135_596_800_001, 253_402_300_800_000, 2**63 - 1])
def test_times_that_no_date_has_are_shown_as_dates(time_ms):
    """Clients of AMQP can set any."""
    assert write_time(time_ms) == ("0001-01-01T00:00:00.000Z" if time_ms < 0 else "9999-12-31T23:59:59.999Z")


def test_lists_have_pages(call):
    names = [f"page/{number:02}" for number in range(7)]
    for name in names:
        assert call("PUT", f"/{name}", entry("Queue"))[0] == 201
    seen, path = [], "/$Resources/queues?$skip=0&$top=3"
    while path:
        _, text = call("GET", path)
        links = ElementTree.fromstring(text).findall(f"{ATOM}link")
        assert [each.get("rel") for each in links] in (["self"], ["self", "next"])
        seen += titles(text)
        path = (
            links[1].get("href").partition("5300")[2] or f"/{links[1].get('href').split('/', 3)[3]}"
            if links[1:]
            else ""
        )
    assert seen == names
    assert call("GET", "/$resources/Queues?%24top=0")[0] == 400
    for name in names:
        assert call("DELETE", f"/{name}")[0] == 200


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/bad", "no XML", "not well-formed"),
        ("/bad", '<!DOCTYPE a [<!ENTITY e "e">]><a>&e;</a>', "document type"),
        ("/bad", "<entry/>", "must be an entry"),
        ("/bad", entry("Queue", "<LockDuration>PT6M</LockDuration>"), "LockDuration: must be at most PT5M"),
        ("/bad", entry("Queue", "<LockDuration>-PT6M</LockDuration>"), "LockDuration"),
        ("/bad", entry("Queue", "<MaxDeliveryCount>NaN</MaxDeliveryCount>"), "MaxDeliveryCount"),
        ("/bad", entry("Queue", "<ForwardTo>sb://localhost/none</ForwardTo>"), "SubCode=40400"),
        ("/bad", entry("Subscription"), "QueueDescription or TopicDescription"),
        ("/b%00d", entry("Queue"), "control characters"),
        ("/b%ffd", entry("Queue"), "not UTF-8"),
        ("/b//d", entry("Queue"), "empty segment"),
        ("/b%2F..%2Fd", entry("Queue"), "'..'"),
        ("/b@d", entry("Queue"), "name is not valid"),
        ("/b/messages/head", entry("Queue"), "ends as the path of a message"),
        ("/bad", entry("Topic", "<Status>ReceiveDisabled</Status>"), "one of Active, Disabled, SendDisabled."),
        ("/bad", entry("Queue", "<ForwardTo>a@b</ForwardTo>"), "ForwardTo: must be the name of a queue or topic"),
        ("/bad", entry("Queue", "<ForwardTo>bad</ForwardTo>"), "ForwardTo names the entity itself"),
        ("/bad", entry("Queue", RULES.format("k" * 257)), "AuthorizationRule KeyName: must be at most 256 characters"),
    ],
)
def test_bad_input_is_answered_with_what_is_wrong(call, path, body, says):
    status, text = call("PUT", path, body)
    error = ElementTree.fromstring(text)
    assert (status, error.tag, error.findtext("Code")) == (400, "Error", "400")
    assert says in error.findtext("Detail")


def test_a_request_needs_a_token_with_the_right(call):
    soon = int(time.time()) + 60
    assert call("GET", "/$namespaceinfo")[0] == 200
    for token, code in (
        ("", "40102"),
        ("Bearer abc", "40105"),
        (generate("sb://localhost/", KEY_NAME, "another", soon), "40103"),
        (generate("sb://localhost/", KEY_NAME, KEY, 1), "40106"),
        (generate("sb://localhost/other", KEY_NAME, KEY, soon), "40104"),
    ):
        status, text = call("GET", "/orders", token=token)
        assert (status, f"SubCode={code}" in text) == (401, True), text
    url = "https://localhost:5300/$resources/queues?api-version=2021-05"
    assert call("GET", "/$Resources/queues?api-version=2021-05", token=generate(url, KEY_NAME, KEY, soon))[0] == 200


def test_a_key_without_the_right_manage_is_told_what_the_cloud_tells(call):
    weak = RULES.replace("own", "weak-key").format("weak")
    assert call("PUT", "/guarded", entry("Queue", weak))[0] == 201
    assert call("PUT", "/told", entry("Topic", weak))[0] == 201
    of = "/told/subscriptions/s"
    assert call("PUT", of, entry("Subscription"))[0] == 201
    token = generate("sb://localhost/", "weak", "weak-key", int(time.time()) + 60)
    for method, path, body, says in (
        ("GET", "/guarded", None, "SubCode=40100. Manage,EntityRead claims required for this operation"),
        ("PUT", "/guarded", "Queue", "Authorization failed for specified action: Manage,EntityWrite."),
        ("DELETE", "/guarded", None, "Authorization failed for specified action: Manage,EntityDelete."),
        ("GET", of, None, ">SubCode=40100: Unauthorized : Unauthorized access for 'GetSubscription' operation on"),
        ("PUT", of, "Subscription", "Unauthorized access for 'CreateOrUpdateSubscription' operation on endpoint 'sb:"),
        ("DELETE", of, None, ">SubCode=40100: Unauthorized : Unauthorized access for 'DeleteSubscription' operation"),
    ):
        status, text = call(method, path, body and entry(body), token=token)
        assert (status, says in text) == (401, True), text
    assert call("GET", f"{of}/rules/$Default", token=token)[0] == 401
    for path in ("/told/subscriptions/none", f"{of}/rules/none"):
        assert call("GET", path, token=token)[0] == 404
    assert call("PUT", "/told/subscriptions/none", entry("Subscription"), token=token)[0] == 401
    assert call("GET", "/none", token=token)[0] == 401, "the key is not one of that"
    assert call("GET", "/$Resources/queues", token=generate("sb://x/", "weak", "weak-key", 1))[0] == 401
    for path in ("/guarded", "/told"):
        assert call("DELETE", path)[0] == 200


def test_authorization_rules_come_back_with_their_rights_in_the_order_given(call):
    for given in ("Manage Send Listen", "Listen Send", "Send Manage Listen Send"):
        rights = "".join(f"<AccessRights>{right}</AccessRights>" for right in given.split())
        body = RULES.replace("<AccessRights>Send</AccessRights>", rights).format("k")
        for options in ({}, {"If_Match": "*"}):
            status, text = call("PUT", "/ruled", entry("Queue", body), **options)
            assert status in (200, 201)
            shown = [each.text for each in ElementTree.fromstring(text).iter(f"{SERVICE_BUS}AccessRights")]
            assert shown == list(dict.fromkeys(given.split()))
        assert "CreatedTime" not in text
        assert "ModifiedTime" not in text
        assert call("GET", "/ruled")[1] == text
        assert call("DELETE", "/ruled")[0] == 200


def test_a_rule_of_an_entity_locks_no_key_of_the_namespace_out(call):
    assert call("PUT", "/locked", entry("Queue", RULES.format(KEY_NAME)))[0] == 201
    token = generate("sb://localhost/", KEY_NAME, "own", int(time.time()) + 60)
    assert call("POST", "/locked/messages", "x", token=token)[0] == 201
    status, text = call("GET", "/locked", token=token)
    assert (status, "SubCode=40100" in text) == (401, True), "the right is missing"
    assert call("DELETE", "/locked")[0] == 200


def test_health_is_that_of_the_emulator(call):
    status, text = call("GET", "/health", token="")
    assert (status, json.loads(text)["status"]) == (200, "healthy")


def test_smuggled_and_unknown_requests_are_refused(broker):
    for lines in (
        "PUT /a HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\na",
        "NONSENSE\r\n\r\n",
    ):
        with closing(HTTPConnection("localhost", broker.http_port, timeout=PATIENCE_S)) as connection:
            connection.connect()
            connection.sock.sendall(lines.encode())
            answer = connection.sock.recv(4096).decode()
            assert answer.startswith(("HTTP/1.1 400", "HTTP/1.0 400")), answer
            assert "Traceback" not in answer


def test_locks_last_longer_than_in_the_cloud_only_where_a_setting_says_so(broker, call, tmp_path):
    status, text = call("PUT", "/long", entry("Queue", "<LockDuration>PT1H</LockDuration>"))
    assert status == 400
    assert "LockDuration: must be at most PT5M." in text
    long = '[[queues]]\nname = "declared"\nlock_duration_ms = 600000\n'
    with pytest.raises(BrokerFailed, match=r"600000 must be at most 300000; lower it, or set delivery.max_lock"):
        Broker(tmp_path / "refused", long).start()
    with Broker(tmp_path / "allowed", f"[delivery]\nmax_lock_duration_ms = 7200000\n{long}") as other:
        body = entry("Queue", "<LockDuration>PT1H</LockDuration>").encode()
        headers = {"Authorization": generate("sb://localhost/", KEY_NAME, KEY, int(time.time()) + 60)}
        for path, data in (("made", body), ("declared", None)):
            url = f"http://localhost:{other.http_port}/{path}"
            request = urllib.request.Request(url, data, headers, method="PUT" if data else "GET")
            with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
                assert value(answer.read().decode(), "LockDuration") == ("PT1H" if data else "PT10M")
        connection = connected(other)
        connection.create_sender("made").send(Message(body="x"))
        receiver = connection.create_receiver("made")
        until = receiver.receive(timeout=PATIENCE_S).annotations["x-opt-locked-until"]
        assert 3500 < until / 1000 - time.time() < 3700
        connection.close()


@pytest.mark.parametrize("kind", ["Queue", "Topic"])
def test_a_new_queue_or_topic_is_named_in_lower_case_and_found_in_any_case(call, kind):
    lower, paths = f"mixed-case/{kind.lower()}", [f"/Mixed-Case/{kind}", f"/MIXED-case/{kind.upper()}"]
    made = call("PUT", paths[0], entry(kind))
    assert made[0] == 201
    found = [made, *(call("GET", path) for path in (*paths, f"/{lower}"))]
    assert {name_and_id(text) for _, text in found} == {(lower, f"/{lower}")}
    assert lower in titles(call("GET", f"/$Resources/{kind}s")[1])
    assert call("PUT", paths[1], entry(kind))[0] == 409
    assert name_and_id(call("PUT", paths[1], entry(kind), If_Match="*")[1]) == (lower, f"/{lower}")
    if kind == "Topic":
        of = "/Mixed-CASE/topic/Subscriptions/Mine"
        assert name_and_id(call("PUT", of, entry("Subscription"))[1]) == ("Mine", f"/{lower}/Subscriptions/Mine")
        assert titles(call("GET", f"{paths[1]}/Subscriptions")[1]) == ["Mine"], "a subscription keeps its name"
    assert call("DELETE", paths[1])[0] == 200


def name_and_id(text):
    """The title of an entry, and the path of its id."""
    found = ElementTree.fromstring(text)
    return found.findtext(f"{ATOM}title"), urlsplit(found.findtext(f"{ATOM}id")).path


def test_what_is_dead_lettered_and_measured_has_the_stored_name(broker, call):
    assert call("PUT", "/Mixed-Letters", entry("Queue"))[0] == 201
    with closing(connected(broker)) as connection:
        connection.create_sender("Mixed-Letters").send(Message(body="x"))
        receiver = connection.create_receiver("MIXED-letters")
        receiver.receive(PATIENCE_S)
        receiver.reject()
        dead = connection.create_receiver("Mixed-LETTERS/$DeadLetterQueue").receive(PATIENCE_S)
        assert dead.annotations["x-opt-deadletter-source"] == "mixed-letters"
    assert 'entity="mixed-letters"' in broker.get("/metrics")[1]
    assert "Mixed-" not in broker.get("/metrics")[1]
    assert call("DELETE", "/mixed-Letters")[0] == 200
