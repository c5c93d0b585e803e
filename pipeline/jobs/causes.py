"""The text of an error of Spark: of the error and its causes, that of the deepest one that has any.

The error that Python gets is often a wrapper, such as "Exception thrown in awaitResult:" with nothing behind it.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

from py4j.protocol import Py4JJavaError

_MOST: Final = 50  # causes of one error
_WRAPPER: Final = re.compile(r"Exception thrown in awaitResult:\s*")
_TRACEBACK: Final = "Traceback (most recent call last):\n"
_OURS: Final = re.compile(r"^pyspark_peeklock\.errors\.\w+: (.+)$", re.MULTILINE)
_STATE: Final = re.compile(r"\s*SQLSTATE: \w+;?")
_PATH: Final = ":/"  # Spark and Hadoop name files as URLs


def told(error: BaseException) -> str:
    """One line: the deepest cause that says something, behind the one that names the file if that one does not."""
    texts = [text for text in _texts(error) if text]
    if not texts:
        return type(error).__name__
    deepest = texts[-1]
    file = next((text for text in reversed(texts) if _PATH in text), None)
    if file is None or _PATH in deepest or file == deepest:
        return deepest
    return f"{file.rstrip('. ')}: {deepest}"


def _texts(error: BaseException | None) -> Iterator[str]:
    """Yield the texts of the error and its causes, the deepest last, also of Java's that PySpark has wrapped."""
    for _ in range(_MOST):
        if error is None:
            return
        java = error.java_exception if isinstance(error, Py4JJavaError) else getattr(error, "_origin", None)
        if java is None:
            yield _line(str(error))
        else:
            yield from _texts_of_java(java)
        error = error.__cause__


def _texts_of_java(error: Any) -> Iterator[str]:
    for _ in range(_MOST):
        if error is None:
            return
        kind, text = error.getClass().getName(), _line(error.getMessage() or "")
        # The texts of others begin in the middle of a sentence, such as "Java heap space".
        yield text if not text or kind.startswith("org.apache.spark.") else f"{kind.rpartition('.')[2]}: {text}"
        error = error.getCause()


def _line(text: str) -> str:
    """The line of a text that says what has happened: of a traceback, the error; of ours, what it says."""
    if ours := _OURS.findall(text):
        return str(ours[-1])
    if _TRACEBACK in text:
        frames = text.rpartition(_TRACEBACK)[2].splitlines()
        text = next((line for line in frames if not line.startswith(" ")), "")
    text = _STATE.sub("", text.strip().partition("\n")[0]).strip()
    return "" if _WRAPPER.fullmatch(text) else text
