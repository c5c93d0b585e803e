"""Shared access keys: the root key, the key ring that rights are looked up in, connection strings."""

import base64
import hmac
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple, Self

from broker.namespace.entities import AuthorizationRule, Description, Right, SubscriptionDescription
from broker.settings.config import Certificate, ConfigurationError, Settings
from storage.data_dir import ROOT_KEY_FILE
from storage.durable import write_file

ROOT_KEY_NAME = "RootManageSharedAccessKey"
EMULATOR_KEY = "SAS_KEY_VALUE"
"""The Service Bus emulator's well-known key, from the emulator's documentation."""

ALL_RIGHTS = frozenset(Right)
AMQP_PORT = 5672
AMQPS_PORT = 5671


def with_root_key(settings: Settings) -> Settings:
    """`settings` with `security.root_key` set: as configured, else the emulator's, else the one in the data directory.

    Makes a random key at the first start, for which the directory must exist. Raises ConfigurationError, OSError.
    """
    if settings.security.root_key is not None:
        return settings
    key = EMULATOR_KEY if settings.emulator else kept_root_key(settings.data_dir / ROOT_KEY_FILE)
    return settings.model_copy(update={"security": settings.security.model_copy(update={"root_key": key})})


def makes_root_key(settings: Settings) -> bool:
    """True if `with_root_key` has to make a key: none is configured, and the data directory has none yet."""
    is_given = settings.security.root_key is not None or settings.emulator
    return not is_given and not (settings.data_dir / ROOT_KEY_FILE).exists()


def kept_root_key(path: Path) -> str:
    """The key in the file at `path`; a missing file is made, mode 0600. Raises ConfigurationError, OSError."""
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        key = base64.b64encode(secrets.token_bytes(32)).decode()
        write_file(path, key.encode() + b"\n", mode=0o600)
        return key
    if mode & 0o077:
        raise ConfigurationError(
            f"{path}: holds the root key and is open to other users (mode {mode:04o}). Run: chmod 600 {path}. Where a "
            "volume's group rights are set at each start, give the key by PEEKLOCK_SECURITY__ROOT_KEY instead"
        )
    try:
        key = path.read_text("ascii").strip()
    except UnicodeDecodeError:
        key = ""
    if not 1 <= len(key) <= 256 or not key.isprintable():
        raise ConfigurationError(
            f"{path}: does not hold a key of 1 to 256 characters; write the key into it, or remove it to get a new one"
        )
    return key


def root_rule(settings: Settings) -> AuthorizationRule:
    """The root key's rule; `settings` come from `with_root_key`."""
    assert settings.security.root_key is not None
    return AuthorizationRule(
        key_name=ROOT_KEY_NAME, primary_key=settings.security.root_key, secondary_key=None, rights=ALL_RIGHTS
    )


def effective_rights(rule: AuthorizationRule) -> frozenset[Right]:
    return ALL_RIGHTS if Right.MANAGE in rule.rights else rule.rights


class Grant(NamedTuple):
    """Rights on one entity, by its name in lower case, or on the whole namespace (None)."""

    entity: str | None
    rights: frozenset[Right]


class Keyring:
    """The authorization rules of a namespace and its entities. Entity names are compared without regard to case."""

    def __init__(
        self, namespace_rules: Iterable[AuthorizationRule] = (), certificates: Iterable[Certificate] = ()
    ) -> None:
        self._rules: dict[str | None, dict[str, AuthorizationRule]] = {
            None: {rule.key_name: rule for rule in namespace_rules}
        }
        self._certificates = tuple(certificates)

    @classmethod
    def of(cls, settings: Settings) -> Self:
        """The namespace's rules with the root key; `settings` come from `with_root_key`."""
        security = settings.security
        return cls((root_rule(settings), *security.authorization_rules), security.certificates)

    def set_entities(self, descriptions: Iterable[Description]) -> None:
        """Replace the rules of all entities by those of `descriptions`. Subscriptions have those of their topics."""
        self._rules = {None: self._rules[None]}
        for description in descriptions:
            self.set_entity(description)

    def set_entity(self, description: Description) -> None:
        """Replace the rules of one entity."""
        self.forget_entity(description)
        if not isinstance(description, SubscriptionDescription) and (rules := description.authorization_rules):
            self._rules[description.name.lower()] = {rule.key_name: rule for rule in rules}

    def forget_entity(self, description: Description) -> None:
        """The entity was deleted."""
        if not isinstance(description, SubscriptionDescription):
            self._rules.pop(description.name.lower(), None)

    def lookup(self, key_name: str, entity: str | None = None) -> AuthorizationRule | None:
        """The rule with this key name at `entity`: the entity's own, else the namespace's, else None.

        `entity` is the name of an entity, without a sub-queue's or node's suffix; None is the namespace.
        """
        own = self._rules.get(entity.lower(), {}) if entity is not None else {}
        return own.get(key_name) or self._rules[None].get(key_name)

    def verify_plain(self, key_name: str, key: str) -> tuple[Grant, ...]:
        """The rights of this key name and key, as SASL PLAIN sends them; empty if no rule has them.

        Every rule with that name is compared in full, so that the time taken tells nothing about the keys.
        """
        grants = []
        for entity, rules in self._rules.items():
            if (rule := rules.get(key_name)) and has_key(rule, key):
                grants.append(Grant(entity, effective_rights(rule)))
        return tuple(grants)

    def of_certificate(self, names: Collection[str]) -> tuple[Grant, ...]:
        """The rights of a client whose certificate, which TLS has verified, has these names."""
        held: dict[str | None, frozenset[Right]] = {}
        for each in self._certificates:
            if each.name in names:
                entity = None if each.entity is None else each.entity.lower()
                held[entity] = held.get(entity, frozenset()) | each.rights
        return tuple(Grant(entity, rights) for entity, rights in held.items())


def has_key(rule: AuthorizationRule, key: str) -> bool:
    """True if `key` is the rule's primary or secondary key; compared in constant time."""
    given = key.encode("utf-8", "surrogatepass")
    primary = hmac.compare_digest(given, rule.primary_key.encode())
    secondary = rule.secondary_key is not None and hmac.compare_digest(given, rule.secondary_key.encode())
    return primary or secondary


def connection_string(host: str, port: int, key_name: str, key: str, *, tls: bool = False) -> str:
    """A connection string for the Service Bus SDKs. `host` is the address on which the broker listens.

    Without TLS it has the emulator's flag, which tells an SDK to connect without TLS. A default port is left out,
    because not every SDK can read a port.
    """
    if host in ("0.0.0.0", "::", "127.0.0.1", "::1"):
        host = "localhost"  # some SDKs use plain TCP only for this name
    elif ":" in host:
        host = f"[{host}]"
    address = host if port == (AMQPS_PORT if tls else AMQP_PORT) else f"{host}:{port}"
    parts = f"Endpoint=sb://{address};SharedAccessKeyName={key_name};SharedAccessKey={key};"
    return parts if tls else parts + "UseDevelopmentEmulator=true;"
