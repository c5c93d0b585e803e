"""The error in a close, end, detach or rejected (AMQP 1.0 2.8.14), always with all of its three fields.

Description and info may be left out, and some SDKs read them by position: azure-servicebus for Python then tells the
program `list index out of range` instead of trying again, or hangs (`protocol.engine.padding`).
"""

from collections.abc import Mapping
from typing import Any

from protocol.codec import Described, Symbol, ULong
from protocol.symbols import Descriptor


def amqp_error(condition: str, description: str = "", info: Mapping[Any, Any] | None = None) -> Described:
    """What stands in a frame or an outcome."""
    return Described(ULong(Descriptor.ERROR), [Symbol(condition), description, dict(info or {})])


def completed(written: Described) -> Described:
    """An error of somebody else with the fields that it lacks; the same object if it lacks none."""
    condition, description, info = (*written.value, None, None)[:3]
    if len(written.value) >= 3 and description is not None and info is not None:
        return written
    return amqp_error(condition, description or "", info)
