"""The manifests of deploy/kubernetes: built, held against the API's schemas, and against what the broker does."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from typing import Any, cast

import jsonschema
import kubernetes_validate
import pytest

import broker
from broker.http.ops import OpsSource, ops_pages
from broker.http.readiness import ANSWER_SECONDS
from broker.settings.config import Settings
from tests.deployment.manifests import (
    BUILDS,
    COMPONENTS,
    KUBERNETES,
    NAMESPACE,
    OVERLAYS,
    ROOT,
    build,
    built,
    container,
    fits,
    image_environment,
    labels_of_pods,
    named,
    of_kind,
    pod,
    probes,
    settings,
    variables,
    workload,
    workloads,
)
from tests.patience import PATIENCE_S

SERVED_VERSIONS = ("1.25", kubernetes_validate.latest_version())
"""The oldest and the newest version of Kubernetes whose API the manifests are held against."""


@pytest.fixture(params=BUILDS, ids=lambda each: "+".join([each[0], *each[1]]))
def objects(request):
    return build(*request.param)


@pytest.fixture(params=OVERLAYS)
def overlay(request):
    return build(request.param)


# The custom resources have no schema in the package. Here are the fields that we use and no others, from the references
# of cert-manager (cert-manager.io/v1) and the Prometheus Operator (monitoring.coreos.com/v1).
def _object(required, **fields):
    return {"type": "object", "additionalProperties": False, "required": required, "properties": fields}


TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "array", "minItems": 1, "items": TEXT}
DURATION = {"type": "string", "pattern": r"^\d+(h|m|s)$"}
SPECS = {
    "Issuer": {
        "oneOf": [
            _object(["selfSigned"], selfSigned=_object([])),
            _object(["ca"], ca=_object(["secretName"], secretName=TEXT)),
        ]
    },
    "Certificate": _object(
        ["secretName", "issuerRef"],
        isCA={"type": "boolean"},
        commonName={"type": "string", "maxLength": 64},
        secretName=TEXT,
        dnsNames=TEXTS,
        usages={"type": "array", "items": {"enum": ["digital signature", "server auth", "client auth"]}},
        duration=DURATION,
        renewBefore=DURATION,
        privateKey=_object(
            [], algorithm={"enum": ["ECDSA"]}, size={"enum": [256, 384, 521]}, rotationPolicy={"enum": ["Always"]}
        ),
        issuerRef=_object(["name"], kind={"enum": ["Issuer", "ClusterIssuer"]}, name=TEXT),
    ),
    "PodMonitor": _object(
        ["selector", "podMetricsEndpoints"],
        selector={"type": "object"},
        podTargetLabels=TEXTS,
        podMetricsEndpoints={
            "type": "array",
            "minItems": 1,
            "items": _object(["port"], port=TEXT, path=TEXT, interval=DURATION),
        },
    ),
}
CUSTOM = {"Issuer": "cert-manager.io/v1", "Certificate": "cert-manager.io/v1", "PodMonitor": "monitoring.coreos.com/v1"}


@pytest.mark.parametrize("version", SERVED_VERSIONS)
def test_every_object_is_one_of_the_api(objects, version):
    for each in objects:
        if each["kind"] in CUSTOM:
            assert each["apiVersion"] == CUSTOM[each["kind"]]
            assert set(each) == {"apiVersion", "kind", "metadata", "spec"}
            jsonschema.validate(each["spec"], SPECS[each["kind"]])
        else:
            kubernetes_validate.validate(each, version, strict=True)


def test_the_schemas_refuse_a_field_that_does_not_exist():
    claim = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "a"}, "automountToken": False}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(claim, SERVED_VERSIONS[0], strict=True)


def test_all_is_in_one_namespace_under_names_of_its_own(objects):
    assert {each["metadata"]["namespace"] for each in objects} == {NAMESPACE}
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert len(names) == len(set(names))


def test_every_file_is_part_of_a_kustomization():
    """And every file that a kustomization names exists, or it could not be built."""
    for directory in {path.parent for path in KUBERNETES.rglob("*") if path.is_file()}:
        text = (directory / "kustomization.yaml").read_text()
        for file in directory.iterdir():
            if file.is_file() and file.name != "kustomization.yaml":
                assert file.name in text, file


def test_workloads_are_selected_by_what_belongs_to_them(objects):
    pods = {component: labels_of_pods(workload(objects, component)) for component in ("worker", "gateway")}
    for each in workloads(objects):
        component = labels_of_pods(each)["app.kubernetes.io/component"]
        selectors = [each["spec"]["selector"]]
        selectors += [spread["labelSelector"] for spread in pod(each)["topologySpreadConstraints"]]
        for rules in pod(each).get("affinity", {}).get("podAntiAffinity", {}).values():
            selectors += [rule.get("podAffinityTerm", rule)["labelSelector"] for rule in rules]
        for selector in selectors:
            assert [other for other, labels in pods.items() if fits(selector, labels)] == [component]
    owners = {
        "peeklock": "gateway",
        "peeklock-workers": "worker",
        "peeklock-worker": "worker",
        "peeklock-gateway": "gateway",
    }
    for each in of_kind(objects, "Service", "PodDisruptionBudget", "NetworkPolicy"):
        spec = each["spec"]
        if each["kind"] == "Service":
            selector = {"matchLabels": spec["selector"]}
        else:
            selector = spec["podSelector" if each["kind"] == "NetworkPolicy" else "selector"]
        found = [component for component, labels in pods.items() if fits(selector, labels)]
        assert found == [owners[each["metadata"]["name"]]], each["metadata"]["name"]


def _ports(objects, component):
    return {port["name"]: port["containerPort"] for port in container(workload(objects, component))["ports"]}


def test_services_lead_to_ports_of_their_pods(objects):
    for each in of_kind(objects, "Service"):
        ports = _ports(objects, each["metadata"]["labels"]["app.kubernetes.io/component"])
        for port in each["spec"]["ports"]:
            wanted = 443 if port["name"] == "https" else ports[port["targetPort"]]
            assert (port["targetPort"] in ports, port["port"]) == (True, wanted)
    stateful = workload(objects, "worker")
    service = named(objects, "Service", stateful["spec"]["serviceName"])
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"]


def _allowed(objects, direction, component):
    """What a policy lets into the pods of a component, or out of them: (components at the other end, ports), by rule.

    Another namespace is there by its name, and "all" is everybody.
    """
    [policy] = [
        each
        for each in of_kind(objects, "NetworkPolicy")
        if fits(each["spec"]["podSelector"], labels_of_pods(workload(objects, component)))
    ]
    assert set(policy["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    for rule in policy["spec"][direction]:
        peers = rule.get("from" if direction == "ingress" else "to")
        others = set() if peers else {"all"}
        for peer in peers or ():
            assert set(peer) in ({"podSelector"}, {"namespaceSelector"})
            if "podSelector" in peer:
                others |= {
                    name
                    for name in ("worker", "gateway")
                    if fits(peer["podSelector"], labels_of_pods(workload(objects, name)))
                }
            else:
                others |= set(peer["namespaceSelector"]["matchLabels"].values())
        yield frozenset(others), frozenset(port["port"] for port in rule["ports"])


def test_only_those_connect_who_have_to(objects):
    clients = frozenset(_ports(objects, "gateway")) - {"ops"}
    assert clients in ({"amqp", "http"}, {"amqps", "https"})
    monitoring = (frozenset({"monitoring"}), frozenset({"ops"}))
    assert set(_allowed(objects, "ingress", "worker")) == {
        (frozenset({"worker", "gateway"}), frozenset({"cluster"})),
        (frozenset({"gateway"}), frozenset({"journal"})),
        monitoring,
    }
    assert set(_allowed(objects, "ingress", "gateway")) == {(frozenset({"all"}), clients), monitoring}
    names = (frozenset({"all"}), frozenset({53}))
    assert set(_allowed(objects, "egress", "worker")) == {(frozenset({"worker"}), frozenset({"cluster"})), names}
    assert set(_allowed(objects, "egress", "gateway")) == {
        (frozenset({"worker"}), frozenset({"cluster", "journal"})),
        names,
    }
    assert {"cluster", "journal", "ops"} == set(_ports(objects, "worker"))


def _routes():
    return set(ops_pages(cast(OpsSource, None)))


def test_probes_ask_what_the_broker_answers(objects):
    for each in workloads(objects):
        for name, probe in probes(each):
            assert probe["httpGet"]["path"] in _routes(), name
            assert probe["httpGet"]["port"] == "ops"
            if probe["httpGet"]["path"] == "/readyz":
                assert probe["timeoutSeconds"] > ANSWER_SECONDS + 1  # else the reason is never heard
    worker, gateway = (dict(probes(workload(objects, name))) for name in ("worker", "gateway"))
    assert worker["readinessProbe"]["httpGet"]["path"] == "/readyz"  # a rolling update waits for the partitions
    assert gateway["startupProbe"]["httpGet"]["path"] == "/readyz"
    assert gateway["readinessProbe"]["httpGet"]["path"] == "/livez"  # not all of them away because of one partition


def test_a_stalled_worker_is_replaced_before_its_pod(objects, tmp_path):
    each = workload(objects, "worker")
    probe = dict(probes(each))["livenessProbe"]
    stall_seconds = Settings().worker_stall_timeout_ms / 1000
    assert probe["periodSeconds"] * probe["failureThreshold"] > 2 * stall_seconds


def test_pods_have_time_to_stop(objects):
    shutdown_seconds = Settings().shutdown_timeout_ms / 1000
    for each in workloads(objects):
        before = container(each).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", "0"])
        assert pod(each)["terminationGracePeriodSeconds"] > int(before[1]) + 1.5 * shutdown_seconds


def test_pods_have_no_rights(objects):
    user, group = map(int, image_user().split(":"))
    account = named(objects, "ServiceAccount", "peeklock")
    assert account["automountServiceAccountToken"] is False
    for each in workloads(objects):
        spec, broker_container = pod(each), container(each)
        assert spec["serviceAccountName"] == account["metadata"]["name"]
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC", "initContainers"} & set(spec)
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True
        assert (context["runAsUser"], context["runAsGroup"], context["fsGroup"]) == (user, group, group)
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert broker_container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        for volume in spec["volumes"]:
            mode = volume.get("secret", {}).get("defaultMode", 0o440)
            assert mode == 0o440  # the broker's group reads it, and others do not
        writable = [mount for mount in broker_container["volumeMounts"] if not mount.get("readOnly")]
        assert [mount["name"] for mount in writable] == (["data"] if each["kind"] == "StatefulSet" else ["run"])


def image_user():
    [user] = [line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("USER")]
    return user


def test_variables_of_services_are_kept_away(objects):
    """Kubernetes would set PEEKLOCK_PORT and others for the Service of that name."""
    assert named(objects, "Service", "peeklock")
    assert all(pod(each)["enableServiceLinks"] is False for each in workloads(objects))


def test_data_are_on_the_volume(objects):
    worker = workload(objects, "worker")
    [claim] = worker["spec"]["volumeClaimTemplates"]
    [mount] = [each for each in container(worker)["volumeMounts"] if each["name"] == claim["metadata"]["name"]]
    assert mount["mountPath"] == image_environment()["PEEKLOCK_DATA_DIR"]
    assert "PEEKLOCK_DATA_DIR" not in variables(objects, worker)
    assert claim["spec"]["accessModes"] == ["ReadWriteOnce"]


def test_pods_have_settings_that_the_broker_takes(overlay, tmp_path):
    for each in workloads(overlay):
        found: Any = settings(
            overlay, each, tmp_path, {} if each["kind"] == "Deployment" else {"PEEKLOCK_CLUSTER__OWNED": "[0]"}
        )
        ports = _ports(overlay, labels_of_pods(each)["app.kubernetes.io/component"])
        assert ports.pop("ops") == found.ops.port
        assert found.ops.host == "0.0.0.0"
        if each["kind"] == "Deployment":
            listened = {"amqp": found.amqp.port, "amqps": found.amqp.tls_port}
            listened |= {"http": found.http.port, "https": found.http.tls_port}
            assert ports == {name: port for name, port in listened.items() if port is not None}
            assert found.amqp.host == found.http.host == "0.0.0.0"
            assert found.gateways == 1
        else:
            assert found.cluster.listen == f"0.0.0.0:{ports['cluster']}"
            assert found.cluster.journal_listen == f"0.0.0.0:{ports['journal']}"
        assert found.security.root_key is not None
        assert found.queues


# The variables of our own that are no settings: the command of the workers reads them.
OWN_VARIABLES = {"PARTITIONS_PER_WORKER", "POD_NAME"}


def test_variables_are_settings_or_our_own(overlay):
    for each in workloads(overlay):
        unknown = {name for name in variables(overlay, each) if not name.startswith("PEEKLOCK_")}
        assert unknown <= OWN_VARIABLES


def _partitions_of(objects, ordinal, tmp_path):
    """The arguments with which the command of a worker calls peeklock; `seq` and the shell are real."""
    program = tmp_path / "bin" / "peeklock"
    program.parent.mkdir(exist_ok=True)
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    worker = workload(objects, "worker")
    name = f"{worker['metadata']['name']}-{ordinal}"
    said = subprocess.run(
        container(worker)["command"],
        env=variables(objects, worker)
        | {"POD_NAME": name, "PATH": f"{program.parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    command, flag, partitions = said.stdout.splitlines()
    assert (command, flag) == ("worker", "--partitions")
    return [int(each) for each in partitions.split(",")]


def test_every_partition_has_one_worker(overlay, tmp_path):
    worker = workload(overlay, "worker")
    replicas = worker["spec"]["replicas"]
    found = variables(overlay, worker)
    owned = [partition for ordinal in range(replicas) for partition in _partitions_of(overlay, ordinal, tmp_path)]
    assert sorted(owned) == list(range(int(found["PEEKLOCK_PARTITIONS"])))
    assert _partitions_of(overlay, 0, tmp_path)[0] == 0  # the home


def test_a_worker_of_two_digits_has_its_partitions(tmp_path):
    objects = build("production")
    assert _partitions_of(objects, 11, tmp_path) == [44, 45, 46, 47]


def _addresses(objects):
    return json.loads(variables(objects, workload(objects, "gateway"))["PEEKLOCK_CLUSTER__WORKERS"])


def test_gateways_and_workers_know_all_workers(overlay):
    worker = workload(overlay, "worker")
    name, service = worker["metadata"]["name"], worker["spec"]["serviceName"]
    for port_name, variable in (("cluster", "WORKERS"), ("journal", "JOURNALS")):
        port = _ports(overlay, "worker")[port_name]
        wanted = [f"{name}-{ordinal}.{service}:{port}" for ordinal in range(worker["spec"]["replicas"])]
        assert port_name != "cluster" or _addresses(overlay) == wanted
        assert all(
            variables(overlay, each)[f"PEEKLOCK_CLUSTER__{variable}"] == json.dumps(wanted, separators=(",", ":"))
            for each in workloads(overlay)
        )


def _secrets(workload):
    volumes = {volume["secret"]["secretName"] for volume in pod(workload)["volumes"] if "secret" in volume}
    keys = {
        each["valueFrom"]["secretKeyRef"]["name"]
        for each in container(workload)["env"]
        if "secretKeyRef" in each.get("valueFrom", {})
    }
    return volumes | keys


def _plain_name(secret):
    """Without the digest that kustomize adds to what it makes."""
    return "peeklock-root-key" if secret.startswith("peeklock-root-key") else secret


@pytest.mark.parametrize("name", OVERLAYS)
def test_secrets_are_made_or_asked_for(name):
    objects = build(name)
    asked = (KUBERNETES / "overlays" / name / "kustomization.yaml").read_text()
    for each in workloads(objects):
        secrets = _secrets(each)
        assert {"peeklock-root-key", "peeklock-cluster-tls"} <= {_plain_name(secret) for secret in secrets}
        for secret in secrets:
            assert named(objects, "Secret", secret) or f" {secret} " in asked, secret


def test_no_key_is_in_the_manifests_of_production():
    assert of_kind(build("production", ("cert-manager", "pod-monitor")), "Secret") == []


@pytest.mark.parametrize("name", OVERLAYS)
def test_certificates_are_for_the_names_of_the_workers(name):
    objects = build(name, ("cert-manager",))
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(objects, "Certificate")}
    issuers = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "Issuer")}
    used = certificates["peeklock-cluster-tls"]
    assert {address.rpartition(":")[0] for address in _addresses(objects)} <= set(used["dnsNames"])
    assert {"server auth", "client auth"} <= set(used["usages"])
    authority = certificates[issuers[used["issuerRef"]["name"]]["ca"]["secretName"]]
    assert authority["isCA"] is True
    assert "selfSigned" in issuers[authority["issuerRef"]["name"]]
    # What clients see is of another authority: that of the cluster makes gateways.
    assert "peeklock-amqp-tls" not in certificates


def test_the_monitor_scrapes_every_pod():
    objects = build("production", ("pod-monitor",))
    [monitor] = of_kind(objects, "PodMonitor")
    for each in workloads(objects):
        assert fits(monitor["spec"]["selector"], labels_of_pods(each))
        for endpoint in monitor["spec"]["podMetricsEndpoints"]:
            assert endpoint["port"] in {port["name"] for port in container(each)["ports"]}
            assert endpoint["path"] in _routes()


def test_production_survives_the_loss_of_a_node():
    objects = build("production")
    worker, gateway = workload(objects, "worker"), workload(objects, "gateway")
    assert worker["spec"]["replicas"] >= 3
    assert worker["spec"]["podManagementPolicy"] == "Parallel"
    [rule] = pod(worker)["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert rule["topologyKey"] == "kubernetes.io/hostname"
    [scaler] = of_kind(objects, "HorizontalPodAutoscaler")
    assert scaler["spec"]["minReplicas"] >= 2
    target = scaler["spec"]["scaleTargetRef"]
    assert named(objects, target["kind"], target["name"]) == gateway
    assert target["apiVersion"] == gateway["apiVersion"]
    assert "replicas" not in gateway["spec"]  # it is the autoscaler's
    assert "cpu" in container(gateway)["resources"]["requests"]  # utilization is of the request
    budgets = {each["metadata"]["name"]: each["spec"] for each in of_kind(objects, "PodDisruptionBudget")}
    assert budgets[worker["metadata"]["name"]]["maxUnavailable"] == 1
    assert budgets[gateway["metadata"]["name"]]["minAvailable"] == "50%"  # with two gateways one may go


def test_clients_of_production_use_tls():
    objects = build("production")
    found = variables(objects, workload(objects, "gateway"))
    assert (found["PEEKLOCK_AMQP__PORT"], found["PEEKLOCK_HTTP__PORT"]) == ("off", "off")
    assert [port["port"] for port in named(objects, "Service", "peeklock")["spec"]["ports"]] == [5671, 443]


def test_production_runs_this_version():
    for each in workloads(build("production")):
        assert container(each)["image"] == f"peeklock:{broker.__version__}"


def test_workers_can_be_updated_before_gateways(objects):
    """As docs/operating.md does it: first everything that is not labelled as a gateway's."""
    first = [
        each for each in objects if each["metadata"].get("labels", {}).get("app.kubernetes.io/component") != "gateway"
    ]
    worker = workload(objects, "worker")
    assert worker in first
    assert workload(objects, "gateway") not in first
    used = [source["configMapRef"]["name"] for source in container(worker)["envFrom"]]
    used += [volume["configMap"]["name"] for volume in pod(worker)["volumes"] if "configMap" in volume]
    assert all(named(tuple(first), "ConfigMap", name) for name in used)


