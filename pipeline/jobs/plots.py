"""Plots as SVG that stands within a page: its colours are the page's, light or dark, and its text is text."""

import io
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import matplotlib as mpl
from markupsafe import escape
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

from pipeline.jobs.report import duration, shortened, shown

# Colours that are drawn, and what the page puts in their place.
_PLACEHOLDERS: Final = {
    "#010101": "var(--text)",
    "#020202": "var(--quiet)",
    "#030303": "var(--line)",
    **{f"#0a0a{number:02x}": f"var(--series-{number})" for number in range(1, 12)},
}
_TEXT, _QUIET, _LINE, *_SERIES, _REST = _PLACEHOLDERS
_STYLE: Final[dict[Any, Any]] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "peeklock",  # the same ids each time
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _TEXT,
    "axes.edgecolor": _LINE,
    "axes.labelcolor": _QUIET,
    "axes.titlesize": 11,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "grid.color": _LINE,
    "legend.frameon": False,
    "text.parse_math": False,  # a name of a queue may have dollar signs
}
_MAX_LABEL_CHARACTERS: Final = 34
_LEGEND_CHARACTERS, _SAMPLE_CHARACTERS = 84, 7  # in a line of a legend, and what the sample of a colour takes
_LEGEND_LINE_INCHES: Final = 0.19
_WIDTH_INCHES: Final = 5.6
# Where the values are milliseconds: what people say, up to the longest time to live but one.
_MS: Final = "ms"
_DURATIONS: Final = (
    *(factor * power for power in (0.001, 0.01, 0.1, 1, 10, 100) for factor in (1, 2, 5)),
    *(seconds * 1000 for seconds in (1, 2, 5, 10, 30)),
    *(minutes * 60_000 for minutes in (1, 2, 5, 10, 30)),
    *(hours * 3_600_000 for hours in (1, 2, 6, 12)),
    *(days * 86_400_000 for days in (1, 2, 7, 30, 90, 365, 3650)),
)
_MOST_DURATIONS: Final = 7  # labels along an axis
# Between the ends of a logarithmic axis: below the first it is ticked as others, above the second at powers of 10 only.
_FEW_TICKS_FACTOR, _MANY_TICKS_FACTOR = 8, 3000
_AROUND_ONE_TIME: Final = timedelta(hours=1)
MAX_LINES: Final = len(_SERIES)


def bars(title: str, counts: Mapping[str, Mapping[str, float]], unit: str, rest: str = "") -> str:
    """Lying bars, one for each key of `counts`, each divided into named parts.

    There is a colour for each of the largest parts; all others are one part, which may be there already: `rest`.
    """
    if not rest:
        counts, rest = _few_parts(counts)
    names = list(dict.fromkeys(name for parts in counts.values() for name in parts if name != rest))
    names += [rest] if rest else []
    colours = [*_SERIES[: len(names) - bool(rest)], *([_REST] if rest else [])]
    legend = _Legend(names) if len(names) > 1 else None
    with mpl.rc_context(_STYLE):
        figure = _figure(1.2 + 0.3 * max(len(counts), 3), legend)
        axes = figure.subplots()
        labels = list(_labels(counts).values())
        starts = [0.0] * len(counts)
        for name, colour in zip(names, colours, strict=True):
            widths = [float(parts.get(name, 0)) for parts in counts.values()]
            axes.barh(
                range(len(labels)), widths, left=starts, color=colour, height=0.65, label=_legend_label(legend, name)
            )
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(max(len(labels), 3) - 0.5, -0.5)  # from above, and one bar alone is no thicker than others
        axes.set_xlabel(unit)
        axes.xaxis.grid(True)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        axes.set_title(shown(title))
        if legend:
            legend.draw(figure)
        return _svg(figure, title)


def lines(
    title: str, times: Sequence[datetime], series: Mapping[str, Sequence[float | None]], unit: str, *, log: bool = False
) -> str:
    """Lines over time, at most MAX_LINES; where a value is None, the line has a gap. The `unit` "ms" is shown as
    times.
    """
    legend = _Legend(series) if len(series) > 1 else None
    with mpl.rc_context(_STYLE):
        figure = _figure(2.4, legend)
        axes = figure.subplots()
        for colour, (name, values) in zip(_SERIES, series.items(), strict=False):
            heights = [float("nan") if value is None else value for value in values]
            label = _legend_label(legend, name)
            axes.plot(times, heights, color=colour, label=label, marker="o", markersize=3, linewidth=1.5)
        if log and any(value for values in series.values() for value in values):
            axes.set_yscale("log")
            _tick_powers(axes.yaxis, unit)
        else:
            axes.set_ylim(bottom=0)
            if unit != _MS:
                axes.yaxis.set_major_locator(MaxNLocator(5, integer=True))
            shorten = duration if unit == _MS else _short
            axes.yaxis.set_major_formatter(lambda value, _: shorten(value))
        if len(times) == 1:
            axes.set_xlim(times[0] - _AROUND_ONE_TIME, times[0] + _AROUND_ONE_TIME)
        locator = AutoDateLocator(maxticks=6)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.set_ylabel("" if unit == _MS else unit)
        axes.yaxis.grid(True)
        axes.set_title(shown(title))
        if legend:
            legend.draw(figure)
        return _svg(figure, title)


