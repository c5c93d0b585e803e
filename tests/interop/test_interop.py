"""Every scenario with every SDK: a run of the SDK's program on each of two brokers, and a test for each result.

One broker has plain entities and one gateway, the other has partitioned entities on two workers, and two gateways.
"""

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
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.interop

FORMS = (False, True)  # are the entities partitioned?
Run = tuple[dict[str, Result], str]  # results by scenario, and the end of the broker's log


def ensure(toolchain: Toolchain) -> None:
    """Install what the SDK needs if PEEKLOCK_REQUIRE_INTEROP=1; skip the test if it is not installed otherwise."""
    if missing := toolchain.missing_tools():
        reason = f"{toolchain.name} needs {', '.join(missing)}, not found on PATH"
        pytest.fail(reason) if REQUIRE_INTEROP else pytest.skip(reason)
    if REQUIRE_INTEROP:
        toolchain.ensure()
    elif not toolchain.installed():
        pytest.skip(f"not installed: python tests/interop/sdks.py {toolchain.name}")


def run(sdk: str, directory: Path, partitioned: bool) -> Run:
    names = [scenario.id for scenario in applicable(sdk, partitioned=partitioned)]
    try:
        secure = harness.broker(directory, partitioned=partitioned)
    except harness.CannotListen as error:
        pytest.fail(str(error)) if REQUIRE_INTEROP else pytest.skip(str(error))
    with secure as broker:
        results = harness.run(PROGRAMS[sdk], broker, names, partitioned=partitioned)
        harness.keep(sdk, results, partitioned=partitioned)
        return results, broker.log()


class Runs:
    """Runs an SDK's program on a broker when the first of its tests there asks."""

    def __init__(self, directories: pytest.TempPathFactory) -> None:
        self._directories = directories
        self._runs: dict[tuple[str, bool], Run] = {}

    def result(self, sdk: str, partitioned: bool, scenario: str) -> tuple[Result, str]:
        """The result and the end of the broker's log."""
        if (sdk, partitioned) not in self._runs:
            ensure(PROGRAMS[sdk].toolchain)
            self._runs[sdk, partitioned] = run(sdk, self._directories.mktemp(sdk), partitioned)
        results, log = self._runs[sdk, partitioned]
        return results[scenario], log


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory)


@pytest.mark.parametrize(
    ("sdk", "form", "scenario"),
    [
        (sdk, "partitioned" if partitioned else "plain", scenario.id)
        for sdk in SDKS
        for partitioned in FORMS
        for scenario in applicable(sdk, partitioned=partitioned)
    ],
)
def test_scenario(runs: Runs, sdk: str, form: str, scenario: str) -> None:
    result, log = runs.result(sdk, form == "partitioned", scenario)
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
            timeout=PATIENCE_S,
        )
        assert (done.returncode, done.stdout.strip()) == (0, f"Hello from {language}"), f"{done.stderr}\n{broker.log()}"
