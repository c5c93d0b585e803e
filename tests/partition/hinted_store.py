"""A store in memory that checks, at each commit, that the journal's hints explain what entered and left queues, and
that the rows of the journal, which are made of the changes and hints, say what is stored."""

from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

import msgpack

from broker.journal.properties import DECODING
from storage.journal.events import ENTERING, LEAVING, RUN_MAX, Hint, Op, name_of
from storage.journal.queues import Mode, Modes, Queues
from storage.journal.rows import Rows
from storage.journal.schema import UNEXPLAINED
from storage.log.changes import Operation
from storage.memory import MemoryStore
from storage.queue_ids import entity_of
from storage.records import unpack_queue_key
from storage.store import Table

NOT_STORED = {Op.DUPLICATE, Op.PING, Op.PUBLISHED}
ENTERS = frozenset(map(name_of, ENTERING))
LEAVES = frozenset(map(name_of, LEAVING))
TURNS = count()  # over all stores
At = tuple[int, int]  # queue id, sequence number


class HintedStore(MemoryStore):
    def __init__(self, capacity_bytes: int = 1 << 40) -> None:
        super().__init__(capacity_bytes)
        self.hints = []
        self.named: dict[int, str] = {}  # entity id -> path, as the hints said
        self.turns: list[tuple[int, bytes]] = []  # number, and what the log has of it: changes and hints
        self.happened: list[tuple[Any, ...]] = []  # all hints
        self._operations: list[tuple[int, int, Any]] = []  # of this turn, as a log has them
        self._queues = Queues(Modes(Mode.BODIES, {}), {})
        self._told: set[tuple[str, str, int]] = set()  # by the rows: entity, sub-queue and number of what is there
        self._changes: list[tuple[str, int, int, int]] = []  # of QUEUE in this turn: kind, queue id, place, number
        self._present: dict[At, int] = {}  # before this turn: the place of each message
        self._putting = False

    # -- what a turn changes

    def put(self, table: Table, key: bytes, value: bytes) -> None:
        if not self._putting:
            if table == Table.QUEUE:
                self._changes.append(("put", *unpack_queue_key(key)))
            self._operations.append((Operation.PUT, table, ((key, value),)))
        super().put(table, key, value)

    def insert_many(self, table: Table, items: Sequence[tuple[bytes, bytes]]) -> None:
        self._putting = True
        super().insert_many(table, items)
        self._putting = False
        if table == Table.QUEUE:
            self._changes += [("insert", *unpack_queue_key(key)) for key, _ in items]
        self._operations.append((Operation.INSERT, table, tuple(items)))

    def delete(self, table: Table, key: bytes) -> None:
        if table == Table.QUEUE and self.get(table, key) is not None:
            self._changes.append(("delete", *unpack_queue_key(key)))
        self._operations.append((Operation.DELETE, table, (key,)))
        super().delete(table, key)

    def delete_many(self, table: Table, keys: Iterable[bytes]) -> None:
        for key in list(keys):
            self.delete(table, key)

    # -- commits

    def commit(self) -> None:
        super().commit()
        operations, self._operations = self._operations, []
        self._check_rows(operations, self.hints or [])
        self._check()

    def abort(self) -> None:
        super().abort()
        self._changes.clear()
        self._operations.clear()
        self.hints = []

    def _check_rows(self, operations: list[Any], hints: list[Any]) -> None:
        if not hints and not any(table in (Table.QUEUE, Table.SESSION_STATES) for _, table, _ in operations):
            return
        # Some tests have two entities of one name.
        hints = [[*hint[:2], str(hint[1])] if hint[0] == Hint.NAMED else hint for hint in hints]
        rows = Rows(0, self._queues, DECODING)
        said = msgpack.packb([operations, hints])
        self.turns.append((next(TURNS), said))
        rows.add(0, *msgpack.unpackb(said, use_list=False, strict_map_key=False))
        assert rows.unfounded == 0
        if len(rows):
            batch = rows.batch(0).select(["op", "entity", "subQueue", "sequenceNumber", "reason"])
            for op, *at, reason in zip(*[column.to_pylist() for column in batch.columns], strict=True):
                assert reason != UNEXPLAINED
                if op in ENTERS:
                    assert tuple(at) not in self._told, (op, at)
                    self._told.add(tuple(at))
                elif op in LEAVES and at[2] is not None:
                    self._told.remove(tuple(at))
        stored = set()
        for queue_id, _, number in map(unpack_queue_key, self._keys[Table.QUEUE]):
            queue = self._queues.at(queue_id)
            stored.add((queue.entity, queue.sub_queue, number))
        assert stored == self._told

    def _check(self) -> None:
        hints, self.hints = self.hints or [], []
        changes, self._changes = self._changes, []
        self.happened += hints
        left: list[At] = []  # by the hints
        entered: list[At] = []
        kept: set[At] = set()
        for kind, *fields in map(_as_done, hints):
            match Hint(kind), fields:
                case Hint.NAMED, [entity_id, path]:
                    assert self.named.setdefault(entity_id, path) == path
                case Hint.DONE, [op, queue_id, numbers, counts, _, _]:
                    assert counts is None or len(counts) == len(numbers)
                    (left.extend if op in LEAVING else kept.update)([(queue_id, number) for number in numbers])
                    assert op not in ENTERING
                    assert op not in NOT_STORED or op == Op.PUBLISHED
                case Hint.MOVED, [op, queue_id, numbers, counts, to_queue_id, first, _]:
                    assert len(counts) == len(numbers)
                    assert op in LEAVING
                    left += [(queue_id, number) for number in numbers]
                    entered += [(to_queue_id, first + index) for index in range(len(numbers))]
                    assert entity_of(to_queue_id) in self.named
                case Hint.ENTERED, [queue_id, numbers, reason, origin, numbers_there]:
                    assert reason
                    assert numbers_there is None or (origin is not None and len(numbers_there) == len(numbers))
                    entered += [(queue_id, number) for number in numbers]
                case Hint.BARE, [op, queue_id, message_ids, copies, _, numbers_there]:
                    assert numbers_there is None or len(numbers_there) == len(message_ids)
                    assert copies is None or len(copies) == len(message_ids)
                    assert op in NOT_STORED
                case ((Hint.TAKEN_OVER | Hint.STAGED), [_, number]):
                    assert number > 0
            if kind != Hint.NAMED:
                has_queue_first = kind in (Hint.ENTERED, Hint.TAKEN_OVER, Hint.STAGED, Hint.STATES)
                assert entity_of(fields[0] if has_queue_first else fields[1]) in self.named, (kind, fields)
        self._compare(changes, left, entered, kept)

    def _compare(self, changes: Sequence[Any], left: list[At], entered: list[At], kept: set[At]) -> None:
        places: dict[At, set[int]] = {at: {place} for at, place in self._present.items()}
        came: list[At] = []
        gone: list[At] = []
        for index, (kind, queue_id, place, number) in enumerate(changes):
            at = queue_id, number
            if kind == "delete":
                assert place in places[at], (at, place)
                stays = any(
                    (later, to, of, what) == ("put", queue_id, number, what) and what != place
                    for later, to, what, of in changes[index + 1 :]
                )
                places[at].discard(place)
                if not places[at] and not stays:
                    del places[at]
                    gone.append(at)
                continue
            if not places.get(at) and (kind == "insert" or at in entered):
                came.append(at)
            elif kind == "insert":
                raise AssertionError(f"{at} was there already")
            elif at not in places:
                raise AssertionError(f"{at} entered, and no hint says why")
            places.setdefault(at, set()).add(place)
        assert sorted(gone) == sorted(left), ("left", set(gone) ^ set(left))
        assert set(entered) <= set(came), ("entered", set(entered) - set(came))
        known = self._present.keys() | set(came)
        assert kept <= known, ("hints about messages that are not there", kept - known)
        assert all(len(each) == 1 for each in places.values()), places
        self._present = {at: place for at, [place] in places.items()}
        stored = {
            (queue_id, number): place for queue_id, place, number in map(unpack_queue_key, self._keys[Table.QUEUE])
        }
        assert stored == self._present


def _as_done(hint: Sequence[Any]) -> Sequence[Any]:
    """A run as the messages that it stands for; other hints as they are."""
    if hint[0] != Hint.DONE_RUN:
        return hint
    _, op, queue_id, first, messages, count, reason, at_ms = hint
    assert 0 < messages <= RUN_MAX
    assert count >= 0
    return Hint.DONE, op, queue_id, range(first, first + messages), [count] * messages, reason, at_ms
