"""Where commands that are clients connect to: the connection string, its HTTP address, and whom to trust with TLS."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from broker.administration.address import Address, parse_http_address, usual_address
from broker.cli.ending import WRONG_USE, fail
from broker.cli.signatures import option, standing_for

if TYPE_CHECKING:
    import ssl

    from protocol.client.connection_string import ConnectionString

CONNECTION_STRING_VARIABLE = "PEEKLOCK_CONNECTION_STRING"
HTTP_ENDPOINT_VARIABLE = "PEEKLOCK_HTTP_ENDPOINT"
CA_FILE_VARIABLE = "PEEKLOCK_CA_FILE"
TRUST_ADVICE = "; --ca names the authority to trust"

ConnectionStringOption = Annotated[
    str | None,
    typer.Option(
        "--connection-string",
        envvar=CONNECTION_STRING_VARIABLE,
        show_envvar=True,
        metavar="TEXT",
        help="The broker's address and a key. `peeklock connection-string` prints it.",
    ),
]
HttpEndpointOption = Annotated[
    str | None,
    typer.Option(
        "--http-endpoint",
        envvar=HTTP_ENDPOINT_VARIABLE,
        show_envvar=True,
        metavar="URL",
        help="The broker's address for HTTP. By default http://HOST:5300 if the connection string is for plain AMQP, "
        "else https://HOST.",
    ),
]
CaFileOption = Annotated[
    str | None,
    typer.Option(
        "--ca",
        envvar=CA_FILE_VARIABLE,
        show_envvar=True,
        metavar="FILE",
        help="Certificates of the authorities to trust with TLS; by default the system's.",
    ),
]


_AMQP_OPTIONS: Final = {"connection_string": ConnectionStringOption, "ca": CaFileOption}
_HTTP_OPTIONS: Final = {
    "connection_string": ConnectionStringOption,
    "http_endpoint": HttpEndpointOption,
    "ca": CaFileOption,
}


@dataclass(frozen=True, slots=True)
class BrokerOptions:
    """What the options of a command say of the broker that it connects to; nothing of it is checked yet."""

    connection_string: str | None
    ca: str | None
    http_endpoint: str | None = None


def connected(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of an AMQP connection. Instead of these the command gets `broker`."""
    return _with_options(command, _AMQP_OPTIONS)


def connected_by_http(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options of a connection, with the address for HTTP. Instead of these it gets `broker`."""
    return _with_options(command, _HTTP_OPTIONS)


def _with_options(command: Callable[..., None], options: dict[str, Any]) -> Callable[..., None]:
    def run(**arguments: Any) -> None:
        given = {name: arguments.pop(name) for name in options}
        command(broker=BrokerOptions(**given), **arguments)

    return standing_for(command, run, "broker", [option(name, of) for name, of in options.items()])


def parsed(
    connection_string: str | None, option: str = "--connection-string", variable: str = CONNECTION_STRING_VARIABLE
) -> "ConnectionString":
    """Return the connection string of `option`, else of `variable`. Ends the command if none makes sense."""
    from protocol.client.connection_string import ConnectionString, InvalidConnectionString

    if not connection_string:
        text = "`peeklock connection-string` prints one for a broker on this machine"
        fail(f"give {option}, or set {variable}: {text}", WRONG_USE)
    try:
        return ConnectionString.parse(connection_string)
    except InvalidConnectionString as error:
        fail(f"{option}: {error}", WRONG_USE)


def http_address(target: "ConnectionString", given: str | None, option: str = "--http-endpoint") -> Address:
    """Return the address that `option` gives, or the usual one of the host. Ends the command if it makes no sense."""
    if not given:
        return usual_address(target.host, target.tls)
    try:
        return parse_http_address(given)
    except ValueError as error:
        fail(f"{option}: {given!r} {error}", WRONG_USE)


def trusted(ca_file: str | None) -> "ssl.SSLContext":
    """Return the authorities to trust. Ends the command if the file has none."""
    import ssl

    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror if error.strerror and not isinstance(error, ssl.SSLError) else "has no certificates"
        fail(f"--ca: {ca_file}: {reason}", WRONG_USE)
