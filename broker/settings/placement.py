"""Whether the partitions are in the gateway's process. Imported before anything heavy is: keep it light."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from broker.settings.variables import CONFIG_VARIABLE, VARIABLE_PREFIX, config_file

CONFIG_FLAG, WORKERS_FLAG = "--config", "--workers"


def processors() -> int:
    return os.cpu_count() or 1


def has_processor_limit(root: str = "/") -> bool:
    """True if a control group, of which containers are made, may use less than the processors that there are."""
    try:
        with open(f"{root}proc/self/cgroup") as file:  # noqa: PTH123
            lines = file.read().splitlines()
    except OSError:
        return False
    for line in lines:
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if controllers and "cpu" not in names:
            continue
        mount, file_name = (
            ("sys/fs/cgroup", "cpu.max") if not controllers else ("sys/fs/cgroup/cpu", "cpu.cfs_quota_us")
        )
        while True:  # in a container the path may be that of the host, and only the last of these files is there
            if _first_word(f"{root}{mount}{path.rstrip('/')}/{file_name}").isdecimal():
                return True
            if path in ("", "/"):
                break
            path = path.rpartition("/")[0]
    return False


def _first_word(path: str) -> str:
    try:
        with open(path) as file:  # noqa: PTH123
            return [*file.read().split(), ""][0]
    except OSError:
        return ""


def is_one_process(workers: int | None, gateways: int) -> bool:
    """The arguments are the settings of these names.

    One process is the default where there is one processor. With two, it answers a lone message a fifth sooner, but
    with messages of 1 KiB in bulk a worker of its own is 11 to 28 % faster, even if clients use the same processors.
    """
    return workers == 0 or (workers is None and gateways == 1 and processors() == 1)


def guess_one_process(arguments: Sequence[str], environment: Mapping[str, str]) -> bool:
    """As `is_one_process`, before the settings are read and checked: from flags, else variables, else the file."""
    given = _in_file(_flag(arguments, CONFIG_FLAG) or config_file(environment.get(CONFIG_VARIABLE, "")))
    for name in ("workers", "gateways"):
        if text := environment.get(f"{VARIABLE_PREFIX}{name.upper()}"):
            given[name] = text
    if text := _flag(arguments, WORKERS_FLAG):
        given["workers"] = text
    gateways = _number(given.get("gateways"))
    return is_one_process(_number(given.get("workers")), 1 if gateways is None else gateways)


def _flag(arguments: Sequence[str], name: str) -> str:
    value = ""
    for argument, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if argument == name:
            value = following
        elif argument.startswith(f"{name}="):
            value = argument.removeprefix(f"{name}=")
    return value


def _in_file(path: str) -> dict[str, Any]:
    """Empty if it is no TOML, or no file: a pipe could be read only once."""
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
