"""A warning about what may happen thousands of times in a second."""

import time

from broker.logging import get_logger

LOG_SECONDS = 5.0


class RepeatedWarning:
    """Logs an event, at most once in some seconds, with the number of times it has happened since the last line."""

    def __init__(self, event: str, process: str = "gateway") -> None:
        """`process` names the logger."""
        self._log = get_logger(process)
        self._event = event
        self._count = 0
        self._silent_until_s = 0.0

    def happened(self, reason: str, **fields: str) -> None:
        self._count += 1
        now_s = time.monotonic()
        if now_s >= self._silent_until_s:
            self._log.warning(self._event, reason=reason, count=self._count, **fields)
            self._count = 0
            self._silent_until_s = now_s + LOG_SECONDS
