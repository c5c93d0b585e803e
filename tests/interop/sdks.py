"""Installs the SDKs, pinned, and builds the programs: `python tests/interop/sdks.py [TOOLCHAIN...]`.

Everything goes to `.build/` here, or to INTEROP_CACHE. What is installed is kept until the files that pin it
change. Needs python with venv, node and npm, go, a JDK and maven, and .NET; `missing_tools` says what one lacks.
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
CACHE = Path(os.environ.get("INTEROP_CACHE", HERE / ".build")).resolve()
DOCS = HERE.parent.parent / "docs" / "first-message"
INSTALL_TIMEOUT_S = 600


@dataclass(frozen=True)
class Toolchain:
    """What programs of one language need. `sources` decide whether what was made from them is still good."""

    name: str
    tools: tuple[str, ...]
    sources: tuple[Path, ...]
    install: Callable[[Path], None]

    @property
    def directory(self) -> Path:
        return CACHE / self.name

    @property
    def _stamp(self) -> Path:
        return self.directory / "installed"

    def _fingerprint(self) -> str:
        files = (file for source in self.sources for file in (source.rglob("*") if source.is_dir() else [source]))
        digest = hashlib.sha256(str(self.directory).encode())
        for file in sorted(file for file in files if file.is_file()):
            digest.update(file.relative_to(HERE.parent.parent).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
        return digest.hexdigest()

    def missing_tools(self) -> list[str]:
        return [tool for tool in self.tools if shutil.which(tool) is None]

    def installed(self) -> bool:
        return self._stamp.is_file() and self._stamp.read_text() == self._fingerprint()

    def ensure(self) -> None:
        """Install and build unless that is done, or being done by another process, which is waited for.

        Raises CalledProcessError, OSError or TimeoutExpired.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        with (self.directory / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # let go when the file is closed
            if self.installed():
                return
            self._stamp.unlink(missing_ok=True)
            self.install(self.directory)
            self._stamp.write_text(self._fingerprint())


def _run(*command: str | Path, cwd: Path, **environment: str) -> None:
    subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, **environment},
        check=True,
        timeout=INSTALL_TIMEOUT_S,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
    )


def _python(*requirements: Path) -> Callable[[Path], None]:
    def install(directory: Path) -> None:
        # Our own pip installs, and only what is imported is compiled: that takes a fifth of the time.
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", directory / "venv", cwd=directory)
        pip = (sys.executable, "-m", "pip", "--python", directory / "venv" / "bin" / "python")
        options = ("--quiet", "--disable-pip-version-check", "--no-compile")
        _run(*pip, "install", *options, *(f"--requirement={file}" for file in requirements), cwd=directory)

    return install


def _javascript(directory: Path) -> None:
    # Modules are found from the importing file upwards, so sources lie beside them: linked, to be the ones of the tree.
    for folder, files in (("programs", HERE / "javascript"), ("first", DOCS / "javascript")):
        target = directory / folder
        target.mkdir(exist_ok=True)
        for file in files.iterdir():
            if file.is_file():
                shutil.copy(file, target / file.name)
        _run("npm", "ci", "--silent", "--no-audit", "--no-fund", cwd=target)


def _go(directory: Path) -> None:
    programs = {name: HERE / "go" / name for name in ("outage", "waits")}
    for name, source in {"program": HERE / "go", **programs, "first": DOCS / "go"}.items():
        _run("go", "build", "-o", directory / name, ".", cwd=source, GOFLAGS="-buildvcs=false -mod=readonly")


def _java(directory: Path) -> None:
    for name, source in (("programs", HERE / "java"), ("first", DOCS / "java")):
        target = directory / name
        goals = ("compile", "dependency:copy-dependencies", f"-DoutputDirectory={target / 'lib'}")
        _run("mvn", "-q", "-B", "-f", source / "pom.xml", f"-DbuildDirectory={target}", *goals, cwd=directory)


def _dotnet(directory: Path) -> None:
    for name, project in (("programs", HERE / "dotnet"), ("first", DOCS / "dotnet")):
        target = directory / name
        # Servers of the compiler would outlive the build.
        options = ("--configuration", "Release", "--nologo", "--verbosity", "quiet", "--disable-build-servers")
        _run("dotnet", "build", *options, "--artifacts-path", target / "build", "--output", target, cwd=project)


def _python_toolchain(name: str, *requirements: Path) -> Toolchain:
    return Toolchain(name, (), requirements, _python(*requirements))


