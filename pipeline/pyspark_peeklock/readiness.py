"""Whether Spark can run here: its packages and Java. Each fault is one line that says what to install."""

import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

MIN_JAVA: Final = 17  # of Spark 4
JAVA_SECONDS: Final = 30.0
_PACKAGES: Final = ("pyspark", "pyarrow", "pandas")
_INSTALL: Final = "pip install 'peeklock[spark]'"
_INSTALL_JAVA: Final = f"install Java {MIN_JAVA} or later (Debian: apt install openjdk-17-jre-headless)"


class NotReady(Exception):
    """Something is missing; the text is one line with what to install."""


def versions() -> dict[str, str]:
    """The versions of all that Spark needs, by name. Raises NotReady."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            raise NotReady(f"{package} is not installed: {_INSTALL}") from None
    if tuple(int(part) for part in re.findall(r"\d+", found["pyspark"])[:2]) < (4, 2):
        raise NotReady(f"pyspark {found['pyspark']} is too old, 4.2 or later is needed: {_INSTALL}")
    return found | {"java": java_version()}


def java_command() -> str:
    """The Java that Spark would start: of JAVA_HOME, or else of PATH. Raises NotReady."""
    home = os.environ.get("JAVA_HOME")
    java = shutil.which("java", path=os.path.join(home, "bin")) if home else shutil.which("java")  # noqa: PTH118
    if java is None:
        where = f"in JAVA_HOME, {home}" if home else "on PATH, and JAVA_HOME is not set"
        raise NotReady(f"Spark needs Java, and there is none {where}: {_INSTALL_JAVA}")
    return java


def java_version() -> str:
    """The version of `java_command`. Raises NotReady."""
    java = java_command()
    try:
        said = subprocess.run([java, "-version"], capture_output=True, timeout=JAVA_SECONDS, check=True, text=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotReady(f"{java} -version fails ({type(error).__name__}): {_INSTALL_JAVA}") from None
    found = re.search(r'version "((?:1\.)?(\d+)[^"]*)"', said.stderr + said.stdout)
    if found is None or int(found[2]) < MIN_JAVA:
        raise NotReady(f"Java {found[1] if found else 'of an unknown version'} at {java} is too old: {_INSTALL_JAVA}")
    return found[1]


def session(name: str, *, master: str | None = None, settings: dict[str, str] | None = None) -> Any:
    """A SparkSession whose Python workers run this interpreter. Raises NotReady before Java could say it at length."""
    versions()
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    for key, value in (settings or {}).items():
        builder = builder.config(key, value)
    return builder.getOrCreate()
