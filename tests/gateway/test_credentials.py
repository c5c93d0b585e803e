"""The rights that a client has by what it has shown, and has still when the rules are others."""

from collections.abc import Collection

import pytest

from broker.gateway.credentials import Credentials
from broker.gateway.rights import NOT_THE_EMULATORS, Proof, Rights
from broker.keys import EMULATOR_KEY, Grant, Keyring
from broker.namespace.entities import Right
from protocol.engine.sasl import Identity, IdentityKind

SEND, LISTEN = Right.SEND, Right.LISTEN


class Rules(Keyring):
    """The key `key` of the rule `name`, and the certificate of `host`, give these rights."""

    def __init__(self) -> None:
        self.grants: tuple[Grant, ...] = (Grant("orders", frozenset({SEND})), Grant(None, frozenset({LISTEN})))

    def verify_plain(self, key_name: str, key: str) -> tuple[Grant, ...]:
        return self.grants if (key_name, key) == ("name", "key") else ()

    def of_certificate(self, names: Collection[str]) -> tuple[Grant, ...]:
        return self.grants if "host" in names else ()

    def rights_of(self, key_name: str, key: str, entity: str | None = None) -> frozenset[Right]:
        return frozenset().union(*(each.rights for each in self.verify_plain(key_name, key) if each.entity == entity))


def credentials(*names: str) -> tuple[Credentials, Rights, Rules]:
    rights, rules = Rights(), Rules()
    return Credentials(rules, names, rights), rights, rules


def test_a_key_gives_its_rights() -> None:
    shown, rights, _ = credentials()
    identity = shown.verify_plain("name", "key")
    assert identity == Identity(IdentityKind.KEY, "name")
    shown.accept(identity)
    assert shown.has_key
    assert rights.allows("orders", SEND, 0)
    assert rights.allows("other", LISTEN, 0)
    assert not rights.allows("other", SEND, 0)


@pytest.mark.parametrize(("key", "problem"), [("wrong", "SASL"), (EMULATOR_KEY, NOT_THE_EMULATORS)])
def test_another_key_gives_nothing(key: str, problem: str) -> None:
    shown, rights, _ = credentials("host")
    assert shown.verify_plain("name", key) is None
    assert shown.problem == problem
    assert rights.is_empty


@pytest.mark.parametrize("kind", [IdentityKind.EXTERNAL, IdentityKind.ANONYMOUS])
@pytest.mark.parametrize("names", [("host",), ("stranger",), ()])
def test_a_certificate_gives_its_rights_to_who_wants_to_be_known_by_it(
    kind: IdentityKind, names: tuple[str, ...]
) -> None:
    shown, rights, _ = credentials(*names)
    shown.accept(Identity(kind, shown.external))
    assert not shown.has_key
    assert rights.allows("orders", SEND, 0) is (kind is IdentityKind.EXTERNAL and "host" in names)


def test_the_names_of_a_certificate_are_told_in_order() -> None:
    shown, _, _ = credentials("b", "a")
    assert shown.external == "a, b"


@pytest.mark.parametrize("proof", [Proof("name", "key"), None])
def test_what_is_granted_now_is_by_the_rules_that_there_are_now(proof: Proof | None) -> None:
    shown, _, rules = credentials("host")
    assert shown.granted_now("orders", proof) == {SEND}
    assert shown.granted_now("", proof) == {LISTEN}
    rules.grants = rules.grants[1:]
    assert shown.granted_now("orders", proof) == frozenset()
    assert shown.granted_now("", Proof("name", "former")) == frozenset()