_TOOLCHAINS = (
    _python_toolchain("python-7.14.3", HERE / "python" / "requirements-7.14.3.txt"),
    _python_toolchain(
        "python-7.15.0", HERE / "python" / "requirements-7.15.0.txt", DOCS / "python" / "requirements.txt"
    ),
    _python_toolchain("celery", HERE / "celery" / "requirements.txt"),
    _python_toolchain("proton", HERE / "proton" / "requirements.txt"),
    Toolchain("javascript", ("node", "npm"), (HERE / "javascript", DOCS / "javascript"), _javascript),
    Toolchain("go", ("go",), (HERE / "go", DOCS / "go"), _go),
    Toolchain("java", ("java", "javac", "mvn"), (HERE / "java", DOCS / "java"), _java),
    Toolchain("dotnet", ("dotnet",), (HERE / "dotnet", DOCS / "dotnet"), _dotnet),
)
TOOLCHAINS = {toolchain.name: toolchain for toolchain in _TOOLCHAINS}


@dataclass(frozen=True)
class Program:
    """A program and the toolchain it needs. `command` runs it, to be followed by its arguments."""

    toolchain: Toolchain
    command: tuple[str | Path, ...]


def _program(toolchain: str, *command: str | Path) -> Program:
    """Parts of the command that are paths are below the toolchain's directory unless they are absolute."""
    directory = TOOLCHAINS[toolchain].directory
    return Program(
        TOOLCHAINS[toolchain], tuple(directory / part if isinstance(part, Path) else part for part in command)
    )


def _java_program(folder: str, main: str) -> Program:
    directory = TOOLCHAINS["java"].directory / folder
    return _program("java", "java", "-cp", f"{directory / 'classes'}:{directory / 'lib'}/*", main)


def _dotnet_program(*arguments: str) -> Program:
    return _program("dotnet", "dotnet", Path("programs/interop.dll"), *arguments)


_VENV_PYTHON = Path("venv/bin/python")

PROGRAMS = {
    "python-7.14.3": _program("python-7.14.3", _VENV_PYTHON, HERE / "python" / "program.py"),
    "python-7.15.0": _program("python-7.15.0", _VENV_PYTHON, HERE / "python" / "program.py"),
    "javascript": _program("javascript", "node", Path("programs/azure.js")),
    "go": _program("go", Path("program")),
    "java": _java_program("programs", "peeklock.Azure"),
    "dotnet": _dotnet_program("azure"),
    "jms": _java_program("programs", "peeklock.Jms"),
    "rhea": _program("javascript", "node", Path("programs/rhea.js")),
    "amqpnetlite": _dotnet_program("lite"),
    "proton": _program("proton", _VENV_PYTHON, HERE / "proton" / "program.py"),
}

LEDGER = _dotnet_program("ledger")

JMS_FRAMEWORKS = _java_program("programs", "peeklock.JmsFrameworks")

OUTAGES = {
    "python": _program("python-7.15.0", _VENV_PYTHON, HERE / "python" / "outage.py"),
    "javascript": _program("javascript", "node", Path("programs/outage.js")),
    "go": _program("go", Path("outage")),
    "java": _java_program("programs", "peeklock.Outage"),
}

# What users wait, by the name of the SDK in the table of `waits.py`.
WAITS = {
    "Python": _program("python-7.15.0", _VENV_PYTHON, HERE / "python" / "waits.py"),
    "JavaScript": _program("javascript", "node", Path("programs/waits.js")),
    "Go": _program("go", Path("waits")),
    "Java": _java_program("programs", "peeklock.Waits"),
    ".NET": _dotnet_program("waits"),
}

# Senders and receivers, by the version and whether they are of threads or of tasks.
PYTHON_OUTAGES = {
    f"{version}-{style}": Program(program.toolchain, (*program.command, style))
    for version in ("7.14.3", "7.15.0")
    for program in [_program(f"python-{version}", _VENV_PYTHON, HERE / "python" / "outage_clients.py")]
    for style in ("sync", "async")
}

FIRST_MESSAGES = {
    "Python": _program("python-7.15.0", _VENV_PYTHON, DOCS / "python" / "first_message.py"),
    "JavaScript": _program("javascript", "node", Path("first/first-message.js")),
    "Go": _program("go", Path("first")),
    "Java": _java_program("first", "FirstMessage"),
    "C#": _program("dotnet", "dotnet", Path("first/FirstMessage.dll")),
}


def main() -> None:
    for name in sys.argv[1:] or TOOLCHAINS:
        toolchain = TOOLCHAINS[name]
        if missing := toolchain.missing_tools():
            sys.exit(f"{name} needs {', '.join(missing)}, not found on PATH")
        toolchain.ensure()
        print(f"{name}: {toolchain.directory}")


if __name__ == "__main__":
    main()
