"""deploy/spark: the entrypoint of the image, with stand-ins for Spark's programs, and the compose file."""

import os
import re
import subprocess
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.deployment.manifests import ROOT

SPARK = ROOT / "deploy" / "spark"
POD = {"POD_IP": "10.0.0.7", "POD_NAME": "flow-audit-1", "POD_NAMESPACE": "shop", "SPARK_IMAGE": "registry/spark:1"}
EXECUTOR = {
    "SPARK_HOME": "/opt/spark",
    "SPARK_CONF_DIR": "/opt/spark/conf",
    "SPARK_EXECUTOR_MEMORY": "2048m",
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "2",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.8",
    "SPARK_RESOURCE_PROFILE_ID": "0",
    "SPARK_EXECUTOR_POD_NAME": "flow-audit-exec-3",
}


@pytest.fixture
def entered(tmp_path):
    """Runs the entrypoint; returns the name and the arguments of the program that it became."""
    for name in ("spark-submit", "java", "peeklock"):
        (tmp_path / name).write_text('#!/bin/sh\nprintf "%s\\n" "${0##*/}" "$@"\n')
        (tmp_path / name).chmod(0o755)

    def run(*arguments, code=0, **variables):
        environment = variables | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run([SPARK / "entrypoint", *arguments], env=environment, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        return done.stdout.splitlines() if code == 0 else done.stderr

    return run


def settings(arguments):
    pairs = [arguments[index + 1] for index, each in enumerate(arguments) if each == "--conf"]
    return dict(each.split("=", 1) for each in pairs)


def test_a_driver_that_spark_made_runs_its_program_in_its_pod(entered):
    given = ["--properties-file", "/opt/spark/conf/spark.properties", "--class", "a.B", "local:///x.py", "--a b", ""]
    found = entered("driver", *given, SPARK_DRIVER_BIND_ADDRESS="10.0.0.7")
    assert found[:3] == ["spark-submit", "--deploy-mode", "client"]
    assert found[-len(given) :] == given
    assert settings(found)["spark.driver.bindAddress"] == "10.0.0.7"


def test_a_job_is_the_driver_and_owns_its_executors(entered):
    found = entered("job", "/opt/spark/jobs/usage.py", "--ledger", "/x y", **POD)
    assert found[:3] == ["spark-submit", "--deploy-mode", "client"]
    assert found[-3:] == ["/opt/spark/jobs/usage.py", "--ledger", "/x y"]
    assert settings(found) == {
        "spark.driver.host": "10.0.0.7",
        "spark.driver.bindAddress": "10.0.0.7",
        "spark.kubernetes.driver.pod.name": "flow-audit-1",
        "spark.kubernetes.namespace": "shop",
        "spark.kubernetes.container.image": "registry/spark:1",
    }


@pytest.mark.parametrize("lacking", POD)
def test_a_job_without_what_it_needs_of_its_pod_says_so(entered, lacking):
    rest = {name: value for name, value in POD.items() if name != lacking}
    assert f"{lacking}: unbound variable" in entered("job", "x.py", code=1, **rest)


def test_an_executor_has_javas_options_in_their_order(entered):
    # Eleven, which as text would not be in the order of their numbers.
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dnumber={number} of 'many'" for number in range(11)}
    found = entered("executor", **EXECUTOR, **options)
    assert found[0] == "java"
    assert found[1:12] == list(options.values())
    assert found[12:16] == ["-Xms2048m", "-Xmx2048m", "-cp", "/opt/spark/conf:/opt/spark/jars/*"]
    main, *pairs = found[16:]
    assert main == "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
    assert dict(zip(pairs[::2], pairs[1::2], strict=True)) == {
        "--driver-url": EXECUTOR["SPARK_DRIVER_URL"],
        "--executor-id": "3",
        "--cores": "2",
        "--app-id": "spark-1",
        "--hostname": "10.0.0.8",
        "--resourceProfileId": "0",
        "--podName": "flow-audit-exec-3",
    }


def test_an_executor_may_have_no_options_and_more_classes(entered):
    found = entered("executor", **EXECUTOR, SPARK_EXTRA_CLASSPATH="/more/*")
    assert found[1:5] == ["-Xms2048m", "-Xmx2048m", "-cp", "/opt/spark/conf:/opt/spark/jars/*:/more/*"]


def test_any_other_command_is_run_as_it_is(entered):
    assert entered("peeklock", "capture", "a b") == ["peeklock", "capture", "a b"]
    assert "give driver, executor, job, or a command" in entered(code=2)


def test_what_the_image_links_is_in_the_package_of_spark():
    pyspark = pytest.importorskip("pyspark")
    home = Path(pyspark.__file__).parent
    text = (SPARK / "Dockerfile").read_text()
    linked = re.findall(r'"\$PWD/pyspark/(\w+)"', text)
    assert set(linked) == {"bin", "jars", "python"}
    assert all((home / each).is_dir() for each in linked)
    assert list((home / "jars").glob("spark-kubernetes_*.jar"))
    assert (ROOT / "pipeline" / "jobs").is_dir()
    assert '"$PWD/pipeline/jobs" /opt/spark/jobs' in text


def services():
    text = (SPARK / "compose.yaml").read_text().replace("${CONNECTION_STRING_FILE:?}", "/the/file").replace("$$", "$")
    assert "${" not in text
    return yaml.safe_load(text)["services"]


def test_containers_have_no_rights_and_share_the_volume():
    user = re.search(r"^USER (\S+)$", (SPARK / "Dockerfile").read_text(), re.MULTILINE)[1]
    for name, service in services().items():
        assert (service["user"], service["read_only"], service["cap_drop"]) == (user, True, ["ALL"]), name
        assert service["volumes"] == ["pipeline:/pipeline"]
        assert service["image"] == "peeklock-spark"
        assert ("build" in service) == (name == "master")  # one image, built once
    published = {name: service["ports"] for name, service in services().items() if "ports" in service}
    assert published == {"master": ["127.0.0.1:8080:8080"]}


def test_a_master_and_two_workers_find_one_another():
    pyspark = pytest.importorskip("pyspark")
    [jar] = (Path(pyspark.__file__).parent / "jars").glob("spark-core_*.jar")
    with zipfile.ZipFile(jar) as archive:
        classes = set(archive.namelist())
    master, worker = services()["master"]["command"], services()["worker"]["command"]
    for command in (master, worker):
        assert command[0] == "spark-class"
        assert command[1].replace(".", "/") + ".class" in classes
    address = f"spark://{master[master.index('--host') + 1]}:{master[master.index('--port') + 1]}"
    assert worker[-1] == address
    assert services()["worker"]["deploy"]["replicas"] == 2
    submitted = services()["flow-audit"]["command"]
    assert submitted[:3] == ["spark-submit", "--master", address]


def test_the_capture_takes_the_key_from_its_file(entered, tmp_path):
    """The shell is real, and peeklock prints what it gets."""
    [service] = [each for name, each in services().items() if name == "capture"]
    (tmp_path / "peeklock").write_text('#!/bin/sh\necho "$PEEKLOCK_CONNECTION_STRING" "$@"\n')
    key = tmp_path / "connection-string"
    key.write_text("Endpoint=sb://x;SharedAccessKeyName=a;SharedAccessKey=b c=\n")
    [secret] = service["secrets"]
    command = [each.replace(secret["target"], str(key)) for each in service["command"]]
    assert entered(*command) == ["Endpoint=sb://x;SharedAccessKeyName=a;SharedAccessKey=b c= capture /pipeline/capture"]
