"""Makes the package's log lines visible: Spark's Python processes configure no logging, and drop information."""

import logging
import sys


def let_speak(log: logging.Logger) -> None:
    """Write lines to standard error, unless the application has said what becomes of them."""
    if not log.hasHandlers():
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
