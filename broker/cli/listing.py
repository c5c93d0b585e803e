"""Lists of entities, as `peeklock queues` and `peeklock queue list` print them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from broker.cli.output import print_json, print_table

Columns = Mapping[str, Callable[[Mapping[str, Any]], Any]]
"""What a column shows of an entity, by the column's head."""


def print_entities(kind: str, entities: Sequence[Mapping[str, Any]], columns: Columns, as_json: bool) -> None:
    """Print the entities as JSON, or as a table that begins with their names, under `kind`."""
    if as_json:
        print_json(entities)
        return
    rows = [[each["name"], *(read(each) for read in columns.values())] for each in entities]
    print_table([kind.upper(), *columns], rows)
