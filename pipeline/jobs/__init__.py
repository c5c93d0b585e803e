"""Jobs over the ledger of a namespace: flow audit, dead letters, latency, usage and costs; and two that change data in
a broker: resubmission of dead letters, and the drain of a pairing's backlog.

Each is a pure function of DataFrames, and a `main` that writes Parquet and a report of HTML.
"""

from typing import Final

# The jobs by the names that the command line uses, each with the module that has its `main`.
JOBS: Final = {
    "audit": "pipeline.jobs.audit",
    "dead-letters": "pipeline.jobs.dead_letters",
    "latency": "pipeline.jobs.latency",
    "usage": "pipeline.jobs.usage",
    "resubmit": "pipeline.jobs.resubmit",
    "drain": "pipeline.jobs.drain",
}

TELLS: Final = {
    "audit": "whether each message is accounted for, or which is not",
    "dead-letters": "what was dead-lettered, where, when and why, and which messages are alike",
    "latency": "how long messages waited for their delivery and their completion",
    "usage": "operations and bytes by entity and day, and what they cost",
    "resubmit": "sends dead letters again, repaired; changes data only with --apply",
    "drain": "brings the backlog of a pairing to its primary; changes data only with --apply",
}
