"""What every peer may rely on in frames of a broker or a sidecar: all fields of rare performatives and of errors.

Some SDKs read these by position (`protocol.engine.padding`). Peers of tests look at each frame that they get, so each
path on which an error is written in any test is one on which it is written whole.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from protocol.codec import Described, Symbol

_ERROR = 0x1D
_DISPOSITION = 0x15  # it may have null for a description that is empty
_FREQUENT = {0x13: 11, 0x14: 11, 0x15: 6}  # these only if the peer reads by position
_WIDTHS = {0x10: 10, 0x11: 8, 0x12: 14, 0x16: 3, 0x17: 1, 0x18: 1}


def require_whole(code: int, fields: Sequence[Any], *, by_position: bool = False) -> None:
    """Fails if the performative, or an error in it, lacks fields."""
    if (width := (_WIDTHS | _FREQUENT if by_position else _WIDTHS).get(code)) is not None:
        assert len(fields) == width, f"performative {code:#x} has {len(fields)} fields, not {width}: {fields}"
    for error in errors_in(fields):
        assert len(error) == 3, f"an error with {len(error)} fields: {error}"
        condition, description, info = error
        assert isinstance(condition, Symbol), error
        assert isinstance(description, str) or (description is None and code == _DISPOSITION), error
        assert isinstance(info, dict), error


def errors_in(value: Any) -> Iterator[list[Any]]:
    """The fields of errors, wherever they are in a value."""
    if isinstance(value, Described):
        if value.descriptor in (_ERROR, "amqp:error:list"):
            yield value.value
        yield from errors_in(value.value)
    elif isinstance(value, dict):
        for item in value.items():
            yield from errors_in(item)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from errors_in(each)
