"""All tests of the pipeline share one Spark session."""

from tests.pipeline.session import spark

__all__ = ["spark"]
