"""The health of all entities that a pairing sends to: timers and pings around `broker.pairing.health`."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

from broker.logging import get_logger
from broker.pairing.counters import Counters
from broker.pairing.health import PathHealth, State
from broker.pairing.options import PairingOptions

log = get_logger("pairing")

Ping = Callable[[str], Awaitable[None]]
"""Send a ping to this path of the primary. Raises what a failed send raises."""


class Path:
    """One entity of the primary. `changed` is done, and replaced, whenever its state changes."""

    __slots__ = ("changed", "health", "name", "pinging")

    def __init__(self, name: str, health: PathHealth) -> None:
        self.name = name
        self.health = health
        self.changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.pinging: asyncio.Task[None] | None = None


class Availability:
    """Knows for each entity whether sends go to the primary. Names of entities have no case.

    A ping that has no answer ends when the next one is due, so each asks the primary as it is then.
    """

    def __init__(self, options: PairingOptions, ping: Ping, counters: Counters) -> None:
        self._options = options
        self._ping = ping
        self._counters = counters
        self._paths: dict[str, Path] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def path(self, name: str) -> Path:
        key = name.lower()
        found = self._paths.get(key)
        if found is None:
            options = self._options
            health = PathHealth(options.failover_interval_ms, options.ping_interval_ms, self.now_ms())
            found = self._paths[key] = Path(name, health)
        return found

    def find(self, name: str) -> Path | None:
        """The entity, if anything was sent to it yet."""
        return self._paths.get(name.lower())

    def __iter__(self) -> Iterator[Path]:
        return iter(self._paths.values())

    @property
    def failed_over(self) -> list[str]:
        return [path.name for path in self._paths.values() if path.health.has_failed_over]

    @staticmethod
    def now_ms() -> int:
        """The clock of all times here: monotonic."""
        return int(asyncio.get_running_loop().time() * 1000)

    def succeeded(self, path: Path) -> None:
        """The primary has taken a message of the entity."""
        if path.health.state is State.HEALTHY:
            path.health.succeeded(self.now_ms())
        else:
            self._change(path, lambda now_ms: path.health.succeeded(now_ms))

    def failed(self, path: Path, began_ms: int) -> None:
        """A send that began then has failed in a way that counts."""
        self._counters.failures += 1
        self._change(path, lambda now_ms: path.health.failed(began_ms, now_ms))

    def mark_healthy(self, name: str) -> None:
        """End the failover of an entity by hand."""
        path = self.path(name)
        self._change(path, lambda now_ms: path.health.mark_healthy(now_ms))

    def close(self) -> None:
        """No more pings, no more failovers."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        for path in self._paths.values():
            if path.pinging is not None:
                path.pinging.cancel()

    def _change(self, path: Path, apply: Callable[[int], None]) -> None:
        before = path.health.state
        apply(self.now_ms())
        self._tell(path, before)
        self._arm()

    def _tell(self, path: Path, before: State) -> None:
        state = path.health.state
        if state is before:
            return
        if state is State.FAILED_OVER:
            self._counters.failovers += 1
            log.warning("entity failed over", entity=path.name, after_ms=self._options.failover_interval_ms)
        elif before is State.FAILED_OVER:
            self._counters.failbacks += 1
            log.info("entity is back", entity=path.name)
            if path.pinging is not None and path.pinging is not asyncio.current_task():
                path.pinging.cancel()
        changed, path.changed = path.changed, asyncio.get_running_loop().create_future()
        changed.set_result(None)

    def _arm(self) -> None:
        """Have `_tick` called at the next deadline."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadlines = [path.health.deadline_ms for path in self._paths.values() if path.health.deadline_ms is not None]
        if deadlines and not self._closed:
            delay_s = max(0, min(deadlines) - self.now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._tick)

    def _tick(self) -> None:
        for path in self._paths.values():
            before = path.health.state
            if path.health.tick(self.now_ms()):
                if path.pinging is not None:
                    path.pinging.cancel()
                path.pinging = asyncio.create_task(self._ask(path))
            self._tell(path, before)
        self._arm()

    async def _ask(self, path: Path) -> None:
        self._counters.pings += 1
        try:
            await self._ping(path.name)
        except Exception as error:  # whatever it is, the entity has not taken a ping
            log.debug("ping failed", entity=path.name, error=str(error))
            return
        self.succeeded(path)
