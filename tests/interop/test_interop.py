"""Every scenario with every SDK: one broker and one run of the SDK's program, a test for each result."""

import os
import subprocess
from pathlib import Path

import pytest

from tests.brokers import Broker
from tests.caller import REQUIRE_INTEROP
from tests.interop import harness
from tests.interop.harness import Result
from tests.interop.scenarios import SDKS, applicable
from tests.interop.sdks import FIRST_MESSAGES, PROGRAMS, Toolchain

pytestmark = pytest.mark.interop


def ensure(toolchain: Toolchain) -> None:
    """Install what the SDK needs if PEEKLOCK_REQUIRE_INTEROP=1; skip the test if it is not installed otherwise."""
    if missing := toolchain.missing_tools():
        reason = f"{toolchain.name} needs {', '.join(missing)}, not found on PATH"
        pytest.fail(reason) if REQUIRE_INTEROP else pytest.skip(reason)
    if REQUIRE_INTEROP:
        toolchain.ensure()
    elif not toolchain.installed():
        pytest.skip(f"not installed: python tests/interop/sdks.py {toolchain.name}")


class Runs:
    """Runs an SDK's program when the first of its tests asks."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._results: dict[str, dict[str, Result]] = {}
        self._logs: dict[str, str] = {}

    def result(self, sdk: str, scenario: str) -> tuple[Result, str]:
        """The result and the end of the broker's log."""
        if sdk not in self._results:
            program = PROGRAMS[sdk]
            ensure(program.toolchain)
            with Broker(self._directories.mktemp(sdk), harness.broker_config()) as broker:
                self._results[sdk] = harness.run(program, broker, [scenario.id for scenario in applicable(sdk)])
                self._logs[sdk] = broker.log()
            harness.keep(sdk, self._results[sdk])
        return self._results[sdk][scenario], self._logs[sdk]


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.mark.parametrize(("sdk", "scenario"), [(sdk, scenario.id) for sdk in SDKS for scenario in applicable(sdk)])
def test_scenario(runs: Runs, sdk: str, scenario: str) -> None:
    result, log = runs.result(sdk, scenario)
    assert result.ok, f"{result.detail}\n{log}"


@pytest.mark.parametrize("language", FIRST_MESSAGES)
def test_the_first_program_of_the_readme_sends_and_receives(language: str, tmp_path: Path) -> None:
    program = FIRST_MESSAGES[language]
    ensure(program.toolchain)
    with Broker(tmp_path, '[[queues]]\nname = "orders"\n') as broker:
        done = subprocess.run(
            program.command,
            env={**os.environ, "SERVICEBUS_CONNECTION_STRING": broker.connection_string},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stdout.strip()) == (0, f"Hello from {language}"), f"{done.stderr}\n{broker.log()}"
