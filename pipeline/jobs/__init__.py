"""Jobs over the ledger of a namespace: flow audit, dead letters, latency, usage and costs.

Each is a pure function of DataFrames, and a `main` that reads Parquet and writes Parquet and a report of HTML.
"""

from typing import Final

# The jobs by the names that the command line uses, each with the module that has its `main`.
JOBS: Final = {
    "audit": "pipeline.jobs.audit",
    "dead-letters": "pipeline.jobs.dead_letters",
    "latency": "pipeline.jobs.latency",
    "usage": "pipeline.jobs.usage",
}

TELLS: Final = {
    "audit": "whether each message is accounted for, or which is not",
    "dead-letters": "what was dead-lettered, where, when and why, and which messages are alike",
    "latency": "how long messages waited for their delivery and their completion",
    "usage": "operations and bytes by entity and day, and what they cost",
}
