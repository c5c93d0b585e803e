"""Whether the partitions are in the gateway's process. Imported before anything heavy is: keep it light."""

import os
from collections.abc import Mapping, Sequence

from broker.settings.variables import VARIABLE_PREFIX

# With no more, one process is the default: it answers sooner and takes less CPU and memory. That is taken to count for
# more than what a worker of its own gains in bulk: 16 to 29 % on two processors that clients used, too.
FEW_PROCESSORS = 2
WORKERS_FLAG = "--workers"


def processors() -> int:
    return os.cpu_count() or 1


def is_one_process(workers: int | None, gateways: int) -> bool:
    """The arguments are the settings of these names."""
    return workers == 0 or (workers is None and gateways == 1 and processors() <= FEW_PROCESSORS)


def guess_one_process(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """As `is_one_process`, before the settings are read: from the flag and the variables, but not from the file."""
    workers = environment.get(f"{VARIABLE_PREFIX}WORKERS", "")
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == WORKERS_FLAG:
            workers = following
        elif argument.startswith(f"{WORKERS_FLAG}="):
            workers = argument.removeprefix(f"{WORKERS_FLAG}=")
    gateways = environment.get(f"{VARIABLE_PREFIX}GATEWAYS", "")
    return is_one_process(
        int(workers) if workers.isdecimal() else None,
        int(gateways) if gateways.isdecimal() else 1,
    )
