"""An archive of the classes that the JVM loads for the jobs, which `pipeline.jobs.rehearsal` writes.

To read, check and link 15,800 classes of Spark takes a JVM some ten seconds. With the archive, it maps them (class data
sharing, JEP 350). It compares the archive with itself and with Spark's files, and goes on without it where they differ;
so an archive can be too old, but not wrong. It must be whole: the JVM reads one that was cut off, and crashes.
"""

import os
import sys
from pathlib import Path
from typing import Final

ARCHIVE: Final = Path(sys.prefix) / "share" / "peeklock" / "spark-classes.jsa"

# Spark adds what this variable holds to the options of a driver's JVM, but not of the JVM that makes its command line.
_OF_THE_DRIVER: Final = "SPARK_SUBMIT_OPTS"
_WRITE: Final = "-XX:ArchiveClassesAtExit="
# Else the JVM says on standard output that an archive is too old.
_READ: Final = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr -XX:SharedArchiveFile="


def reading(archive: Path = ARCHIVE) -> str:
    """The options with which a JVM maps the archive: none if there is none, or if one is being written."""
    is_writing = _WRITE in os.environ.get(_OF_THE_DRIVER, "")
    # The JVM takes a space for the end of an option.
    return f"{_READ}{archive}" if archive.exists() and not is_writing and " " not in str(archive) else ""


def writing(archive: Path) -> dict[str, str]:
    """The environment of a program of Spark whose JVM writes the archive when it ends."""
    given = os.environ.get(_OF_THE_DRIVER, "")
    return os.environ | {_OF_THE_DRIVER: f"{given} {_WRITE}{archive}".strip()}
