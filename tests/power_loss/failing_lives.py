"""Lives of a worker's log, run under the shim: `python -m tests.power_loss.failing_lives DIRECTORY TRACE LIVES`.

Each turn stores a number. A life ends when a write or a sync of its disk fails; the next begins from what it finds, as
the start of a worker does. Marks say what clients would have been told:

    asked N     number N is being stored
    done N      it is: somebody was answered, or the next life has found it
    gone N      the next life has not found it, and serves without it
"""

import sys
from pathlib import Path

from storage.log import commit_log
from storage.log.commit_log import CommitLog, LogLimits
from storage.store import StoreError, Table
from tests.logged_turns import Local
from tests.logs import crash, open_log
from tests.power_loss.trace import Marker

PARTITIONS = (0, 1)
LIMITS = LogLimits(64 << 10, 1 << 20)
TURNS = 60  # of a life whose disk does not fail
STARTS = 20  # that fail, one after the other


def key(number: int) -> bytes:
    return b"%08d" % number


def numbers(log: CommitLog) -> set[int]:
    found = set()
    for store in log.stores.values():
        found |= {int(each) for each, _ in store.scan(Table.MESSAGES, b"0", b"9\xff", 1 << 20)}
    return found


def value_of(number: int) -> bytes:
    """Of one block, of several, and now and then larger than a segment."""
    return b"%d." % number * (1, 1500, 300, 6000, 10, 30_000)[number % 6]


def opened(directory: Path) -> CommitLog:
    """A start that fails is tried again, as by a supervisor. Raises StoreError if that is in vain."""
    for _ in range(STARTS - 1):
        try:
            return open_log(directory, PARTITIONS, limits=LIMITS, map_size_bytes=1 << 24)
        except StoreError as error:
            if "Input/output error" not in str(error):
                raise
    return open_log(directory, PARTITIONS, limits=LIMITS, map_size_bytes=1 << 24)


def live(directory: Path, marker: Marker, number: int) -> int:
    """One life. Returns the last number that was asked for."""
    log = opened(directory)
    log.checkpointer.log = log  # type: ignore[attr-defined]
    marker.mark(**{"done" if number in numbers(log) else "gone": number})
    try:
        for _ in range(TURNS):
            number += 1
            store = log.stores[number % len(PARTITIONS)]
            store.put(Table.MESSAGES, key(number), value_of(number))
            marker.mark(asked=number)
            log.commit()
            marker.mark(done=number)
            if log.is_checkpointing:
                log.hear()
    except StoreError as error:
        if "Input/output error" not in str(error):
            raise
    crash(log)
    return number


def main() -> None:
    vars(commit_log)["Checkpointer"] = Local
    directory, marker = Path(sys.argv[1]), Marker(Path(sys.argv[2]))
    marker.mark(root=directory.stat().st_ino)
    number = 0
    for _ in range(int(sys.argv[3])):
        number = live(directory, marker, number)


if __name__ == "__main__":
    main()
