"""Workers and gateways of one namespace, each with a supervisor and a directory of its own, as on several machines."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import trustme

from tests.brokers import Broker
from tests.cluster.hosts import Host
from tests.end_to_end.raw_peer import RawPeer
from tests.end_to_end.raw_requests import Node
from tests.patience import eventually
from tests.ports import free_ports

HOST = "127.0.0.1"


class Certificates:
    """An authority, and PEM files of a certificate that it made for each name."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._authority = trustme.CA()
        directory.mkdir(parents=True, exist_ok=True)
        self.ca = directory / "ca.pem"
        self._authority.cert_pem.write_to_path(self.ca)

    def settings(self, *names: str, ca: Path | None = None) -> str:
        """The settings of a process with a certificate for these names. It trusts `ca`, else this authority."""
        made = self._authority.issue_cert(*names)
        certificate, key = self._directory / f"{names[0]}.pem", self._directory / f"{names[0]}.key"
        certificate.write_bytes(b"".join(each.bytes() for each in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)
        return f'certificate = "{certificate}"\nkey = "{key}"\nca = "{ca or self.ca}"\n'


class Machine(Broker):
    """A worker, if it owns partitions, else a gateway. `cluster` are settings of that section."""

    def __init__(
        self,
        directory: Path,
        config: str,
        cluster: str,
        addresses: Sequence[str],
        owned: Sequence[int] = (),
        listen: str = "",
        host: Host | None = None,
        journals: Sequence[str] = (),
    ) -> None:
        """It runs on this host, else here. `journals` are the addresses of all workers' journals, if there are any."""
        prefix = () if host is None else host.prefix
        super().__init__(directory, f"{config}\n[cluster]\n{cluster}", workers=None, prefix=prefix)
        self.is_elsewhere = host is not None
        self.addresses = list(addresses)
        self.owned = owned
        self.listen = listen
        self.journals = list(journals)

    def command(self) -> list[str]:
        part = "worker" if self.owned else "gateway"
        command = [part, "--config", str(self.config_file), "--workers", ",".join(self.addresses)]
        command += ["--ops-port", str(self.ops_port)]
        if not self.owned:
            if self.is_elsewhere:
                command += ["--host", "0.0.0.0"]
            command += ["--amqp-port", str(self.amqp_port), "--http-port", str(self.http_port)]
            if self.journals:
                command += ["--journals", ",".join(self.journals)]
            return [*command, "--emulator"]
        if self.journals:
            command += ["--journal-listen", self.journals[self.addresses.index(self.listen)]]
        owned = ",".join(map(str, self.owned))
        return [*command, "--partitions", owned, "--listen", self.listen, "--data-dir", str(self.data_dir)]

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """All its processes stand still meanwhile; its kernel goes on."""
        processes = self.processes()
        for process in processes:
            process.suspend()
        try:
            yield
        finally:
            for process in processes:
                process.resume()

    def wait_until_told(self) -> None:
        """As `wait_until_ready`, where its operations endpoint cannot be reached."""
        eventually(lambda: b" is ready." in self.log_file.read_bytes(), "it says so")


class Cluster:
    """`partitions` of the namespace on so many workers, in turn. `config` is that of all processes."""

    def __init__(
        self,
        directory: Path,
        config: str,
        *,
        partitions: int = 4,
        workers: int = 2,
        gateways: int = 1,
        certificates: Certificates | None = None,
        has_journals: bool = False,
        cluster: str = "",
    ) -> None:
        """`cluster` are settings of that section, of all processes."""
        self._directory = directory
        self._config = config
        self._certificates = certificates
        self._cluster = cluster
        self.partitions = partitions
        ports = free_ports(2 * workers)
        self.addresses = [f"{HOST}:{port}" for port in ports[:workers]]
        self.journals = [f"{HOST}:{port}" for port in ports[workers:]] if has_journals else []
        self.workers = [
            self._machine(f"worker-{number}", range(number, partitions, workers), address)
            for number, address in enumerate(self.addresses)
        ]
        self.gateways = [self._machine(f"gateway-{number}") for number in range(gateways)]

    def _machine(self, name: str, owned: Sequence[int] = (), listen: str = "") -> Machine:
        secured = "" if self._certificates is None else self._certificates.settings(name, HOST)
        config = f"partitions = {self.partitions}\n{self._config}"
        return Machine(
            self._directory / name,
            config,
            self._cluster + secured,
            self.addresses,
            owned,
            listen,
            journals=self.journals,
        )

    def grow(self, count: int) -> Machine:
        """Another worker, with so many new partitions. It is not started, and the others know of it after a restart."""
        before, self.partitions = f"partitions = {self.partitions}\n", self.partitions + count
        for machine in self.machines:
            text = machine.config_file.read_text()
            machine.config_file.write_text(text.replace(before, f"partitions = {self.partitions}\n"))
        for addresses in (self.addresses, self.journals) if self.journals else (self.addresses,):
            addresses.append(f"{HOST}:{free_ports(1)[0]}")
        for machine in self.machines:
            machine.addresses, machine.journals = list(self.addresses), list(self.journals)
        owned = range(self.partitions - count, self.partitions)
        added = self._machine(f"worker-{len(self.workers)}", owned, self.addresses[-1])
        self.workers.append(added)
        return added

    @property
    def machines(self) -> list[Machine]:
        return [*self.workers, *self.gateways]

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with contextlib.ExitStack() as stack:
            for machine in self.machines:
                stack.callback(machine.kill if error else machine.stop)

    def start(self) -> None:
        """Start all at once, and wait until they are ready; on failure kill what started."""
        try:
            begun = [(machine, machine.begin()) for machine in self.machines]
            for machine, said_before in begun:
                machine.wait_until_ready(said_before)
            eventually(self._joined, "all workers follow the home")
        except BaseException:
            for machine in self.machines:
                machine.kill()
            raise

    def _joined(self) -> bool:
        """Entities can be changed: a change of one that does not exist is not refused as busy."""
        with RawPeer.connect(self.gateways[0].amqp_port) as peer:
            answer = Node(peer, "$management").ask("peeklock:delete-entity", {"path": "no such entity"})
            return answer.status == 404

    def of(self, partition: int) -> Machine:
        return next(each for each in self.workers if partition in each.owned)