def test_stores_are_full_before_their_volume(overlay):
    worker = workload(overlay, "worker")
    [volume] = [each for each in pod(worker)["volumes"] if each["name"] == "settings"]
    store = tomllib.loads(named(overlay, "ConfigMap", volume["configMap"]["name"])["data"]["peeklock.toml"])["store"]
    partitions = int(variables(overlay, worker)["PARTITIONS_PER_WORKER"])
    size = worker["spec"]["volumeClaimTemplates"][0]["spec"]["resources"]["requests"]["storage"]
    volume_bytes = int(size.removesuffix("Gi")) << 30
    log_bytes = 2 * Settings().store.log_bytes
    assert partitions * store["map_size_bytes"] + log_bytes + Settings().store.min_free_disk_bytes < volume_bytes


def test_the_kustomization_of_the_documentation_builds(tmp_path):
    """With the checkout as its folder peeklock."""
    text = (ROOT / "docs" / "operating.md").read_text()
    [example] = re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    place = tmp_path / "own"
    place.mkdir()
    shutil.copytree(KUBERNETES, tmp_path / "own" / "peeklock" / "deploy" / "kubernetes")
    (place / "kustomization.yaml").write_text(example)
    (place / "peeklock.toml").write_text('namespace = "mine"\n')
    objects = built(place)
    for each in workloads(objects):
        assert container(each)["image"] == f"registry.example.net/peeklock:{broker.__version__}"
        [volume] = [volume for volume in pod(each)["volumes"] if volume["name"] == "settings"]
        assert named(objects, "ConfigMap", volume["configMap"]["name"])["data"] == {
            "peeklock.toml": 'namespace = "mine"\n'
        }
    assert {each["kind"] for each in objects} == {each["kind"] for each in build("production", tuple(COMPONENTS))}


def test_the_documentation_names_overlays_and_components():
    text = (ROOT / "docs" / "operating.md").read_text()
    for name in OVERLAYS:
        assert f"overlays/{name}" in text
    for name in COMPONENTS:
        assert f"components/{name}" in text
