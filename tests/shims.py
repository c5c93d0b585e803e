"""Libraries in C that are loaded into brokers by LD_PRELOAD."""

import subprocess
from pathlib import Path
from shutil import which


class NoCompiler(Exception):
    """There is no C compiler to make the shim with."""


def make_shim(source: Path, directory: Path) -> Path:
    """Compile `source` to a library in `directory`. Raises NoCompiler."""
    compiler = which("cc") or which("gcc") or which("clang")
    if compiler is None:
        raise NoCompiler(f"no C compiler (cc, gcc, clang) to compile {source} with")
    library = directory / f"{source.stem}.so"
    command = [compiler, "-O2", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", str(library), str(source)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return library
