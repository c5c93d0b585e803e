"""The fuzzer, for a few seconds: seeds differ by day, so that the suite looks at other cases tomorrow."""

import time
from random import Random

import pytest

from protocol.engine.engine import Engine
from tests.fuzz import native_targets
from tests.fuzz.engine_cases import Server
from tests.fuzz.mutations import mutated, session
from tests.fuzz.run import Found, _engine_cases, fuzz_broker, fuzz_engine

SEED = int(time.time() // 86_400)


def test_the_engine_takes_no_harm():
    assert fuzz_engine(SEED, 4) > 100


def test_a_broker_takes_no_harm(tmp_path):
    assert fuzz_broker(SEED, 5, tmp_path) > 20


@pytest.mark.parametrize("target", native_targets.TARGETS)
def test_the_c_of_the_extension_takes_no_harm(target, tmp_path):
    assert native_targets.change_seeds(target, 1, SEED, tmp_path) > 100


def test_the_session_to_mutate_is_valid():
    """Else it would be refused at its first frame, and nothing behind it be looked at."""
    server = Server()
    server.engine.push(b"".join(session("orders")))
    assert server.opened
    assert server.engine.pull()
    server.engine.free()


def test_a_case_is_made_by_its_number():
    frames = session("orders")
    assert mutated(Random("1/5"), frames) == mutated(Random("1/5"), frames)
    assert len({mutated(Random(f"1/{case}"), frames) for case in range(50)}) > 45


def test_a_process_that_dies_is_found_with_its_case(monkeypatch, tmp_path):
    (tmp_path / "tests" / "fuzz").mkdir(parents=True)
    (tmp_path / "tests" / "fuzz" / "engine_cases.py").write_text(
        "import os\nprint(41)\nprint(42, flush=True)\nos.abort()"
    )
    monkeypatch.setattr("tests.fuzz.run.REPOSITORY", tmp_path)
    with pytest.raises(Found, match="engine case 7/42: signal 6"):
        _engine_cases(["7", "0", "1"], 7, 1)


def test_the_engine_is_the_gateways():
    assert isinstance(Server().engine, Engine)
