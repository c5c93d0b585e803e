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
PACKAGES = {"pyspark": "of Spark and the jobs", "matplotlib": "of plots"}


def left_out() -> Iterator[str]:
    """A line for each tool that is missing."""
    for name, toolchain in TOOLCHAINS.items():
        if missing := toolchain.missing_tools():
            yield f"{', '.join(missing)} not found: without the tests with the SDK {name}"
        elif not toolchain.installed():
            yield f"SDK {name} not installed: without its tests"
    for program, tests in PROGRAMS.items():
        if shutil.which(program) is None:
            yield f"{program} not found: without tests {tests}"
    for package, tests in PACKAGES.items():
        if find_spec(package) is None:
            yield f"{package} not installed: without tests {tests}"
    if os.geteuid() != 0:
        yield "not root: without tests of full disks and of split networks"


if __name__ == "__main__":
    lines = [*left_out()]
    if lines:
        print("Left out for want of tools, by make test and make test-all (make tools installs what can be installed):")
        print(*(f"  {line}" for line in lines), sep="\n")
