"""Logs: structured events on standard error, readable on a terminal, JSON lines elsewhere; never a key or a body.

    log = Logger()
    log.info("link opened", entity="orders", role="receiver")

An event is a sentence fragment; what varies goes into fields. Times are UTC.
"""

# Written here and not taken from a library: those at hand import 100 ms worth of others into each process.

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, NamedTuple, TextIO

from broker.settings.config import Log, LogFormat

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}

REDACTED = "***"
_SECRET_FIELD = re.compile(
    r"(^|_)(key|password|secret|credentials?|token|signature|sig|sas|authorization|connection_string|body|payload)$",
    re.IGNORECASE,
)
_SECRET_TEXT = re.compile(r"(SharedAccessKey|SharedAccessSignature|sig|primary_key|secondary_key|root_key)=[^\s;&,)]+")
_NO_SECRET = {"lock_token"}  # names one delivery, to who holds the right anyway

_COLOURS = {"debug": "\x1b[2m", "info": "\x1b[32m", "warning": "\x1b[33m", "error": "\x1b[31m"}
_BOLD, _CYAN, _PLAIN = "\x1b[1m", "\x1b[36m", "\x1b[0m"
EVENT_WIDTH = 30  # on a terminal, so that fields stand below each other


class _Output(NamedTuple):
    """Where this process writes its log, and how. `stream` None is standard error, as it is when a line is written."""

    stream: TextIO | None = None
    level: int = logging.INFO
    console: bool = False
    coloured: bool = False


_output = _Output()


def configure_logging(settings: Log, stream: TextIO | None = None) -> None:
    """Set up logging for this process, the standard library's included, to `stream` or standard error."""
    global _output
    stream = stream or sys.stderr
    console = settings.format is LogFormat.CONSOLE or (settings.format is LogFormat.AUTO and stream.isatty())
    level = LEVELS[settings.level]
    _output = _Output(stream, level, console, console and stream.isatty())
    logging.basicConfig(handlers=[_OfLibraries()], level=max(level, logging.WARNING), force=True)


class Logger:
    """Writes events of this process. Values of fields that JSON does not know are written as their `repr`."""

    def debug(self, event: str, **fields: object) -> None:
        _write("debug", event, fields)

    def info(self, event: str, **fields: object) -> None:
        _write("info", event, fields)

    def warning(self, event: str, **fields: object) -> None:
        _write("warning", event, fields)

    def error(self, event: str, **fields: object) -> None:
        _write("error", event, fields)

    def exception(self, event: str, **fields: object) -> None:
        """An error, with the exception that is being handled."""
        _write("error", event, fields, sys.exception())


def _write(level: str, event: str, fields: dict[str, object], error: BaseException | None = None) -> None:
    output = _output
    if LEVELS[level] < output.level:
        return
    if error is not None:
        fields = fields | {"exception": "".join(traceback.format_exception(error)).rstrip()}
    fields = {name: _masked(name, value) for name, value in fields.items()}
    now = datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")
    event = str(_masked("event", event))
    if output.console:
        line = _readable(now, level, event, fields, output.coloured)
    else:
        document = {"timestamp": now, "level": level, "event": event, **fields}
        line = json.dumps(document, ensure_ascii=False, default=lambda value: _masked("", repr(value)))
    stream = output.stream or sys.stderr
    stream.write(line + "\n")
    stream.flush()


def _readable(now: str, level: str, event: str, fields: dict[str, Any], coloured: bool) -> str:
    trace = fields.pop("exception", None)
    texts = {name: value if isinstance(value, str) else str(_masked("", repr(value))) for name, value in fields.items()}
    # A line break within a value would look like the next event.
    shown = {name: text if text.isprintable() and text else repr(text) for name, text in texts.items()}
    if coloured:
        parts = [f"{_CYAN}{name}{_PLAIN}={text}" for name, text in shown.items()]
        line = f"{now} {_COLOURS[level]}{level:<7}{_PLAIN} {_BOLD}{event:<{EVENT_WIDTH}}{_PLAIN}"
    else:
        parts = [f"{name}={text}" for name, text in shown.items()]
        line = f"{now} {level:<7} {event:<{EVENT_WIDTH}}"
    return "\n".join(_not_empty((" ".join([line, *parts]).rstrip(), trace)))


def _not_empty(lines: Iterable[str | None]) -> list[str]:
    return [line for line in lines if line]


def _masked(name: str, value: object) -> object:
    """`value` with secrets masked: what is named like a key or a body, keys inside texts, and all bytes."""
    if _SECRET_FIELD.search(name) and name not in _NO_SECRET and value is not None:
        return REDACTED
    if isinstance(value, str):
        return _SECRET_TEXT.sub(rf"\1={REDACTED}", value) if "=" in value else value
    if isinstance(value, bytes | bytearray | memoryview):
        return value.hex() if name in _NO_SECRET else f"<{len(value)} bytes>"
    if isinstance(value, dict):
        return {str(inner): _masked(str(inner), inner_value) for inner, inner_value in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked("", item) for item in value]
    return value


class _OfLibraries(logging.Handler):
    """What libraries log (asyncio, aiohttp), in the form of our own."""

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        level = "error" if record.levelno >= logging.ERROR else "warning"
        _write(level, record.getMessage(), {"logger": record.name}, error)
