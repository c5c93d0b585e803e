"""Compiles the extension `_native` into the folder `protocol`: as a hook of hatchling, and as a command.

python protocol/native/build.py
"""

import sysconfig
from contextlib import chdir
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from setuptools import Distribution, Extension

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# The stable ABI of Python 3.11: one build for all later versions.
EXTENSION = "protocol/_native.abi3.so"


def compile_extension() -> None:
    """Compile the extension. Raises setuptools' errors if there is no C compiler, or no Python.h."""
    extension = Extension(
        "protocol._native",
        sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*.c")),
        depends=sorted(str(path.relative_to(ROOT)) for path in HERE.glob("*.h")),
        extra_compile_args=["-std=c11", "-O2", "-Wall", "-Wextra", "-Wshadow", "-fvisibility=hidden"],
        py_limited_api=True,
    )
    distribution = Distribution({"ext_modules": [extension], "packages": ["protocol"]})
    command: Any = distribution.get_command_obj("build_ext")
    command.inplace = True
    command.ensure_finalized()
    with chdir(ROOT):
        command.run()


class NativeHook(BuildHookInterface[Any]):
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        compile_extension()
        build_data["artifacts"].append(EXTENSION)
        build_data["pure_python"] = False
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{platform}"


if __name__ == "__main__":
    compile_extension()
