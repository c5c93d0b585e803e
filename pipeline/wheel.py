"""Puts the sources in Python of `protocol` and `storage` into the wheel pyspark-peeklock: a hook of hatchling.

Without the extension in C the wheel is one file for all machines; what it would do, Python's code does.
"""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parents[1]
PACKAGES = ("protocol", "storage")
EXTENSION = ROOT / "protocol" / "native"  # its sources, and the module that compiles them


class OurPackages(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        sources = [path for name in PACKAGES for path in (ROOT / name).rglob("*.py") if EXTENSION not in path.parents]
        build_data["force_include"].update({str(path): str(path.relative_to(ROOT)) for path in sources})
