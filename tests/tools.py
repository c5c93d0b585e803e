"""Says which tests are left out for want of a tool: `python -m tests.tools`."""

import os
import shutil
from collections.abc import Iterator
from importlib.util import find_spec

from tests.interop.sdks import TOOLCHAINS

PROGRAMS = {
    "java": "of Spark and the jobs",
    "valgrind": "of instructions per message",
    "iptables": "of cut networks",
    "openssl": "of certificates that scripts make",
    "systemd-analyze": "of units",
}
PACKAGES = {"pyspark": ("of Spark and the jobs", "make spark"), "matplotlib": ("of plots", "pip install --group bench")}


def left_out() -> Iterator[str]:
    """A line for each tool that is missing."""
    for name, toolchain in TOOLCHAINS.items():
        if missing := toolchain.missing_tools():
            yield f"{', '.join(missing)} not found: without the tests with the SDK {name}"
        elif not toolchain.installed():
            yield f"SDK {name} not installed (python tests/interop/sdks.py {name}): without its tests"
    for program, tests in PROGRAMS.items():
        if shutil.which(program) is None:
            yield f"{program} not found: without tests {tests}"
    for package, (tests, how) in PACKAGES.items():
        if find_spec(package) is None:
            yield f"{package} not installed ({how}): without tests {tests}"
    if os.geteuid() != 0:
        yield "not root: without tests of full disks and of split networks"


if __name__ == "__main__":
    for line in left_out():
        print(line)
