"""`peeklock queue`, `topic` and `subscription`: list, show, create, update and delete by the management API.

An update reads the entity, changes what the options say, and writes all of it back: what a request omits gets the
default of the service (management.md 1.7).
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from broker.cli.listing import Columns, print_entities
from broker.cli.managing.entity_settings import with_settings
from broker.cli.managing.management import Connect, confirm, path_of
from broker.cli.managing.paths import Path, entity_path, subscription_path
from broker.cli.managing.rule_options import with_first_rule
from broker.cli.output import JsonOption, print_json, print_table
from broker.cli.target import BrokerOptions, connected_by_http

if TYPE_CHECKING:
    from broker.administration.client import HttpClient
    from broker.atom.client_documents import Described
    from broker.namespace.rule_descriptions import RuleDescription

_METAVAR: Final = {"queue": "QUEUE", "topic": "TOPIC", "subscription": "TOPIC/SUBSCRIPTION"}
_PATH_HELP: Final = {
    "queue": "The queue's name.",
    "topic": "The topic's name.",
    "subscription": "The subscription, as TOPIC/NAME or TOPIC/subscriptions/NAME.",
}
_READ_PATH: Final = {"queue": entity_path, "topic": entity_path, "subscription": subscription_path}
_FORWARDING: Final = ("ForwardTo", "ForwardDeadLetteredMessagesTo")
_NEEDS: Final = "Needs the right Manage."

YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def entity_app(kind: str) -> typer.Typer:
    """Return the commands for entities of one kind."""
    app = typer.Typer(
        help=f"List, show, create, change and delete {kind}s.", no_args_is_help=True, rich_markup_mode=None
    )
    path_argument = typer.Argument(metavar=_METAVAR[kind], help=_PATH_HELP[kind])
    read = _READ_PATH[kind]

    if kind == "subscription":

        @app.command("list", help=f"Print the subscriptions of a topic with the counts of their messages. {_NEEDS}")
        @connected_by_http
        def list_subscriptions(
            broker: BrokerOptions,
            topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic's name.")],
            as_json: JsonOption = False,
        ) -> None:
            of = path_of(entity_path, topic)
            connect = Connect(broker)
            _list(kind, connect, f"{of.url_path}/Subscriptions", of.entity, as_json)

    else:

        @app.command("list", help=f"Print all {kind}s with the counts of their messages. {_NEEDS}")
        @connected_by_http
        def list_all(
            broker: BrokerOptions,
            as_json: JsonOption = False,
        ) -> None:
            _list(kind, Connect(broker), f"$Resources/{kind}s", "", as_json)

    @app.command("show", help=f"Print a {kind}: its settings, and the counts of its messages. {_NEEDS}")
    @connected_by_http
    def show(
        broker: BrokerOptions,
        path: Annotated[str, path_argument],
        as_json: JsonOption = False,
    ) -> None:
        at = path_of(read, path)

        async def work(client: "HttpClient") -> "Described":
            return await _found(client, kind, at)

        _print(kind, at, Connect(broker).run(work, at.shown), as_json)

    @app.command("create", help=f"Create a {kind}; what is not given has the service's default. {_NEEDS}")
    @with_settings(kind, is_create=True)
    @with_first_rule(kind)
    @connected_by_http
    def create(
        broker: BrokerOptions,
        path: Annotated[str, path_argument],
        values: Mapping[str, str],
        rule: "RuleDescription | None",
        as_json: JsonOption = False,
    ) -> None:
        from broker.atom import rules
        from broker.atom.client_documents import new_description
        from broker.atom.entities import ELEMENT

        at = path_of(read, path)
        connect = Connect(broker)

        async def work(client: "HttpClient") -> "Described":
            made = new_description(ELEMENT[kind])
            first = "" if rule is None else rules.write(rule, element=rules.FIRST)
            return await _put(client, connect, kind, at, made, values, is_update=False, first_rule=first)

        made = connect.run(work, at.shown)
        if as_json:
            _print(kind, at, made, as_json)
        else:
            name = at.shown if at.subscription else made.title or at.shown
            typer.echo(f"{kind} {name} created")

    @app.command(
        "update", help=f"Change settings of a {kind}; the others stay. An empty TEXT removes a setting. {_NEEDS}"
    )
    @with_settings(kind, is_create=False)
    @connected_by_http
    def update(
        broker: BrokerOptions,
        path: Annotated[str, path_argument],
        values: Mapping[str, str],
        as_json: JsonOption = False,
    ) -> None:
        at = path_of(read, path)
        if not values:
            raise typer.BadParameter("give at least one setting to change")
        connect = Connect(broker)

        async def work(client: "HttpClient") -> "Described":
            known = await _found(client, kind, at)
            return await _put(client, connect, kind, at, known.description, values, is_update=True)

        changed = connect.run(work, at.shown)
        if as_json:
            _print(kind, at, changed, as_json)
        else:
            typer.echo(f"{kind} {at.shown} changed")

    @app.command("delete", help=f"Delete a {kind} with all that it has. {_NEEDS}")
    @connected_by_http
    def delete(
        broker: BrokerOptions,
        path: Annotated[str, path_argument],
        yes: YesOption = False,
    ) -> None:
        at = path_of(read, path)
        connect = Connect(broker)
        confirm(f"Delete the {kind} {at.shown} and its messages?", yes)

        async def work(client: "HttpClient") -> None:
            await _found(client, kind, at)  # queues and topics have the same URLs
            await client.delete(at.url_path)

        connect.run(work, at.shown)
        typer.echo(f"{kind} {at.shown} deleted")

    return app


async def _found(client: "HttpClient", kind: str, at: Path) -> "Described":
    """Return the entity, if it is of this kind. Raises HttpError."""
    from broker.administration.client import NotThere
    from broker.atom.entities import ELEMENT, KIND

    found = await client.get(at.url_path)
    if found.element != ELEMENT[kind]:
        other = KIND.get(found.element)
        raise NotThere(f"is a {other} and no {kind}" if other else f"is no {kind}")
    return found


async def _put(
    client: "HttpClient",
    connect: Connect,
    kind: str,
    at: Path,
    description: Any,
    values: Mapping[str, str],
    *,
    is_update: bool,
    first_rule: str = "",
) -> "Described":
    from broker.atom.client_documents import change, text_of, write_entry

    wanted = dict(values)
    for name in _FORWARDING:
        if wanted.get(name) and "://" not in wanted[name]:
            # As the SDKs write it.
            wanted[name] = f"sb://{connect.address.authority}/{wanted[name].strip('/')}"
    change(kind, description, wanted)
    forwards_to, dead_letters_to = (_url_path(text_of(description, name)) for name in _FORWARDING)
    body = write_entry(description, first_rule)
    return await client.put(at.url_path, body, is_update=is_update, forwards_to=(forwards_to, dead_letters_to))


def _url_path(url: str) -> str:
    """Return the percent-encoded path of sb://host/path."""
    from urllib.parse import quote, unquote

    return quote(unquote(url.partition("://")[2].partition("/")[2]), safe="/")


