"""Reads the messages of a queue, subscription or dead-letter queue without taking them: `mode=browse`.

The range of sequence numbers is found once, when the query is planned: from the first message to the last, for each
partition of the entity. So a task that runs again reads the same range. It is no snapshot: what was settled meanwhile
is gone, and a scheduled message that became due has another number.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSourceReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.types import StructType

from protocol.bounds import MAX_NUMBER
from protocol.client.browsing import FRAGMENT_BITS, last_numbers
from protocol.client.connection import Connection, connect_to
from protocol.client.errors import ClientError, ConnectionLost
from protocol.client.messages import Message
from protocol.client.requests import Management
from protocol.errors import ProtocolError
from pyspark_peeklock import rows
from pyspark_peeklock.decoding import columns_of
from pyspark_peeklock.errors import BrowseFailed
from pyspark_peeklock.options import Access, BrowseOptions

PAGE: Final = 1000  # messages asked for at once; brokers answer with fewer, as many as fit
TIMEOUT_S: Final = 30.0
ATTEMPTS: Final = 5  # without a message in between
PAUSE_S: Final = 1.0


@dataclass
class NumberRange(InputPartition):
    """Sequence numbers `first` to `last`, both included, of one partition of the entity."""

    first: int
    last: int


class BrowseReader(DataSourceReader):
    def __init__(self, options: BrowseOptions, schema: StructType) -> None:
        rows.check_schema(schema)
        self._options = options
        self._schema = schema
        self._first, self._last = 0, MAX_NUMBER

    def partitions(self) -> list[NumberRange]:
        """Return the ranges of numbers to read, one for each task. Raises BrowseFailed."""
        found = run(self._ranges(), self._options.address)
        wanted = [
            NumberRange(max(each.first, self._first), min(each.last, self._last))
            for each in found
            if each.first <= self._last and each.last >= self._first
        ]
        return split(wanted, self._options.min_partitions)

    async def _ranges(self) -> list[NumberRange]:
        async with await self._connect() as connection:
            management = await connection.management(self._options.address)
            found = []
            for fragment, last in (await last_numbers(management)).items():
                lowest = await management.peek(1, fragment << FRAGMENT_BITS, omit_body=True)
                found.append(NumberRange(min(_number(lowest[0]), last) if lowest else last, last))
            return found

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The messages of one range, a batch for each answer of the broker. Raises BrowseFailed."""
        if not isinstance(partition, NumberRange):  # Spark's, where there is no message at all
            return
        for _, batch in self.pages(partition):
            yield batch

    def pages(self, wanted: NumberRange) -> Iterator[tuple[list[int], pa.RecordBatch]]:
        """The messages of one range, and their numbers. Raises BrowseFailed."""
        schema = rows.arrow_schema(self._schema)
        namespace = self._options.access.connection_string().host
        pages = self._pages(wanted)
        with asyncio.Runner() as runner:
            while (page := runner.run(_next(pages, self._options.address))) is not None:
                columns = columns_of(page, has_body=self._options.includes_body)
                yield columns["sequenceNumber"], self._batch(page, columns, namespace, schema)

    def _batch(self, page: list[bytes], columns: dict[str, Any], namespace: str, schema: pa.Schema) -> pa.RecordBatch:
        count = len(page)
        columns["namespace"] = [namespace] * count
        columns["entity"] = [self._options.entity] * count
        columns["subQueue"] = [self._options.sub_queue] * count
        if self._options.includes_amqp_message:
            columns["amqpMessage"] = page
        return rows.batch_of(columns, count, schema)

    async def _pages(self, wanted: NumberRange) -> AsyncGenerator[list[bytes], None]:
        """Encoded messages of the range; after a lost connection it goes on behind the last one."""
        start, attempts = wanted.first, 0
        while start <= wanted.last:
            try:
                async with await self._connect() as connection:
                    management = await connection.management(self._options.address)
                    while start <= wanted.last:
                        page = await self._peek(management, start)
                        if page and _number(page[-1]) > wanted.last:
                            # Ask again behind those of the range: a server may fill a page with the first message of
                            # the next partition while this one has more, which were too large for the page.
                            page = [each for each in page if _number(each) <= wanted.last]
                        if not page:
                            return
                        start, attempts = _number(page[-1]) + 1, 0
                        yield page
                    return
            except (ConnectionLost, TimeoutError):
                attempts += 1
                if attempts == ATTEMPTS:
                    raise
                await asyncio.sleep(PAUSE_S)

    async def _peek(self, management: Management, start: int) -> list[bytes]:
        return await management.peek(PAGE, start, omit_body=not self._options.includes_body)

    async def _connect(self) -> Connection:
        return await connected(self._options.access)


class FilteringBrowseReader(BrowseReader):
    """Used only with option `filterPushdown`: Spark refuses a reader with `pushFilters` while its setting is off."""

    def pushFilters(self, filters: list[Filter]) -> Iterator[Filter]:  # noqa: N802 - Spark's name
        """Narrow the range of numbers by conditions on `sequenceNumber` and `partition`; yields the others."""
        for each in filters:
            bounds = number_bounds(each)
            if bounds is None:
                yield each
            else:
                self._first, self._last = max(self._first, bounds[0]), min(self._last, bounds[1])


async def connected(access: Access) -> Connection:
    """Connect to the broker. Raises ClientError, TimeoutError, InvalidOption."""
    target = access.connection_string()
    return await connect_to(target, tls=access.trust_of(tls=target.tls), timeout_s=TIMEOUT_S)


def number_bounds(condition: Filter) -> tuple[int, int] | None:
    """The first and last sequence number that meet the condition, exactly; None for a condition on something else."""
    value = getattr(condition, "value", None)
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if condition.attribute == ("sequenceNumber",):
        first, last = value, value
    elif condition.attribute == ("partition",):
        first = value << FRAGMENT_BITS
        last = first + (1 << FRAGMENT_BITS) - 1
    else:
        return None
    if isinstance(condition, EqualTo):
        return first, last
    if isinstance(condition, GreaterThan):
        return last + 1, MAX_NUMBER
    if isinstance(condition, GreaterThanOrEqual):
        return first, MAX_NUMBER
    if isinstance(condition, LessThan):
        return 0, first - 1
    if isinstance(condition, LessThanOrEqual):
        return 0, last
    return None


def split(ranges: list[NumberRange], least: int) -> list[NumberRange]:
    """The ranges cut so that there are `least`, as far as they have numbers; each part of about the same length."""
    total = sum(each.last - each.first + 1 for each in ranges)
    if len(ranges) >= least or not total:
        return ranges
    parts = []
    for each in ranges:
        length = each.last - each.first + 1
        count = min(length, max(1, -(-length * least // total)))
        cuts = [each.first + length * place // count for place in range(count + 1)]
        parts += [NumberRange(first, end - 1) for first, end in pairwise(cuts)]
    return parts


def _number(encoded: bytes) -> int:
    return Message.decode(encoded).sequence_number or 0


async def _next(pages: AsyncGenerator[list[bytes], None], address: str) -> list[bytes] | None:
    try:
        return await anext(pages, None)
    except (ClientError, ProtocolError, TimeoutError, UnicodeError) as error:
        raise _failed(address, error) from error


def _failed(address: str, error: Exception) -> BrowseFailed:
    return BrowseFailed(f"'{address[:300]}': {error}")


def run(work: Any, address: str) -> Any:
    """Do the work, which is about this address. Raises BrowseFailed."""
    try:
        return asyncio.run(work)
    except (ClientError, ProtocolError, TimeoutError, UnicodeError) as error:
        raise _failed(address, error) from error
