"""Logs: structured events on standard error, readable on a terminal, JSON lines elsewhere; never a key or a body.

What clients say of themselves is among the values. It is escaped, so that it neither controls a terminal nor looks like
a line of its own.

    log = get_logger("gateway")
    log.info("link opened", entity="orders", role="receiver")

An event is a constant text; values go into fields. Times are UTC.
"""

import logging
import re
import sys
from typing import TextIO

from broker.printable import json_text, printable, printable_lines
from broker.settings.log import Log, LogFormat
from broker.settings.secrets import REDACTED, masked

# structlog imports rich if it is there, which costs each process 60 ms at its start; our tracebacks are plain text.
_rich = sys.modules.get("rich")
sys.modules["rich"] = None  # type: ignore[assignment] # as documented: importing it raises ModuleNotFoundError
try:
    import structlog
    from structlog.typing import EventDict, Processor, WrappedLogger
finally:
    del sys.modules["rich"]
    if _rich is not None:
        sys.modules["rich"] = _rich

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

_SECRET_FIELD = re.compile(
    r"(^|_)(key|password|secret|credentials?|token|signature|sig|sas|authorization|connection_string|body|payload)$",
    re.IGNORECASE,
)
_NO_SECRET = {"lock_token"}  # names a delivery, but is of no use without the right to receive


get_logger = structlog.get_logger
"""Makes a logger; its argument names the process. Import it from here, so that rich is not imported."""


def configure_logging(settings: Log, stream: TextIO | None = None) -> None:
    """Set up logging for this process, the standard library's included, to `stream` or standard error."""
    stream = stream or sys.stderr
    console = settings.format is LogFormat.CONSOLE or (settings.format is LogFormat.AUTO and stream.isatty())
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        redact,
    ]
    renderer: Processor
    if console:
        shared.append(_escaped)
        renderer = structlog.dev.ConsoleRenderer(
            colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    else:
        renderer = structlog.processors.JSONRenderer(serializer=json_text)
    level = LEVELS[settings.level]
    structlog.configure(
        processors=[*shared, renderer],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=stream),
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_ToStructlog()], level=max(level, logging.WARNING), force=True)


def redact(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Mask fields that are named like a secret or a body, keys inside texts, and all bytes."""
    return {name: _masked(name, value) for name, value in event.items()}


def _masked(name: str, value: object) -> object:
    if _SECRET_FIELD.search(name) and name not in _NO_SECRET and value is not None:
        return REDACTED
    if isinstance(value, str):
        return masked(value)
    if isinstance(value, bytes | bytearray | memoryview):
        return value.hex() if name in _NO_SECRET else f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {inner: _masked(str(inner), inner_value) for inner, inner_value in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked("", item) for item in value]
    return value


def _escaped(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Escape the values. Only a traceback keeps its lines, which are indented: a line that is not is one of ours."""
    return {
        name: printable_lines(value, "  ") if name == "exception" else _printable(value)
        for name, value in event.items()
    }


def _printable(value: object) -> object:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {_printable(inner): _printable(inner_value) for inner, inner_value in value.items()}
    if isinstance(value, list):
        return [_printable(item) for item in value]
    return value


class _ToStructlog(logging.Handler):
    """What libraries log (asyncio, aiohttp), in the form of our own."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(
            record.levelno, record.getMessage(), logger=record.name, exc_info=record.exc_info or None
        )
