"""The owner of a request, which is told of the answer: a client's connection, as the router knows it."""

from typing import Protocol


class Owner(Protocol):
    """A client's connection. An exception of its channels or replies is told to it, and ends nothing else."""

    def flush(self) -> None: ...

    def fail(self, error: Exception) -> None:
        """`error` is being handled."""
