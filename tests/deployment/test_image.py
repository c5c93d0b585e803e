"""The broker and Spark in the roots that the Dockerfiles make: `make image`."""

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from proton import Message
from proton.utils import BlockingConnection

from tests.caller import BUILD_IMAGE
from tests.deployment.clean_root import Image, build, make_base
from tests.patience import PATIENCE_S
from tests.pipeline import ledgers
from tests.pipeline.ledgers import History
from tests.ports import free_ports

pytestmark = pytest.mark.skipif(not BUILD_IMAGE, reason="takes minutes, root and the network: make image")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    make_base(root)
    return root


@pytest.fixture(scope="module")
def image(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return build("Dockerfile", base, lambda: tmp_path_factory.mktemp("stage"))


@pytest.fixture(scope="module")
def spark_image(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Image:
    return build("deploy/spark/Dockerfile", base, lambda: tmp_path_factory.mktemp("spark"))


def test_the_image_serves_as_its_user_with_nothing_but_its_files(image: Image) -> None:
    for tool in ("gcc", "pip"):
        assert shutil.which(tool, path=f"{image.root}/usr/bin:{image.root}/opt/peeklock/bin") is None
    amqp_port, http_port, ops_port = free_ports(3)
    environment = image.environment | {
        "PEEKLOCK_AMQP__PORT": str(amqp_port),
        "PEEKLOCK_HTTP__PORT": str(http_port),
        "PEEKLOCK_OPS__PORT": str(ops_port),
        **{name: "127.0.0.1" for name in image.environment if name.endswith("__HOST")},
    }
    entry, arguments = (json.loads(image.settings[name]) for name in ("ENTRYPOINT", "CMD"))
    output = image.root / "output"
    with output.open("wb") as file:
        process = subprocess.Popen(
            image.command(*entry, *arguments, user=image.settings["USER"]),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "is ready" not in output.read_text():
            assert process.poll() is None, output.read_text()
            assert time.monotonic() < deadline, output.read_text()
            time.sleep(0.1)
        health = json.loads(image.settings["HEALTHCHECK"].split("CMD ", 1)[1])
        assert subprocess.run(image.command(*health, user=image.settings["USER"]), env=environment).returncode == 0
        [key] = (image.root / "var/lib/peeklock/root-key").read_text().split()
        connection = BlockingConnection(
            f"amqp://localhost:{amqp_port}",
            timeout=PATIENCE_S,
            user="RootManageSharedAccessKey",
            password=key,
            allowed_mechs="PLAIN",
        )
        connection.create_sender("orders").send(Message(body="x"))
        assert connection.create_receiver("orders").receive(timeout=PATIENCE_S).body == "x"
        connection.close()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, output.read_text()


def test_the_image_of_spark_runs_a_job_as_its_user(spark_image: Image) -> None:
    for tool in ("gcc", "pip"):
        assert shutil.which(tool, path=f"{spark_image.root}/usr/bin:{spark_image.root}/opt/peeklock/bin") is None
    history = History(partitions=1)
    history.end(history.send("orders"))
    ledgers.write(spark_image.root / "pipeline" / "capture" / "table=ledger", history.rows)
    [entry] = json.loads(spark_image.settings["ENTRYPOINT"])
    program = ["spark-submit", "--master", "local[2]", "/opt/spark/jobs/usage.py"]
    options = ["--ledger", "/pipeline/capture", "--output", "/pipeline/reports/usage"]
    command = spark_image.command(entry, *program, *options, user=spark_image.settings["USER"])
    done = subprocess.run(command, env=spark_image.environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    # spark-submit sends a program's standard error, where its progress is, to its own standard output.
    assert done.stdout.endswith("\n1 operations: 1 sends and 0 receives.\n")
    assert (spark_image.root / "pipeline" / "reports" / "usage" / "report.html").is_file()
    assert list((spark_image.root / "opt" / "spark" / "work-dir").iterdir()) == []


def test_the_image_of_spark_finds_all_that_spark_needs(spark_image: Image) -> None:
    command = spark_image.command("python", "-m", "pyspark_peeklock", user=spark_image.settings["USER"])
    done = subprocess.run(command, env=spark_image.environment, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert {"pyspark", "pyarrow", "pandas", "java"} == {each.split()[0] for each in done.stdout.split(", ")}
    for name in ("bin/spark-submit", "jars", "python/lib/pyspark.zip", "jobs/audit.py", "streams/mirror.py"):
        inside = spark_image.command("test", "-e", f"/opt/spark/{name}", user=spark_image.settings["USER"])
        assert subprocess.run(inside).returncode == 0, name
