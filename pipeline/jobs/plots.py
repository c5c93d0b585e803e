"""Plots as SVG that stands within a page: its colours are the page's, light or dark, and its text is text."""

import io
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import matplotlib as mpl
from markupsafe import escape
from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, MaxNLocator

from pipeline.jobs.report import shown

# Colours that are drawn, and what the page puts in their place.
_PLACEHOLDERS: Final = {
    "#010101": "var(--text)",
    "#020202": "var(--quiet)",
    "#030303": "var(--line)",
    **{f"#0a0a0{number}": f"var(--series-{number})" for number in range(1, 7)},
}
_TEXT, _QUIET, _LINE, *_SERIES = _PLACEHOLDERS
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
# Between the ends of a logarithmic axis: below the first it is ticked as others, above the second at powers of 10 only.
_FEW_TICKS_FACTOR, _MANY_TICKS_FACTOR = 8, 3000
_AROUND_ONE_TIME: Final = timedelta(hours=1)


def bars(title: str, counts: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """Lying bars, one for each key of `counts`, each divided into named parts."""
    names = list(dict.fromkeys(name for parts in counts.values() for name in parts))
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 1.2 + 0.3 * max(len(counts), 3)), layout="constrained")
        axes = figure.subplots()
        labels = [_label(key) for key in counts]
        starts = [0.0] * len(counts)
        for index, name in enumerate(names):
            widths = [float(parts.get(name, 0)) for parts in counts.values()]
            colour = _SERIES[index % len(_SERIES)]
            axes.barh(range(len(labels)), widths, left=starts, color=colour, height=0.65, label=name)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(range(len(labels)), labels)
        axes.set_ylim(max(len(labels), 3) - 0.5, -0.5)  # from above, and one bar alone is no thicker than others
        axes.set_xlabel(unit)
        axes.xaxis.grid(True)
        axes.set_axisbelow(True)
        axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
        axes.set_title(shown(title))
        if len(names) > 1:
            _legend(figure, names)
        return _svg(figure, title)


def lines(
    title: str, times: Sequence[datetime], series: Mapping[str, Sequence[float | None]], unit: str, *, log: bool = False
) -> str:
    """Lines over time; where a value is None, the line has a gap."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 2.9), layout="constrained")
        axes = figure.subplots()
        for index, (name, values) in enumerate(series.items()):
            heights = [float("nan") if value is None else value for value in values]
            colour = _SERIES[index % len(_SERIES)]
            axes.plot(times, heights, color=colour, label=_label(name), marker="o", markersize=3, linewidth=1.5)
        if log and any(value for values in series.values() for value in values):
            axes.set_yscale("log")
            _tick_powers(axes.yaxis)
        else:
            axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(lambda value, _: _short(value))
        if len(times) == 1:
            axes.set_xlim(times[0] - _AROUND_ONE_TIME, times[0] + _AROUND_ONE_TIME)
        locator = AutoDateLocator(maxticks=6)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(ConciseDateFormatter(locator))
        axes.set_ylabel(unit)
        axes.yaxis.grid(True)
        axes.set_title(shown(title))
        if len(series) > 1:
            _legend(figure, series)
        return _svg(figure, title)


def points(title: str, values: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """A line for each key of `values`, with a point for each of its named values, on a logarithmic scale.

    Values of 0 are drawn at its lower end, where the smallest of the others is not.
    """
    names = list(dict.fromkeys(name for each in values.values() for name in each))
    above = [value for each in values.values() for value in each.values() if value > 0] or [1.0]
    least = min(above) / 2
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.6, 1.2 + 0.3 * max(len(values), 3)), layout="constrained")
        axes = figure.subplots()
        rows = range(len(values))
        drawn = [[max(value, least) for value in each.values()] for each in values.values()]
        axes.hlines(rows, [min(each) for each in drawn], [max(each) for each in drawn], color=_LINE, linewidth=3)
        for index, name in enumerate(names):
            having = [row for row, each in zip(rows, values.values(), strict=True) if name in each]
            widths = [max(each[name], least) for each in values.values() if name in each]
            axes.plot(widths, having, "o", color=_SERIES[index % len(_SERIES)], label=name, markersize=6)
        axes.set_yticks(rows, [_label(key) for key in values])
        axes.set_ylim(max(len(values), 3) - 0.5, -0.5)
        axes.set_xscale("log")
        axes.set_xlim(least / 1.2, max(above) * 1.5)
        _tick_powers(axes.xaxis)
        axes.set_xlabel(unit)
        axes.xaxis.grid(True)
        axes.set_axisbelow(True)
        axes.set_title(shown(title))
        _legend(figure, names)
        return _svg(figure, title)


def _tick_powers(axis: Any) -> None:
    """Of a logarithmic axis: label 1, 10, 100, ..., and 2 and 5 times these if they are few, or round numbers."""
    low, high = sorted(axis.get_view_interval())
    if high / low < _FEW_TICKS_FACTOR:
        axis.set_major_locator(MaxNLocator(5))
    else:
        axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > _MANY_TICKS_FACTOR else (1.0, 2.0, 5.0)))
    axis.set_major_formatter(lambda value, _: _short(value))
    axis.set_minor_locator(FixedLocator([]))


def _legend(figure: Figure, names: Iterable[str]) -> None:
    """Below the axes, in as many columns as the figure is wide."""
    longest = max(len(_label(name)) for name in names)
    columns = max(1, min(4, _LEGEND_CHARACTERS // (longest + _SAMPLE_CHARACTERS)))
    figure.legend(loc="outside lower center", ncols=columns, fontsize=9)


def _label(name: str) -> str:
    text = shown(name)
    return text if len(text) <= _MAX_LABEL_CHARACTERS else f"{text[: _MAX_LABEL_CHARACTERS - 1]}…"


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
