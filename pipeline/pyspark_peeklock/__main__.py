"""Says whether Spark can run here with `format("peeklock")`: the versions, or what to install."""

import sys

from pyspark_peeklock.readiness import NotReady, versions


def main() -> int:
    try:
        found = versions()
    except NotReady as error:
        print(error, file=sys.stderr)
        return 1
    print(", ".join(f"{name} {version}" for name, version in found.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
