"""The connection string of a broker on this machine: its ports as they are, if it runs, and keys of entities, too."""

from typing import TYPE_CHECKING
from urllib.parse import quote

from broker.certified_host import certified_host
from broker.keys import ROOT_KEY_NAME, Keyring, connection_string, makes_root_key, with_root_key
from broker.ports_file import Ports, running_ports
from broker.settings.config import ConfigurationError, Settings
from storage.data_dir import ROOT_KEY_FILE

if TYPE_CHECKING:
    import ssl

    from broker.administration.address import Address


def of_broker(settings: Settings, key_name: str, entity: str | None, *, tls: bool) -> str:
    """Return the connection string of a broker for a key. Raises ConfigurationError, OSError."""
    ports = running_ports(settings.data_dir)
    key = _namespace_key(settings, key_name) if entity is None else _entity_key(settings, ports, entity, key_name)
    for what, part in (
        ("--key-name: the name", key_name),
        ("--key-name: the key", key),
        ("--entity: it", entity or ""),
    ):
        if ";" in part or not part.isprintable():  # it would become another part, such as an Endpoint
            raise ConfigurationError(f"{what} has characters that cannot be in a connection string, such as ';'")
    port = _amqp_port(settings, ports, tls=tls)
    host = certified_host(settings) if tls else settings.amqp.host
    text = connection_string(host, port, key_name, key, tls=tls)
    return text if entity is None else f"{text}EntityPath={entity};"


def _amqp_port(settings: Settings, ports: Ports | None, *, tls: bool) -> int:
    name = "amqp.tls_port" if tls else "amqp.port"
    port = settings.amqp.tls_port if tls else settings.amqp.port
    if ports is not None:
        port = ports.amqps_port if tls else ports.amqp_port
    if port is None:
        raise ConfigurationError(f"{name} is off; {'set it' if tls else 'use --tls'}")
    if port == 0:
        raise ConfigurationError(f"{name} is 0, any free port, and the broker does not run; start it")
    return port


def _keyring(settings: Settings) -> Keyring:
    """Return the keys of the namespace, without the root key if there is none yet."""
    if makes_root_key(settings):
        return Keyring(settings.security.authorization_rules)
    return Keyring.of(with_root_key(settings).security)


def _namespace_key(settings: Settings, key_name: str) -> str:
    rule = _keyring(settings).lookup(key_name)
    if rule is not None:
        return rule.primary_key
    if key_name == ROOT_KEY_NAME:
        path = settings.data_dir / ROOT_KEY_FILE
        raise ConfigurationError(f"{path}: there is no root key yet; start the broker once, or name its --data-dir")
    raise ConfigurationError(f"--key-name: {key_name!r} is no authorization rule of the namespace")


def _entity_key(settings: Settings, ports: Ports | None, entity: str, key_name: str) -> str:
    """A running broker is asked, because entities and their rules change while it runs."""
    own = _declared(settings, entity) if ports is None else _asked(settings, ports, entity)
    if key_name in own:
        return own[key_name]
    rule = _keyring(settings).lookup(key_name)
    if rule is None:
        names = ", ".join(own) or "none"
        raise ConfigurationError(
            f"--key-name: {key_name!r} is no authorization rule of {entity!r} or the namespace; its own are: {names}"
        )
    return rule.primary_key


def _declared(settings: Settings, entity: str) -> dict[str, str]:
    for each in (*settings.queues, *settings.topics):
        if each.name.lower() == entity.lower():
            return {rule.key_name: rule.primary_key for rule in each.authorization_rules}
    raise ConfigurationError(f"--entity: {entity!r} is not declared; if it was made while the broker ran, start that")


def _asked(settings: Settings, ports: Ports, entity: str) -> dict[str, str]:
    import asyncio

    from broker.administration.client import HttpClient, HttpError
    from broker.atom import xml
    from protocol.client.connection_string import SharedAccessKey

    address = _address(settings, ports)

    async def ask() -> dict[str, str]:
        key = SharedAccessKey(ROOT_KEY_NAME, _namespace_key(settings, ROOT_KEY_NAME))
        client: HttpClient
        async with HttpClient(address, key, _trust(settings)) as client:
            description = (await client.get(quote(entity))).description
        rules = xml.child(description, "AuthorizationRules")
        found = [dict(xml.children(each)) for _, each in xml.children(rules)] if rules is not None else []
        return {xml.text_of(each.get("KeyName")): xml.text_of(each.get("PrimaryKey")) for each in found}

    try:
        return asyncio.run(ask())
    except HttpError as error:
        raise ConfigurationError(f"--entity: {entity!r}: {error}") from error


def _address(settings: Settings, ports: Ports) -> "Address":
    from broker.administration.address import Address

    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.http.host, settings.http.host)
    if ports.http_port is not None:
        return Address("http", host, ports.http_port)
    if ports.https_port is not None:
        return Address("https", host, ports.https_port)
    raise ConfigurationError("--entity: the broker has no port for HTTP to be asked at; set http.port")


def _trust(settings: Settings) -> "ssl.SSLContext":
    """Return the broker's own certificate, which may be for other names than the loopback address."""
    import ssl

    context = ssl.create_default_context(cafile=settings.tls.certificate)
    context.check_hostname = False
    return context
