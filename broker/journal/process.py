"""The process that writes the journal of a machine's workers and serves it to the gateways.

A thread follows the logs, because it computes and waits for the disk; the event loop answers requests and questions of
the operations endpoint. Whatever happens to this process, the workers do not notice: their logs wait for it, up to
`journal.backlog_bytes`.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from broker.child import Instructions, announce_ready
from broker.cluster.tls import server_context
from broker.gateway.reports import report_at
from broker.gateway.running import keep_beating, serve_beside, set_at_sigterm
from broker.journal.consumers import Consumers
from broker.journal.following import Follower, Retention
from broker.journal.serving import Serving
from broker.logging import get_logger
from broker.metrics import process_usage
from broker.settings.addresses import parse_address
from broker.settings.config import ConfigurationError, NoRoom, Settings
from broker.unix_socket import JOURNAL_SOCKET, listen_at
from storage.durable import is_full
from storage.journal.queues import Mode, Modes
from storage.liveness import Signs

BACKLOG = 64

log = get_logger("journal")


class SignsOfThread(Signs):
    """Given by a thread, and passed on by the event loop: a process lives as long as both do."""

    def __init__(self) -> None:
        self._count = 0
        self._waits_for_disk = False
        self._heard = -1

    def _tell(self, waits_for_disk: bool) -> None:
        self._waits_for_disk = waits_for_disk
        self._count += 1

    def goes_on(self) -> bool:
        """True if there was a sign since the last call, or the thread waits for the disk."""
        before, self._heard = self._heard, self._count
        return self._waits_for_disk or self._heard != before


class JournalProcess:
    """The journal's process. It also answers the operations endpoint (`broker.gateway.reports.Reporter`)."""

    def __init__(self, instructions: Instructions, beat: Callable[[], None]) -> None:
        """`beat` is a sign of life to the supervisor."""
        self._settings: Settings = instructions.settings
        self._restarts = instructions.restarts
        self._reports = instructions.journal_socket
        self._beat = beat
        self._of_thread = SignsOfThread()
        journal = self._settings.journal
        modes = {pattern: Mode(mode) for pattern, mode in journal.modes.items()}
        self._consumers = Consumers(Path(), journal.hold_for)
        self.follower = Follower(
            Path(),
            self._settings.workers_here,
            Modes(Mode(journal.mode), modes),
            Retention(
                journal.retention_hours * 3600.0,
                journal.retention_bytes,
                journal.held_bytes,
                # Before workers refuse messages.
                2 * self._settings.store.min_free_disk_bytes,
            ),
            self._consumers,
            signs=self._of_thread,
        )
        self._serving = Serving(
            self._settings.namespace,
            lambda: self.follower.journals,
            self._consumers,
            self.follower.logged,
            self.follower.has,
        )
        self._stopping = asyncio.Event()

    # -- what is reported

    def problem(self) -> str:
        if self.follower.counters.is_full:
            return "the disk is full: nothing is journaled"
        return ""

    def snapshot(self) -> dict[str, Any]:
        counters, now_ms = self.follower.counters, time.time() * 1000
        return {
            "rows": counters.rows,
            "read_bytes": counters.read_bytes,
            "dropped_files": counters.dropped_files,
            "dropped_unread_files": counters.dropped_unread_files,
            "gaps": counters.gaps,
            "unfounded": counters.unfounded,
            "is_full": counters.is_full,
            "readers": self._serving.readers,
            "turns_behind": {str(worker): turns for worker, turns in counters.behind.items()},
            "seconds_behind": {
                str(worker): max(0.0, now_ms - counters.last_ms.get(worker, now_ms)) / 1000 if turns else 0.0
                for worker, turns in counters.behind.items()
            },
            "partitions": {
                str(partition): {"low": journal.low, "stable": journal.stable, "bytes": journal.bytes}
                for partition, journal in self.follower.journals.items()
            },
            "consumers_behind": {name: self._serving.rows_behind(each) for name, each in self._consumers.all().items()},
            "consumers_bytes_behind": {
                name: self._serving.bytes_behind(each) for name, each in self._consumers.all().items()
            },
            "restarts": self._restarts,
            **process_usage(),
        }

    def accept_failed(self, error: OSError) -> None:
        log.warning("no connection can be accepted", reason=error.strerror or str(error))

    # -- the work

    async def run(self) -> None:
        """Serve until SIGTERM, and then journal what is logged. Raises ConfigurationError, and what the thread does."""
        set_at_sigterm(self._stopping)
        await serve_beside(self._serve(), [keep_beating(self._beat, self._of_thread.goes_on)])

    async def _serve(self) -> None:
        try:
            await asyncio.to_thread(self.follower.open)
            reports = report_at(self._reports, self)
            server = self._serving.server()
            listening = await self._listen(server)
        except OSError as error:
            kind = NoRoom if is_full(error) else ConfigurationError
            raise kind(f"the journal cannot be opened in data_dir: {error}") from error
        announce_ready()
        ending = threading.Event()
        following = asyncio.create_task(asyncio.to_thread(self.follower.run, ending))
        stopping = asyncio.create_task(self._stopping.wait())
        await asyncio.wait((following, stopping), return_when=asyncio.FIRST_COMPLETED)
        ending.set()
        await following
        stopping.cancel()
        listening.close()
        await server.shutdown(1.0)
        reports.close()
        self.follower.close()

    async def _listen(self, server: Callable[[], asyncio.BaseProtocol]) -> asyncio.AbstractServer:
        """Listen for gateways: of this machine on a unix socket, else by TCP. Raises ConfigurationError."""
        loop = asyncio.get_running_loop()
        address, cluster = self._settings.cluster.journal_listen, self._settings.cluster
        if address is None:
            return await loop.create_unix_server(server, sock=listen_at(JOURNAL_SOCKET, BACKLOG))
        host, port = parse_address(address)
        try:
            return await loop.create_server(server, host, port, ssl=server_context(cluster), backlog=BACKLOG)
        except OSError as error:
            raise ConfigurationError(
                f"cannot listen on {address} for gateways that read the journal: {error.strerror or error}. "
                "Free the port, or set cluster.journal_listen (--journal-listen) to another"
            ) from error
