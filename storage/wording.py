"""Counts with their nouns, in texts for people: 1 message, 2 messages."""


def plural(count: int, one: str, many: str | None = None) -> str:
    """The noun for so many: `one`, or else `many`, which is `one` with an s unless it is given."""
    return one if count == 1 else many or one + "s"


def counted(count: int, one: str, many: str | None = None) -> str:
    """The count, in digits alone, and the noun."""
    return f"{count} {plural(count, one, many)}"
