"""Machines that lose their network or their power: nobody gets a reset. Needs root, iproute2 and iptables."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.caller import REQUIRE_DISKS
from tests.cluster.hosts import Network, reason_missing
from tests.cluster.machines import Certificates, Machine
from tests.cluster.under_way import (
    CONFIG,
    HEARTBEATS,
    HOME_QUEUE,
    PARTITIONS,
    QUEUE,
    SILENCE_S,
    answers_while,
    unknown,
)
from tests.patience import eventually

PORT = 5680
WORKERS = ("worker0", "worker1")
GATEWAY = "gateway0"


class Scene:
    """Two workers and a gateway on hosts of their own."""

    def __init__(self, directory: Path, network: Network, stack: ExitStack) -> None:
        self.network = network
        certificates = Certificates(directory / "certificates")
        addresses = [f"{network.hosts[name].address}:{PORT}" for name in WORKERS]
        self.machines = {}
        for name, host in network.hosts.items():
            number = WORKERS.index(name) if name in WORKERS else 0
            owned = range(number, PARTITIONS, len(WORKERS)) if name in WORKERS else ()
            cluster = HEARTBEATS + certificates.settings(name, host.address)
            config = f"partitions = {PARTITIONS}\n{CONFIG}"
            machine = Machine(directory / name, config, cluster, addresses, owned, f"{host.address}:{PORT}", host)
            stack.callback(machine.kill)
            machine.begin()
            self.machines[name] = machine
        for machine in self.machines.values():
            machine.wait_until_told()

    def on_the_gateways_host(self, work: Callable[[Machine], None]) -> None:
        """Raises what it raises."""
        failed: list[BaseException] = []
        gateway = self.machines[GATEWAY]

        def run() -> None:
            try:
                eventually(lambda: gateway.get("/readyz")[0] == 200, "it is ready")
                work(gateway)
            except BaseException as error:
                failed.append(error)

        self.network.hosts[GATEWAY].run(run).join()
        if failed:
            raise failed[0]

    @contextmanager
    def without_power(self, name: str) -> Iterator[None]:
        """What was sent to the machine just before was acknowledged. In the end it is started anew."""
        machine = self.machines[name]
        for process in machine.processes():
            process.suspend()
        with ExitStack() as stack:

            def lose() -> None:
                stack.enter_context(self.network.cut(name))
                machine.kill()

            losing = threading.Timer(SILENCE_S / 3, lose)
            losing.start()
            yield
            losing.join()
        machine.begin()


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    if reason := reason_missing():
        pytest.fail(reason) if REQUIRE_DISKS else pytest.skip(reason)
    with Network((*WORKERS, GATEWAY)) as network, ExitStack() as stack:
        yield Scene(tmp_path, network, stack)


def test_what_is_under_way_to_machines_that_are_cut_off_is_answered_in_time_and_never_done_later(scene: Scene) -> None:
    def work(gateway: Machine) -> None:
        for name, queue, put in (("worker0", HOME_QUEUE, 504), ("worker1", QUEUE, 201)):
            answers = answers_while(scene.network.cut(name), gateway, queue, f"made-without-{name}")
            assert answers == unknown(put=put)

    scene.on_the_gateways_host(work)


def test_what_is_under_way_to_a_machine_that_loses_its_power_is_answered_in_time(scene: Scene) -> None:
    def work(gateway: Machine) -> None:
        answers = answers_while(scene.without_power("worker1"), gateway, QUEUE, "made-without-power")
        assert answers == unknown(put=201)

    scene.on_the_gateways_host(work)
