"""The commands of docs/http.md, run as they stand there on a real broker, print what the page says."""

import os
import re
import subprocess
import sys

from tests.brokers import REPOSITORY, Broker

PAGE = (REPOSITORY / "docs" / "http.md").read_text()
MARK = "--- end of the commands ---"


def test_the_commands_of_the_page_print_what_it_says(tmp_path):
    blocks = re.findall(r"^```(bash|text)\n(.*?)^```$", PAGE, re.M | re.S)
    script, expected = "set -euo pipefail\n", [""]
    for kind, text in blocks:
        if kind == "bash":
            script += f"{text}\necho '{MARK}'\n"
            expected.append("")
        else:
            expected[-1] = text
    with Broker(tmp_path / "broker") as broker:
        script = script.replace("http://localhost:5300", f"http://localhost:{broker.http_port}")
        (tmp_path / "peeklock").write_text(f'#!/bin/sh\nexec {sys.executable} -m broker.cli "$@"\n')
        (tmp_path / "peeklock").chmod(0o755)
        environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(REPOSITORY)}
        environment["PEEKLOCK_CONNECTION_STRING"] = broker.connection_string
        result = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, env=os.environ | environment, capture_output=True, text=True
        )
    assert result.returncode == 0, result.stdout + result.stderr
    printed = [text.removeprefix("\n") for text in result.stdout.split(MARK)][:-1]
    assert len(printed) == len(expected) - 1
    for shown, said in zip(printed, expected[1:], strict=True):
        pattern = ".*".join(map(re.escape, said.split("…")))
        assert re.fullmatch(pattern, shown.replace("\r", "")), (said, shown)
