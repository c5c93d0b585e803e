"""Captures the journal of a broker, over HTTP, into Parquet files."""
