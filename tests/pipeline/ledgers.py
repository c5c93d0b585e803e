"""Synthetic ledgers: a namespace that is played message by message, with the rows that its journal would have.

`History` is faultless by construction: what it plays could happen. Faults are planted afterwards, in its rows or in
what is present. All rows are dicts of the columns of the ledger.
"""

import random
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa

START: Final = datetime(2026, 3, 2, 8, 0, tzinfo=UTC)

_TIME = pa.timestamp("us", tz="UTC")
SCHEMA: Final = pa.schema(
    [
        ("namespace", pa.string()),
        ("partition", pa.int32()),
        ("journalOffset", pa.int64()),
        ("eventTime", _TIME),
        ("op", pa.string()),
        ("entity", pa.string()),
        ("entityId", pa.int32()),
        ("subQueue", pa.string()),
        ("sequenceNumber", pa.int64()),
        *((name, pa.string()) for name in ("messageId", "sessionId", "partitionKey", "correlationId", "subject")),
        ("contentType", pa.string()),
        *((name, _TIME) for name in ("enqueuedTime", "scheduledTime", "expiresAt")),
        ("deliveryCount", pa.int32()),
        ("reason", pa.string()),
        ("description", pa.string()),
        ("bodySize", pa.int64()),
        ("originEntity", pa.string()),
        ("originEntityId", pa.int32()),
        ("originSubQueue", pa.string()),
        ("originSequenceNumber", pa.int64()),
        ("copies", pa.int32()),
        ("record", pa.binary()),
        ("overlay", pa.binary()),
        ("epoch", pa.string()),
    ]
)
PRESENT: Final = pa.schema(
    [("namespace", pa.string()), ("entity", pa.string()), ("subQueue", pa.string()), ("sequenceNumber", pa.int64())]
)

Row = dict[str, Any]
Queue = tuple[str, str]  # entity, subqueue
Place = tuple[str, str, int]


def frame(spark: Any, rows: Iterable[Row], schema: pa.Schema = SCHEMA, without: Sequence[str] = ()) -> Any:
    """A DataFrame of the rows; columns that a row does not have are null."""
    table = pa.Table.from_pylist(list(rows), schema=schema)
    return spark.createDataFrame(table.drop_columns(list(without)))


