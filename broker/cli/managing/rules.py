"""`peeklock rule`: list, show, create, update and delete the rules of a subscription by the management API."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from broker.cli.ending import fail
from broker.cli.managing.management import Connect, confirm, path_of
from broker.cli.managing.paths import rule_path, subscription_path
from broker.cli.managing.rule_options import (
    FIELDS,
    ActionOption,
    AllOption,
    FieldsOption,
    NoneOption,
    ParametersOption,
    PropertiesOption,
    SqlOption,
    described,
    filter_of,
)
from broker.cli.output import JsonOption, print_json, print_table
from broker.cli.target import BrokerOptions, connected_by_http

if TYPE_CHECKING:
    from broker.administration.client import HttpClient
    from broker.atom.client_documents import Described
    from broker.namespace.rule_descriptions import RuleDescription, RuleValue

rule_app = typer.Typer(
    help="List, show, create, change and delete rules of subscriptions.", no_args_is_help=True, rich_markup_mode=None
)

RuleArgument = Annotated[
    str,
    typer.Argument(
        metavar="TOPIC/SUBSCRIPTION/RULE",
        help="The rule, as TOPIC/SUBSCRIPTION/NAME or TOPIC/subscriptions/SUBSCRIPTION/rules/NAME.",
    ),
]


@rule_app.command("list")
@connected_by_http
def list_rules(
    broker: BrokerOptions,
    subscription: Annotated[
        str, typer.Argument(metavar="TOPIC/SUBSCRIPTION", help="As TOPIC/NAME or TOPIC/subscriptions/NAME.")
    ],
    as_json: JsonOption = False,
) -> None:
    """Print the rules of a subscription. Needs the right Manage."""
    of = path_of(subscription_path, subscription)

    async def work(client: "HttpClient") -> "list[Described]":
        return await client.all_of(f"{of.url_path}/Rules")

    found = [_read(each) for each in Connect(broker).run(work, of.shown)]
    if as_json:
        print_json([_document(rule) for rule in found])
    else:
        print_table(
            ["RULE", "FILTER", "ACTION"], [[rule.name, _filter_text(rule), _action_text(rule)] for rule in found]
        )


@rule_app.command("show")
@connected_by_http
def show_rule(
    broker: BrokerOptions,
    path: RuleArgument,
    as_json: JsonOption = False,
) -> None:
    """Print a rule. Needs the right Manage."""
    at = path_of(rule_path, path)

    async def work(client: "HttpClient") -> "Described":
        return await client.get(at.url_path)

    rule = _read(Connect(broker).run(work, at.shown))
    if as_json:
        print_json(_document(rule))
    else:
        rows = [("Name", rule.name), ("Filter", _filter_text(rule)), ("Action", _action_text(rule))]
        print_table((), rows)


@rule_app.command("create")
@connected_by_http
def create_rule(
    broker: BrokerOptions,
    path: RuleArgument,
    sql: SqlOption = None,
    fields: FieldsOption = None,
    properties: PropertiesOption = None,
    takes_all: AllOption = False,
    takes_none: NoneOption = False,
    action: ActionOption = None,
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create a rule; a subscription takes the messages that any of its rules takes. Needs the right Manage.

    A new subscription has the rule $Default, which takes all: delete it for other rules to select.
    """
    at = path_of(rule_path, path)
    rule = described(
        at.rule, {}, filter_of(sql, fields, properties, parameters, takes_all, takes_none), action, parameters
    )

    async def work(client: "HttpClient") -> "Described":
        return await client.put(at.url_path, _body(rule), is_update=False)

    made = Connect(broker).run(work, at.shown)
    if as_json:
        print_json(_document(_read(made)))
    else:
        typer.echo(f"rule {at.shown} created")


@rule_app.command("update")
@connected_by_http
def update_rule(
    broker: BrokerOptions,
    path: RuleArgument,
    sql: SqlOption = None,
    fields: FieldsOption = None,
    properties: PropertiesOption = None,
    takes_all: AllOption = False,
    takes_none: NoneOption = False,
    action: ActionOption = None,
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace the filter or the action of a rule, or both. Needs the right Manage."""
    at = path_of(rule_path, path)
    wanted = filter_of(sql, fields, properties, parameters, takes_all, takes_none)
    if wanted is None and action is None:
        raise typer.BadParameter("give a filter or an action to change")

    async def work(client: "HttpClient") -> "Described":
        known = _read(await client.get(at.url_path))
        rule = described(at.rule, known.model_dump(exclude_none=True), wanted, action, parameters)
        return await client.put(at.url_path, _body(rule), is_update=True)

    changed = Connect(broker).run(work, at.shown)
    if as_json:
        print_json(_document(_read(changed)))
    else:
        typer.echo(f"rule {at.shown} changed")


@rule_app.command("delete")
@connected_by_http
def delete_rule(
    broker: BrokerOptions,
    path: RuleArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete a rule. Needs the right Manage."""
    at = path_of(rule_path, path)
    connect = Connect(broker)
    confirm(f"Delete the rule {at.shown}?", yes)

    async def work(client: "HttpClient") -> None:
        await client.delete(at.url_path)

    connect.run(work, at.shown)
    typer.echo(f"rule {at.shown} deleted")


# --- rules as XML, JSON and text --------------------------------------------------------------------------------------


def _body(rule: "RuleDescription") -> bytes:
    from broker.atom import rules
    from broker.atom.client_documents import wrapped

    return wrapped(rules.write(rule))


def _read(found: "Described") -> "RuleDescription":
    from broker.atom import rules
    from broker.errors import InvalidArgument

    try:
        return rules.read(found.title, found.description)
    except InvalidArgument as error:
        fail(f"{found.title}: {error}")


def _document(rule: "RuleDescription") -> dict[str, Any]:
    shown: dict[str, Any] = rule.model_dump(mode="json", exclude_none=True)
    for part in (shown["filter"], shown.get("action") or {}):
        for name in ("parameters", "properties"):
            if not part.get(name):
                part.pop(name, None)
    return shown


def _filter_text(rule: "RuleDescription") -> str:
    described = rule.filter
    match described.kind:
        case "true":
            return "all messages"
        case "false":
            return "no message"
        case "sql":
            return _sql_text(described.expression, described.parameters)
        case "correlation":
            names = {field: name for name, field in reversed(FIELDS.items())}
            texts = [
                f"{name} = {getattr(described, field)!r}"
                for field, name in names.items()
                if getattr(described, field) is not None
            ]
            texts += [
                f"{name} is null" if value.value is None else f"{name} = {value.value!r}"
                for name, value in described.properties.items()
            ]
            return " and ".join(texts)


def _action_text(rule: "RuleDescription") -> str:
    return "" if rule.action is None else _sql_text(rule.action.expression, rule.action.parameters)


def _sql_text(expression: str, parameters: "Mapping[str, RuleValue]") -> str:
    values = ", ".join(f"{name} = {value.value!r}" for name, value in parameters.items())
    return f"{expression} ({values})" if values else expression
