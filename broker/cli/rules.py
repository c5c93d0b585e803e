"""`peeklock rule`: list, show, create, update and delete the rules of a subscription by the management API."""

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.management import Connect, confirm, path_of
from broker.cli.output import JsonOption, print_json, print_table
from broker.cli.pairs import PAIR_HELP, pairs
from broker.cli.paths import Path, rule_path, subscription_path
from broker.cli.target import CaFileOption, ConnectionStringOption, HttpEndpointOption

if TYPE_CHECKING:
    from broker.administration.client import HttpClient
    from broker.atom.client_documents import Described
    from broker.namespace.rule_descriptions import RuleDescription, RuleValue

_FIELDS: Final = {
    "CorrelationId": "correlation_id",
    "MessageId": "message_id",
    "To": "to",
    "ReplyTo": "reply_to",
    "Label": "label",
    "Subject": "label",
    "SessionId": "session_id",
    "ReplyToSessionId": "reply_to_session_id",
    "ContentType": "content_type",
}

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
SqlOption = Annotated[
    str | None, typer.Option("--sql", metavar="TEXT", help="Take messages for which this condition of SQL is true.")
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field", metavar="NAME=TEXT", help=f"Take messages with this text in {', '.join(_FIELDS)}; may be repeated."
    ),
]
PropertiesOption = Annotated[
    list[str] | None,
    typer.Option("--property", metavar="PAIR", help=f"Take messages with this application property, {PAIR_HELP}"),
]
AllOption = Annotated[bool, typer.Option("--all", help="Take all messages; so does a new rule without a filter.")]
NoneOption = Annotated[bool, typer.Option("--none", help="Take no message.")]
ActionOption = Annotated[
    str | None,
    typer.Option("--action", metavar="TEXT", help="Statements of SQL that change the copy; empty for no action."),
]
ParametersOption = Annotated[
    list[str] | None,
    typer.Option("--parameter", metavar="PAIR", help=f"A parameter of the SQL, such as @level, {PAIR_HELP}"),
]


@rule_app.command("list")
def list_rules(
    subscription: Annotated[
        str, typer.Argument(metavar="TOPIC/SUBSCRIPTION", help="As TOPIC/NAME or TOPIC/subscriptions/NAME.")
    ],
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    http_endpoint: HttpEndpointOption = None,
    ca: CaFileOption = None,
) -> None:
    """Print the rules of a subscription. Needs the right Manage."""
    of = path_of(subscription_path, subscription)

    async def work(client: "HttpClient") -> "list[Described]":
        return await client.all_of(f"{of.url_path}/Rules")

    found = [_read(each) for each in Connect(connection_string, http_endpoint, ca).run(work, of.shown)]
    if as_json:
        print_json([_document(rule) for rule in found])
    else:
        print_table(
            ["RULE", "FILTER", "ACTION"], [[rule.name, _filter_text(rule), _action_text(rule)] for rule in found]
        )


@rule_app.command("show")
def show_rule(
    path: RuleArgument,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    http_endpoint: HttpEndpointOption = None,
    ca: CaFileOption = None,
) -> None:
    """Print a rule. Needs the right Manage."""
    at = path_of(rule_path, path)

    async def work(client: "HttpClient") -> "Described":
        return await client.get(at.url_path)

    rule = _read(Connect(connection_string, http_endpoint, ca).run(work, at.shown))
    if as_json:
        print_json(_document(rule))
    else:
        rows = [("Name", rule.name), ("Filter", _filter_text(rule)), ("Action", _action_text(rule))]
        print_table((), rows)


@rule_app.command("create")
def create_rule(
    path: RuleArgument,
    sql: SqlOption = None,
    fields: FieldsOption = None,
    properties: PropertiesOption = None,
    takes_all: AllOption = False,
    takes_none: NoneOption = False,
    action: ActionOption = None,
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    http_endpoint: HttpEndpointOption = None,
    ca: CaFileOption = None,
) -> None:
    """Create a rule; a subscription takes the messages that any of its rules takes. Needs the right Manage.

    A new subscription has the rule $Default, which takes all: delete it for other rules to select.
    """
    at = path_of(rule_path, path)
    rule = _described(at, {}, _filter(sql, fields, properties, parameters, takes_all, takes_none), action, parameters)

    async def work(client: "HttpClient") -> "Described":
        return await client.put(at.url_path, _body(rule), is_update=False)

    made = Connect(connection_string, http_endpoint, ca).run(work, at.shown)
    if as_json:
        print_json(_document(_read(made)))
    else:
        typer.echo(f"rule {at.shown} created")