class History:
    """A namespace that is played. Times go on by a second from call to call, unless `wait` says otherwise.

    `present` are the messages that are in queues now, by place, each with its message id. `partition_of` says on which
    partition an entity lives: the first call that names it decides, by turns.
    """

    def __init__(self, namespace: str = "shop", partitions: int = 2, start: datetime = START) -> None:
        self.namespace = namespace
        self.rows: list[Row] = []
        self.present: dict[Place, str] = {}
        self.partition_of: dict[str, int] = {}
        self._partitions = partitions
        self._next_offset = [0] * partitions
        self._next_number: dict[Queue, int] = {}
        self._entity_ids: dict[str, int] = {}
        self._ids = 0
        self._now = start

    @property
    def ends(self) -> dict[int, int]:
        """The offset behind the last row, by partition."""
        return dict(enumerate(self._next_offset))

    def wait(self, duration: timedelta) -> None:
        self._now += duration

    def _row(self, op: str, place: Place | None, entity: str, **more: Any) -> Row:
        partition = self._home(entity)
        row = {
            "namespace": self.namespace,
            "partition": partition,
            "journalOffset": self._next_offset[partition],
            "eventTime": self._now,
            "op": op,
            "entity": entity,
            "entityId": self._entity_id(entity),
            "subQueue": place[1] if place else "active",
            "sequenceNumber": place[2] if place else None,
            **more,
        }
        self._next_offset[partition] += 1
        self.rows.append(row)
        return row

    def _entity_id(self, entity: str) -> int:
        return self._entity_ids.setdefault(entity, len(self._entity_ids) + 1)

    def _home(self, entity: str) -> int:
        name = entity.partition("/")[0]  # subscriptions live where their topic does
        return self.partition_of.setdefault(name, len(self.partition_of) % self._partitions)

    def _enter(self, op: str, queue: Queue, message_id: str, **more: Any) -> Place:
        number = self._next_number.get(queue, 1)
        self._next_number[queue] = number + 1
        place = (*queue, number)
        brought = {"bodySize": 100, "enqueuedTime": self._now, "deliveryCount": 0} | more
        self._row(op, place, queue[0], messageId=message_id, **brought)
        self.present[place] = message_id
        return place

    def _origin(self, place: Place, reason: str) -> Row:
        entity, sub_queue, number = place
        return {
            "reason": reason,
            "originEntity": entity,
            "originEntityId": self._entity_id(entity),
            "originSubQueue": sub_queue,
            "originSequenceNumber": number,
        }

    def _tick(self) -> None:
        self._now += timedelta(seconds=1)

    def send(self, entity: str, message_id: str | None = None, **more: Any) -> Place:
        self._tick()
        self._ids += 1
        return self._enter("enqueued", (entity, "active"), message_id or f"id-{self._ids}", **more)

    def schedule(self, entity: str) -> Place:
        self._tick()
        self._ids += 1
        return self._enter("scheduled", (entity, "active"), f"id-{self._ids}")

    def use(self, place: Place, op: str = "delivered", **more: Any) -> None:
        """Something that neither enters nor leaves."""
        self._tick()
        self._row(op, place, place[0], **more)

    def end(self, place: Place, op: str = "completed", **more: Any) -> None:
        self._tick()
        self._row(op, place, place[0], **more)
        del self.present[place]

    def _move(self, place: Place, op: str, to: Queue, leaving: Row | None = None, **more: Any) -> Place:
        self._tick()
        message_id = self.present.pop(place)
        self._row(op, place, place[0], **(leaving or {}))
        return self._enter("enqueued", to, message_id, **self._origin(place, op), **more)

    def dead_letter(self, place: Place, reason: str | None = "MaxDeliveryCountExceeded", **more: Any) -> Place:
        return self._move(place, "deadlettered", (place[0], "deadletter"), {"reason": reason} | more)

    def activate(self, place: Place) -> Place:
        return self._move(place, "activated", place[:2])

    def forward(self, place: Place, entity: str) -> Place:
        return self._move(place, "forwarded", (entity, "active"))

    def publish(self, topic: str, subscriptions: Sequence[str], message_id: str | None = None) -> list[Place]:
        """Sent to a topic and published at once."""
        self._tick()
        self._ids += 1
        name = message_id or f"id-{self._ids}"
        self._row("published", None, topic, messageId=name, copies=len(subscriptions), bodySize=100)
        origin = {"reason": "published", "originEntity": topic, "originEntityId": self._entity_id(topic)}
        origin["originSubQueue"] = "active"
        return [
            self._enter("enqueued", (f"{topic}/subscriptions/{each}", "active"), name, **origin)
            for each in subscriptions
        ]

    def publish_waiting(self, place: Place, subscriptions: Sequence[str]) -> list[Place]:
        """Of a message that has waited in its topic."""
        self._tick()
        topic = place[0]
        name = self.present.pop(place)
        self._row("published", place, topic, copies=len(subscriptions))
        origin = self._origin(place, "published")
        return [
            self._enter("enqueued", (f"{topic}/subscriptions/{each}", "active"), name, **origin)
            for each in subscriptions
        ]

    def drop(self, entity: str, op: str) -> None:
        """A duplicate or a ping."""
        self._tick()
        self._ids += 1
        self._row(op, None, entity, messageId=f"id-{self._ids}", bodySize=1)

    def move_entity(self, entity: str) -> None:
        """To the next partition, with its messages. Plain queues only."""
        self._tick()
        held = [place for place in self.present if place[0] == entity]
        for place in held:
            self._row("moved", place, entity)
        self.partition_of[entity] = (self._home(entity) + 1) % self._partitions
        for place in held:
            self._row(
                "enqueued", place, entity, messageId=self.present[place], bodySize=100, **self._origin(place, "moved")
            )

    def recreate(self, entity: str) -> None:
        """It is deleted with its messages, and created again under its name. Plain queues only."""
        self._tick()
        gone = [place for place in self.present if place[0] == entity]
        rows = [self._row("purged", place, entity, reason="deleted") for place in gone[:1]]
        self._entity_ids[entity] = max([0, *self._entity_ids.values()]) + 1
        for sub_queue in ("active", "deadletter"):
            self._next_number.pop((entity, sub_queue), None)
        for place in gone:
            del self.present[place]
        # The old messages are purged step by step, while the new entity is in use.
        self.send(entity)
        for place in gone[1:]:
            self._row("purged", place, entity, reason="deleted")["entityId"] = rows[0]["entityId"]

    def restore(self, place: Place) -> None:
        """Received and deleted, but the receiver was gone before it had it."""
        message_id = self.present[place]
        self.end(place, reason="receiveAndDelete")
        self._row("enqueued", place, place[0], messageId=message_id, reason="restored", bodySize=100)
        self.present[place] = message_id

    def snapshot(self) -> list[Row]:
        """What a client that browses all queues sees."""
        return [
            {"namespace": self.namespace, "entity": entity, "subQueue": sub_queue, "sequenceNumber": number}
            for entity, sub_queue, number in self.present
        ]


