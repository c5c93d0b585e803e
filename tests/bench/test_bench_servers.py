"""Each broker of the bench, for real: it gets no CPU while paused, and keeps what it accepted when it is killed."""

import time
from pathlib import Path

import psutil
import pytest

from bench import artemis, load
from bench.measure import fresh
from bench.processes import cpu_s
from bench.rabbitmq import RabbitMQ
from bench.servers import Peeklock, Server, ServerMissing
from tests.caller import REQUIRE_INTEROP
from tests.patience import PATIENCE_S

MESSAGES = 500


@pytest.fixture(scope="module")
def tools():
    try:
        return load.build()
    except load.LoadToolMissing as missing:
        pytest.fail(str(missing)) if REQUIRE_INTEROP else pytest.skip(str(missing))


@pytest.fixture(params=[Peeklock, RabbitMQ, artemis.Artemis], ids=lambda kind: kind.name)
def server(request):
    if request.param is artemis.Artemis and not artemis.HOME.exists() and not REQUIRE_INTEROP:
        pytest.skip("Artemis was not fetched yet: the first run of the bench does it")
    try:
        if request.param is artemis.Artemis:
            artemis.Artemis.find()
        if request.param is RabbitMQ:
            RabbitMQ.find_scripts()
    except ServerMissing as missing:
        pytest.skip(str(missing))
    with fresh(request.param) as made:
        yield made


def run(tools: load.Tools, server: Server, mode: str, *options: str) -> load.Figures:
    return load.run(tools.load, mode, server.endpoint, server.address(1), "--idle", "10", *options)


def test_a_server_stops_while_paused_and_keeps_what_it_accepted_when_it_is_killed(server, tools):
    server.start()
    run(tools, server, "send", "-n", str(MESSAGES))
    assert server.disk_bytes() > MESSAGES * 1024

    server.pause()
    processes = server.processes()
    assert processes
    assert {process.status() for process in processes} == {psutil.STATUS_STOPPED}
    before = cpu_s(processes)
    time.sleep(0.5)  # it may do nothing meanwhile
    assert cpu_s(processes) == before

    server.resume()
    run(tools, server, "send", "-n", "1")
    server.kill()
    assert not [process for process in processes if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]

    server.start()
    until = time.monotonic() + PATIENCE_S
    while True:  # RabbitMQ listens before its queues are up
        try:
            received = run(tools, server, "recv", "-n", str(MESSAGES + 1))
            break
        except load.LoadFailed:
            assert time.monotonic() < until
            time.sleep(0.2)
    assert received.messages == MESSAGES + 1


def test_a_checkout_with_an_interpreter_of_its_own_runs_with_it(tmp_path):
    own = tmp_path / "checkout" / ".venv" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.touch()
    command, environment = Peeklock(tmp_path, tmp_path / "checkout", "before")._command()
    assert command[0] == str(own)
    assert environment["PYTHONPATH"] == str(tmp_path / "checkout")
    here, _ = Peeklock(tmp_path)._command()
    assert Path(here[0]).exists()
    assert here[0] != str(own)
