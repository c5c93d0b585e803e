"""Errors have all of their fields, and one place writes them."""

import ast
from pathlib import Path

import pytest

from protocol.amqp_error import amqp_error, completed
from protocol.codec import Described, Symbol, UInt, ULong, decode, encode
from protocol.engine.padding import pad
from tests.whole_frames import require_whole

ROOT = Path(__file__).parents[2]
# Besides, this one says of which types the fields are that peers send.
WRITERS = {"protocol/amqp_error.py", "protocol/engine/performatives.py"}
CONDITION = Symbol("amqp:not-found")


def test_an_error_has_condition_description_and_info():
    assert amqp_error("amqp:not-found").value == [CONDITION, "", {}]
    assert amqp_error("amqp:not-found", "why", {"a": 1}).value == [CONDITION, "why", {"a": 1}]


@pytest.mark.parametrize("fields", [[], [None], ["why"], ["why", None], [None, None], [None, {}], ["why", {}]])
@pytest.mark.parametrize(("code", "before"), [(0x16, [UInt(0), True]), (0x17, []), (0x18, [])])
def test_an_error_of_somebody_else_is_completed(code, before, fields):
    written = Described(ULong(0x1D), [CONDITION, *fields])
    whole = completed(written)
    assert (whole is written) == (fields == ["why", {}])
    assert whole.value == [CONDITION, "why" if "why" in fields else "", {}]
    body = encode(Described(ULong(code), [*before, written]))
    padded = pad((8 + len(body)).to_bytes(4, "big") + bytes((2, 0, 0, 7)) + body)
    assert (int.from_bytes(padded[:4], "big"), padded[4:8]) == (len(padded), bytes((2, 0, 0, 7)))
    performative, _ = decode(padded, 8)
    require_whole(code, performative.value)
    assert performative.value[-1].value == whole.value


def test_one_place_writes_errors():
    """Whoever else would make the list of an error could forget a field."""
    found = set()
    for folder in ("broker", "protocol", "pipeline", "storage"):
        for path in (ROOT / folder).rglob("*.py"):
            if {"__pycache__", "build"} & set(path.parts):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                is_name = (
                    isinstance(node, ast.Attribute) and node.attr == "ERROR" and ast.unparse(node.value) == "Descriptor"
                )
                is_code = isinstance(node, ast.Constant) and type(node.value) is int and node.value == 0x1D
                is_text = isinstance(node, ast.Constant) and node.value == "amqp:error:list"
                if is_name or (is_code and "protocol" in path.parts) or is_text:
                    found.add(path.relative_to(ROOT).as_posix())
    assert found - {"protocol/symbols.py"} == WRITERS
    setters = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "protocol").rglob("*")
        if path.suffix in (".py", ".c", ".h") and "condition_set" in path.read_text()
    ]
    assert setters == ["protocol/engine/proton/library.py"]