def played(
    rng: random.Random, steps: int, namespace: str = "shop", partitions: int = 2, *, is_rare: bool = False
) -> History:
    """A history with some of everything. `is_rare`: also with places that are used twice, and nothing is wrong."""
    history = History(namespace, partitions)
    for _ in range(steps):
        play(history, rng, is_rare=is_rare)
    return history


def play(history: History, rng: random.Random, *, is_rare: bool = False) -> None:
    """One thing more that can happen."""
    queues = ("orders", "bills", "mail")
    queue = rng.choice(queues)
    places = list(history.present)
    kind = rng.random()
    if kind < 0.35 or not places:
        history.send(queue)
        return
    if kind < 0.40:
        history.publish("news", rng.sample(("a", "b"), rng.randint(0, 2)))
        return
    if kind < 0.44:
        history.schedule(rng.choice((queue, "news")))
        return
    if kind < 0.46:
        history.drop(queue, rng.choice(("duplicate", "ping")))
        return
    if kind < 0.48:
        history.move_entity(queue)
        return
    if kind < 0.49 and is_rare:
        history.recreate(queue)
        return
    place = rng.choice(places)
    entity, sub_queue, _ = place
    if entity == "news":
        history.publish_waiting(place, rng.sample(("a", "b"), rng.randint(0, 2)))
    elif kind < 0.51 and is_rare:
        history.restore(place)
    elif kind < 0.62:
        history.use(place, rng.choice(("delivered", "abandoned", "deferred", "lockExpired", "returned")))
    elif kind < 0.70 and sub_queue == "active":
        history.dead_letter(place)
    elif kind < 0.78 and entity in queues:
        history.forward(place, rng.choice([each for each in queues if each != entity]))
    elif kind < 0.82 and sub_queue == "active":
        history.activate(place)
    else:
        history.end(place, rng.choice(("completed", "completed", "completed", "expired", "purged", "cancelled")))


def write(
    path: Path, rows: Iterable[Row], schema: pa.Schema = SCHEMA, without: Sequence[str] = ("record", "overlay")
) -> Path:
    """As one Parquet file in the directory."""
    import pyarrow.parquet as pq

    path.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows), schema=schema)
    pq.write_table(table.drop_columns([name for name in without if name in schema.names]), path / "part-0.parquet")
    return path


LARGE_ENTITIES: Final = 64
LARGE_PARTITIONS: Final = 8


class Large(NamedTuple):
    """A large ledger on disk, what is present, and the planted faults by verdict: (entity, sequence number)."""

    ledger: Path
    present: Path
    faults: dict[str, set[tuple[str, int]]]


