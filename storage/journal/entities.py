"""Which rows are about the entities that a reader asks for. Paths of entities are compared in lower case."""

from collections.abc import Callable
from fnmatch import translate
from re import compile as compiled
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

_SUBSCRIPTIONS: Final = "/subscriptions/"


def fits(pattern: str) -> Callable[[str], bool]:
    """Whether a path fits a pattern as of a shell, in which `*` stands for slashes, too."""
    match = compiled(translate(pattern.lower())).match
    return lambda path: match(path.lower()) is not None


class Wanted:
    """The entities whose rows are wanted.

    Those that fit `pattern`, and that are the queue or topic `owner` or a subscription of it; None is all.
    """

    def __init__(self, pattern: str | None, owner: str | None = None) -> None:
        self._fits = fits("*" if pattern is None else pattern)
        self._owner = None if owner is None else owner.lower()

    def has(self, path: str) -> bool:
        return self._fits(path) and (self._owner is None or _owner_of(path.lower()) == self._owner)

    def rows_of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows of wanted entities, or of none. Few different entities are in a batch."""
        entities = batch.column("entity").dictionary_encode()
        names = enumerate(entities.dictionary.to_pylist())
        wanted = [each for each, name in names if name is None or self.has(name)]
        mask = pc.or_kleene(
            pc.is_in(entities.indices, value_set=pa.array(wanted, entities.indices.type)), entities.indices.is_null()
        )
        return batch.filter(mask)


def _owner_of(path: str) -> str:
    """The topic of a subscription, and any other entity itself: paths are read from the right."""
    topic, separator, name = path.rpartition(_SUBSCRIPTIONS)
    return topic if separator and "/" not in name else path
