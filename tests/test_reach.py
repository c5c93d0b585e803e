"""Which tests a change reaches, in a small repository and in this one."""

import subprocess
import sys
from pathlib import PurePosixPath

import pytest

from tests.reach import Reach, Sources, Unknown, parsed, read
from tests.sources import ROOT

FILES = {
    "storage/__init__.py": "",
    "storage/store.py": "import os",
    "storage/tables.py": "from storage import store",
    "broker/__init__.py": "",
    "broker/rules.py": "GRAMMAR = 'rules.lark'",
    "broker/worker.py": "from storage.tables import Tables\nfrom broker.rules import GRAMMAR",
    "broker/gateway.py": "def f():\n    from protocol.frames import Frame",
    "broker/supervisor.py": "PARTS = ['broker.worker', 'broker.gateway']",
    "broker/cli/__init__.py": "",
    "broker/cli/__main__.py": "import broker.cli.commands",
    "broker/cli/commands.py": "import json\ndef serve():\n    from broker import supervisor",
    "protocol/__init__.py": "",
    "protocol/extension.py": "",
    "protocol/frames.py": "from protocol.extension import native",
    "tests/brokers.py": "COMMAND = ['-m', 'broker.cli']",
    "tests/conftest.py": "",
    "tests/storage/conftest.py": "from tests.storage import helper",
    "tests/storage/helper.py": "PAGE = 'docs/' + 'storage.md'",
    "tests/storage/test_tables.py": "from storage.tables import Tables",
    "tests/worker/test_worker.py": "from broker import worker\nSHIM = 'slow.c'",
    "tests/gateway/test_gateway.py": "import broker.gateway",
    "tests/end_to_end/test_sends.py": "from tests.brokers import COMMAND",
    "tests/deploy/test_units.py": "FOLDER = ROOT / 'deploy' / 'systemd'",
    "tests/client/test_commands.py": "from broker.cli.commands import serve",
}
TABLES, WORKER, GATEWAY, SENDS, UNITS, COMMANDS = (
    "tests/storage/test_tables.py",
    "tests/worker/test_worker.py",
    "tests/gateway/test_gateway.py",
    "tests/end_to_end/test_sends.py",
    "tests/deploy/test_units.py",
    "tests/client/test_commands.py",
)


def name_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


SMALL = Sources({name_of(path): parsed(name_of(path), PurePosixPath(path), text) for path, text in FILES.items()})


@pytest.mark.parametrize(
    ("changed", "tests", "of_programs"),
    [
        ("storage/store.py", {TABLES, WORKER}, {SENDS, COMMANDS}),
        ("broker/rules.py", {WORKER}, {SENDS, COMMANDS}),
        ("broker/rules.lark", {WORKER}, {SENDS, COMMANDS}),  # a module beside it names it
        ("broker/supervisor.py", set(), {SENDS, COMMANDS}),  # only commands that run import it
        ("broker/cli/commands.py", {COMMANDS}, {SENDS}),
        ("protocol/native/pump.c", {GATEWAY}, {SENDS, COMMANDS}),  # by the module that loads the extension
        ("tests/brokers.py", {SENDS}, set()),
        ("tests/storage/conftest.py", {TABLES}, set()),
        ("tests/storage/helper.py", {TABLES}, set()),  # by way of the conftest
        ("tests/worker/slow.c", {WORKER}, set()),
        ("tests/worker/test_worker.py", {WORKER}, set()),
        ("docs/storage.md", {TABLES}, set()),
        ("deploy/systemd/peeklock.service", {UNITS}, set()),
        ("LICENSE", set(), set()),
    ],
)
def test_a_change_reaches(changed: str, tests: set[str], of_programs: set[str]) -> None:
    assert SMALL.reached_by([changed]) == Reach(tests, of_programs)


def test_several_changes_reach_what_each_does() -> None:
    assert SMALL.reached_by(["storage/store.py", "broker/supervisor.py", "broker/cli/commands.py"]) == Reach(
        {TABLES, WORKER, COMMANDS}, {SENDS}
    )


def test_the_nearest_come_first() -> None:
    assert SMALL.nearest_first([WORKER, SENDS, TABLES], "storage/tables.py") == [TABLES, WORKER, SENDS]
    assert SMALL.nearest_first([SENDS, WORKER], "broker/worker.py") == [WORKER, SENDS]


@pytest.mark.parametrize("changed", ["pyproject.toml", "tests/conftest.py", "broker/gone.py", "assets/logo.svg"])
def test_of_some_nobody_can_say(changed: str) -> None:
    with pytest.raises(Unknown, match=changed):
        SMALL.reached_by(["LICENSE", changed])


def test_in_this_repository_each_module_is_reached_by_a_test() -> None:
    """A part that no test imports or runs is one whose changes nobody would notice."""
    known = read()
    sources = Sources(known)
    unreached = []
    for module in known.values():
        if module.path.parts[0] == "tests" or str(module.path) in ("setup.py",):
            continue
        try:
            found = sources.reached_by([str(module.path)])
        except Unknown:
            unreached.append(str(module.path))
        else:
            assert found.tests or found.of_programs
    assert unreached == []


def test_the_command_lists_the_tests_of_a_change() -> None:
    command = [sys.executable, "-m", "tests.changed", "--list", "--since", "HEAD~1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if "HEAD~1" in done.stderr:
        pytest.skip("a checkout without history")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("tests")
