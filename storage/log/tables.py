"""Applies net effects to the tables of a partition, and its position in the log."""

from typing import NamedTuple

from storage.log.changes import NetEffect
from storage.records import LOG_POSITION_KEY, CorruptRecord, decode_document, encode_document
from storage.store import Store, StoreDamaged, Table


class LogPosition(NamedTuple):
    """In META of a partition that a worker has open, or had open when it ended: the log with its latest changes, and
    the LSN of a turn up to which the tables have all of them. A store without a position has no changes in any log."""

    log_id: bytes
    worker: int
    lsn: int


def position(store: Store) -> LogPosition | None:
    """Return the store's position in the log; None if it has none. Raises StoreDamaged."""
    value = store.get(Table.META, LOG_POSITION_KEY)
    return None if value is None else decode_position(value)


def decode_position(value: bytes) -> LogPosition:
    """Decode a position in the log. Raises StoreDamaged."""
    try:
        return LogPosition(*decode_document(value))
    except (CorruptRecord, TypeError) as error:
        raise StoreDamaged(f"META {LOG_POSITION_KEY.decode()}: {error}") from error


def write_position(store: Store, at: LogPosition | None) -> None:
    """Stage the position; None: the store leaves its log."""
    if at is None:
        store.delete(Table.META, LOG_POSITION_KEY)
    else:
        store.put(Table.META, LOG_POSITION_KEY, encode_document(list(at)))


def write_net_effect(store: Store, effect: NetEffect) -> None:
    """Stage it, in the order of the keys, which makes the fewest changes of pages."""
    for number, deleted, changed, fresh in effect:
        table = Table(number)
        if deleted:
            store.delete_many(table, sorted(deleted))
        if changed:
            store.put_many(table, sorted(changed))
        if fresh:
            fresh = sorted(fresh)
            last = store.last_key(table)
            # Pages are filled to the end only if the store knows that nothing will come between these keys.
            if last is None or last < fresh[0][0]:
                store.append(table, fresh)
            else:
                store.put_many(table, fresh)
