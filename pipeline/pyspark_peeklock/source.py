"""The data source that Spark registers as `format("peeklock")`: it reads the options and makes readers and writers."""

from typing import Any

from pyspark.sql.datasource import DataSource
from pyspark.sql.types import StructType

from pyspark_peeklock.options import BrowseOptions, JournalOptions, Options, SinkOptions, mode_of

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
        given = Options(self.options)
        if mode_of(given, "browse") == "journal":
            from pyspark_peeklock.journal import FilteringJournalReader, JournalReader

            of_journal = JournalOptions.of(given, is_stream=False)
            return (FilteringJournalReader if of_journal.pushes_filters else JournalReader)(of_journal, schema)
        from pyspark_peeklock.browse import BrowseReader, FilteringBrowseReader

        options = BrowseOptions.of(given)
        if options.as_of_offsets is not None:
            from pyspark_peeklock.as_of import AsOfReader

            return AsOfReader(options, schema)
        return (FilteringBrowseReader if options.pushes_filters else BrowseReader)(options, schema)

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802 - Spark's name
        from pyspark_peeklock.errors import InvalidOption
        from pyspark_peeklock.journal import JournalStreamReader

        given = Options(self.options)
        if mode_of(given, "journal") == "browse":
            raise InvalidOption("mode=browse is for batch queries: what was settled cannot be browsed again")
        return JournalStreamReader(JournalOptions.of(given, is_stream=True), schema)

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from pyspark_peeklock.errors import InvalidOption
        from pyspark_peeklock.sink import BatchWriter

        if overwrite:
            raise InvalidOption("a queue cannot be overwritten: use .mode('append')")
        return BatchWriter(SinkOptions.of(Options(self.options)), schema)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802 - Spark's name
        from pyspark_peeklock.sink import StreamWriter

        return StreamWriter(SinkOptions.of(Options(self.options)), schema)
