"""Settings of what is on disk: the partitions' stores, and the journal."""

from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from broker.namespace.entities import Frozen
from broker.settings.fields import GIB, MIB


class JournalMode(StrEnum):
    OFF = "off"
    EVENTS = "events"
    BODIES = "bodies"


class Stores(Frozen):
    """The partitions' stores on disk."""

    map_size_bytes: int = Field(
        64 * GIB,
        ge=16 * MIB,
        le=1024 * 1024 * GIB,
        description="Size that a partition's store may grow to; the file is sparse, so unused space takes no disk.",
    )
    send_watermark: float = Field(
        0.9,
        gt=0,
        lt=1,
        description="Used share of the store above which sends are refused; receiving still works. A quarter of the "
        "store, or 16 MiB if that is less, stays free in any case.",
    )
    min_free_disk_bytes: int = Field(
        256 * MIB, ge=0, le=1024 * 1024 * GIB, description="Free disk space below which sends are refused."
    )
    log_bytes: int = Field(
        64 * MIB,
        ge=8 * MIB,
        le=64 * GIB,
        description="Changes that a worker has logged and its stores have not, at most; they are in memory, too, where "
        "small ones take up to four times as much. Sends are refused beyond it; 4 messages of the largest size are "
        "always allowed.",
    )


class Journal(Frozen):
    """The journal: what happened to each message, to be read as data."""

    mode: JournalMode = Field(
        JournalMode.OFF,
        description="What is journaled of messages: nothing, events, or events and the messages themselves. If it "
        "is not off for some, a process more writes the journal, and serves it at /$journal of the HTTP listener.",
    )
    modes: dict[Annotated[str, StringConstraints(min_length=1, max_length=300)], JournalMode] = Field(
        {},
        max_length=1000,
        description="The mode of some entities, by patterns of their paths, as `orders`, `audit-*` or "
        "`prices/subscriptions/*`: the first that fits counts, and without one `journal.mode`.",
    )
    retention_hours: int = Field(
        168, ge=1, le=100 * 366 * 24, description="Time that rows are kept. They are deleted by files of up to an hour."
    )
    retention_bytes: int = Field(
        16 * GIB,
        ge=64 * MIB,
        le=1024 * 1024 * GIB,
        description="Size of all journal files, beyond which the oldest are deleted.",
    )
    hold_for: tuple[Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,100}$")], ...] = Field(
        (),
        max_length=16,
        description="Names of consumers, as `capture`. Files that one of them has not read are kept beyond "
        "`journal.retention_hours` and `journal.retention_bytes`, up to `journal.held_bytes`.",
    )
    held_bytes: int = Field(
        64 * GIB,
        ge=64 * MIB,
        le=1024 * 1024 * GIB,
        description="Size of all journal files, beyond which even those are deleted that a consumer has not read.",
    )
    backlog_bytes: int = Field(
        256 * MIB,
        ge=8 * MIB,
        le=1024 * GIB,
        description="Log that a worker keeps for the journal, while that is behind. Beyond it the journal has a gap.",
    )

    @property
    def is_on(self) -> bool:
        """Return True if any entity may be journaled."""
        return self.mode is not JournalMode.OFF or any(mode is not JournalMode.OFF for mode in self.modes.values())
