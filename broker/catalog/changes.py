"""Changes of the catalog: what a client asks the namespace's home for, and what the home decides.

Both travel as a list: the name of the change, and the fields of its record. A gateway asks for one change by the
request `ChangeCatalog`. What is decided goes to all workers and gateways (`broker.wire.Changed`); deletions go as
`broker.wire.Deleted`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

from broker import requests
from broker.errors import InvalidArgument
from broker.named_records import NamedRecords, WrongNumber

# The home checks these itself, and its errors say what is wrong with them.
Kind = Annotated[str, Any]
Path = Annotated[str, Any]
Properties = Annotated[Mapping[str, Any], Any]
Token = Annotated[bytes, Any]
Number = Annotated[int, Any]

Document = dict[str, Any]  # of a definition (`broker.catalog.catalog`), or of a rule


# -- what a client asks for


class Create(NamedTuple):
    """Make an entity; a subscription with these rules, or else with that of new ones. The answer is its definition."""

    kind: Kind
    properties: Properties
    rules: Sequence[Document] | None


class Update(NamedTuple):
    """Give these properties another value. The answer is the definition."""

    path: Path
    properties: Properties


class Delete(NamedTuple):
    """Delete an entity. The answer is None."""

    path: Path


class Provide(NamedTuple):
    """Make an entity unless there is one of this path. The answer is its definition.

    A holder above 0 makes a temporary one, and holds it: see `broker.worker.temporary`.
    """

    kind: Kind
    properties: Properties
    rules: Sequence[Document] | None
    holder: Number


class Release(NamedTuple):
    """End what this holder holds; what nobody holds is deleted soon. The answer is None."""

    holder: int


class AddRule(NamedTuple):
    """Add a rule to a subscription of a partitioned topic. The answer is None."""

    path: Path
    rule: Document


class ReplaceRule(NamedTuple):
    """Replace a rule of a subscription of a partitioned topic. The answer is None."""

    path: Path
    rule: Document


class RemoveRule(NamedTuple):
    """Remove a rule of a subscription of a partitioned topic. The answer is None."""

    path: Path
    name: str


class BeginMove(NamedTuple):
    """Let an entity be moved to this partition: see `broker.worker.moves`.

    The answer is [entity id, the partition that it lives on, token].
    """

    path: Path
    partition: Number


class EndMove(NamedTuple):
    """Let the entity live on the other partition from now on. The answer is its definition."""

    token: Token


class CancelMove(NamedTuple):
    """Let the entity stay where it is. The answer is None."""

    token: Token


Asked = (
    Create | Update | Delete | Provide | Release | AddRule | ReplaceRule | RemoveRule | BeginMove | EndMove | CancelMove
)  # fmt: skip

ASKED: Final[NamedRecords[Asked]] = NamedRecords(
    {
        "create": Create,
        "update": Update,
        "delete": Delete,
        "provide": Provide,
        "release": Release,
        "add-rule": AddRule,
        "replace-rule": ReplaceRule,
        "remove-rule": RemoveRule,
        "begin-move": BeginMove,
        "end-move": EndMove,
        "cancel-move": CancelMove,
    }
)


def request(change: Asked) -> requests.ChangeCatalog:
    """The request for this change, which is for the home."""
    name, fields = ASKED.packed(change)
    return requests.ChangeCatalog([name, *fields])


def of_partitioned(path: str, asked: requests.AddRule | requests.ReplaceRule | requests.RemoveRule) -> Asked:
    """The same change of a rule, of the subscription with this path, whose topic is partitioned."""
    match asked:
        case requests.AddRule(rule):
            return AddRule(path, rule)
        case requests.ReplaceRule(rule):
            return ReplaceRule(path, rule)
        case requests.RemoveRule(name):
            return RemoveRule(path, name)


def asked(packed: Sequence[Any]) -> Asked:
    """The change that has come in a `ChangeCatalog`. Raises InvalidArgument; Malformed."""
    name, *fields = packed or (None,)
    try:
        change = ASKED.parsed(name, fields)
    except WrongNumber:
        change = None
    if change is None:
        raise InvalidArgument(NO_CHANGE)
    return change


NO_CHANGE: Final = "This is no change of entities."


# -- what the home decides


class Put(NamedTuple):
    """Create an entity, a subscription with these rules, or change it."""

    definition: Document
    rules: Sequence[Document] | None

    @property
    def entity_id(self) -> int:
        return int(self.definition["entity_id"])


class SetRule(NamedTuple):
    """Add a rule to a subscription of a partitioned topic, in place of one of this name."""

    entity_id: int
    rule: Document


class DropRule(NamedTuple):
    """Remove a rule of a subscription of a partitioned topic."""

    entity_id: int
    name: str


Decided = Put | SetRule | DropRule

DECIDED: Final[NamedRecords[Decided]] = NamedRecords({"put": Put, "set-rule": SetRule, "drop-rule": DropRule})


def packed(decided: Iterable[Decided]) -> list[list[Any]]:
    """Changes as they travel."""
    return [[name, *fields] for name, fields in map(DECIDED.packed, decided)]


def decided(packed: Iterable[Sequence[Any]]) -> Iterator[Decided]:
    """The changes that have come; kinds that are unknown are left out. Raises Malformed."""
    for name, *fields in packed:
        change = DECIDED.parsed(name, fields)
        if change is not None:
            yield change
