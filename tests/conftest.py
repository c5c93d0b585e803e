"""Brokers that tests start see none of the caller's settings."""

from tests import caller

__all__ = ["caller"]  # importing it is what counts
