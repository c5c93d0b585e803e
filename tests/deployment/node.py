"""Runs pods as processes of this machine: a container's command in its environment, with files in place of volumes."""

import re
import subprocess
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from tests.deployment.kubernetes_api import KubernetesApi
from tests.patience import PATIENCE_S

Object = dict[str, Any]
_OF_THE_POD: Final = {"status.podIP": "127.0.0.1"}


class Node:
    """The pods of one API, each with one container.

    `entrypoint` and `image` (its variables) are the image's, and `machine` are variables that count for more. `texts`
    are what stands in pods and ConfigMaps and has another name here: directories of the image and of volumes, and the
    address of the API. A ConfigMap becomes a directory of its pod.
    """

    def __init__(
        self,
        api: KubernetesApi,
        here: Path,
        entrypoint: Path,
        image: dict[str, str],
        machine: dict[str, str],
        texts: dict[str, str],
    ) -> None:
        self._api = api
        self._here = here
        self._entrypoint = entrypoint
        self._image = image
        self._machine = machine
        self._texts = texts
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> "Node":
        self._api.on_pod = self._run_to_its_end
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:
            for process in self._running.values():
                stack.callback(process.wait, PATIENCE_S)
                process.kill()

    def directory(self, pod: Object) -> Path:
        return self._here / str(pod["metadata"]["name"])

    def logs(self) -> dict[str, str]:
        return {each.parent.name: each.read_text()[-4000:] for each in self._here.glob("*/log")}

    def start(self, pod: Object) -> subprocess.Popen[bytes]:
        """Start the container of a pod."""
        [container] = pod["spec"]["containers"]
        texts = self._texts | self._mounted(pod, container)
        own = {each["name"]: self._value(pod, each) for each in container.get("env", [])}
        for source in container.get("envFrom", []):
            own |= self._config_map(pod, source["configMapRef"]["name"])
        environment = {name: _replaced(value, texts) for name, value in (self._image | own).items()}
        arguments = [_replaced(each, texts) for each in container["args"]]
        work = self.directory(pod) / "work-dir"
        work.mkdir(parents=True)
        with (self.directory(pod) / "log").open("wb") as log:
            process = subprocess.Popen(
                [self._entrypoint, *arguments],
                env=environment | self._machine,
                cwd=work,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._running[pod["metadata"]["name"]] = process
        return process

    def _run_to_its_end(self, pod: Object) -> None:
        process = self.start(pod)
        [container] = pod["spec"]["containers"]
        state: Object = {"running": {"startedAt": "2026-01-01T00:00:00Z"}}
        status = {"name": container["name"], "image": container["image"], "ready": True, "state": state}
        self._api.set_status(pod, phase="Running", podIP="127.0.0.1", containerStatuses=[status])
        code = process.wait()
        state = {"terminated": {"exitCode": code, "reason": "Error" if code else "Completed"}}
        phase = "Failed" if code else "Succeeded"
        self._api.set_status(pod, phase=phase, containerStatuses=[status | {"ready": False, "state": state}])

    def _mounted(self, pod: Object, container: Object) -> dict[str, str]:
        """Where the pod's own volumes are here, with the files of ConfigMaps in them."""
        mounts = {each["name"]: each["mountPath"] for each in container.get("volumeMounts", [])}
        volumes = [each for each in pod["spec"].get("volumes", []) if {"emptyDir", "configMap"} & set(each)]
        volumes = [each for each in volumes if mounts[each["name"]] != "/tmp"]  # which processes here share
        places = {mounts[each["name"]]: self.directory(pod) / "volumes" / each["name"] for each in volumes}
        found = {path: str(place) for path, place in places.items()}
        for volume in volumes:
            place = places[mounts[volume["name"]]]
            place.mkdir(parents=True)
            if "configMap" in volume:
                texts = self._texts | self._names() | found
                items = {each["key"]: each["path"] for each in volume["configMap"].get("items", [])}
                for key, text in self._config_map(pod, volume["configMap"]["name"]).items():
                    name = items.get(key, key)
                    is_template = name.endswith((".yaml", ".yml"))  # of pods, whose paths are those of their own
                    (place / name).write_text(text if is_template else _replaced(text, texts))
        return found

    def _names(self) -> dict[str, str]:
        """As the cluster's resolver has them: headless services of single pods."""
        services = [key for key in self._api.objects if key[0] == "services"]
        return {f"{name}.{namespace}.svc": "127.0.0.1" for _, namespace, name in services}

    def _config_map(self, pod: Object, name: str) -> dict[str, str]:
        """Waits until it is there: spark-submit makes the pod of a driver first."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self._api.objects.get(("configmaps", pod["metadata"]["namespace"], name))) is None:
            assert time.monotonic() < deadline, name
            time.sleep(0.1)
        return dict(found["data"])

    @staticmethod
    def _value(pod: Object, variable: Object) -> str:
        if "valueFrom" not in variable:
            return str(variable.get("value") or "")
        field = variable["valueFrom"]["fieldRef"]["fieldPath"]
        part, _, name = field.partition(".")
        return _OF_THE_POD.get(field) or str(pod[part][name])


def _replaced(text: str, texts: dict[str, str]) -> str:
    """In one pass, and whole paths only: file:///pipeline/x begins with the path /pipeline, /opt/pipeline does not."""
    names = "|".join(re.escape(each) for each in sorted(texts, key=len, reverse=True))
    return re.sub(rf"(?:(?<=://)|(?<![\w/.-]))({names})(?![\w-])", lambda match: texts[match[1]], text)


def image_environment(dockerfile: str) -> dict[str, str]:
    """The variables of an image's last ENV."""
    text = re.sub(r"\\\n\s*", " ", dockerfile)
    return dict(each.split("=", 1) for each in re.findall(r"^ENV (.*)$", text, re.MULTILINE)[-1].split())
