"""Peeklock with a journal, and what the journal has."""

import contextlib
import ssl
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from bench.load import LoadFailed
from bench.rows import PEEKLOCK
from bench.servers import ROOT, Peeklock, ServerFailed, free_port
from broker.administration.address import Address
from broker.capture.journal import HttpJournal
from protocol.client.connection_string import ConnectionString
from storage.capture.errors import SourceFailed

MODES = ("off", "events", "bodies")
ROWS = {"send": 1, "recv": 2, "both": 3}  # enqueued; delivered and completed; all of them
IDS = "ids"  # a queue with duplicate detection
CATCH_UP_S = 300.0
POLL_S = 0.02


class PeeklockWithJournal(Peeklock):
    """Peeklock with a journal in a mode of `journal.mode`, served over HTTP."""

    def __init__(self, directory: Path, root: Path = ROOT, name: str = PEEKLOCK, mode: str = "bodies") -> None:
        super().__init__(directory, root, name)
        self.mode = mode
        self.http_port = str(free_port())

    @property
    def connection_string(self) -> str:
        key = f"SharedAccessKeyName={self.endpoint.user};SharedAccessKey={self.endpoint.password}"
        return f"Endpoint=sb://127.0.0.1:{self.endpoint.port};{key};UseDevelopmentEmulator=true"

    @property
    def http_endpoint(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    def _settings(self) -> list[str]:
        return [] if self.mode == "off" else [f'[journal]\nmode = "{self.mode}"\n']

    def _entities(self) -> list[str]:
        ids = f'[[queues]]\nname = "{IDS}"\nmax_size_mb = 20480\nrequires_duplicate_detection = true\n'
        return [*super()._entities(), ids]

    def start(self) -> float:
        """As any server; then wait for the journal, whose process may start later."""
        elapsed = super().start()
        if self.mode != "off":
            began = time.monotonic()
            while not self._journal_answers():
                if time.monotonic() - began > self.start_timeout_s:
                    raise ServerFailed(f"{self.name}: the journal does not answer")
                time.sleep(POLL_S)
        return elapsed

    def _journal_answers(self) -> bool:
        with self._journal() as journal, contextlib.suppress(SourceFailed):
            journal.extents()
            return True
        return False

    def journaled_rows(self) -> int:
        """Rows that the journal has had so far, of all partitions; 0 without a journal. Raises LoadFailed."""
        with self._journal() as journal:
            return self._rows(journal)

    def wait_until_journaled(self, rows: int) -> float:
        """Wait until the journal has had so many rows; return the seconds it took. Raises LoadFailed."""
        began = time.monotonic()
        with self._journal() as journal:
            while (found := self._rows(journal)) < rows:
                if time.monotonic() - began > CATCH_UP_S:
                    raise LoadFailed(f"{self.name}: after {CATCH_UP_S:g} s the journal has {found:,} of {rows:,} rows")
                time.sleep(POLL_S)
        return time.monotonic() - began

    def _rows(self, journal: HttpJournal) -> int:
        try:
            return 0 if self.mode == "off" else sum(each.stable for each in journal.extents().partitions)
        except SourceFailed as problem:
            raise LoadFailed(f"{self.name}: {problem}") from problem

    @contextmanager
    def _journal(self) -> Iterator[HttpJournal]:
        address = Address("http", "127.0.0.1", int(self.http_port))
        credentials = ConnectionString.parse(self.connection_string).credentials
        with closing(HttpJournal(address, credentials, ssl.create_default_context(), "bench")) as journal:
            yield journal


class PeeklockWithoutJournal(PeeklockWithJournal):
    """With the same queues, as it is by default."""

    def __init__(self, directory: Path, root: Path = ROOT, name: str = PEEKLOCK) -> None:
        super().__init__(directory, root, name, mode="off")
