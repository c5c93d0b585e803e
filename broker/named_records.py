"""Records that travel between processes as a name and a list of arguments.

A record is a NamedTuple, and its fields are the arguments in their order. A field with a default may be missing at the
end of the list, because processes of neighbouring versions talk to each other. The annotations of the fields say what
may arrive. Of `Annotated[T, what]`, T is the type in the code, and `what` says what may travel: a type, a range of
numbers, or a function that is True for a value that may.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import FunctionType, NoneType, UnionType
from typing import Annotated, Any, Generic, TypeVar, Union, cast, get_args, get_origin, get_type_hints

R = TypeVar("R", bound=tuple[Any, ...])
Check = Callable[[Any], bool]


class Malformed(Exception):
    """The arguments are not those of a record with this name: a bug of the broker, here or in another process."""


class WrongNumber(Malformed):
    """There are too few arguments, or too many."""


class NamedRecords(Generic[R]):
    """Classes of records, by their names."""

    def __init__(
        self,
        records: Mapping[str, type[R]],
        *,
        take_all: Collection[type[R]] = (),
        take_more: Collection[type[R]] = (),
        least: Mapping[type[R], int] | None = None,
    ) -> None:
        """Each of `take_all` has one field: the list of all arguments. Of those in `take_more`, arguments behind the
        known ones are left out when they arrive. `least` are numbers of arguments that are always sent, where these are
        more than the fields without defaults.
        """
        self.classes = records
        self._kinds = {
            name: _Kind(name, record, (least or {}).get(record, 0), record in take_all, record in take_more)
            for name, record in records.items()
        }
        self._of_records = {kind.record: kind for kind in self._kinds.values()}

    def name_of(self, record: type[R]) -> str:
        return self._of_records[record].name

    def packed(self, record: R) -> tuple[str, list[Any]]:
        """The name and the arguments, as they travel."""
        kind = self._of_records[type(record)]
        return kind.name, kind.packed(record)

    def parsed(self, name: object, arguments: object) -> R | None:
        """The record of what has arrived; None if there are none of this name. Raises Malformed."""
        kind = self._kinds.get(name) if isinstance(name, str) else None
        return None if kind is None else kind.parsed(arguments)

    def made(self, name: str, *arguments: Any) -> Any:
        """The record of these arguments, whatever they are: for tests."""
        return self._kinds[name].made(arguments)


class _Kind(Generic[R]):
    """What is known of one class of records."""

    def __init__(self, name: str, record: type[R], least: int, takes_all: bool, takes_more: bool) -> None:
        hints = get_type_hints(record, include_extras=True)
        defaults: Mapping[str, Any] = record._field_defaults  # type: ignore[attr-defined] # it is a NamedTuple
        self.name = name
        self.record = record
        self._make = cast(Callable[..., R], record)
        self._types = [_types(hint) for hint in hints.values()]
        self._known: set[tuple[type, ...]] = set()  # types of fields that were found right: they are few
        self._checks = [(at, check) for at, hint in enumerate(hints.values()) if (check := check_of(hint)) is not None]
        self._defaults = [defaults.get(field) for field in hints]
        self._least = max(least, len(hints) - len(defaults))
        self._takes_all = takes_all
        self._most = len(hints) if takes_more else None

    def packed(self, record: R) -> list[Any]:
        if self._takes_all:
            return [*record[0]]
        arguments = [*record]
        while len(arguments) > self._least and arguments[-1] == self._defaults[len(arguments) - 1]:
            arguments.pop()
        return arguments

    def parsed(self, arguments: object) -> R:
        if not isinstance(arguments, list | tuple):
            raise Malformed(f"'{self.name}' has no list of arguments.")
        try:
            record = self.made(arguments)
        except TypeError:
            raise WrongNumber(f"'{self.name}' has {len(arguments)} arguments.") from None
        found = tuple(map(type, record))
        if found not in self._known:
            for at, types in enumerate(self._types):
                if types is not None and found[at] not in types:
                    raise Malformed(f"The argument {at} of '{self.name}' is of the type {found[at].__name__}.")
            if None not in self._types:
                self._known.add(found)
        for at, check in self._checks:
            if not check(record[at]):
                raise Malformed(f"The argument {at} of '{self.name}' is not what it must be.")
        return record

    def made(self, arguments: Sequence[Any]) -> R:
        return self._make(arguments) if self._takes_all else self._make(*arguments[: self._most])


def _types(hint: Any) -> frozenset[type] | None:
    """The types of values, as msgpack makes them, that may be in a field with this annotation; None if all may."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        what = inner[1]
        return _types(int if isinstance(what, range) else Any if isinstance(what, FunctionType) else what)
    if kind is Union or kind is UnionType:
        return frozenset[type]().union(*(_types(each) or () for each in inner))
    if hint is Any:
        return None
    if hint is int or hint is bool:
        return frozenset((int, bool))  # each has always been taken for the other
    if hint is None or kind is dict:
        return frozenset((kind or NoneType,))
    return frozenset((hint,) if kind is None else (list, tuple))


def check_of(hint: Any) -> Check | None:
    """Tells whether a value that is of one of the `_types` may be in a field with this annotation; None if each may."""
    kind, inner = get_origin(hint), get_args(hint)
    if kind is Annotated:
        what = inner[1]
        if isinstance(what, range):
            return what.__contains__
        return what if isinstance(what, FunctionType) else check_of(what)
    if kind is Union or kind is UnionType:
        checks = [(types, check) for each in inner if (types := _types(each)) and (check := check_of(each))]
        return (
            (lambda value: all(type(value) not in types or check(value) for types, check in checks)) if checks else None
        )
    if kind is None or kind is dict:
        return None
    types, check = _types(inner[0]), check_of(inner[0])
    if check is not None:
        return lambda value: (types is None or types.issuperset(map(type, value))) and all(map(check, value))
    return None if types is None else lambda value: types.issuperset(map(type, value))
