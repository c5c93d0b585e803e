"""Cuts the texts of rejections that are larger than a frame.

SDKs send the reason and the description of a dead-letter request as long as their user has them, and Python's the
description twice, in the one frame that an outcome has. The broker keeps MAX_REASON_CHARACTERS of each.
"""

from typing import Any, Final

from protocol.codec import Described
from protocol.symbols import DEAD_LETTER_ERROR_DESCRIPTION, DEAD_LETTER_REASON, DESCRIPTOR_OF, Descriptor

MAX_REASON_CHARACTERS: Final = 4096  # of the reason and of the description (amqp.md 13.1)
MAX_FRAME_BYTES: Final = 256 * 1024  # of such a disposition

_STATE: Final = 4  # field of a disposition
_TEXTS: Final = (DEAD_LETTER_REASON, DEAD_LETTER_ERROR_DESCRIPTION)


def with_texts_cut(fields: list[Any]) -> list[Any]:
    """The fields of a disposition, those of a rejection with shorter texts."""
    return [*fields[:_STATE], _cut_state(fields[_STATE]), *fields[_STATE + 1 :]]


def _cut_state(state: Any) -> Any:
    if not isinstance(state, Described) or not isinstance(state.value, list):
        return state
    kind = DESCRIPTOR_OF.get(state.descriptor) if isinstance(state.descriptor, str) else state.descriptor
    if kind == Descriptor.TRANSACTIONAL_STATE:
        return Described(state.descriptor, [*state.value[:1], *map(_cut_state, state.value[1:])])
    if kind != Descriptor.REJECTED:
        return state
    return Described(state.descriptor, [*map(_cut_error, state.value)])


def _cut_error(error: Any) -> Any:
    if not isinstance(error, Described) or not isinstance(error.value, list):
        return error
    condition, description, info = [*error.value, None, None, None][:3]
    if isinstance(info, dict):
        info = {name: _cut(value) if name in _TEXTS else value for name, value in info.items()}
    return Described(error.descriptor, [condition, _cut(description), info])


def _cut(text: Any) -> Any:
    return text[:MAX_REASON_CHARACTERS] if isinstance(text, str) else text
