"""The bugs that the tests must find: see `bugs.toml`."""

import tomllib
from dataclasses import dataclass
from pathlib import Path

BUGS = Path(__file__).with_name("bugs.toml")


@dataclass(frozen=True)
class Bug:
    """`new` in place of `old` in this file of a checkout, and the fault that a user would see."""

    name: str
    file: str
    what: str
    old: str
    new: str

    def planted(self, text: str) -> str:
        """The text of the file with the bug. Raises ValueError if it does not have `old` exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise ValueError(f"{self.name}: its text is {count} times in {self.file}; it must be there once")
        return text.replace(self.old, self.new)

    def plant(self, root: Path) -> None:
        """Write the file with the bug in the checkout at `root`. Raises ValueError, as `planted` does."""
        path = root / self.file
        path.write_text(self.planted(path.read_text()))


def load() -> list[Bug]:
    return [Bug(**each) for each in tomllib.loads(BUGS.read_text())["bug"]]
