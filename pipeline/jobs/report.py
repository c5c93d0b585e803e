"""The page of a job's results: one file of HTML that needs nothing else, for screens of any size, and for print."""

import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from storage.wording import plural

_NOT_PRINTED: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff\u200e\u200f\u202a-\u202e\u2066-\u2069]")
_COLUMN_NAME: Final = re.compile("[a-z]+([A-Z][a-z]*)*")
MAX_CELL_CHARACTERS: Final = 500
_SECOND_MS: Final = 1000
_UNITS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (_SECOND_MS, "s"))


class Table(NamedTuple):
    """`note` stands below. `total`: so many rows there are, if not all are shown."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    note: str = ""
    total: int | None = None


class Section(NamedTuple):
    """`plots` are SVG, as `plots` draws them."""

    title: str
    text: str = ""
    plots: Sequence[str] = ()
    tables: Sequence[Table] = ()


class Headline(NamedTuple):
    """The one figure that a reader came for, and in a few words of what it is."""

    value: Any
    text: str


class Report(NamedTuple):
    """`mood` of the verdict is "good", "bad", or "plain". `facts` are names and values below it."""

    title: str
    verdict: str
    mood: str
    facts: Sequence[tuple[str, Any]]
    sections: Sequence[Section]
    headline: Headline | None = None


class Duration(float):
    """Milliseconds, which pages show in the unit that people would say them in."""


def shown(value: Any) -> str:
    """The text of a cell: numbers with thin spaces between thousands, times to the second in UTC, characters that
    can be printed.

    Controls and the characters that change the direction of text are U+FFFD: a name in the ledger is a client's.
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Duration):
        return duration(value)
    if isinstance(value, int):
        return f"{value:,}".replace(",", "\u202f")
    if isinstance(value, float):
        return f"{value:,.2f}".replace(",", "\u202f")
    if isinstance(value, datetime):
        # Without a zone it is what PySpark has collected, which is of this machine's zone.
        return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")
    text = _NOT_PRINTED.sub("\ufffd", str(value))
    return shortened(text, MAX_CELL_CHARACTERS)


def shortened(text: str, most: int) -> str:
    """The text, or its first `most` characters and an ellipsis."""
    return text if len(text) <= most else f"{text[:most]}…"


def duration(milliseconds: float) -> str:
    """Three digits in the largest unit of which there is at least one: "850 ms", "1.3 s", "2.5 min", "26 h", "3 d".

    Hours go up to two days, minutes to two hours, seconds to two minutes: "90 s" says more than "1.5 min".
    """
    for size, unit in _UNITS:
        if milliseconds >= 2 * size or size == _SECOND_MS <= milliseconds:
            return f"{_digits(milliseconds / size)}\u202f{unit}"
    return f"{_digits(milliseconds)}\u202fms"


def _digits(value: float) -> str:
    """Three digits, without zeros at the end: 1.3, 12.5, 250, 0.004."""
    text = f"{value:.3g}" if value < 999.5 else f"{value:,.0f}".replace(",", "\u202f")
    return f"{value:.5f}".rstrip("0").rstrip(".") if "e" in text else text


def counted(count: int, one: str, many: str = "") -> str:
    """ "1 message", "2,000 messages"; `many` where it is not `one` with an s."""
    return f"{count:,} {plural(count, one, many)}"


def labels(places: Iterable[tuple[str, str]]) -> dict[tuple[str, str], str]:
    """Label each namespace and entity: by the entity alone, or with its namespace where there are several of these."""
    found = list(places)
    several = len({namespace for namespace, _ in found}) > 1
    return {place: f"{place[1]} ({place[0]})" if several else place[1] for place in found}


def heading(name: str) -> str:
    """The name of a column for people: "sequenceNumber" is "Sequence number". Other names stay as they are."""
    if not _COLUMN_NAME.fullmatch(name):
        return name
    return re.sub("[A-Z]", lambda letter: f" {letter[0].lower()}", name).capitalize()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_pages = Environment(
    loader=PackageLoader("pipeline.jobs", "pages"), autoescape=True, trim_blocks=True, lstrip_blocks=True
)
_pages.filters["shown"] = shown
_pages.filters["heading"] = heading
_pages.tests["a_number"] = _is_number


def render(report: Report) -> str:
    """The page. All text is escaped but the plots, which `plots` has drawn."""
    sections = [each._replace(plots=[Markup(plot) for plot in each.plots]) for each in report.sections]
    page: str = _pages.get_template("report.html.j2").render(report=report._replace(sections=sections))
    return page
