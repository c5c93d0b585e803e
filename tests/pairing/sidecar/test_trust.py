"""What a sidecar says of credentials without the primary: no more than the primary has said, or its own key signs."""

import time

import pytest

from broker.pairing.sidecar.credentials import Credentials
from broker.pairing.sidecar.trust import Trust, Unverifiable
from protocol.client.connection_string import ConnectionString
from protocol.host_names import HostNames
from protocol.nodes.sas_tokens import ExpiredToken, InvalidAudience, InvalidSignature, generate

PRIMARY = "Endpoint=sb://primary.example.com/;SharedAccessKeyName=app;SharedAccessKey=app-key"
NOW = int(time.time())


@pytest.fixture
def trust():
    return Trust(ConnectionString.parse(PRIMARY), HostNames(["primary.example.com", "*.shop.example"]).has)


def signed(resource, name="app", key="app-key"):
    return generate(resource, name, key, NOW + 3600)


@pytest.mark.parametrize("resource", ["tenant1.inbox", "v1.0", "orders"])
def test_a_token_for_a_queue_is_none_for_the_namespace(trust, resource):
    one, token = Credentials(trust), signed(resource)
    trust.check_token(resource, token, NOW)
    one.has_token(resource, token)
    assert one.may_send(resource)
    assert not one.may_send("payroll")
    for audience in (f"sb://{resource}/", "sb://primary.example.com/", "sb://primary.example.com/payroll", "payroll"):
        with pytest.raises(InvalidAudience):
            trust.check_token(audience, token, NOW)


@pytest.mark.parametrize("host", ["primary.example.com", "localhost", "10.0.0.1", "x:5672", "sidecar.shop.example"])
def test_a_token_without_a_scheme_may_begin_with_a_name_that_is_known(trust, host):
    one, token = Credentials(trust), signed(f"{host}/orders")
    trust.check_token(f"sb://{host}/orders", token, NOW)
    one.has_token(f"{host}/orders", token)
    assert one.may_send("orders")
    assert not one.may_send("payroll")


def with_key(trust, name, key):
    trust.key_answered(name, key, True, NOW)
    one = Credentials(trust)
    one.has_key(name, key)
    return one


def with_tokens(trust, *tokens):
    one = Credentials(trust)
    for audience, token in tokens:
        trust.token_accepted(audience, token, NOW)
        one.has_token(audience, token)
    return one


def test_rules_of_two_queues_with_one_name_are_two(trust):
    with_key(trust, "send", "key-of-a").sender_answered("a", True)
    with_key(trust, "send", "key-of-b").sender_answered("b", True)
    for key, own, other in (("key-of-a", "a", "b"), ("key-of-b", "b", "a")):
        assert trust.check_key("send", key, NOW)
        again = with_key(trust, "send", key)
        assert again.may_send(own)
        assert again.may_send(own.upper())
        assert not again.may_send(other)


def test_a_rule_that_is_called_as_the_sidecars_own_is_not_that(trust):
    other = with_key(trust, "app", "key-of-c")
    other.sender_answered("c", True)
    assert other.may_send("c")
    assert not other.may_send("payroll")
    assert trust.check_key("app", "key-of-c", NOW), "the primary has accepted it"
    assert trust.check_key("app", "app-key", NOW)
    assert with_key(trust, "app", "app-key").may_send("payroll")
    assert not trust.check_key("app", "another", NOW)
    token = signed("sb://x/c", key="key-of-c")
    by_token = with_tokens(trust, ("sb://x/c", token))
    assert not by_token.may_send("c"), "nobody has said that this token sends"
    by_token.sender_answered("c", True)
    assert by_token.may_send("c")
    assert not by_token.may_send("payroll")


@pytest.mark.parametrize("forged", ["", "a.b.c", "SharedAccessSignature sr=x&sig=AAAA&se=99999999999&skn=app"])
def test_a_token_that_only_says_whose_it_is_is_nobodys(trust, forged):
    one = with_tokens(trust, ("sb://x/", forged))
    assert not one.may_send("orders")


