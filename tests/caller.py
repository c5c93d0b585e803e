"""What the caller's environment says to the tests, and not to the brokers that they start.

A broker takes every variable that begins with PEEKLOCK_ for a setting, and refuses one it does not know. Only
PEEKLOCK_PURE is for brokers, too: they do without the extension in C, as the tests' own process does.
"""

import os
import signal

from broker.settings.variables import PURE_VARIABLE

VARIABLES = {
    name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PEEKLOCK_") and name != PURE_VARIABLE
}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
for size_of_a_terminal in ("COLUMNS", "LINES"):  # which pytest-xdist says to its processes
    os.environ.pop(size_of_a_terminal, None)
REQUIRE_INTEROP = VARIABLES.get("PEEKLOCK_REQUIRE_INTEROP") == "1"  # an SDK that is missing is a failure
REQUIRE_DISKS = VARIABLES.get("PEEKLOCK_REQUIRE_DISKS") == "1"  # a file system that cannot be mounted is a failure
REQUIRE_DEPLOYMENT = VARIABLES.get("PEEKLOCK_REQUIRE_DEPLOYMENT") == "1"  # so is a tool that reads what deploy/ holds
KILL_DRIVERS = VARIABLES.get("PEEKLOCK_KILL_DRIVERS") == "1"  # as `make kill-drivers` says: it takes a minute of CPU
BUILD_IMAGE = VARIABLES.get("PEEKLOCK_BUILD_IMAGE") == "1"  # as `make image` says
ALL_PODS = VARIABLES.get("PEEKLOCK_ALL_PODS") == "1"  # as `make pipeline-pods` says
WORKERS = int(
    VARIABLES.get("PEEKLOCK_TEST_WORKERS", "1")
)  # of brokers whose test does not say how many; 0 is one process
# Each process loads its modules: see tests/preloaded.py.
WHOLE_STARTS = VARIABLES.get("PEEKLOCK_TEST_STARTS") == "whole"
SIDECAR = VARIABLES.get("PEEKLOCK_TEST_SIDECAR") == "1"  # clients reach brokers through a sidecar
