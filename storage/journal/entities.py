"""Which rows are about the entities that a reader asks for."""

from fnmatch import translate
from re import IGNORECASE, Pattern
from re import compile as compiled

import pyarrow as pa
import pyarrow.compute as pc


def pattern_of(entity: str) -> Pattern[str]:
    """A pattern as of a shell that the entity's path must fit, whatever its case."""
    return compiled(translate(entity), IGNORECASE)


def of_entities(batch: pa.RecordBatch, pattern: Pattern[str]) -> pa.RecordBatch:
    """The rows whose entity fits, or that have none. Few different entities are in a batch."""
    entities = batch.column("entity").dictionary_encode()
    fitting = [each for each, name in enumerate(entities.dictionary.to_pylist()) if name is None or pattern.match(name)]
    mask = pc.or_kleene(
        pc.is_in(entities.indices, value_set=pa.array(fitting, entities.indices.type)), entities.indices.is_null()
    )
    return batch.filter(mask)
