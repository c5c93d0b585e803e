"""The data source that Spark registers as `format("peeklock")`: it reads the options and makes readers and writers."""

from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from pyspark_peeklock.options import BrowseOptions, Options, SinkOptions

# Spark imports this module in every session, also where nobody uses it: what needs pyarrow is imported in the methods.


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "peeklock"

    def schema(self) -> StructType:
        from pyspark_peeklock.rows import SCHEMA

        Options(self.options)
        return SCHEMA

    def reader(self, schema: StructType) -> Any:
        from pyspark_peeklock.browse import BrowseReader, FilteringBrowseReader

        options = BrowseOptions.of(Options(self.options))
        return (FilteringBrowseReader if options.pushes_filters else BrowseReader)(options, schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_peeklock.errors import InvalidOption
        from pyspark_peeklock.sink import BatchWriter

        if overwrite:
            raise InvalidOption("a queue cannot be overwritten: use .mode('append')")
        return BatchWriter(SinkOptions.of(Options(self.options)), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        from pyspark_peeklock.sink import StreamWriter

        return StreamWriter(SinkOptions.of(Options(self.options)), schema)
