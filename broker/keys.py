"""Shared access keys: the root key, the key ring that rights are looked up in, connection strings."""

import base64
import hmac
import secrets
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple, Self

from broker.namespace.entities import AuthorizationRule, Description, Right, SubscriptionDescription
from broker.settings.config import ConfigurationError, Settings
from broker.settings.security import Certificate, Security
from storage.data_dir import ROOT_KEY_FILE, RUN
from storage.durable import write_file

ROOT_KEY_NAME = "RootManageSharedAccessKey"
EMULATOR_KEY = "SAS_KEY_VALUE"
"""The Service Bus emulator's well-known key, from the emulator's documentation."""

ALL_RIGHTS = frozenset(Right)
AMQP_PORT = 5672
AMQPS_PORT = 5671
SECURITY_FILE = f"{RUN}/security.json"
"""The keys and rights of certificates that SIGHUP has brought, for gateways; below their working directory."""


def with_root_key(settings: Settings) -> Settings:
    """`settings` with `security.root_key` set: as configured, else the emulator's, else the one in the data directory.

    Makes a random key at the first start, for which the directory must exist. Raises ConfigurationError, OSError.
    """
    if settings.security.root_key is not None:
        return settings
    keys = RootKeys(EMULATOR_KEY) if settings.emulator else kept_root_keys(settings.data_dir / ROOT_KEY_FILE)
    update = {"root_key": keys.primary, "root_secondary_key": settings.security.root_secondary_key or keys.secondary}
    return settings.model_copy(update={"security": settings.security.model_copy(update=update)})


def makes_root_key(settings: Settings) -> bool:
    """True if `with_root_key` has to make a key: none is configured, and the data directory has none yet."""
    is_given = settings.security.root_key is not None or settings.emulator
    return not is_given and not (settings.data_dir / ROOT_KEY_FILE).exists()


class RootKeys(NamedTuple):
    """The keys in the file of the root key: the primary one, and on a line of its own the secondary one, if any."""

    primary: str
    secondary: str | None = None

    def write(self, path: Path) -> None:
        """Write the keys to a file that only its owner can read. Raises OSError."""
        write_file(path, "".join(f"{key}\n" for key in self if key is not None).encode(), mode=0o600)


def random_key() -> str:
    """A new key: 32 random bytes in base64, as the cloud makes them."""
    return base64.b64encode(secrets.token_bytes(32)).decode()


def kept_root_keys(path: Path) -> RootKeys:
    """The keys in the file at `path`; a missing file is made, mode 0600. Raises ConfigurationError, OSError."""
    try:
        mode = path.stat().st_mode & 0o777
    except FileNotFoundError:
        keys = RootKeys(random_key())
        keys.write(path)
        return keys
    if mode & 0o077:
        raise ConfigurationError(
            f"{path}: holds the root key and is open to other users (mode {mode:04o}). Run: chmod 600 {path}. Where a "
            "volume's group rights are set at each start, give the key by PEEKLOCK_SECURITY__ROOT_KEY instead"
        )
    try:
        lines = [line.strip() for line in path.read_text("ascii").strip().splitlines()]
    except UnicodeDecodeError:
        lines = []
    if not 1 <= len(lines) <= 2 or not all(1 <= len(key) <= 256 and key.isprintable() for key in lines):
        raise ConfigurationError(
            f"{path}: does not hold a key of 1 to 256 characters, or two on lines of their own; write the key into "
            "it, or remove it to get a new one"
        )
    return RootKeys(*lines)


def regenerate(settings: Settings, *, secondary: bool) -> Path:
    """Replace one of the kept root keys by a new one; returns their file. Raises ConfigurationError, OSError."""
    security = settings.security
    if settings.emulator or security.root_key is not None or (secondary and security.root_secondary_key is not None):
        name = "root_secondary_key" if secondary else "root_key"
        raise ConfigurationError(
            f"the key is not in the data directory: change security.{name}, and send SIGHUP to the broker"
        )
    path = settings.data_dir / ROOT_KEY_FILE
    if not path.exists():
        raise ConfigurationError(f"{path}: there is no root key yet; start the broker once, or name its --data-dir")
    keys, new = kept_root_keys(path), random_key()
    (keys._replace(secondary=new) if secondary else keys._replace(primary=new)).write(path)
    return path