@rule_app.command("update")
def update_rule(
    path: RuleArgument,
    sql: SqlOption = None,
    fields: FieldsOption = None,
    properties: PropertiesOption = None,
    takes_all: AllOption = False,
    takes_none: NoneOption = False,
    action: ActionOption = None,
    parameters: ParametersOption = None,
    as_json: JsonOption = False,
    connection_string: ConnectionStringOption = None,
    http_endpoint: HttpEndpointOption = None,
    ca: CaFileOption = None,
) -> None:
    """Replace the filter or the action of a rule, or both. Needs the right Manage."""
    at = path_of(rule_path, path)
    wanted = _filter(sql, fields, properties, parameters, takes_all, takes_none)
    if wanted is None and action is None:
        raise typer.BadParameter("give a filter or an action to change")

    async def work(client: "HttpClient") -> "Described":
        known = _read(await client.get(at.url_path))
        rule = _described(at, known.model_dump(exclude_none=True), wanted, action, parameters)
        return await client.put(at.url_path, _body(rule), is_update=True)

    changed = Connect(connection_string, http_endpoint, ca).run(work, at.shown)
    if as_json:
        print_json(_document(_read(changed)))
    else:
        typer.echo(f"rule {at.shown} changed")


@rule_app.command("delete")
def delete_rule(
    path: RuleArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    connection_string: ConnectionStringOption = None,
    http_endpoint: HttpEndpointOption = None,
    ca: CaFileOption = None,
) -> None:
    """Delete a rule. Needs the right Manage."""
    at = path_of(rule_path, path)
    connect = Connect(connection_string, http_endpoint, ca)
    confirm(f"Delete the rule {at.shown}?", yes)

    async def work(client: "HttpClient") -> None:
        await client.delete(at.url_path)

    connect.run(work, at.shown)
    typer.echo(f"rule {at.shown} deleted")


# --- rules as options, XML, JSON and text -----------------------------------------------------------------------------


def _filter(
    sql: str | None,
    fields: Sequence[str] | None,
    properties: Sequence[str] | None,
    parameters: Sequence[str] | None,
    takes_all: bool,
    takes_none: bool,
) -> dict[str, Any] | None:
    """The filter that the options describe, as `RuleDescription` reads it; None if they describe none."""
    is_correlation = bool(fields or properties)
    if sum((sql is not None, is_correlation, takes_all, takes_none)) > 1:
        raise typer.BadParameter("give one of --sql, --all, --none, and --field with --property")
    if sql is not None:
        return {"kind": "sql", **_sql(sql, parameters)}
    if is_correlation:
        given = pairs(properties, "--property")
        return {"kind": "correlation", **_correlated(fields or ()), "properties": given}
    if takes_all or takes_none:
        return {"kind": "true" if takes_all else "false"}
    return None


def _sql(expression: str, parameters: Sequence[str] | None) -> dict[str, Any]:
    """The expression with those parameters that it names: one option gives them to the filter and to the action."""
    named = {name.lower() for name in re.findall(r"@\w+", expression)}
    given = pairs(parameters, "--parameter").items()
    return {
        "expression": expression,
        "parameters": {name: value for name, value in given if f"@{name.lower().removeprefix('@')}" in named},
    }


def _correlated(texts: Sequence[str]) -> dict[str, str]:
    names = {name.lower(): field for name, field in _FIELDS.items()}
    found: dict[str, str] = {}
    for pair in texts:
        name, equals, text = pair.partition("=")
        if not equals or name.strip().lower() not in names:
            fail(f"--field: {pair!r} is not NAME=TEXT with a NAME of {', '.join(_FIELDS)}", WRONG_USE)
        found[names[name.strip().lower()]] = text
    return found


def _described(
    at: Path,
    known: Mapping[str, Any],
    wanted: Mapping[str, Any] | None,
    action: str | None,
    parameters: Sequence[str] | None,
) -> "RuleDescription":
    """The known rule with what the options change. Ends the command if that makes no rule."""
    from pydantic import ValidationError

    from broker.atom.xml import is_writable
    from broker.namespace.rule_descriptions import RuleDescription

    given: dict[str, Any] = {**known, "name": at.rule}
    if wanted is not None:
        given["filter"] = wanted
    if action is not None:
        given["action"] = _sql(action, parameters) if action else None
    try:
        rule = RuleDescription.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        fail(f"{'.'.join(map(str, first['loc']))}: {first['msg']}", WRONG_USE)
    if not is_writable(rule.model_dump_json()):
        fail("the rule has characters that XML cannot have", WRONG_USE)
    return rule


def _body(rule: "RuleDescription") -> bytes:
    from broker.atom import rules
    from broker.atom.client_documents import wrapped

    return wrapped(rules.write(rule, 0))


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
            names = {field: name for name, field in reversed(_FIELDS.items())}
            texts = [
                f"{name} = {getattr(described, field)!r}"
                for field, name in names.items()
                if getattr(described, field) is not None
            ]
            texts += [f"{name} = {value.value!r}" for name, value in described.properties.items()]
            return " and ".join(texts)


def _action_text(rule: "RuleDescription") -> str:
    return "" if rule.action is None else _sql_text(rule.action.expression, rule.action.parameters)


def _sql_text(expression: str, parameters: "Mapping[str, RuleValue]") -> str:
    values = ", ".join(f"{name} = {value.value!r}" for name, value in parameters.items())
    return f"{expression} ({values})" if values else expression
