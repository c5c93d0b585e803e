"""What the sections of settings share: sizes, and errors for settings that contradict each other."""

from pydantic_core import PydanticCustomError

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB
MAX_PARTITIONS = 64


def inconsistent(text: str, *places: str) -> PydanticCustomError:
    """Return an error for settings that contradict each other.

    `places` are dotted, relative to the section that raises it.
    """
    return PydanticCustomError("inconsistent", "{text}", {"text": text, "places": places})


def refuse_duplicates(what: str, place: str, names: list[str]) -> None:
    """Raise the error that `inconsistent` makes if a name is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise inconsistent(f"{what} {name!r} is declared twice; remove one", place)
        seen.add(name)