def write_security(path: Path, security: Security) -> None:
    """Write the settings for gateways, which take them with `read_security`. Raises OSError."""
    write_file(path, security.model_dump_json().encode(), mode=0o600)


def read_security(path: Path) -> Security | None:
    """What `write_security` has written; None if it has written nothing. Raises OSError, ValueError."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return None
    return Security.model_validate_json(content)


def root_rule(security: Security) -> AuthorizationRule:
    """The root key's rule; `security` is that of `with_root_key`."""
    assert security.root_key is not None
    return AuthorizationRule(
        key_name=ROOT_KEY_NAME,
        primary_key=security.root_key,
        secondary_key=security.root_secondary_key,
        rights=ALL_RIGHTS,
    )


def effective_rights(rule: AuthorizationRule) -> frozenset[Right]:
    return ALL_RIGHTS if Right.MANAGE in rule.rights else frozenset(rule.rights)


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
    def of(cls, security: Security) -> Self:
        """The namespace's rules with the root key; `security` is that of `with_root_key`."""
        return cls((root_rule(security), *security.authorization_rules), security.certificates)

    def set_namespace(self, other: Self) -> bool:
        """Take the rules of the namespace and the certificates of `other`. True if that changed anything."""
        before = self._rules[None], self._certificates
        self._rules[None], self._certificates = other._rules[None], other._certificates
        return before != (self._rules[None], self._certificates)

    def set_entities(self, descriptions: Iterable[Description]) -> bool:
        """Replace the rules of all entities by those of `descriptions`. Subscriptions have those of their topics.

        True if that changed anything.
        """
        before = self._rules
        self._rules = {None: before[None]}
        for description in descriptions:
            self.set_entity(description)
        return self._rules != before

    def set_entity(self, description: Description) -> bool:
        """Replace the rules of one entity. True if they were others."""
        if isinstance(description, SubscriptionDescription):
            return False
        name = description.name.lower()
        before = self._rules.pop(name, {})
        if rules := description.authorization_rules:
            self._rules[name] = {rule.key_name: rule for rule in rules}
        return before != self._rules.get(name, {})

    def forget_entity(self, description: Description) -> None:
        """The entity was deleted."""
        if not isinstance(description, SubscriptionDescription):
            self._rules.pop(description.name.lower(), None)

    def lookup(self, key_name: str) -> AuthorizationRule | None:
        """The namespace's rule with this key name."""
        return self._rules[None].get(key_name)

    def rules(self, key_name: str, entity: str | None = None) -> list[AuthorizationRule]:
        """The rules with this key name that count at `entity`: its own, and the namespace's.

        `entity` is the name of an entity, without a sub-queue's or node's suffix; None is the namespace.
        """
        own = self._rules.get(entity.lower(), {}) if entity is not None else {}
        return [found for each in (own, self._rules[None]) if (found := each.get(key_name)) is not None]

    def rights_of(self, key_name: str, key: str, entity: str | None = None) -> frozenset[Right]:
        """The rights of this key name and key at `entity`; empty if no rule of that name has this key."""
        rules = [rule for rule in self.rules(key_name, entity) if has_key(rule, key)]
        return frozenset[Right]().union(*map(effective_rights, rules))

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
    """A connection string for the Service Bus SDKs. `host` is the address on which the broker listens, or its name.

    Without TLS it has the emulator's flag, which tells an SDK to connect without TLS. A default port is left out,
    because not every SDK can read a port.
    """
    if host in ("0.0.0.0", "::") or (host in ("127.0.0.1", "::1") and not tls):
        host = "localhost"  # some SDKs use plain TCP only for this name
    elif ":" in host:
        host = f"[{host}]"
    address = host if port == (AMQPS_PORT if tls else AMQP_PORT) else f"{host}:{port}"
    parts = f"Endpoint=sb://{address};SharedAccessKeyName={key_name};SharedAccessKey={key};"
    return parts if tls else parts + "UseDevelopmentEmulator=true;"
