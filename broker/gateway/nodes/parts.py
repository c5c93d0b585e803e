"""The items of a request, each of which is for one partition of the entity."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Parts(Generic[T]):
    def __init__(self, items: Iterable[T], partition_of: Callable[[T], int]) -> None:
        self._order: list[int] = []  # the partition of each item
        self._parts: dict[int, list[T]] = {}
        for item in items:
            partition = partition_of(item)
            self._order.append(partition)
            self._parts.setdefault(partition, []).append(item)

    def items(self) -> Iterator[tuple[int, list[T]]]:
        """Each partition, with its items in their order."""
        return iter(self._parts.items())

    def joined(self, results: Mapping[int, Sequence[Any]]) -> list[Any]:
        """The results of all items, in the order of these. `results` has those of each partition's items."""
        rest = {partition: iter(found) for partition, found in results.items()}
        return [next(rest[partition]) for partition in self._order]
