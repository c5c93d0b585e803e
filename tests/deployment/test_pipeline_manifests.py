"""The manifests of deploy/kubernetes/pipeline: a capture, jobs and a stream, each the driver of its executors."""

import functools
import importlib.util
import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from tests.deployment.command_line import options
from tests.deployment.manifests import (
    KUBERNETES,
    ROOT,
    Object,
    build,
    built,
    container,
    fits,
    labels_of_pods,
    named,
    of_kind,
    pod,
)

PIPELINE = KUBERNETES / "pipeline"
SERVED_VERSIONS = ("1.25", kubernetes_validate.latest_version())
JOBS = ("flow-audit", "dead-letters", "usage")
STREAMS = ("mirror-orders",)
MIB = {"m": 1, "g": 1024, "Mi": 1, "Gi": 1024}


@functools.cache
def objects() -> tuple[Object, ...]:
    return built(PIPELINE)


def cron_job(name: str) -> Object:
    found = named(objects(), "CronJob", name)
    assert found
    return found


def as_workload(name: str) -> Object:
    """A CronJob's pods in the form that those of a Deployment have."""
    return {"spec": cron_job(name)["spec"]["jobTemplate"]["spec"]}


def capture() -> Object:
    [found] = of_kind(objects(), "Deployment")
    return found


def executor() -> Object:
    """The template, in the form of a workload."""
    return {"spec": {"template": yaml.safe_load((PIPELINE / "pod.yaml").read_text())}}


def all_pods() -> dict[str, Object]:
    found = {name: as_workload(name) for name in (*JOBS, *STREAMS)}
    return found | {"capture": capture(), "executor": executor()}


@functools.cache
def spark_settings() -> dict[str, str]:
    lines = (PIPELINE / "spark-defaults.conf").read_text().splitlines()
    pairs = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    assert len({name for name, _ in pairs}) == len(pairs)
    return dict(pairs)


def mebibytes(size: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]+)", size).groups()
    return int(number) * MIB[unit]


@pytest.mark.parametrize("version", SERVED_VERSIONS)
def test_every_object_is_one_of_the_api(version):
    for each in (*objects(), executor()["spec"]["template"] | {"metadata": {"name": "made-by-spark"}}):
        kubernetes_validate.validate(each, version, strict=True)


def test_all_is_in_the_namespace_of_the_broker_and_takes_none_of_its_names():
    assert {each["metadata"]["namespace"] for each in objects()} == {"peeklock"}
    names = [(each["kind"], each["metadata"]["name"]) for each in (*objects(), *build("production", ("pod-monitor",)))]
    assert len(names) == len(set(names))
    assert {each["metadata"]["name"] for each in of_kind(objects(), "CronJob")} == {*JOBS, *STREAMS}


@pytest.mark.parametrize("name", [*JOBS, *STREAMS])
def test_jobs_do_not_overlap_nor_last_for_ever(name):
    spec = cron_job(name)["spec"]
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] > 0
    assert 0 < spec["jobTemplate"]["spec"]["activeDeadlineSeconds"] <= 3600
    assert spec["jobTemplate"]["spec"]["backoffLimit"] in (0, 1)  # Kubernetes tries six times unless told otherwise
    assert (spec["successfulJobsHistoryLimit"], spec["failedJobsHistoryLimit"]) == (3, 3)
    assert pod(as_workload(name))["restartPolicy"] == "Never"
    assert spec.get("suspend", False) == (name in STREAMS)  # an example, which writes to a queue


def test_the_audit_runs_hourly_and_the_others_daily():
    schedules = {name: cron_job(name)["spec"]["schedule"].split() for name in JOBS}
    assert all(len(each) == 5 and each[0].isdigit() for each in schedules.values())
    assert {name: [each == "*" for each in schedules[name][1:]] for name in JOBS} == {
        "flow-audit": [True] * 4,
        "dead-letters": [False, True, True, True],
        "usage": [False, True, True, True],
    }
    assert len({each[0] for each in schedules.values()}) == len(JOBS)  # not all at once


def test_an_hourly_audit_does_not_read_all_that_was_captured():
    assert "--series" in container(as_workload("flow-audit"))["args"]


def test_an_audit_that_leaves_something_open_is_a_failed_job():
    failing = {"--fail-on-faults", "--fail-on-gaps", "--fail-on-undecided"}
    assert failing <= set(container(as_workload("flow-audit"))["args"])


