"""The flow of messages as data: jobs over the ledger of a namespace, on Apache Spark."""
