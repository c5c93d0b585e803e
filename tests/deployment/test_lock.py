"""The lock files of the image: they have what pyproject.toml asks for, in versions that it allows, with hashes."""

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LINUX = {"sys_platform": "linux", "implementation_name": "cpython", "python_version": "3.11"}


def locked(name: str) -> dict[str, Requirement]:
    """The requirements of the file that count on Linux, each with its hashes."""
    text = (ROOT / "deploy" / name).read_text()
    entries = re.findall(r"^(\S+==[^\\\n]+?)\s*\\\n((?:\s+--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
    pinned = re.findall(r"^\S+==", text, re.MULTILINE)
    assert len(entries) == len(pinned) > 5, "each has its hashes"
    found = [Requirement(entry) for entry, _ in entries]
    return {canonicalize_name(each.name): each for each in found if each.marker is None or each.marker.evaluate(LINUX)}


def version(requirement: Requirement) -> str:
    [pin] = requirement.specifier
    assert pin.operator == "=="
    return pin.version


@pytest.mark.parametrize(
    ("file", "section", "key"),
    [("requirements.lock", "project", "dependencies"), ("build.lock", "build-system", "requires")],
)
def test_what_is_asked_for_is_locked_in_a_version_that_is_allowed(file, section, key):
    found = locked(file)
    asked = [Requirement(each) for each in tomllib.loads((ROOT / "pyproject.toml").read_text())[section][key]]
    assert asked
    for each in asked:
        name = canonicalize_name(each.name)
        assert name in found, f"{name}: make lock"
        assert each.specifier.contains(version(found[name])), f"{name}: make lock"


def test_the_image_of_spark_has_the_extras_and_else_what_the_brokers_has():
    spark, plain = locked("spark.lock"), locked("requirements.lock")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for each in (Requirement(text) for name in ("spark", "jobs") for text in extras[name]):
        assert each.specifier.contains(version(spark[canonicalize_name(each.name)])), f"{each.name}: make lock"
    assert {name: version(spark[name]) for name in plain} == {name: version(each) for name, each in plain.items()}


def test_the_compilers_tools_are_locked_too():
    """python-qpid-proton is built in the image, and both must agree on cffi, which compiles and runs it."""
    built, installed = locked("build.lock"), locked("requirements.lock")
    assert {"pip", "setuptools", "cffi"} <= built.keys()
    assert version(built["cffi"]) == version(installed["cffi"])
