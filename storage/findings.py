"""The problems that verification finds in one partition."""

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from storage.store import Table

FINDINGS_KEPT = 1000  # per partition; all are counted


class Problem(StrEnum):
    UNREADABLE_STORE = "unreadable-store"  # the file cannot be opened, or its pages are invalid
    DAMAGED_LOG = "damaged-log"  # changes of the partition are in a log that is damaged, missing, or of another store
    DAMAGED_PAGES = "damaged-pages"  # of a table, of the list of free pages, or a root
    CORRUPT_RECORD = "corrupt-record"  # checksum or shape of a value
    MALFORMED_KEY = "malformed-key"
    MISSING_MESSAGE = "missing-message"  # a queue entry refers to a message that is not there
    ORPHANED_MESSAGE = "orphaned-message"  # no queue entry refers to it
    TWO_PLACES = "two-places"  # a sequence number is in two places of its queue
    WRONG_COUNTS = "wrong-counts"
    STRAY_TIMER = "stray-timer"  # it has no queue entry, or one that needs no timer or has another time
    MISSING_TIMER = "missing-timer"  # an entry would never become available, or never expire
    WRONG_REFERENCES = "wrong-references"  # the recorded number of entries of a message is wrong
    STRAY_RULE = "stray-rule"  # its subscription is not there
    STRAY_MARK = "stray-mark"  # its queue is not there
    NO_DESTINATION = "no-destination"  # a message in a transfer queue that would never move on
    MISSING_SESSION_ENTRY = "missing-session-entry"  # no receiver of its session would get the message
    STRAY_SESSION_ENTRY = "stray-session-entry"  # its queue entry is not there, or is of another session
    WRONG_DUPLICATE = "wrong-duplicate"  # message ids that are not found, not counted, or have no entity
    WRONG_SESSION_STATE = "wrong-session-state"  # of another length than recorded, not recorded, or not there


@dataclass(frozen=True)
class Finding:
    """One problem. `table` and `key` say where it is; they are None and empty for the store as a whole."""

    problem: Problem
    table: Table | None
    key: bytes
    text: str


@dataclass
class PartitionReport:
    """The records read and the problems found: the first FINDINGS_KEPT findings, and the number of each kind.

    `torn`: what the log of the partition ends with, if that is torn or damaged. It is no problem, because a write that
    nobody was answered leaves the same.
    """

    partition: int
    records: Counter[Table] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    problems: Counter[Problem] = field(default_factory=Counter)
    torn: str = ""

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, problem: Problem, table: Table | None, key: bytes, text: str) -> None:
        self.problems[problem] += 1
        if len(self.findings) < FINDINGS_KEPT:
            self.findings.append(Finding(problem, table, key, text))