def main_of(path: Path) -> Callable[[], object]:
    """The `main` of a program of Spark's, without running it. It reads sys.argv."""
    if path.parent == ROOT / "pipeline" / "jobs":
        return importlib.import_module(f"pipeline.jobs.{path.stem}").main
    return runpy.run_path(str(path))["main"]


@pytest.mark.parametrize("name", [*JOBS, *STREAMS])
def test_commands_are_programs_of_the_image_with_options_that_they_take(name, monkeypatch, capsys):
    pytest.importorskip("pyspark")
    kind, program, *arguments = container(as_workload(name))["args"]
    assert kind == "job"
    places = {"/opt/spark/jobs": ROOT / "pipeline" / "jobs", "/opt/spark/streams": ROOT / "deploy" / "spark"}
    path = places[str(Path(program).parent)] / Path(program).name
    # One more that does not exist ends it, and is the only one that it complains of.
    monkeypatch.setattr(sys, "argv", [str(path), *arguments, "--no-such-option"])
    with pytest.raises(SystemExit) as end:
        main_of(path)()
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("error: unrecognized arguments: --no-such-option\n")


def test_jobs_read_what_the_capture_writes_and_write_to_places_of_their_own():
    place = container(capture())["args"][1]
    outputs = []
    for name in JOBS:
        arguments = container(as_workload(name))["args"]
        assert arguments[arguments.index("--ledger") + 1] == place
        outputs.append(arguments[arguments.index("--output") + 1])
    for name in STREAMS:
        arguments = container(as_workload(name))["args"]
        outputs.append(arguments[arguments.index("--checkpoint") + 1])
    assert len({place, *outputs}) == 1 + len(outputs)
    for each in (place, *outputs):
        assert each.startswith("/pipeline/")


def test_the_capture_is_a_command_with_an_operations_endpoint():
    found = options(container(capture())["args"])
    assert found["ops_host"] == "0.0.0.0"
    assert [port["containerPort"] for port in container(capture())["ports"]] == [found["ops_port"]]
    for probe, path in {"readinessProbe": "/readyz", "livenessProbe": "/livez"}.items():
        assert container(capture())[probe]["httpGet"] == {"path": path, "port": "ops"}
    [monitor] = of_kind(build("production", ("pod-monitor",)), "PodMonitor")
    assert fits(monitor["spec"]["selector"], labels_of_pods(capture()))
    assert "ops" in {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}


