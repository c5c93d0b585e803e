"""Rules as options of commands: filters and actions (management.md 1.7)."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from broker.cli.ending import WRONG_USE, fail
from broker.cli.pairs import PAIR_HELP, pairs
from broker.cli.signatures import option, standing_for
from broker.namespace import names

if TYPE_CHECKING:
    from broker.namespace.rule_descriptions import RuleDescription

DEFAULT_NAME: Final = "$Default"  # of the rule that a new subscription has

FIELDS: Final = {
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

SqlOption = Annotated[
    str | None, typer.Option("--sql", metavar="TEXT", help="Take messages for which this condition of SQL is true.")
]
FieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--field", metavar="NAME=TEXT", help=f"Take messages with this text in {', '.join(FIELDS)}; may be repeated."
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


def filter_of(
    sql: str | None,
    fields: Sequence[str] | None,
    properties: Sequence[str] | None,
    parameters: Sequence[str] | None,
    takes_all: bool,
    takes_none: bool,
) -> dict[str, Any] | None:
    """Return the filter that the options describe, as `RuleDescription` reads it; None if they describe none."""
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
    """Return the expression with the parameters that it names: one option is for the filter and for the action."""
    named = {name.lower() for name in re.findall(r"@\w+", expression)}
    given = pairs(parameters, "--parameter").items()
    return {
        "expression": expression,
        "parameters": {name: value for name, value in given if f"@{name.lower().removeprefix('@')}" in named},
    }


def _correlated(texts: Sequence[str]) -> dict[str, str]:
    names = {name.lower(): field for name, field in FIELDS.items()}
    found: dict[str, str] = {}
    for pair in texts:
        name, equals, text = pair.partition("=")
        if not equals or name.strip().lower() not in names:
            fail(f"--field: {pair!r} is not NAME=TEXT with a NAME of {', '.join(FIELDS)}", WRONG_USE)
        found[names[name.strip().lower()]] = text
    return found


def described(
    name: str,
    known: Mapping[str, Any],
    wanted: Mapping[str, Any] | None,
    action: str | None,
    parameters: Sequence[str] | None,
) -> "RuleDescription":
    """Return the known rule with what the options change. Ends the command if that makes no rule."""
    from pydantic import ValidationError

    from broker.atom.xml import is_writable
    from broker.namespace.rule_descriptions import RuleDescription

    given: dict[str, Any] = {**known, "name": name}
    if wanted is not None:
        given["filter"] = wanted
    if action is not None:
        given["action"] = _sql(action, parameters) if action else None
    named = {name for part in ("filter", "action") for name in (given.get(part) or {}).get("parameters", ())}
    if unused := set(pairs(parameters, "--parameter")) - named:
        fail(f"--parameter: {min(unused)!r} is neither in --sql nor in --action", WRONG_USE)
    try:
        rule = RuleDescription.model_validate(given)
    except ValidationError as error:
        [first, *_] = error.errors(include_url=False, include_input=False)
        place = ".".join(map(str, first["loc"]))
        problem = names.problem("rule", first) if place == "name" else first["msg"]
        fail(f"{place}: {problem}" if place else problem, WRONG_USE)
    if not is_writable(rule.model_dump_json()):
        fail("the rule has characters that XML cannot have", WRONG_USE)
    return rule


def with_first_rule(kind: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give the command that creates subscriptions the options of rules; others get no options.

    Instead of these the command gets `rule`: the one that a new subscription has, or None for the service's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            given = {name: arguments.pop(name) for name in offered}
            command(
                rule=_first_rule(**given) if any(each is not None for each in given.values()) else None, **arguments
            )

        offered = _OF_FIRST_RULE if kind == "subscription" else {}
        return standing_for(command, run, "rule", [option(name, of) for name, of in offered.items()])

    return decorate


def _first_rule(
    rule_name: str | None,
    sql: str | None,
    fields: Sequence[str] | None,
    properties: Sequence[str] | None,
    takes_none: bool | None,
    action: str | None,
    parameters: Sequence[str] | None,
) -> "RuleDescription":
    wanted = filter_of(sql, fields, properties, parameters, False, bool(takes_none))
    return described(DEFAULT_NAME if rule_name is None else rule_name, {}, wanted, action, parameters)


_OF_FIRST_RULE: Final = {
    "rule_name": Annotated[
        str | None,
        typer.Option(
            "--rule-name",
            metavar="NAME",
            help=f"The name of its first rule; by default {DEFAULT_NAME}, which takes all.",
        ),
    ],
    "sql": SqlOption,
    "fields": FieldsOption,
    "properties": PropertiesOption,
    "takes_none": Annotated[bool | None, typer.Option("--none", help="Take no message.")],
    "action": ActionOption,
    "parameters": ParametersOption,
}
