"""The settings of queues, topics and subscriptions as options of commands.

This is loaded with every command; the language of XML is not (`broker.atom`), which takes longer.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import Parameter
from typing import Annotated, Any, Final, NamedTuple

import typer

from broker.atom.values import read_boolean, read_number
from broker.cli.quantities import duration_text, size_in
from broker.cli.signatures import option, standing_for

_ALL: Final = ("queue", "topic", "subscription")
_SENT: Final = ("queue", "topic")
_RECEIVED: Final = ("queue", "subscription")


class Setting(NamedTuple):
    """An option for an element. `read` makes the element's text of the option's, or raises ValueError.

    Without `read` it is a switch.
    """

    option: str
    element: str
    kinds: tuple[str, ...]
    help: str
    metavar: str = ""
    read: Callable[[str], str] | None = None
    is_immutable: bool = False

    @property
    def field(self) -> str:
        return self.option.removeprefix("--").replace("-", "_")


def _number(text: str) -> str:
    return str(read_number(text))


SETTINGS: Final = (
    Setting(
        "--lock-duration",
        "LockDuration",
        _RECEIVED,
        "How long a message is locked; a new entity without it has the API's default of one minute.",
        "TIME",
        duration_text,
    ),
    Setting(
        "--max-delivery-count", "MaxDeliveryCount", _RECEIVED, "Failed deliveries until dead-lettering.", "N", _number
    ),
    Setting(
        "--default-ttl", "DefaultMessageTimeToLive", _ALL, "Longest time to live of messages.", "TIME", duration_text
    ),
    Setting(
        "--dead-letter-on-expiration", "DeadLetteringOnMessageExpiration", _RECEIVED, "Dead-letter expired messages."
    ),
    Setting(
        "--dead-letter-on-filter-errors",
        "DeadLetteringOnFilterEvaluationExceptions",
        ("subscription",),
        "Dead-letter messages on which a rule fails.",
    ),
    Setting("--requires-session", "RequiresSession", _RECEIVED, "Messages belong to sessions.", is_immutable=True),
    Setting(
        "--duplicate-detection",
        "RequiresDuplicateDetection",
        _SENT,
        "Drop messages whose id was seen within the window.",
        is_immutable=True,
    ),
    Setting(
        "--duplicate-detection-window",
        "DuplicateDetectionHistoryTimeWindow",
        _SENT,
        "Window of duplicate detection.",
        "TIME",
        duration_text,
    ),
    Setting("--partitioning", "EnablePartitioning", _SENT, "Spread over all partitions.", is_immutable=True),
    Setting(
        "--max-size", "MaxSizeInMegabytes", _SENT, "Size above which sends are refused.", "SIZE", partial(size_in, "MB")
    ),
    Setting(
        "--max-message-size",
        "MaxMessageSizeInKilobytes",
        _SENT,
        "Largest message.",
        "SIZE",
        partial(size_in, "KB"),
    ),
    Setting("--forward-to", "ForwardTo", _RECEIVED, "Queue or topic that messages are moved on to.", "ENTITY", str),
    Setting(
        "--forward-dead-letters-to",
        "ForwardDeadLetteredMessagesTo",
        _RECEIVED,
        "Queue or topic that dead letters are moved on to.",
        "ENTITY",
        str,
    ),
    Setting("--auto-delete", "AutoDeleteOnIdle", _ALL, "Delete when unused for so long.", "TIME", duration_text),
    Setting("--status", "Status", _ALL, "Active, Disabled, SendDisabled or ReceiveDisabled.", "STATUS", str),
    Setting("--user-metadata", "UserMetadata", _ALL, "Free text.", "TEXT", str),
)


def with_settings(kind: str, *, is_create: bool) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command an option for each setting of the kind.

    Instead of these the command gets `values`: texts by element, of the options that were given.
    """
    offered = [each for each in SETTINGS if kind in each.kinds and (is_create or not each.is_immutable)]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**arguments: Any) -> None:
            values = _others(kind, arguments.pop("others") or ())
            for each in offered:
                given = arguments.pop(each.field)
                if given is not None:
                    values[each.element] = _text(each, given)
            command(values=values, **arguments)

        options = [_parameter(each.field, str if each.read else bool, _option(each)) for each in offered]
        others = typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set any element of the API by its name, such as EnableBatchedOperations=false; may be repeated.",
        )
        return standing_for(command, run, "values", [*options, _parameter("others", list[str], others)])

    return decorate


def _parameter(name: str, kind: type, described: Any) -> Parameter:
    return option(name, Annotated[kind | None, described])


def _option(setting: Setting) -> Any:
    if setting.read is None:
        return typer.Option(
            f"{setting.option}/--no-{setting.option.removeprefix('--')}", help=setting.help, show_default=False
        )
    return typer.Option(setting.option, metavar=setting.metavar, help=setting.help)


def _text(setting: Setting, given: Any) -> str:
    if setting.read is None:
        return "true" if given else "false"
    return _checked(setting.option, given, setting.read)


def _checked(option: str, text: str, read: Callable[[str], str]) -> str:
    from broker.atom.xml import is_writable

    if not is_writable(text):
        raise typer.BadParameter("has characters that XML cannot have", param_hint=option)
    try:
        return read(text) if text else ""
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} {error}", param_hint=option) from None


def _others(kind: str, pairs: Sequence[str]) -> dict[str, str]:
    """Return texts by element, of NAME=VALUE."""
    from broker.atom.client_documents import settable
    from broker.atom.entities import Form, form_of

    read: Mapping[Form, Callable[[str], str]] = {
        Form.BOOLEAN: _boolean,
        Form.NUMBER: _number,
        Form.DURATION: duration_text,
        Form.TEXT: str,
    }
    names = {name.lower(): name for name in settable(kind)}
    values: dict[str, str] = {}
    for pair in pairs:
        given, equals, text = pair.partition("=")
        name = names.get(given.strip().lower())
        if not equals or name is None:
            known = ", ".join(names.values())
            raise typer.BadParameter(f"{pair!r} is not NAME=VALUE with a NAME of {known}", param_hint="--set")
        values[name] = _checked("--set", text, read[form_of(name)])
    return values


def _boolean(text: str) -> str:
    return "true" if read_boolean(text) else "false"
