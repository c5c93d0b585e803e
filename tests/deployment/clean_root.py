"""The steps of a Dockerfile in a clean root of Debian.

There need not be an engine for containers: debootstrap makes the root of Debian that python:3.11-slim has, with
Debian's own Python 3.11 in it, and the steps are read from the Dockerfile and run in it as they are written. The final
stage has a root of its own, which has never had a compiler. How to reach a mirror of Debian and an index of Python's
packages is taken from this machine's settings.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.brokers import REPOSITORY

SUITE = "bookworm"
PACKAGES = "python3,python3-venv,libpython3-dev,ca-certificates"  # that image has Python's headers, too


class Stage(NamedTuple):
    name: str
    steps: list[tuple[str, str]]  # instruction, arguments


def stages(dockerfile: str) -> list[Stage]:
    text = re.sub(r"^\s*#.*\n", "", (REPOSITORY / dockerfile).read_text(), flags=re.MULTILINE)
    found: list[Stage] = []
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        if line.strip():
            instruction, _, arguments = line.partition(" ")
            if instruction == "FROM":
                assert arguments.startswith("python:3.11-slim"), "the root below is that of this image"
                found.append(Stage(arguments.rpartition(" AS ")[2], []))
            else:
                found[-1].steps.append((instruction, arguments.strip()))
    return found


def mirror() -> list[str]:
    """That of this machine as an argument of debootstrap, which has one of its own if there is none."""
    for file in (Path("/etc/apt/sources.list.d/debian.sources"), Path("/etc/apt/sources.list")):
        if file.is_file() and (found := re.search(r"^(?:URIs: |deb )(\S+)", file.read_text(), re.MULTILINE)):
            return [found[1]]
    return []


def lend_settings(root: Path) -> None:
    """How this machine reaches the network: its resolver, apt's and pip's settings, and files that these name."""
    named = [Path(value) for name, value in os.environ.items() if name.startswith("PIP_") and value.startswith("/")]
    for file in ("/etc/pip.conf", "/root/.config/pip/pip.conf"):
        if Path(file).is_file():
            named += [Path(each) for each in re.findall(r"=\s*(/\S+)", Path(file).read_text())] + [Path(file)]
    apt = Path("/etc/apt/apt.conf.d")
    named += [each for each in apt.glob("*") if "roxy" in each.read_text() or "CaInfo" in each.read_text()]
    for each in [Path("/etc/hosts"), Path("/etc/resolv.conf"), Path("/etc/ssl/certs/ca-certificates.crt"), *named]:
        if each.exists():
            target = Path(f"{root}{each}")
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True) if not each.is_dir() else None
            shutil.copytree(each, target, dirs_exist_ok=True) if each.is_dir() else shutil.copy(each, target)


class Image:
    """A root in which the steps of a stage are done."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.chmod(0o755)  # it is / to every user inside
        self.work = "/"
        self.environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "DEBIAN_FRONTEND": "noninteractive"}
        self.settings: dict[str, str] = {}

    def command(self, *command: str, user: str = "0:0") -> list[str]:
        """In mounts of its own, so that none is left."""
        script = (
            'mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" && exec chroot --userspec="$1" "$0" "${@:2}"'
        )
        enter = ["sh", "-c", f"cd {shlex.quote(self.work)} && exec {shlex.join(command)}"]
        return ["unshare", "--mount", "bash", "-c", script, str(self.root), user, *enter]

    def do(self, step: tuple[str, str], images: dict[str, "Image"]) -> None:
        instruction, arguments = step
        match instruction:
            case "RUN":
                lent = {
                    name: value
                    for name, value in os.environ.items()
                    if name.startswith("PIP_") or "proxy" in name.lower()
                }
                subprocess.run(
                    self.command("sh", "-c", arguments),
                    env=lent | self.environment,
                    check=True,
                    stdin=subprocess.DEVNULL,
                )
            case "WORKDIR":
                self.work = arguments
                self.inside(arguments).mkdir(parents=True, exist_ok=True)
            case "COPY":
                *options, target = arguments.split()
                source_root = REPOSITORY
                if options[0].startswith("--from="):
                    source_root = images[options.pop(0).removeprefix("--from=")].root
                self.copy([source_root / each.lstrip("/") for each in options], target)
            case "ENV":
                for pair in shlex.split(arguments):
                    name, value = pair.split("=", 1)
                    self.environment[name] = value.replace("$PATH", self.environment["PATH"])
            case _:
                self.settings[instruction] = arguments

    def inside(self, path: str) -> Path:
        return self.root / os.path.normpath(f"{self.work}/{path}" if not path.startswith("/") else path).lstrip("/")

    def copy(self, sources: list[Path], target: str) -> None:
        place = self.inside(target)
        is_directory = target.endswith("/") or len(sources) > 1
        for source in sources:
            to = place / source.name if is_directory and not source.is_dir() else place
            to.parent.mkdir(parents=True, exist_ok=True)
            ignored = shutil.ignore_patterns("__pycache__") if source.is_relative_to(REPOSITORY) else None
            shutil.copytree(
                source, to, symlinks=True, dirs_exist_ok=True, ignore=ignored
            ) if source.is_dir() else shutil.copy(source, to)


def make_base(root: Path) -> None:
    """Make the root that all stages begin with. Raises CalledProcessError."""
    command = ["debootstrap", "--variant=minbase", f"--include={PACKAGES}", SUITE, str(root), *mirror()]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL)
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    lend_settings(root)


def build(dockerfile: str, base: Path, place: Callable[[], Path]) -> Image:
    """Do the steps of a Dockerfile, each stage in a copy of `base` in a new directory that `place` makes."""
    made: dict[str, Image] = {}
    for stage in stages(dockerfile):
        root = place()
        subprocess.run(["cp", "-a", f"{base}/.", str(root)], check=True)
        made[stage.name] = built = Image(root)
        for step in stage.steps:
            built.do(step, made)
    return built