def test_a_token_of_the_own_key_is_that_key(trust):
    one = Credentials(trust)
    one.has_key("app", "app-key")
    one.sender_answered("orders", False)
    token = signed("sb://x/")
    assert not with_tokens(trust, ("sb://x/", token)).may_send("orders")
    assert with_tokens(trust, ("sb://x/", token)).may_send("others")
    one.sender_answered("orders", True)
    assert with_tokens(trust, ("sb://x/", token)).may_send("orders")


def test_who_shows_several_things_gets_no_right_for_each_of_them(trust):
    """A token that listens everywhere, and one that sends to one queue: nobody says which the primary went by."""
    listens, sends = ("sb://x/", signed("sb://x/", "reader", "r")), ("sb://x/a", signed("sb://x/a", "send", "s"))
    with_tokens(trust, listens, sends).sender_answered("a", True)
    assert with_tokens(trust, sends, listens).may_send("a")
    assert not with_tokens(trust, listens).may_send("a")
    assert not with_tokens(trust, sends).may_send("a"), "it might have been the other one"
    with_tokens(trust, sends).sender_answered("a", True)
    assert with_tokens(trust, sends).may_send("a")
    assert not with_tokens(trust, listens).may_send("a")
    with_tokens(trust, listens, sends).sender_answered("a", False)
    assert not with_tokens(trust, sends).may_send("a")
    assert not with_tokens(trust, listens, sends).may_send("a")


def test_a_connection_of_which_not_all_is_known_teaches_nothing(trust):
    known = ("sb://x/", signed("sb://x/", "reader", "r"))
    one = with_tokens(trust, known)
    one.has_more()
    one.sender_answered("a", True)
    assert not with_tokens(trust, known).may_send("a")
    assert not one.may_send("a")


def test_the_last_token_for_a_path_counts(trust):
    first, second = signed("sb://x/a", "send", "1"), signed("sb://x/a", "send", "2")
    one = with_tokens(trust, ("sb://x/a", first))
    one.sender_answered("a", True)
    one.has_token("amqps://y:5671/A/", second)
    assert not one.may_send("a")
    one.sender_answered("a", True)
    assert one.may_send("a")
    assert with_tokens(trust, ("sb://x/a", second)).may_send("a")


def test_a_token_ends(trust):
    over = generate("sb://x/a", "send", "s", NOW - 1)
    one = Credentials(trust)
    one.has_token("sb://x/a", over)
    assert not one.may_send("a")
    one.sender_answered("a", True)  # the primary's clock may be behind
    assert not one.may_send("a")
    with pytest.raises(Unverifiable):
        trust.check_token("sb://x/a", over, NOW)
    with pytest.raises(ExpiredToken):
        trust.check_token("sb://x/a", generate("sb://x/a", "app", "app-key", NOW - 1), NOW)


def test_a_right_at_an_entity_is_none_at_another_whose_path_goes_on_behind_it(trust):
    one = with_tokens(trust, ("sb://x/a", signed("sb://x/a")))
    assert one.may_send("a")
    assert not one.may_send("a/b")
    assert not one.may_send("a/subscriptions/b/c")
    assert not one.may_send("ab")


def test_the_own_key_counts_no_more_when_the_primary_has_refused_it(trust):
    token = signed("sb://x/orders")
    one = with_tokens(trust, ("sb://x/orders", token))
    assert one.may_send("orders")
    trust.key_answered("app", "app-key", False, NOW)
    assert not one.may_send("orders")
    assert not trust.check_key("app", "app-key", NOW)
    with pytest.raises(Unverifiable):
        trust.check_token("sb://x/others", signed("sb://x/others"), NOW)
    trust.key_answered("app", "app-key", True, NOW)
    assert one.may_send("orders")
    assert trust.check_key("app", "app-key", NOW)


def test_a_wrong_key_for_the_own_name_is_refused_for_good_and_others_are_not(trust):
    with pytest.raises(InvalidSignature):
        trust.check_token("sb://x/orders", signed("sb://x/orders", key="wrong"), NOW)
    with pytest.raises(Unverifiable):
        trust.check_token("sb://x/orders", signed("sb://x/orders", "other", "wrong"), NOW)
    with pytest.raises(Unverifiable):
        trust.check_key("other", "wrong", NOW)
