"""What depends on the processors: whether the partitions are in the gateway's process, and whether processes may poll.

Imported before anything heavy is: keep it light.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from broker.settings.variables import CONFIG_VARIABLE, VARIABLE_PREFIX, config_file

CONFIG_FLAG, WORKERS_FLAG = "--config", "--workers"
PARTITIONS = 4  # the default of the setting


class Guess(NamedTuple):
    """The processes of `peeklock serve`; where one process is both, it is the only gateway and the only worker."""

    is_one_process: bool
    gateways: int
    workers: int


def processors() -> int:
    return os.cpu_count() or 1


def has_processor_limit(root: str = "/") -> bool:
    """Return True if a control group, of which containers are made, may use less than the processors that there are."""
    for line in _text(f"{root}proc/self/cgroup").splitlines():
        controllers, _, path = line.partition(":")[2].partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue  # a group of version 1, of something else
        groups, limit = ("sys/fs/cgroup/cpu", "cpu.cfs_quota_us") if controllers else ("sys/fs/cgroup", "cpu.max")
        # In a container the path may be that of the host: then only the last of these files is there.
        for group in _with_parents(path):
            if [*_text(f"{root}{groups}{group}/{limit}").split(), ""][0].isdecimal():
                return True
    return False


def _with_parents(group: str) -> Iterator[str]:
    """Return the path of a control group, and of those that it is in; the last is empty."""
    while group.strip("/"):
        yield group
        group = group.rpartition("/")[0]
    yield ""


def _text(path: str) -> str:
    """Return the text of a file, which is empty if it cannot be read."""
    try:
        with open(path, errors="surrogateescape") as file:  # noqa: PTH123 - pathlib takes long to import
            return file.read()
    except OSError:
        return ""


def is_one_process(workers: int | None, gateways: int) -> bool:
    """The arguments are the settings of these names.

    One process is the default where there is one processor. With two, it answers a lone message a fifth sooner, but
    with messages of 1 KiB in bulk a worker of its own is 11 to 28 % faster, even if clients use the same processors.
    """
    return workers == 0 or (workers is None and gateways == 1 and processors() == 1)


def worker_count(workers: int | None, partitions: int) -> int:
    """Return the number of workers, each with a log. The only one may have no process of its own."""
    return max(1, min(partitions, processors() - 1) if workers is None else workers)


def guess(arguments: Sequence[str], environment: Mapping[str, str]) -> Guess:
    """Guess what the settings will say, before they are read: from flags, else variables, else the file."""
    given = _in_file(_flag(arguments, CONFIG_FLAG) or config_file(environment.get(CONFIG_VARIABLE, "")))
    for name in ("workers", "gateways", "partitions"):
        if text := environment.get(f"{VARIABLE_PREFIX}{name.upper()}"):
            given[name] = text
    if text := _flag(arguments, WORKERS_FLAG):
        given["workers"] = text
    workers, gateways, partitions = (_number(given.get(name)) for name in ("workers", "gateways", "partitions"))
    gateways = 1 if gateways is None else gateways
    partitions = PARTITIONS if partitions is None else partitions
    return Guess(is_one_process(workers, gateways), gateways, worker_count(workers, partitions))


def _flag(arguments: Sequence[str], name: str) -> str:
    value = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == name:
            value = following
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
    return value


def _in_file(path: str) -> dict[str, Any]:
    """Read the file; the result is empty if it is no TOML, or no file: a pipe could be read only once."""
    if not os.path.isfile(path):  # noqa: PTH113 - pathlib takes long to import
        return {}
    import tomllib

    try:
        with open(path, "rb") as file:  # noqa: PTH123
            return tomllib.load(file)
    except (OSError, ValueError, RecursionError):
        return {}


def _number(value: object) -> int | None:
    text = str(value)
    return int(text) if text.isdecimal() and len(text) < 10 else None
