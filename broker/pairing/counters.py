"""What a pairing has done since it began: for metrics and for the accounting of costs (PN11)."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """`failures` are failed sends that count towards a failover. `pings` are those that were begun."""

    sent_to_primary: int = 0
    sent_to_backlog: int = 0
    failures: int = 0
    failovers: int = 0
    failbacks: int = 0
    pings: int = 0
    backlog_queues_pulled: int = 0
