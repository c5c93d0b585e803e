"""The data pipeline: the journal, its capture, and Spark."""
