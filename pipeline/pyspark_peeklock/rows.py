"""The columns of `format("peeklock")`: one schema for all modes, so that their rows can be united.

What a mode does not know is null: a browsed message has no `op`, a row of the journal no `lockedUntil`. Spark cannot
tell a data source which columns a query needs (4.3), but a user can: `.schema("body binary, sequenceNumber bigint")`.
"""

from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from pyspark_peeklock.errors import UnfitSchema

TEXT: Final = StringType()
LONG: Final = LongType()
TIME: Final = TimestampType()
BINARY: Final = BinaryType()
PROPERTIES: Final = MapType(TEXT, TEXT)

_COLUMNS: Final = {
    "namespace": TEXT,
    "entity": TEXT,
    "entityId": IntegerType(),
    "subQueue": TEXT,
    "partition": IntegerType(),
    "epoch": TEXT,
    "journalOffset": LONG,
    "eventTime": TIME,
    "op": TEXT,
    "sequenceNumber": LONG,
    "enqueuedTime": TIME,
    "scheduledTime": TIME,
    "expiresAt": TIME,
    "lockedUntil": TIME,
    "state": TEXT,
    "messageId": TEXT,
    "sessionId": TEXT,
    "partitionKey": TEXT,
    "correlationId": TEXT,
    "subject": TEXT,
    "replyTo": TEXT,
    "contentType": TEXT,
    "deliveryCount": IntegerType(),
    "deadLetterReason": TEXT,
    "deadLetterDescription": TEXT,
    "deadLetterSource": TEXT,
    "reason": TEXT,
    "description": TEXT,
    "body": BINARY,
    "bodySize": LONG,
    "applicationProperties": PROPERTIES,
    "originEntity": TEXT,
    "originEntityId": IntegerType(),
    "originSubQueue": TEXT,
    "originSequenceNumber": LONG,
    "copies": IntegerType(),
    "record": BINARY,
    "overlay": BINARY,
    "amqpMessage": BINARY,
}
SCHEMA: Final = StructType([StructField(name, kind) for name, kind in _COLUMNS.items()])


def check_schema(schema: StructType) -> None:
    """Check a user's schema. Raises UnfitSchema if it has a column that is not ours, or one of another type."""
    for field in schema.fields:
        kind = _COLUMNS.get(field.name)
        if kind is None:
            raise UnfitSchema(f"there is no column '{field.name}'; there are {', '.join(_COLUMNS)}")
        if field.dataType != kind:
            raise UnfitSchema(f"column '{field.name}' is {kind.simpleString()}, not {field.dataType.simpleString()}")


def arrow_schema(schema: StructType) -> pa.Schema:
    """What Spark expects of Arrow batches, to the letter."""
    from pyspark.sql.pandas.types import to_arrow_schema

    return to_arrow_schema(schema, timezone="UTC")


def batch_of(columns: dict[str, Any], rows: int, schema: pa.Schema) -> pa.RecordBatch:
    """A batch of this schema; columns that are not given are null. Values are arrays or lists."""
    arrays = []
    for field in schema:
        values = columns.get(field.name)
        if values is None:
            arrays.append(pa.nulls(rows, field.type))
        elif isinstance(values, pa.Array):
            arrays.append(values if values.type == field.type else values.cast(field.type))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
