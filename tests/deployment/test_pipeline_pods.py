"""The pods of the pipeline: Spark's real Kubernetes mode, with a small API as the cluster and processes as pods.

So what Spark asks of the API, the image's entrypoint, the manifests' commands and the settings of Spark are real.
"""

import functools
import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from tests.brokers import Broker
from tests.caller import ALL_PODS, VARIABLES
from tests.deployment.kubernetes_api import KubernetesApi
from tests.deployment.manifests import KUBERNETES, ROOT, Object, built, named, of_kind
from tests.deployment.node import Node, image_environment
from tests.patience import PATIENCE_S
from tests.pipeline import ledgers
from tests.pipeline.ledgers import History
from tests.pipeline.session import missing
from tests.ports import free_ports

SPARK = ROOT / "deploy" / "spark"
DOCUMENT = ROOT / "docs" / "pipeline.md"
START = "2026-01-01T00:00:00Z"
PORTS = ("spark.driver.port", "spark.driver.blockManager.port")
RUN_SECONDS = 1200.0  # a machine that does much else beside
# Executors are smaller and fewer than in the manifests, ports are free ones, and plans of few rows are not compiled.
SMALL = """
spark.driver.memory              1g
spark.driver.port                0
spark.driver.blockManager.port   0
spark.executor.instances         1
spark.executor.memory            640m
spark.executor.extraJavaOptions  -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.driver.extraJavaOptions    -XX:TieredStopAtLevel=1 -XX:+UseSerialGC
spark.sql.shuffle.partitions     1
spark.sql.codegen.wholeStage     false
spark.sql.codegen.factoryMode    NO_CODEGEN
spark.sql.adaptive.enabled       false
"""


@pytest.fixture(scope="module", autouse=True)
def _spark_is_installed() -> None:
    if (lacking := missing()) is not None:
        (pytest.fail if VARIABLES.get("PEEKLOCK_REQUIRE_SPARK") == "1" else pytest.skip)(f"needs {lacking}")


@functools.cache
def objects() -> tuple[Object, ...]:
    return built(KUBERNETES / "pipeline")


