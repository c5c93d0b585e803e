"""What cannot be run here without an engine is read: the image's recipe and the files that it is set up with."""

import fnmatch
import json
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from broker.settings.sources import load
from tests.brokers import Broker
from tests.patience import PATIENCE_S, eventually

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


def instructions(file="Dockerfile"):
    """(name, arguments) of each instruction of a Dockerfile, continuation lines joined and comments left out."""
    text = re.sub(r"^\s*#.*\n", "", (ROOT / file).read_text(), flags=re.M)
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [tuple(line.split(" ", 1)) for line in lines if line.strip()]


def final_stage():
    stages = instructions()
    last = max(index for index, (name, _) in enumerate(stages) if name == "FROM")
    return stages[last:]


def environment():
    pairs = [pair for name, arguments in final_stage() if name == "ENV" for pair in arguments.split()]
    return dict(pair.split("=", 1) for pair in pairs)


def only(name):
    [arguments] = [arguments for each, arguments in final_stage() if each == name]
    return arguments


def test_the_image_runs_as_a_user_that_an_orchestrator_can_see_is_not_root():
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", only("USER"))


def test_the_images_settings_are_settings():
    inside = environment()
    *_, own = inside.pop("PEEKLOCK_CONFIG").split(":")
    assert f"deploy/container.toml {own}" in [rest for name, rest in final_stage() if name == "COPY"]
    settings = load(DEPLOY / "container.toml", environment=inside).settings
    assert str(settings.data_dir) == only("VOLUME")
    assert settings.amqp.host == settings.http.host == settings.ops.host == "0.0.0.0"


def test_the_images_ports_are_those_the_broker_listens_on():
    settings = load(environment={}).settings
    assert {settings.amqp.port, settings.http.port, settings.ops.port} < {int(port) for port in only("EXPOSE").split()}


def test_the_image_stops_by_a_signal_that_the_broker_takes():
    assert only("STOPSIGNAL") == "SIGTERM"


def health(directory, ops_port=1):
    """The exit code of the program of the image's health check, for the broker with this data directory."""
    assert json.loads(only("HEALTHCHECK").split("CMD ", 1)[1]) == ["/opt/peeklock/healthcheck"]
    assert "deploy/healthcheck /opt/peeklock/healthcheck" in [rest for name, rest in final_stage() if name == "COPY"]
    environment = {"PEEKLOCK_DATA_DIR": str(directory), "PEEKLOCK_OPS__PORT": str(ops_port)}
    return subprocess.run([DEPLOY / "healthcheck"], env=environment, capture_output=True, timeout=PATIENCE_S).returncode


def test_the_health_check_follows_the_broker_on_whichever_port(tmp_path):
    with Broker(tmp_path) as broker:
        assert health(broker.data_dir) == 0
        broker.kill()
        assert health(broker.data_dir) != 0
    assert health(tmp_path / "nothing") != 0


def test_the_health_check_of_a_gateway_without_a_data_directory_uses_the_port_of_the_environment(tmp_path):
    with Broker(tmp_path) as broker:
        assert health(tmp_path / "nothing", broker.ops_port) == 0


def test_the_health_check_of_a_broker_that_is_not_ready_fails(tmp_path):
    with Broker(tmp_path, workers=1) as broker:
        worker = broker.worker()
        worker.suspend()
        eventually(lambda: health(broker.data_dir) != 0, "it is not ready")
        worker.resume()


@pytest.mark.parametrize("file", ["Dockerfile", "deploy/spark/Dockerfile"])
def test_files_that_the_images_copy_exist_and_are_not_ignored(file):
    rules = (ROOT / ".dockerignore").read_text().split()
    copied = [
        source
        for name, arguments in instructions(file)
        if name == "COPY" and "--from" not in arguments
        for source in arguments.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (ROOT / source).exists(), source
        kept = None
        for rule in rules:  # the last that fits counts
            if fnmatch.fnmatch(source, rule.removeprefix("!")):
                kept = rule.startswith("!")
        assert kept, source


@pytest.mark.parametrize("file", ["quickstart.toml", "container.toml"])
def test_example_settings_are_valid_and_have_the_queue_of_the_readme(file):
    settings = load(DEPLOY / file, environment={}).settings
    assert [queue.name for queue in settings.queues] == ["orders"]


def test_the_well_known_key_is_for_this_machine_only():
    settings = load(DEPLOY / "quickstart.toml", environment={}).settings
    assert settings.emulator
    assert settings.amqp.host == settings.ops.host == "127.0.0.1"
    assert not load(DEPLOY / "container.toml", environment=environment()).settings.emulator


def test_a_wheel_is_all_that_an_installation_needs(tmp_path):
    """Everything imported from an unpacked, read-only wheel, with nothing of the checkout in reach."""
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path / "dist"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        timeout=PATIENCE_S,
    )
    [wheel] = (tmp_path / "dist").glob("peeklock-*.whl")
    installed = tmp_path / "installed"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
        shipped = {name for name in archive.namelist() if name.endswith(".py")}
    sources = {
        str(path.relative_to(above))
        for above, folder in (
            (ROOT, "broker"),
            (ROOT, "protocol"),
            (ROOT, "storage"),
            (ROOT, "pipeline/jobs"),
            (ROOT / "pipeline", "pyspark_peeklock"),
        )
        for path in (above / folder).rglob("*.py")
    } - {"protocol/native/build.py"}
    assert shipped == sources | {"pipeline/__init__.py"}
    for path in [*installed.rglob("*"), installed]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    imported = subprocess.run(
        [
            sys.executable,
            "-c",
            "from broker.cli import commands; import broker.supervisor.supervisor, broker.worker.process; "
            "from protocol.extension import extension; assert extension is not None; "
            "print(commands.__file__)",
        ],
        cwd=tmp_path,
        env={"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1", "PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    assert imported.stdout.strip() == str(installed / "broker" / "cli" / "commands.py")
    for path in [installed, *installed.rglob("*")]:
        if path.is_dir():
            path.chmod(0o755)  # so that the temporary directory can be removed


def test_the_hosted_workflow_only_prepares_and_calls_the_one_script():
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    assert re.findall(r"^\s+(?:- )?run: (.*)$", workflow, re.MULTILINE) == [".ci/run"]
    used = re.findall(r"uses: (\S+)", workflow)
    assert used
    assert [action for action in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action)] == []


def test_the_wheel_carries_its_license(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", tmp_path],
        cwd=ROOT,
        check=True,
        timeout=PATIENCE_S,
    )
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        license_files = [name for name in archive.namelist() if name.endswith("/LICENSE")]
        [metadata] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        texts = {(ROOT / name).read_bytes() for name in ("LICENSE", "protocol/native/xxhash/LICENSE")}
        assert {archive.read(name) for name in license_files} == texts
        assert b"License-Expression: Apache-2.0 AND BSD-2-Clause\n" in archive.read(metadata)
