"""Which processes a broker has, and what each is told.

They are in groups in the order of their stop: gateways before workers, so that clients are told before these end, and a
syphon, which is a client, before all others. The journal, which reads what workers have logged, is the last.
"""

import os
from collections.abc import Callable, Sequence

from broker.child import Instructions, gateway_process
from broker.settings.config import Settings
from broker.supervisor.parking import Parking
from broker.supervisor.processes import Role
from storage.data_dir import RUN

Roles = list[list[Role]]


def all_roles(settings: Settings, parkings: Sequence[Parking]) -> Roles:
    """A whole broker; `parkings` has an item for each worker."""
    syphon = _syphon(settings)
    workers = settings.worker_count
    sockets = tuple(f"{RUN}/worker-{worker}.sock" for worker in range(workers))
    if settings.is_one_process:
        both = _instructions(
            settings, sockets, gateway=0, worker=0, owned=settings.partitions_here, parking=parkings[0]
        )
        stall_seconds = settings.worker_stall_timeout_ms / 1000
        crashed = parkings[0].crashed
        serving = Role("gateway", "broker.one_process", both, stall_seconds, reloads=True, crashed=crashed)
        return [*syphon, [serving], *_journal(settings, sockets)]
    gateways, observer = _gateways(settings, sockets)
    partitions = [tuple(range(worker, settings.partitions, workers)) for worker in range(workers)]
    here = [_worker(settings, sockets, each, partitions[each], parkings[each]) for each in range(workers)]
    return [*syphon, gateways, [*observer, *here], *_journal(settings, sockets)]


def roles_of_gateways(settings: Settings) -> Roles:
    """The gateways of a namespace on several machines. They write no journal."""
    return list(_gateways(settings, settings.cluster.workers, is_with_data=False))


def roles_of_worker(settings: Settings, parking: Parking) -> Roles:
    """A worker of a namespace on several machines."""
    sockets, owned = settings.cluster.workers, settings.partitions_here
    observes = _instructions(settings, sockets, owned=owned)
    worker = _worker(settings, sockets, 0, owned, parking)
    return [_observer(settings, observes), [worker], *_journal(settings, sockets)]


def _gateways(
    settings: Settings, sockets: tuple[str, ...], *, is_with_data: bool = True
) -> tuple[list[Role], list[Role]]:
    """The gateways, and the observer of several. A single one has its operations endpoint itself.

    `is_with_data`: workers and journal are beside them.

    The observer is to be stopped after them, so that it tells what becomes of them.
    """
    is_observed = settings.gateways > 1 and settings.ops.port is not None
    reports = tuple(f"{RUN}/gateway-{number}.sock" for number in range(settings.gateways)) if is_observed else ()
    gateways = [
        Role(
            gateway_process(number),
            "broker.gateway",
            _instructions(settings, sockets, gateway=number, reports=reports, is_with_data=is_with_data),
            settings.gateway_stall_timeout_ms / 1000,
            reloads=True,
        )
        for number in range(settings.gateways)
    ]
    observes = _instructions(settings, sockets, reports=reports, is_with_data=is_with_data)
    return gateways, _observer(settings, observes) if is_observed else []


def _observer(settings: Settings, instructions: Callable[[int], Instructions]) -> list[Role]:
    if settings.ops.port is None:
        return []
    return [Role("observer", "broker.observer", instructions, settings.gateway_stall_timeout_ms / 1000)]


def _syphon(settings: Settings) -> Roles:
    if settings.syphon.primary is None:
        return []
    stall_seconds = settings.gateway_stall_timeout_ms / 1000
    return [[Role("syphon", "broker.inner_syphon", _instructions(settings, ()), stall_seconds, reloads=True)]]


def _journal(settings: Settings, sockets: tuple[str, ...]) -> Roles:
    if not settings.journal.is_on:
        return []
    stall_seconds = settings.gateway_stall_timeout_ms / 1000
    return [[Role("journal", "broker.journal", _instructions(settings, sockets), stall_seconds)]]


def _worker(
    settings: Settings, sockets: tuple[str, ...], number: int, owned: tuple[int, ...], parking: Parking
) -> Role:
    instructions = _instructions(settings, sockets, worker=number, owned=owned, parking=parking)
    stall_seconds = settings.worker_stall_timeout_ms / 1000
    return Role(f"worker-{number}", "broker.worker", instructions, stall_seconds, crashed=parking.crashed)


def _instructions(
    settings: Settings,
    sockets: tuple[str, ...],
    *,
    gateway: int | None = None,
    worker: int | None = None,
    owned: tuple[int, ...] = (),
    parking: Parking | None = None,
    reports: tuple[str, ...] = (),
    is_with_data: bool = True,
) -> Callable[[int], Instructions]:
    for_children = settings.model_copy(update={"queues": (), "topics": ()})

    def after(restarts: int) -> Instructions:
        return Instructions(
            settings=for_children,
            supervisor=os.getpid(),
            gateway=gateway,
            worker=worker,
            partitions=owned,
            sockets=sockets,
            restarts=restarts,
            parked=() if parking is None else parking.parked,
            gateway_sockets=reports,
            syphon_socket="" if settings.syphon.primary is None else f"{RUN}/syphon.sock",
            journal_socket=f"{RUN}/journal.reports.sock" if settings.journal.is_on and is_with_data else "",
        )

    return after