def environment() -> dict[str, str]:
    """Where Spark and Python are on this machine."""
    import pyspark

    home = Path(pyspark.__file__).parent
    found = {
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "PYSPARK_DRIVER_PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "pipeline")]),
        "PATH": os.pathsep.join([str(home / "bin"), str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    return found | ({"JAVA_HOME": os.environ["JAVA_HOME"]} if "JAVA_HOME" in os.environ else {})


@pytest.fixture
def api() -> Iterator[KubernetesApi]:
    with KubernetesApi().serving() as serving:
        yield serving


@pytest.fixture
def node(api: KubernetesApi, tmp_path: Path) -> Iterator[Node]:
    """A node whose shared volume is tmp_path / "pipeline", with the manifests' ConfigMaps in the API."""
    texts = {
        "/pipeline": str(tmp_path / "pipeline"),
        "/run/secrets/peeklock": str(tmp_path / "secret"),
        "/opt/spark/jobs": str(ROOT / "pipeline" / "jobs"),
        "/opt/spark/streams": str(SPARK),
        "k8s://https://kubernetes.default.svc": f"k8s://http://127.0.0.1:{api.port}",
    }
    for each in of_kind(objects(), "ConfigMap"):
        config_map = json.loads(json.dumps(each))
        if "spark-defaults.conf" in config_map["data"]:
            config_map["data"]["spark-defaults.conf"] += SMALL
        api.put("configmaps", each["metadata"]["namespace"], config_map)
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "secret").mkdir()
    image = image_environment((SPARK / "Dockerfile").read_text())
    with Node(api, tmp_path / "pods", SPARK / "entrypoint", image, environment(), texts) as started:
        yield started


def pod_of(cron_job: str, start: int) -> Object:
    """As Kubernetes makes it when the time has come."""
    found = named(objects(), "CronJob", cron_job)
    assert found
    template = json.loads(json.dumps(found["spec"]["jobTemplate"]["spec"]["template"]))
    template["metadata"] |= {"name": f"{cron_job}-{start}", "namespace": found["metadata"]["namespace"]}
    return {"apiVersion": "v1", "kind": "Pod", **template}


def ran(node: Node, api: KubernetesApi, cron_job: str, *more: str, start: int = 0) -> int:
    """The exit code of the pod of a start of a CronJob, with more arguments."""
    pod = pod_of(cron_job, start)
    pod["spec"]["containers"][0]["args"] += more
    pod["status"] = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
    api.put("pods", pod["metadata"]["namespace"], pod)
    try:
        return node.start(pod).wait(RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise AssertionError(node.logs()) from None


def made_pods(api: KubernetesApi) -> list[Object]:
    """By Spark, whatever became of them."""
    return [each for each in api.created if each["kind"] == "Pod"]


def granted() -> set[tuple[str, str]]:
    """(verb, resource) of all that the Role of drivers allows."""
    role = named(objects(), "Role", "peeklock-driver")
    assert role
    return {(verb, resource) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}


def check_what_was_asked(api: KubernetesApi, node: Node) -> None:
    """Within the Role and the namespace. Executors are as the template has them, and have written to volumes alone."""
    assert api.unknown == []
    assert {(each.verb, each.resource) for each in api.asked} <= granted()
    assert {each.namespace for each in api.asked} == {"peeklock"}
    assert made_pods(api)
    for each in made_pods(api):
        check_template(each)
        assert each["spec"]["serviceAccountName"] == "peeklock-pipeline"
        [owner] = each["metadata"]["ownerReferences"]
        assert ("pods", "peeklock", owner["name"]) in api.objects  # with which it is removed
        assert list((node.directory(each) / "work-dir").iterdir()) == []


def check_template(made: Object) -> None:
    """A pod that Spark has made is as the template has it."""
    template = yaml.safe_load((KUBERNETES / "pipeline" / "pod.yaml").read_text())
    [wanted] = template["spec"]["containers"]
    spec, [container] = made["spec"], made["spec"]["containers"]
    for name, value in template["spec"].items():
        if name == "volumes":
            assert all(each in spec["volumes"] for each in value)
        elif name != "containers":
            assert spec[name] == value, name
    assert container["image"] == "peeklock-spark"
    assert wanted["securityContext"].items() <= container["securityContext"].items()
    assert all(mount in container["volumeMounts"] for mount in wanted["volumeMounts"])
    assert template["metadata"]["labels"].items() <= made["metadata"]["labels"].items()


def capture(tmp_path: Path, history: History) -> None:
    ledgers.write(tmp_path / "pipeline" / "capture" / "table=ledger", history.rows)


def report(tmp_path: Path, name: str) -> Path:
    return tmp_path / "pipeline" / "reports" / name


def test_a_job_runs_in_a_pod_that_makes_pods_for_its_executors(api, node, tmp_path):
    history = History(partitions=1)
    for _ in range(3):
        history.end(history.send("orders"))
    capture(tmp_path, history)
    assert ran(node, api, "usage") == 0, node.logs()
    rows = pq.read_table(report(tmp_path, "usage") / "usage").to_pylist()
    assert [(row["entity"], row["sends"]) for row in rows] == [("orders", 3)]
    assert "3 operations" in (report(tmp_path, "usage") / "report.html").read_text()
    check_what_was_asked(api, node)


only_if_asked = pytest.mark.skipif(not ALL_PODS, reason="takes minutes of CPU: make pipeline-pods")


@only_if_asked
def test_the_job_of_an_audit_fails_when_it_finds_a_fault(api, node, tmp_path):
    history = History(partitions=1)
    history.end(history.send("orders"))
    history.rows.append(history.rows[-1] | {"journalOffset": len(history.rows)})
    capture(tmp_path, history)
    assert ran(node, api, "flow-audit") == 1, node.logs()
    [audit] = report(tmp_path, "flow-audit").iterdir()
    faults = pq.read_table(audit / "faults").to_pylist()
    assert [row["verdict"] for row in faults] == ["left_twice"]
    check_what_was_asked(api, node)


@only_if_asked
def test_dead_letters_are_analysed_in_pods(api, node, tmp_path):
    history = History(partitions=1)
    history.dead_letter(history.send("orders"), "Rejected")
    capture(tmp_path, history)
    assert ran(node, api, "dead-letters") == 0, node.logs()
    assert "Rejected" in (report(tmp_path, "dead-letters") / "report.html").read_text()
    check_what_was_asked(api, node)


def submitted_in_cluster_mode(api: KubernetesApi, *more: str) -> subprocess.CompletedProcess[str]:
    """A job of the image, as docs/pipeline.md submits one, to the API of this test."""
    [block] = re.findall(
        r"^( {4}spark-submit .*--deploy-mode cluster(?:.*\\\n)*.*)$", DOCUMENT.read_text(), re.MULTILINE
    )
    command = shlex.split(block.replace("\\\n", " "))
    command[command.index("--master") + 1] = f"k8s://http://127.0.0.1:{api.port}"
    command[command.index("--conf") : command.index("--conf")] = more
    return subprocess.run(
        command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=RUN_SECONDS, check=False
    )


def test_cluster_mode_makes_a_driver_like_the_template_and_hides_its_failure(api):
    """The reason why the pods of jobs are drivers themselves."""
    status = {"name": "driver", "image": "peeklock-spark", "ready": False}
    state = {"terminated": {"exitCode": 1, "reason": "Error", "startedAt": START, "finishedAt": START}}
    api.on_pod = lambda pod: api.set_status(pod, phase="Failed", containerStatuses=[status | {"state": state}])
    done = submitted_in_cluster_mode(api)
    assert (done.returncode, "phase: Failed" in done.stderr) == (0, True), done.stderr
    assert api.unknown == []
    [driver] = made_pods(api)
    [container] = driver["spec"]["containers"]
    assert container["args"][:3] == ["driver", "--properties-file", "/opt/spark/conf/spark.properties"]
    program, *options = container["args"][-5:]
    assert program == "local:///opt/spark/jobs/usage.py"
    assert options == ["--ledger", "/pipeline/capture", "--output", "/pipeline/reports/usage"]
    assert driver["spec"]["serviceAccountName"] == "peeklock-driver"
    check_template(driver)
    assert {each.resource for each in api.asked if each.verb == "patch"} == {
        "services",
        "networkpolicies",
        "configmaps",
    }


@only_if_asked
def test_a_driver_that_cluster_mode_made_runs_in_its_pod(api, node, tmp_path):
    history = History(partitions=1)
    history.end(history.send("orders"))
    capture(tmp_path, history)
    ports = [f"{name}={port}" for name, port in zip(PORTS, free_ports(2), strict=True)]
    master = f"spark.kubernetes.driver.master=http://127.0.0.1:{api.port}"  # as the driver calls the API
    small = ["=".join(line.split(maxsplit=1)) for line in SMALL.split("\n") if line and not line.startswith(PORTS)]
    done = submitted_in_cluster_mode(api, *(word for each in [*small, *ports, master] for word in ("--conf", each)))
    assert (done.returncode, "phase: Succeeded" in done.stderr) == (0, True), node.logs()
    assert "1 operations" in (report(tmp_path, "usage") / "report.html").read_text()


@only_if_asked
def test_a_stream_goes_on_where_its_last_pod_ended(api, node, tmp_path):
    config = '[journal]\nmode = "bodies"\n[[queues]]\nname = "orders"\n'
    config += '[[queues]]\nname = "orders-copy"\nrequires_duplicate_detection = true\n'
    with Broker(tmp_path / "broker", config) as broker:
        (tmp_path / "secret" / "connection-string").write_text(broker.connection_string)
        for start, count in enumerate((100, 50)):
            send(broker, count)
            endpoint = f"http://localhost:{broker.http_port}"
            assert ran(node, api, "mirror-orders", "--http-endpoint", endpoint, start=start) == 0, node.logs()
        ids = [each["message_id"] for each in received(broker, "orders-copy")]
        assert len(ids) == len(set(ids)) == 150
    check_what_was_asked(api, node)


def peeklock(broker: Broker, *arguments: str) -> str:
    command = [sys.executable, "-m", "broker.cli", *arguments, "--connection-string", broker.connection_string]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=True).stdout


def send(broker: Broker, count: int) -> None:
    peeklock(broker, "send", "orders", "--body", "x", "--count", str(count))


def received(broker: Broker, queue: str) -> list[Object]:
    return [json.loads(line) for line in peeklock(broker, "receive", queue, "--count", "1000").splitlines()]
