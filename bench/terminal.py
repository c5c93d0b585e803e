"""Twenty seconds of a terminal, recorded and drawn as an animated SVG: python -m bench.terminal [FILE].

It types COMMANDS into a shell of its own, in an empty directory, and records what the shell shows and when: a broker is
started and killed, and what was sent before is there after. Only what was shown is drawn, at the time at which it was.
The ports of deploy/quickstart.toml must be free.
"""

import argparse
import fcntl
import os
import pty
import select
import struct
import sys
import tempfile
import termios
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

import psutil

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "images" / "terminal.svg"

PROMPT, CONTINUED = "$ ", "> "
START = "peeklock serve --config deploy/quickstart.toml >log 2>&1 &"
READY = 'until grep "is ready" log; do sleep 0.1; done'
COMMANDS = (
    START,
    READY,
    "export PEEKLOCK_CONNECTION_STRING=$(",
    "  peeklock connection-string --emulator)",
    'peeklock send orders --body "Two coffees" --count 1000',
    "kill -9 %1  # all its processes die with it",
    START,
    READY,
    "peeklock peek orders --count 1",
    "peeklock receive orders --count 1000 | wc -l",
)

COLUMNS = 66
KEY_SECONDS = 0.015  # between two keys
THOUGHT_SECONDS = 0.3  # before a command is typed
PATIENCE_SECONDS = 60
LAST_LOOK_SECONDS = 4  # at the end, before it begins again

SIZE, ADVANCE, LINE, MARGIN, BAR = 14, 8.4, 20, 18, 30  # pixels; a letter of these fonts is 0.6 as wide as high
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', 'Liberation Mono', monospace"


class Shown(NamedTuple):
    seconds: float  # since the recording began
    text: str
    typed: bool


class Run(NamedTuple):
    """Text that came to one row at one time."""

    row: int
    column: int
    seconds: float
    text: str
    typed: bool


class Shell:
    """A bash on a terminal of its own, which keeps what it shows."""

    def __init__(self, process: int, terminal: int) -> None:
        self.shown: list[Shown] = []
        self._process = process
        self._terminal = terminal
        self._began = time.monotonic()
        self._typing = False

    def type(self, command: str) -> None:
        """Types the command as a person would, and waits for the next prompt. Raises TimeoutError."""
        self._watch(THOUGHT_SECONDS)
        self._typing = True
        for key in command:
            os.write(self._terminal, key.encode())
            self._watch(KEY_SECONDS)
        self._typing = False
        before = len(self.shown)
        os.write(self._terminal, b"\n")
        until = time.monotonic() + PATIENCE_SECONDS
        while not "".join(each.text for each in self.shown[before:]).endswith(("\n" + PROMPT, "\n" + CONTINUED)):
            if time.monotonic() > until:
                raise TimeoutError(f"{command}: {self.shown[before:]}")
            self._watch(0.02)

    def end(self) -> None:
        shell = psutil.Process(self._process)
        for process in [*shell.children(recursive=True), shell]:
            process.kill()
        os.close(self._terminal)
        os.waitpid(self._process, 0)

    def wait_for_prompt(self) -> None:
        while not self.shown:
            self._watch(0.02)

    def _watch(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self._terminal], [], [], left)[0]:
                text = os.read(self._terminal, 65536).decode()
                self.shown.append(Shown(time.monotonic() - self._began, text, self._typing))


@contextmanager
def shell(directory: Path) -> Iterator[Shell]:
    """A shell in `directory`, in which `peeklock` is that of this checkout."""
    ours = {"PS1": PROMPT, "PS2": CONTINUED, "TERM": "dumb", "LC_ALL": "C.UTF-8"}
    paths = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PEEKLOCK_")}
    process, terminal = pty.fork()
    if process == 0:
        os.chdir(directory)
        os.execvpe("bash", ["bash", "--noprofile", "--norc", "-i"], {**environment, **paths, **ours})
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    opened = Shell(process, terminal)
    try:
        yield opened
    finally:
        opened.end()


def record() -> list[Shown]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "deploy").symlink_to(ROOT / "deploy")
        with shell(directory) as opened:
            opened.wait_for_prompt()
            for command in COMMANDS:
                opened.type(command)
            return opened.shown


def runs(shown: Iterable[Shown]) -> list[Run]:
    """Where each text stands, with lines that are too long going on in the next row."""
    found = []
    row = column = 0
    for seconds, text, typed in shown:
        for number, line in enumerate(text.replace("\r", "").split("\n")):
            if number:
                row, column = row + 1, 0
            while line:
                if column == COLUMNS:
                    row, column = row + 1, 0
                here, line = line[: COLUMNS - column], line[COLUMNS - column :]
                found.append(Run(row, column, seconds, here, typed))
                column += len(here)
    return found


def drawn(shown: list[Shown]) -> str:
    """The animated SVG: each text is hidden until its time, over and over. Without animation all of it is there."""
    texts = runs(shown)
    total = shown[-1].seconds + LAST_LOOK_SECONDS
    width = round(2 * MARGIN + COLUMNS * ADVANCE)
    height = BAR + 2 * MARGIN + LINE * (max(run.row for run in texts) + 1)
    times = {seconds: f"t{number}" for number, seconds in enumerate(sorted({run.seconds for run in texts}))}
    style = [
        f"text {{ font: {SIZE}px {FONTS}; fill: #adbac7; white-space: pre }}",
        f"text {{ animation: {total:.2f}s step-end infinite }}",
        ".typed { fill: #f0f6fc; font-weight: 600 }",
        "@media (prefers-reduced-motion: reduce) { text { animation: none } }",
        *(
            f".{name}{{animation-name:{name}}}"
            f"@keyframes {name}{{0%{{visibility:hidden}}{100 * seconds / total:.2f}%{{visibility:visible}}}}"
            for seconds, name in times.items()
        ),
    ]
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'role="img">',
        "<title>A broker takes 1,000 messages, is killed, starts again, and has them all</title>",
        "<!-- Made by bench/terminal.py, which ran these commands. -->",
        "<style>",
        *style,
        "</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#1c2128"/>',
        *(
            f'<circle cx="{MARGIN + 6 + 18 * number}" cy="20" r="5.5" fill="{colour}"/>'
            for number, colour in enumerate(("#ff5f57", "#febc2e", "#28c840"))
        ),
    ]
    for run in texts:
        x, y = MARGIN + run.column * ADVANCE, BAR + MARGIN + LINE * run.row + SIZE
        names = times[run.seconds] + (" typed" if run.typed else "")
        length = f' textLength="{len(run.text) * ADVANCE:.1f}"' if len(run.text) > 1 else ""
        lines.append(f'<text x="{x:.1f}" y="{y}" class="{names}"{length}>{escape(run.text)}</text>')
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?", default=FILE)
    file: Path = parser.parse_args().file
    shown = record()
    file.write_text(drawn(shown))
    print("".join(each.text for each in shown).replace("\r", ""))
    print(f"{file}: {shown[-1].seconds:.1f} s")


if __name__ == "__main__":
    main()