# --- what is printed --------------------------------------------------------------------------------------------------


def document(kind: str, title: str, found: "Described", topic: str = "") -> dict[str, Any]:
    """Return an entity as JSON. What the service does not say is left out."""
    from broker.atom import client_documents as atom

    description = found.description
    shown: dict[str, Any] = {"name": title}
    if topic:
        shown["topic"] = topic
    if of := atom.counts(description):
        shown["counts"] = of
    for key, element in (
        ("message_count", "MessageCount"), ("size_bytes", "SizeInBytes"), ("subscription_count", "SubscriptionCount"),
    ):  # fmt: skip
        if (number := atom.number_of(description, element)) is not None:
            shown[key] = number
    for key, element in (("created_at", "CreatedAt"), ("updated_at", "UpdatedAt"), ("accessed_at", "AccessedAt")):
        if time := atom.text_of(description, element):
            shown[key] = time
    shown["settings"] = atom.settings(description)
    if keys := atom.keys(description):
        shown["keys"] = [{"name": key.name, "rights": list(key.rights)} for key in keys]
    return shown


def _list(kind: str, connect: Connect, url_path: str, topic: str, as_json: bool) -> None:
    async def work(client: "HttpClient") -> "list[Described]":
        return await client.all_of(url_path)

    found = connect.run(work, topic)
    shown = [document(kind, each.title, each, topic) for each in found]
    print_entities(kind, shown, _COLUMNS[kind], as_json)


def _count(state: str) -> Callable[[Mapping[str, Any]], Any]:
    return lambda shown: shown.get("counts", {}).get(state)


def _status(shown: Mapping[str, Any]) -> Any:
    return shown["settings"].get("Status")


_COLUMNS: Final[dict[str, Columns]] = {
    "queue": {
        "STATUS": _status,
        "ACTIVE": _count("active"),
        "DEAD-LETTERED": _count("dead_lettered"),
        "SCHEDULED": _count("scheduled"),
        "TRANSFER": _count("transfer"),
        "BYTES": lambda shown: shown.get("size_bytes"),
    },
    "topic": {
        "STATUS": _status,
        "SUBSCRIPTIONS": lambda shown: shown.get("subscription_count"),
        "SCHEDULED": _count("scheduled"),
        "BYTES": lambda shown: shown.get("size_bytes"),
    },
    "subscription": {
        "STATUS": _status,
        "ACTIVE": _count("active"),
        "DEAD-LETTERED": _count("dead_lettered"),
        "TRANSFER": _count("transfer"),
    },
}


def _print(kind: str, at: Path, found: "Described", as_json: bool) -> None:
    shown = document(kind, found.title or at.subscription or at.entity, found, at.entity if at.subscription else "")
    if as_json:
        print_json(shown)
        return
    from broker.cli.quantities import people_size

    rows: list[tuple[str, str]] = [("Name", shown["name"])]
    if at.subscription:
        rows.append(("Topic", at.entity))
    rows += [
        (f"{state.replace('_', '-').capitalize()} messages", str(count))
        for state, count in shown.get("counts", {}).items()
    ]
    if "size_bytes" in shown:
        rows.append(("Size", people_size(shown["size_bytes"])))
    if "subscription_count" in shown:
        rows.append(("Subscriptions", str(shown["subscription_count"])))
    rows += [(name, _people(name, value)) for name, value in shown["settings"].items()]
    rows += [("Key", f"{key['name']}: {', '.join(key['rights'])}") for key in shown.get("keys", ())]
    rows += [(name, shown[key]) for name, key in (("Created", "created_at"), ("Updated", "updated_at")) if key in shown]
    print_table((), rows)


def _people(name: str, value: Any) -> str:
    from broker.atom.entities import Form, form_of
    from broker.cli.quantities import people_duration

    if form_of(name) is Form.DURATION:
        return "unlimited" if value is None else people_duration(str(value))
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