def points(title: str, values: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A line for each key of `values`, with a point for each of its named values, on a logarithmic scale.

    Values of 0 are drawn at its lower end, where the smallest of the others is not. The `unit` "ms" is shown as times.
    """
    names = list(dict.fromkeys(name for each in values.values() for name in each))
    above = [value for each in values.values() for value in each.values() if value > 0] or [1.0]
    least = min(above) / 2
    legend = _Legend(names)
    with mpl.rc_context(_STYLE):
        figure = _figure(1.2 + 0.3 * max(len(values), 3), legend)
        axes = figure.subplots()
        rows = range(len(values))
        drawn = [[max(value, least) for value in each.values()] for each in values.values()]
        axes.hlines(rows, [min(each) for each in drawn], [max(each) for each in drawn], color=_LINE, linewidth=3)
        for colour, name in zip(_SERIES, names, strict=False):
            having = [row for row, each in zip(rows, values.values(), strict=True) if name in each]
            widths = [max(each[name], least) for each in values.values() if name in each]
            axes.plot(widths, having, "o", color=colour, label=_legend_label(legend, name), markersize=6)
        axes.set_yticks(rows, list(_labels(values).values()))
        axes.set_ylim(max(len(values), 3) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xlim(least / 1.2, max(above) * 1.5)
        _tick_powers(axes.xaxis, unit)
        axes.set_xlabel("" if unit == _MS else unit)
        axes.xaxis.grid(True)
        axes.set_axisbelow(True)
        axes.set_title(shown(title))
        legend.draw(figure)
        return _svg(figure, title)


def _few_parts(counts: Mapping[str, Mapping[str, float]]) -> tuple[dict[str, dict[str, float]], str]:
    """`counts` with a part for each colour at most, and the name of the one that has all others, or ""."""
    totals = Counter[str]()
    for parts in counts.values():
        totals.update(parts)
    if len(totals) <= len(_SERIES):
        return {key: dict(parts) for key, parts in counts.items()}, ""
    largest = {name for name, _ in totals.most_common(len(_SERIES))}
    rest = f"{len(totals) - len(largest):,} others"
    while rest in largest:
        rest += " "
    few = {}
    for key, parts in counts.items():
        few[key] = {name: value for name, value in parts.items() if name in largest}
        if others := sum(value for name, value in parts.items() if name not in largest):
            few[key][rest] = others
    return few, rest


def _tick_powers(axis: Any, unit: str) -> None:
    """Label a logarithmic axis with 1, 10, 100, ..., and 2 and 5 times these if they are few, or with round numbers.

    Milliseconds get the durations that people say.
    """
    low, high = sorted(axis.get_view_interval())
    if unit == _MS:
        ticks = _apart([each for each in _DURATIONS if low <= each <= high], (high / low) ** (1 / _MOST_DURATIONS))
        if len(ticks) > 1:
            axis.set_major_locator(FixedLocator(ticks))
        else:
            axis.set_major_locator(MaxNLocator(5))
        axis.set_major_formatter(lambda value, _: duration(value))
    else:
        if high / low < _FEW_TICKS_FACTOR:
            axis.set_major_locator(MaxNLocator(5))
        else:
            axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _MANY_TICKS_FACTOR else (1.0, 2.0, 5.0)))
        axis.set_major_formatter(lambda value, _: _short(value))
    axis.set_minor_locator(FixedLocator([]))


def _apart(ticks: Sequence[float], factor: float) -> list[float]:
    """Return those of the rising ticks that are at least `factor` times the one before, so that labels have room."""
    found: list[float] = []
    for each in ticks:
        if not found or each >= found[-1] * factor:
            found.append(each)
    return found


class _Legend:
    """A legend below the axes, in as many columns as the figure is wide. The figure is as much higher."""

    def __init__(self, names: Iterable[str]) -> None:
        self.labels = _labels(names)
        longest = max(map(len, self.labels.values()))
        self._columns = max(1, min(4, _LEGEND_CHARACTERS // (longest + _SAMPLE_CHARACTERS)))

    @property
    def inches(self) -> float:
        return -(-len(self.labels) // self._columns) * _LEGEND_LINE_INCHES

    def draw(self, figure: Figure) -> None:
        figure.legend(loc="outside lower center", ncols=self._columns, fontsize=9)


def _legend_label(legend: _Legend | None, name: str) -> str:
    return legend.labels[name] if legend else name


def _figure(height: float, legend: _Legend | None) -> Figure:
    return Figure(figsize=(_WIDTH_INCHES, height + (legend.inches if legend else 0.0)), layout="constrained")


def _labels(names: Iterable[str]) -> dict[str, str]:
    """Return by name a text of at most _MAX_LABEL_CHARACTERS, another one for each. If names begin alike, their ends
    are shown, too.
    """
    found = {name: shown(name) for name in names}
    cuts: tuple[Callable[[str], str], ...] = (_beginning, _both_ends)
    for cut in cuts:
        short = {name: cut(text) for name, text in found.items()}
        if len(set(short.values())) == len(short):
            return short
    return {
        name: f"{text[: _MAX_LABEL_CHARACTERS - 6]}… ({number})" for number, (name, text) in enumerate(found.items(), 1)
    }


def _beginning(text: str) -> str:
    return text if len(text) == _MAX_LABEL_CHARACTERS else shortened(text, _MAX_LABEL_CHARACTERS - 1)


def _both_ends(text: str) -> str:
    half = _MAX_LABEL_CHARACTERS // 2
    return text if len(text) <= _MAX_LABEL_CHARACTERS else f"{text[: half - 1]}…{text[-half:]}"


def _short(value: float) -> str:
    for limit, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:g}{letter}"
    return f"{value:g}"


def _svg(figure: Any, title: str) -> str:
    file = io.StringIO()
    # `Date` would make each page another one; the rest of the metadata is noise.
    with warnings.catch_warnings():
        # The page's fonts may have the characters that this one lacks: here it only measures them.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.savefig(
            file, format="svg", transparent=True, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :]
    for colour, variable in _PLACEHOLDERS.items():
        svg = svg.replace(colour, variable)
    return re.sub(r"<svg ", f'<svg role="img" aria-label="{escape(shown(title))}" ', svg, count=1)
