"""Whether the broker is ready: it probes partitions and gateways when somebody asks, and answers within a second.

A question begins a probe where none is under way, and waits for all of them, but not for long. A probe that takes
longer goes on, so that later answers tell how long it has been under way, and a worker that hangs does not get another
probe from everybody who asks.

A slow disk is no fault. So a probe counts as unanswered only after twice the time that the last good one took, with
limits below and above; until then the result of the one before holds.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple, Protocol

from broker.errors import PartitionParked

ANSWER_SECONDS = 0.8  # orchestrators wait for a second, if nobody has told them otherwise
# The limits of the patience with one probe. The lower one is met when the question that began the probe is answered.
SHORTEST_SECONDS = 0.75
LONGEST_SECONDS = 5.0  # with a slower disk a partition is not ready


class RefusesSends(Exception):
    """The partition is in order and has no room for messages; the text says why."""


class ReadinessSource(Protocol):
    @property
    def partitions(self) -> Iterable[int]: ...

    @property
    def gateways(self) -> Iterable[int]:
        """Gateways that are processes beside this one."""

    def unready(self) -> str | None:
        """The reason why this process takes no work now (it is starting or stopping), or None."""

    async def probe(self, partition: int) -> None:
        """Write, commit and read on the partition. Raises the error if that fails, RefusesSends."""

    async def probe_gateway(self, number: int) -> None:
        """Ask the gateway. Raises an error that says why it does not serve."""


class Probe:
    """Asks one thing again and again whether it serves, one question at a time."""

    def __init__(self, ask: Callable[[], Awaitable[None]]) -> None:
        """`ask` raises if it does not serve."""
        self._ask = ask
        self._fault: Exception | None = None  # of the last question that was answered
        self._took_seconds = 0.0  # the last question that was answered well
        self._began = 0.0
        self._asking: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None] | None:
        """The question that was asked now or earlier, if it is worth waiting for."""
        if self._asking is None:
            self._began = time.monotonic()
            self._asking = asyncio.create_task(self._go_on())
        return None if self._is_overdue else self._asking

    @property
    def fault(self) -> Exception | None:
        if self._is_overdue:
            return TimeoutError(f"no answer for {self._waited_seconds:.1f} s")
        return self._fault

    @property
    def _is_overdue(self) -> bool:
        patience_seconds = min(max(2 * self._took_seconds, SHORTEST_SECONDS), LONGEST_SECONDS)
        return self._asking is not None and self._waited_seconds >= patience_seconds

    @property
    def _waited_seconds(self) -> float:
        return time.monotonic() - self._began

    async def _go_on(self) -> None:
        try:
            await self._ask()
        except Exception as error:  # whatever the error is, this does not serve
            self._fault = error.with_traceback(None)  # which refers to this call
        else:
            self._fault = None
            self._took_seconds = self._waited_seconds
        finally:
            self._asking = None


class Verdict(NamedTuple):
    """Why the broker is not ready, or None if it is; and what is wrong by partition and by gateway.

    A broker with parked partitions is ready: it serves the others, and a restart would not help. One without room for
    messages is, too: it must be reached by those who receive them.
    """

    reason: str | None
    partitions: Mapping[int, str]
    gateways: Mapping[int, str]
    refuse_sends: Mapping[int, str]  # these partitions have no room


class Readiness:
    """Requests at the same time share probes, so they do not add fsyncs."""

    def __init__(self, source: ReadinessSource) -> None:
        self._source = source
        self._partitions: dict[int, Probe] = {}
        self._gateways: dict[int, Probe] = {}

    async def check(self) -> Verdict:
        source = self._source
        reason = source.unready()
        if reason is not None:
            return Verdict(reason, {}, {}, {})
        if not self._partitions:
            self._partitions = {each: Probe(partial(source.probe, each)) for each in source.partitions}
            self._gateways = {each: Probe(partial(source.probe_gateway, each)) for each in source.gateways}
        probes = [*self._partitions.values(), *self._gateways.values()]
        asking = [task for probe in probes if (task := probe.begin()) is not None]
        if asking:
            await asyncio.wait(asking, timeout=ANSWER_SECONDS)
        partitions, gateways = _faults(self._partitions), _faults(self._gateways)
        full = {each: fault for each, fault in partitions.items() if isinstance(fault, RefusesSends)}
        partitions = {each: fault for each, fault in partitions.items() if each not in full}
        reasons = []
        if failing := [each for each, fault in partitions.items() if not isinstance(fault, PartitionParked)]:
            reasons.append("partitions that fail: " + ", ".join(map(str, failing)))
        if gateways:
            reasons.append("gateways that fail: " + ", ".join(map(str, gateways)))
        return Verdict("; ".join(reasons) or None, _texts(partitions), _texts(gateways), _texts(full))


def _faults(probes: Mapping[int, Probe]) -> dict[int, Exception]:
    return {number: fault for number, probe in probes.items() if (fault := probe.fault) is not None}


def _texts(faults: Mapping[int, Exception]) -> dict[int, str]:
    return {number: str(fault) or type(fault).__name__ for number, fault in faults.items()}
