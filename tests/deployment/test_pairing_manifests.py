"""The manifests of deploy/kubernetes/pairing: two namespaces, the syphon, and an application with its sidecar."""

import functools
import re
from typing import Any

import kubernetes_validate
import pytest

from broker.pairing.syphon.syphon import STOP_SECONDS
from broker.settings.sources import load
from tests.deployment.command_line import options
from tests.deployment.manifests import (
    KUBERNETES,
    ROOT,
    Object,
    build,
    built,
    fits,
    labels_of_pods,
    named,
    of_kind,
    pod,
    workloads,
)

PLACES = ("primary", "secondary", "application")
SERVED_VERSIONS = ("1.25", kubernetes_validate.latest_version())
OURS = {"secondary": "syphon", "application": "sidecar"}  # place: the container that is of the pairing


@functools.cache
def objects(place: str) -> tuple[Object, ...]:
    return built(KUBERNETES / "pairing" / place)


def of_pairing(place: str) -> tuple[Object, Object]:
    """The workload that stands beside the namespaces, and its container."""
    for each in workloads(objects(place)):
        for container in pod(each)["containers"]:
            if container["name"] == OURS[place]:
                return each, container
    raise AssertionError(place)


@pytest.mark.parametrize("version", SERVED_VERSIONS)
@pytest.mark.parametrize("place", PLACES)
def test_every_object_is_one_of_the_api(place, version):
    for each in objects(place):
        kubernetes_validate.validate(each, version, strict=True)


@pytest.mark.parametrize("place", PLACES)
def test_all_is_in_one_namespace_under_names_of_its_own(place):
    assert {each["metadata"]["namespace"] for each in objects(place)} == {f"peeklock-{place}"}
    names = [(each["kind"], each["metadata"]["name"]) for each in objects(place)]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("place", ["primary", "secondary"])
def test_both_namespaces_are_overlays_with_settings_of_their_own(place, tmp_path):
    found = {(each["kind"], _plain(each["metadata"]["name"])) for each in objects(place)}
    assert {(each["kind"], _plain(each["metadata"]["name"])) for each in build("development")} <= found
    [volume] = [each for each in pod(workloads(objects(place))[0])["volumes"] if each["name"] == "settings"]
    config_map = named(objects(place), "ConfigMap", volume["configMap"]["name"])
    (tmp_path / "peeklock.toml").write_text(config_map["data"]["peeklock.toml"])
    settings = load(tmp_path / "peeklock.toml", environment={}).settings
    assert settings.namespace == place
    if place == "primary":
        assert [(each.name, each.requires_duplicate_detection) for each in settings.queues] == [("orders", True)]


def _plain(name: str) -> str:
    """Without the digest that kustomize adds to what it makes."""
    return re.sub(r"-[0-9a-z]{10}$", "", name)


@pytest.mark.parametrize("place", OURS)
def test_the_commands_are_commands_of_peeklock(place):
    _, container = of_pairing(place)
    found = options(container["args"])
    assert found["ops_host"] == "0.0.0.0"
    assert [port["containerPort"] for port in container["ports"]] == [found["ops_port"]]
    if place == "application":
        assert found["listen"].startswith("127.0.0.1:")  # nobody but the pod itself


def test_both_mean_the_same_backlog_queues():
    arguments: list[Any] = [of_pairing(place)[1]["args"] for place in OURS]
    assert {each[each.index("--primary-name") + 1] for each in arguments} == {"primary"}


@pytest.mark.parametrize("place", OURS)
def test_keys_come_from_a_secret_that_the_kustomization_asks_for(place):
    text = (KUBERNETES / "pairing" / place / "kustomization.yaml").read_text()
    asked = re.findall(r"^# {3}(?:peeklock-pairing| {16}) {3}(\w+) ", text, re.MULTILINE)
    each, _ = of_pairing(place)
    variables = [variable for container in pod(each)["containers"] for variable in container["env"]]
    references = [variable["valueFrom"]["secretKeyRef"] for variable in variables]
    assert {reference["name"] for reference in references} == {"peeklock-pairing"}
    assert {reference["key"] for reference in references} == set(asked)
    assert not named(objects(place), "Secret", "peeklock-pairing")


@pytest.mark.parametrize("place", OURS)
def test_pods_have_no_rights(place):
    [user] = [line.split()[1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("USER")]
    each, _ = of_pairing(place)
    spec = pod(each)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # it would set PEEKLOCK_PORT and others
    assert not {"hostNetwork", "hostPID", "hostIPC", "volumes"} & set(spec)
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert f"{context['runAsUser']}:{context['runAsGroup']}" == user
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("place", OURS)
def test_probes_ask_the_operations_endpoint(place):
    """A pod stays alive while the process does, and ready while it can do its work."""
    _, container = of_pairing(place)
    for probe, path in {"readinessProbe": "/readyz", "livenessProbe": "/healthz"}.items():
        assert container[probe]["httpGet"] == {"path": path, "port": "ops"}


@pytest.mark.parametrize("place", OURS)
def test_pods_have_time_to_stop(place):
    each, _ = of_pairing(place)
    assert pod(each)["terminationGracePeriodSeconds"] > 2 * STOP_SECONDS


def test_there_are_two_syphons_on_two_nodes_if_there_are_two():
    each, container = of_pairing("secondary")
    assert each["spec"]["replicas"] == 2
    [spread] = pod(each)["topologySpreadConstraints"]
    labels = labels_of_pods(each)
    [policy] = [
        found for found in of_kind(objects("secondary"), "NetworkPolicy") if fits(found["spec"]["podSelector"], labels)
    ]
    for selector in (each["spec"]["selector"], spread["labelSelector"], policy["spec"]["podSelector"]):
        others = [other for other in workloads(objects("secondary")) if fits(selector, labels_of_pods(other))]
        assert others == [each]
    assert [port["port"] for port in policy["spec"]["ingress"][0]["ports"]] == [container["ports"][0]["name"]]


def test_the_monitor_scrapes_the_syphon_too():
    [monitor] = of_kind(build("production", ("pod-monitor",)), "PodMonitor")
    each, container = of_pairing("secondary")
    assert fits(monitor["spec"]["selector"], labels_of_pods(each))
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= {
        port["name"] for port in container["ports"]
    }
