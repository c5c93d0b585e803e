"""The manifests of deploy/kubernetes as a cluster gets them, and what the broker would make of them."""

import functools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from broker.settings.config import Settings
from broker.settings.sources import load
from tests.caller import REQUIRE_DEPLOYMENT
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy" / "kubernetes"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
COMPONENTS = sorted(path.name for path in (KUBERNETES / "components").iterdir())
BUILDS = [
    (overlay, components) for overlay in OVERLAYS for components in ((), *((c,) for c in COMPONENTS), (*COMPONENTS,))
]
"""(overlay, components): each overlay alone, with each component, and with all of them."""

NAMESPACE = "peeklock"

Object = dict[str, Any]


def skip_or_fail(reason: str) -> None:
    (pytest.fail if REQUIRE_DEPLOYMENT else pytest.skip)(reason)


@functools.cache
def kustomize() -> tuple[str, ...] | None:
    """The command that builds a kustomization; None if there is none that knows components (kubectl before 1.21)."""
    if kubectl := shutil.which("kubectl"):
        said = subprocess.run(
            [kubectl, "version", "--client"], capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        if re.search(r"Kustomize Version: v([5-9]|\d\d)\.", said.stdout):
            return kubectl, "kustomize"
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    program = shutil.which("kustomize", path=path)
    return (program, "build") if program else None


@functools.cache
def build(overlay: str, components: tuple[str, ...] = ()) -> tuple[Object, ...]:
    """The objects of an overlay with some components, as in a kustomization that a user writes."""
    with tempfile.TemporaryDirectory() as directory:
        here = Path(directory).resolve()
        own = {
            "namespace": NAMESPACE,
            "resources": [os.path.relpath(KUBERNETES / "overlays" / overlay, here)],
            "components": [os.path.relpath(KUBERNETES / "components" / each, here) for each in components],
        }
        (here / "kustomization.yaml").write_text(yaml.safe_dump(own))
        return built(here)


def built(directory: Path) -> tuple[Object, ...]:
    """The objects of the kustomization in a directory."""
    command = kustomize()
    if command is None:
        skip_or_fail("neither kubectl 1.27 or later nor kustomize 5 is installed")
        raise AssertionError
    done = subprocess.run([*command, str(directory)], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "a warning, as of a field that is deprecated"
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(objects: tuple[Object, ...], *kinds: str) -> list[Object]:
    return [each for each in objects if each["kind"] in kinds]


def workloads(objects: tuple[Object, ...]) -> list[Object]:
    return of_kind(objects, "StatefulSet", "Deployment")


def workload(objects: tuple[Object, ...], component: str) -> Object:
    [found] = [each for each in workloads(objects) if labels_of_pods(each)["app.kubernetes.io/component"] == component]
    return found


def labels_of_pods(workload: Object) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def pod(workload: Object) -> Object:
    return dict(workload["spec"]["template"]["spec"])


def container(workload: Object) -> Object:
    [only] = pod(workload)["containers"]
    return dict(only)


def named(objects: tuple[Object, ...], kind: str, name: str) -> Object | None:
    return next((each for each in of_kind(objects, kind) if each["metadata"]["name"] == name), None)


def fits(selector: Object, labels: dict[str, str]) -> bool:
    """True if a label selector takes these labels. An empty selector takes all."""
    for key, value in selector.get("matchLabels", {}).items():
        if labels.get(key) != value:
            return False
    for each in selector.get("matchExpressions", []):
        assert each["operator"] == "In", "another operator needs its meaning here"
        if labels.get(each["key"]) not in each["values"]:
            return False
    return True


def image_environment() -> dict[str, str]:
    """The variables that the image sets, by the last ENV of the Dockerfile."""
    text = re.sub(r"\\\n\s*", " ", (ROOT / "Dockerfile").read_text())
    pairs = re.findall(r"^ENV (.*)$", text, re.MULTILINE)[-1].split()
    return dict(pair.split("=", 1) for pair in pairs)


def variables(objects: tuple[Object, ...], workload: Object) -> dict[str, str]:
    """The environment of a pod's container beyond the image's; what comes from a Secret or from the pod is a mark."""
    found: dict[str, str] = {}
    for source in container(workload).get("envFrom", []):
        config_map = named(objects, "ConfigMap", source["configMapRef"]["name"])
        assert config_map, source
        found |= config_map["data"]
    for each in container(workload).get("env", []):
        found[each["name"]] = each["value"] if "value" in each else f"<{each['name']}>"
    return found


def settings(objects: tuple[Object, ...], workload: Object, here: Path, more: dict[str, str] | None = None) -> Settings:
    """The settings that a pod's broker reads. `here` takes the place of the root of the file system.

    Raises ConfigurationError, also for variables that are no settings.
    """
    environment = image_environment() | variables(objects, workload) | (more or {})
    mounts = {mount["name"]: mount["mountPath"] for mount in container(workload)["volumeMounts"]}
    for volume in pod(workload)["volumes"]:
        place = here / mounts[volume["name"]].lstrip("/")
        place.mkdir(parents=True, exist_ok=True)
        if "configMap" in volume:
            config_map = named(objects, "ConfigMap", volume["configMap"]["name"])
            assert config_map, volume
            for name, text in config_map["data"].items():
                (place / name).write_text(text)
        elif "secret" in volume:
            for name in ("tls.crt", "tls.key", "ca.crt"):
                (place / name).touch()
    for name, value in environment.items():
        if any(value.startswith(f"{mount}/") for mount in mounts.values()):
            environment[name] = str(here / value.lstrip("/"))
    return load(environment=environment).settings


def probes(workload: Object) -> Iterator[tuple[str, Object]]:
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        yield name, container(workload)[name]
