"""SIGHUP: keys of the namespace, rights of certificates and names of hosts are read again where the settings came from.

The supervisor writes them to a file in its directory, from which gateways take them at once, and at each later start.
Everything else that was changed waits for the next start of the broker; the log names it.
"""

from collections.abc import Callable
from pathlib import Path

from broker.keys import SECURITY_FILE, write_security
from broker.logging import get_logger
from broker.settings.config import ConfigurationError, Settings
from broker.settings.security import Security

log = get_logger("supervisor")

# Of `security`, what gateways take while they run.
_TAKEN = {"root_key", "root_secondary_key", "authorization_rules", "certificates", "host_names"}


class Reloading:
    def __init__(self, settings: Settings, directory: Path, read_again: Callable[[], Settings]) -> None:
        """`settings` and those of `read_again` are complete: they have a root key. It raises ConfigurationError."""
        self._settings = settings
        self._file = directory / SECURITY_FILE
        self._read_again = read_again
        self._file.unlink(missing_ok=True)  # of an earlier start

    def reload(self) -> None:
        """If the settings cannot be used, nothing changes, and the log says why."""
        try:
            settings = self._read_again()
            write_security(self._file, settings.security)
        except (ConfigurationError, OSError) as error:
            log.error("settings not read again", reason=str(error))
            return
        if waiting := self._waiting(settings):
            log.warning("changed settings wait for the next start", settings=waiting)

    def _waiting(self, settings: Settings) -> list[str]:
        names = [name for name in Settings.model_fields if name != "security"]
        waiting = [name for name in names if getattr(settings, name) != getattr(self._settings, name)]
        before, now = self._settings.security, settings.security
        within = [name for name in Security.model_fields if name not in _TAKEN]
        return waiting + [f"security.{name}" for name in within if getattr(before, name) != getattr(now, name)]