def test_one_capture_at_a_time_writes_to_its_place():
    spec = capture()["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})


def image_user(dockerfile: Path) -> str:
    [user] = [line.split()[1] for line in dockerfile.read_text().splitlines() if line.startswith("USER")]
    return user


@pytest.mark.parametrize("name", [*JOBS, *STREAMS, "capture", "executor"])
def test_pods_have_no_rights(name):
    spec, inside = pod(all_pods()[name]), container(all_pods()[name])
    user = image_user(ROOT / "Dockerfile")
    assert user == image_user(ROOT / "deploy" / "spark" / "Dockerfile")
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    assert context["fsGroup"] == context["runAsGroup"]  # else the volume is root's
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert inside["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["enableServiceLinks"] is False
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    is_driver = name in (*JOBS, *STREAMS)
    if name != "executor":  # Spark sets its account
        assert spec.get("automountServiceAccountToken", True) is is_driver
        assert spec["serviceAccountName"] == ("peeklock-driver" if is_driver else "peeklock-pipeline")


def test_executors_have_an_account_without_rights():
    account = spark_settings()["spark.kubernetes.authenticate.executor.serviceAccountName"]
    assert named(objects(), "ServiceAccount", account)["automountServiceAccountToken"] is False
    subjects = [subject["name"] for each in of_kind(objects(), "RoleBinding") for subject in each["subjects"]]
    assert subjects == ["peeklock-driver"]
    assert named(objects(), "ServiceAccount", "peeklock-driver")
    assert of_kind(objects(), "ClusterRole", "ClusterRoleBinding") == []
    [role] = of_kind(objects(), "Role")
    assert "*" not in str(role["rules"])
    assert "secrets" not in str(role["rules"])  # what runs in a driver could read every key of the namespace


@pytest.mark.parametrize("name", [*JOBS, *STREAMS, "capture", "executor"])
def test_volumes_are_there_and_keys_are_files(name):
    spec, inside = pod(all_pods()[name]), container(all_pods()[name])
    mounts = {each["name"]: each["mountPath"] for each in inside["volumeMounts"]}
    volumes = {each["name"]: each for each in spec["volumes"]}
    assert set(mounts) == set(volumes)
    claim = volumes["pipeline"]["persistentVolumeClaim"]["claimName"]
    assert named(objects(), "PersistentVolumeClaim", claim)["spec"]["accessModes"] == ["ReadWriteMany"]
    assert mounts["pipeline"] == "/pipeline"
    if name == "capture":
        return
    assert volumes["secret"]["secret"] == {"secretName": "peeklock-pipeline", "defaultMode": 0o440}
    assert {mounts["tmp"], mounts["work"]} == {"/tmp", "/opt/spark/work-dir"}
    assert "SharedAccessKey" not in str(spec)


def test_the_secret_is_asked_for_and_not_made():
    assert of_kind(objects(), "Secret") == []
    asked = (PIPELINE / "kustomization.yaml").read_text()
    assert re.search(r"^# {3}peeklock-pipeline +connection-string ", asked, re.MULTILINE)
    [variable] = container(capture())["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "peeklock-pipeline", "key": "connection-string"}
    for name in STREAMS:
        arguments = container(as_workload(name))["args"]
        assert arguments[arguments.index("--connection-string-file") + 1] == "/run/secrets/peeklock/connection-string"


@pytest.mark.parametrize("name", [*JOBS, *STREAMS])
def test_drivers_have_what_the_entrypoint_asks_for(name):
    inside = container(as_workload(name))
    text = (ROOT / "deploy" / "spark" / "entrypoint").read_text()
    asked = set(re.findall(r"\$(POD_\w+|SPARK_IMAGE)", text.partition("executor)")[0]))
    given = {each["name"] for each in inside["env"]}
    [source] = inside["envFrom"]
    config_map = named(objects(), "ConfigMap", source["configMapRef"]["name"])["data"]
    assert asked == given | set(config_map)
    assert config_map["SPARK_IMAGE"] == inside["image"]


@pytest.mark.parametrize("name", [*JOBS, *STREAMS])
def test_the_settings_of_spark_are_where_it_looks_for_them(name):
    spec = pod(as_workload(name))
    [volume] = [each for each in spec["volumes"] if "configMap" in each]
    files = named(objects(), "ConfigMap", volume["configMap"]["name"])["data"]
    [mount] = [each["mountPath"] for each in container(as_workload(name))["volumeMounts"] if each["name"] == "spark"]
    assert f"SPARK_CONF_DIR={mount}" in (ROOT / "deploy" / "spark" / "Dockerfile").read_text()
    assert "spark-defaults.conf" in files
    directory, _, file = spark_settings()["spark.kubernetes.executor.podTemplateFile"].rpartition("/")
    assert (directory, file in files) == (mount, True)


def test_a_driver_has_room_beside_its_heap():
    heap = mebibytes(spark_settings()["spark.driver.memory"])
    for name in (*JOBS, *STREAMS):
        resources = container(as_workload(name))["resources"]
        assert resources["limits"]["memory"] == resources["requests"]["memory"]
        assert mebibytes(resources["limits"]["memory"]) >= 1.3 * heap
        assert "cpu" not in resources["limits"]


def test_policies_let_drivers_and_executors_reach_one_another_and_nobody_else_reach_them():
    policies = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects(), "NetworkPolicy")}
    spark = {name: labels_of_pods(each) for name, each in all_pods().items() if name != "capture"}
    selector = policies["peeklock-pipeline"]["podSelector"]
    assert all(fits(selector, labels) for labels in spark.values())
    assert not fits(selector, labels_of_pods(capture()))
    [rule] = policies["peeklock-pipeline"]["ingress"]
    assert rule == {"from": [{"podSelector": selector}]}
    assert [each for each in policies if fits(policies[each]["podSelector"], labels_of_pods(capture()))] == [
        "peeklock-capture"
    ]
    for workload in of_kind(build("production"), "StatefulSet", "Deployment"):
        assert not any(fits(each["podSelector"], labels_of_pods(workload)) for each in policies.values())