def write_large(path: Path, messages: int, seed: int = 1) -> Large:
    """Write a ledger of so many messages in 64 queues on 8 partitions, three rows each and a little more.

    Each is enqueued, delivered and completed; every hundredth is dead-lettered instead; of the last few of each queue
    some wait. Faults: 7 lost, 5 ghosts, 11 left twice, 3 left but present, 2 entered twice.
    """
    import numpy as np
    import pandas as pd
    import pyarrow.parquet as pq

    rng = np.random.default_rng(seed)
    each = messages // LARGE_ENTITIES
    entity = np.repeat(np.arange(LARGE_ENTITIES), each)
    number = np.tile(np.arange(1, each + 1), LARGE_ENTITIES)
    sent_us = np.sort(rng.integers(0, 24 * 3600 * 10**6, each * LARGE_ENTITIES).reshape(LARGE_ENTITIES, each)).ravel()
    wait_us = rng.exponential(20_000, sent_us.size).astype(np.int64) + 500
    work_us = rng.exponential(80_000, sent_us.size).astype(np.int64) + 500
    kind = np.where(number % 100 == 0, "deadlettered", "completed")
    waits = number > each - rng.integers(0, 3, sent_us.size)
    name = pd.Series([f"shop-{index:02}" for index in range(LARGE_ENTITIES)], dtype="string[pyarrow]")
    base = pd.DataFrame({"entity": entity, "sequenceNumber": number, "at": sent_us})
    ids = (
        pd.Series(entity.astype(str), dtype="string[pyarrow]")
        + "-"
        + pd.Series(number.astype(str), dtype="string[pyarrow]")
    )
    size = rng.integers(200, 4000, sent_us.size)
    enqueued = base.assign(op="enqueued", subQueue="active", messageId=ids, bodySize=size)
    delivered = base.assign(op="delivered", subQueue="active", at=sent_us + wait_us)[~waits]
    left_us = sent_us + wait_us + work_us
    left = base.assign(op=kind, subQueue="active", at=left_us)[~waits]
    left.loc[left.op == "deadlettered", "reason"] = "MaxDeliveryCountExceeded"
    dead = left[left.op == "deadlettered"]
    dead = dead.assign(
        op="enqueued",
        subQueue="deadletter",
        reason="deadlettered",
        originEntity=dead.entity.map(name),
        originSubQueue="active",
        originSequenceNumber=dead.sequenceNumber,
        sequenceNumber=dead.sequenceNumber // 100,
        messageId=ids[dead.index],
        bodySize=size[dead.index],
    )
    completed = left.index[(left.op == "completed")]
    picked = rng.choice(completed[base.loc[completed].sequenceNumber > 1], 28, replace=False)
    lost, ghosts, twice, still, entered = np.split(picked, [7, 12, 23, 26])
    faults = {
        verdict: {(name[base.entity[index]], int(base.sequenceNumber[index])) for index in chosen}
        for verdict, chosen in (("lost", lost), ("ghost", ghosts), ("left_twice", twice), ("left_but_present", still))
    } | {"entered_twice": {(name[base.entity[index]], int(base.sequenceNumber[index])) for index in entered}}
    parts = [enqueued.drop(ghosts), enqueued.loc[entered], delivered, left.drop(lost), left.loc[twice], dead]
    rows = pd.concat(parts, ignore_index=True).sort_values("at", kind="stable", ignore_index=True)
    rows["partition"] = (rows.entity % LARGE_PARTITIONS).astype("int32")
    rows["journalOffset"] = rows.groupby("partition").cumcount()
    start_us = int(START.timestamp() * 1e6)
    rows["eventTime"] = pd.to_datetime(rows["at"] + start_us, unit="us", utc=True)
    rows["entity"] = rows.entity.map(name)
    rows["namespace"] = "shop"
    rows = rows.sort_values(["entity", "partition", "journalOffset"], ignore_index=True)
    fields = [field for field in SCHEMA if field.name not in ("epoch", "record", "overlay")]
    for field in fields:
        if field.name not in rows:
            rows[field.name] = None
    table = pa.Table.from_pandas(rows[[field.name for field in fields]], schema=pa.schema(fields), preserve_index=False)
    ledger = path / "table=ledger"
    ledger.mkdir(parents=True)
    step = 500_000
    for start in range(0, table.num_rows, step):
        pq.write_table(table.slice(start, step), ledger / f"{start}.parquet", compression="zstd")
    there = pd.concat([base[waits], base.loc[still]])
    there = there.assign(entity=there.entity.map(name), subQueue="active")
    gone = dead.assign(entity=dead.entity.map(name))
    present = pd.concat([there, gone]).assign(namespace="shop")[list(PRESENT.names)]
    (path / "present").mkdir()
    pq.write_table(pa.Table.from_pandas(present, schema=PRESENT, preserve_index=False), path / "present" / "0.parquet")
    return Large(ledger, path / "present", faults)
