"""Settings of the log."""

from enum import StrEnum

from pydantic import Field

from broker.namespace.entities import Frozen


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    AUTO = "auto"
    JSON = "json"
    CONSOLE = "console"


class Log(Frozen):
    """Logs, on standard error."""

    level: LogLevel = Field(LogLevel.INFO, description="Lowest level that is logged.")
    format: LogFormat = Field(LogFormat.AUTO, description="JSON lines or console; auto is console on a terminal.")
