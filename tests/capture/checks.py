"""What must hold of a capture at any time, checked with pyarrow's own reader and not with ours."""

from collections import defaultdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from storage.capture.chain import load
from storage.capture.manifest import State, TableName
from storage.capture.place import Place
from storage.capture.tables import MESSAGES_SCHEMA

SORTED_BY = [
    ("entity", "ascending"),
    ("partition", "ascending"),
    ("epoch", "ascending"),
    ("journalOffset", "ascending"),
]


def rows_of(place: Place, state: State, table: TableName) -> list[pa.Table]:
    """Each named file of a table; its order, its place and its size are checked."""
    tables = []
    for file in state.files.values():
        if file.table is table:
            assert place.local is not None
            rows = pq.ParquetFile(place.local / file.path).read()
            assert rows.equals(rows.sort_by(SORTED_BY)), f"{file.path} is not sorted"
            assert len(rows) == file.rows
            date, hour = file.path.split("/")[1:3]
            of_path = {f"{at:date=%Y-%m-%d hour=%H}" for at in rows.column("eventTime").to_pylist()}
            assert of_path == {f"{date} {hour}"}
            tables.append(rows)
    return tables


def captured_rows(folder: Path) -> dict[tuple[int, str], list[dict[str, object]]]:
    """The rows of each partition and epoch, in order, with what the messages table adds.

    Fails if an offset is in two files or in none, or if the tables do not fit to each other.
    """
    place = Place.of(str(folder))
    state = load(place)
    if state is None:
        return {}
    found: dict[tuple[int, str], dict[int, dict[str, object]]] = defaultdict(dict)
    for rows in rows_of(place, state, TableName.LEDGER):
        for row in rows.to_pylist():
            of_position = found[row["partition"], row["epoch"]]
            assert row["journalOffset"] not in of_position, f"offset {row['journalOffset']} is in two files"
            of_position[row["journalOffset"]] = {**row, "record": None, "overlay": None}
    seen = set()
    for rows in rows_of(place, state, TableName.MESSAGES):
        assert rows.schema.equals(MESSAGES_SCHEMA)
        for row in rows.to_pylist():
            key = row["partition"], row["epoch"], row["journalOffset"]
            assert key not in seen, f"{key} is in two files"
            seen.add(key)
            assert row["record"] is not None or row["overlay"] is not None
            ledger = found[key[0], key[1]][key[2]]
            assert {**row, "record": None, "overlay": None} == ledger
            found[key[0], key[1]][key[2]] = row
    missing = {
        offset for gap in state.gaps for offset in range(gap.first, gap.last + 1)
    }  # tests with gaps have one partition
    for position, each in state.next.items():
        expected = [offset for offset in range(each.first, each.offset) if offset not in missing]
        assert sorted(found[position]) == expected, f"{position}: offsets are missing, or are there too early"
    assert found.keys() <= state.next.keys()
    return {position: [rows[offset] for offset in sorted(rows)] for position, rows in found.items()}
