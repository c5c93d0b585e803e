"""The systemd units of deploy/systemd and the files beside them."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from broker.child import NO_ROOM, PERMANENT_FAULT
from broker.pairing.pairing import CLOSE_SECONDS
from broker.pairing.syphon.syphon import STOP_SECONDS
from broker.settings.config import Settings
from broker.settings.sources import load
from tests.deployment.command_line import options
from tests.deployment.manifests import skip_or_fail
from tests.patience import PATIENCE_S

UNITS = Path(__file__).parents[2] / "deploy" / "systemd"
NAMES = sorted(path.name for path in UNITS.glob("*.service"))
BROKER = "/opt/peeklock/bin/peeklock"
COMMANDS = {"peeklock.service": "serve", "peeklock-worker@.service": "worker", "peeklock-gateway.service": "gateway"}
OF_PAIRINGS = {"peeklock-syphon.service": "syphon", "peeklock-pair.service": "pair"}
CLIENTS = OF_PAIRINGS | {"peeklock-capture.service": "capture"}
SUPERVISED = sorted(COMMANDS)


def lines(name, section="Service"):
    """(key, value) of each line of a section, in order; keys may repeat."""
    found, within = [], False
    for line in (UNITS / name).read_text().splitlines():
        if line.startswith("["):
            within = line == f"[{section}]"
        elif within and line and not line.startswith("#"):
            found.append(tuple(line.split("=", 1)))
    return found


def value(name, key):
    [found] = [text for each, text in lines(name) if each == key]
    return found


def systemd_analyze(directory, *arguments):
    if shutil.which("systemd-analyze") is None:
        skip_or_fail("systemd-analyze is not installed")
    return subprocess.run(
        ["systemd-analyze", *arguments], cwd=directory, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


@pytest.fixture
def installed(tmp_path):
    """The units with a program that exists in the place of the broker, which is not installed here."""
    for name in NAMES:
        text = (UNITS / name).read_text()
        assert BROKER in text
        (tmp_path / name.replace("@.", "@0.")).write_text(text.replace(BROKER, "/bin/true"))
    return tmp_path


def test_all_units_are_known_here():
    assert {*COMMANDS, *CLIENTS} == set(NAMES)


def test_systemd_takes_the_units(installed):
    for unit in installed.iterdir():
        done = systemd_analyze(installed, "verify", "--man=no", f"./{unit.name}")
        assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), unit.name


def test_systemd_finds_a_fault_in_a_unit(installed):
    """So that the test before this one can fail."""
    unit = installed / "peeklock.service"
    unit.write_text(unit.read_text().replace("ProtectHome=yes", "ProtectHomes=yes"))
    done = systemd_analyze(installed, "verify", "--man=no", f"./{unit.name}")
    assert "ProtectHomes" in done.stdout + done.stderr


def test_the_broker_is_shut_in(installed):
    for unit in installed.iterdir():
        done = systemd_analyze(
            installed, "security", "--offline=true", "--threshold=20", "--no-pager", f"./{unit.name}"
        )
        assert done.returncode == 0, done.stdout.splitlines()[-1]  # exposure of more than 2.0 of 10


def test_all_units_shut_the_broker_in_alike():
    sandboxes = []
    for name in NAMES:
        found = lines(name)
        sandboxes.append(found[found.index(("NoNewPrivileges", "yes")) :])
    assert len(sandboxes[0]) > 15
    assert all(each == sandboxes[0] for each in sandboxes)


@pytest.mark.parametrize("name", SUPERVISED)
def test_each_unit_runs_its_command(name):
    program, command, *rest = value(name, "ExecStart").split()
    assert (program, command) == (BROKER, COMMANDS[name])
    assert rest == ["--config", "/etc/peeklock/peeklock.toml" if command == "serve" else "/etc/peeklock/cluster.toml"]


@pytest.mark.parametrize("name", CLIENTS)
def test_the_units_of_clients_run_their_commands(name):
    program, command, *rest = value(name, "ExecStart").split()
    assert (program, command) == (BROKER, CLIENTS[name])
    assert not any("SharedAccessKey" in line for line in (UNITS / name).read_text().splitlines())
    options([command, *rest])


def test_what_may_run_on_one_machine_has_operations_endpoints_of_its_own():
    ports = [re.findall(r"--ops-port (\d+)", value(name, "ExecStart")) for name in CLIENTS]
    assert len({str(Settings().ops.port), *(port for found in ports for port in found)}) == 1 + len(CLIENTS)


@pytest.mark.parametrize("name", OF_PAIRINGS)
def test_a_pairing_has_time_to_end(name):
    assert int(value(name, "TimeoutStopSec")) > max(STOP_SECONDS, CLOSE_SECONDS) + 5


@pytest.mark.parametrize("name", NAMES)
def test_what_cannot_start_is_not_started_again(name):
    assert value(name, "Restart") == "always"
    assert {int(code) for code in value(name, "RestartPreventExitStatus").split()} == {2, PERMANENT_FAULT}


@pytest.mark.parametrize("name", SUPERVISED)
def test_what_finds_no_room_is_started_again_for_as_long_as_it_takes(name):
    assert str(NO_ROOM) not in value(name, "RestartPreventExitStatus").split()
    assert value(name, "RestartSec") == "1"
    assert dict(lines(name, "Unit"))["StartLimitIntervalSec"] == "0"


@pytest.mark.parametrize("name", SUPERVISED)
def test_the_supervisor_ends_its_children_in_time(name):
    assert value(name, "KillMode") == "mixed"
    assert int(value(name, "TimeoutStopSec")) > 2 * Settings().shutdown_timeout_ms / 1000


@pytest.mark.parametrize("name", NAMES)
def test_a_gateway_can_have_all_its_connections(name):
    assert int(value(name, "LimitNOFILE")) > Settings().amqp.max_connections + 250


def environment(name, here, instance="0"):
    """What the unit sets, and the files that it reads, from beside the unit; `here` is the root of the file system."""
    found = {}
    for key, text in lines(name):
        if key == "Environment":
            found.update(pair.split("=", 1) for pair in text.split())
    for key, text in lines(name):
        file = UNITS / Path(text.replace("%i", instance)).name
        if key == "EnvironmentFile" and file.exists():
            rows = [row for row in file.read_text().splitlines() if row and not row.startswith("#")]
            found.update(row.split("=", 1) for row in rows)
    for variable, text in found.items():
        text = text.replace("%S", "/var/lib").replace("%i", instance)
        if text.startswith("/etc/"):
            text = str(here / text.lstrip("/"))
            Path(text).parent.mkdir(parents=True, exist_ok=True)
            Path(text).touch()
        found[variable] = text
    return found


def test_one_machine_needs_nothing_but_its_settings(tmp_path):
    found = load(UNITS.parent / "container.toml", environment=environment("peeklock.service", tmp_path)).settings
    assert str(found.data_dir) == "/var/lib/" + value("peeklock.service", "StateDirectory")


def test_the_files_of_several_machines_fit_together(tmp_path):
    file = UNITS / "cluster.toml"
    worker: Any = load(file, environment=environment("peeklock-worker@.service", tmp_path)).settings
    gateway: Any = load(file, environment=environment("peeklock-gateway.service", tmp_path)).settings
    assert worker.cluster.workers == gateway.cluster.workers
    assert len(worker.cluster.workers) * len(worker.cluster.owned) == worker.partitions
    assert worker.cluster.owned == (0, 1, 2, 3)
    assert worker.cluster.listen.rpartition(":")[2] == worker.cluster.workers[0].rpartition(":")[2]
    assert len(worker.cluster.journals) == len(worker.cluster.workers)
    assert worker.cluster.journal_listen.rpartition(":")[2] == worker.cluster.journals[0].rpartition(":")[2]
    assert gateway.amqp.host == gateway.http.host == "0.0.0.0"
    # On one machine the operations endpoints of worker and gateways have ports of their own.
    assert worker.ops.port != gateway.ops.port


def test_each_worker_of_a_machine_has_its_directory(tmp_path):
    unit = "peeklock-worker@.service"
    directories = [environment(unit, tmp_path, instance)["PEEKLOCK_DATA_DIR"] for instance in "01"]
    assert directories == ["/var/lib/peeklock/worker-0", "/var/lib/peeklock/worker-1"]
    assert value(unit, "StateDirectory").replace("%i", "1") == "peeklock/worker-1"


def test_the_head_of_a_unit_names_files_that_exist():
    for name in NAMES:
        for path in re.findall(r"deploy/[\w./@-]+\w", (UNITS / name).read_text()):
            assert (UNITS.parents[1] / path).exists(), path
