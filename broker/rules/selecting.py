"""Message selectors, for processes that mostly have none: the language is loaded with the first."""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from broker.rules.selectors import Selector


@lru_cache(maxsize=1024)
def compile_selector(text: str) -> "Selector":
    """Raises RuleSyntaxError, SelectorNotSupported. The first takes 0.1 s."""
    from broker.rules.selectors import Selector

    return Selector(text)


def joined(texts: Sequence[str]) -> str:
    """The selector of what all of these match. Raises RuleSyntaxError, SelectorNotSupported for one that is none."""
    for text in texts:
        compile_selector(text)
    if len(texts) == 1:
        return texts[0]
    return compile_selector(" AND ".join(f"({text})" for text in texts)).text
