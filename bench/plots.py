"""The plots of a document: each function draws one figure, or returns None when nothing of it was measured."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure as Drawing
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench.document import Document, notable
from bench.plan import KIB, MODES, PLAIN, SIZE_NAMES, load_name
from bench.recording import CLIENT, CPU
from bench.rows import ARTEMIS, BEFORE, LATENCIES, ONE_PROCESS, PEEKLOCK, QUANTILES, RABBITMQ

matplotlib.use("agg")
COLOURS = {PEEKLOCK: "#1b6ca8", BEFORE: "#8fbcdb", RABBITMQ: "#e07b39", ARTEMIS: "#6a9e58", ONE_PROCESS: "#8e6bb0"}
MODE_TITLES = {"send": "send", "recv": "receive and complete", "both": "send and receive at once"}
SHADES = ("#1b6ca8", "#e07b39", "#6a9e58", "#b0568f", "#d9b03c", "#7f7f7f")
DPI = 110
Rows = Mapping[str, Mapping[str, Any]]
"""Row key → a row of the document."""
Bars = Mapping[str, Sequence[Mapping[str, float] | None]]
"""Server → one figure for each group of bars, or None."""
Draw = Callable[[Any, Bars, Sequence[str]], None]


def drawings(made: Document) -> dict[str, Drawing]:
    """File name without its suffix → figure, in the order in which a page shows them."""
    rows = {row["key"]: row for row in made["rows"]}
    servers = list(made["servers"])
    makers: dict[str, Callable[[], Drawing | None]] = {
        "sizes": lambda: _throughput(rows, servers, _sizes(made), "rate by size of the body, 1 link", _draw_points),
        "links": lambda: _throughput(rows, servers, _shapes(made), "rate by links and queues, 1 KiB", _draw_bars),
        "one-at-a-time": lambda: _one_at_a_time(rows, servers),
        "open-loop": lambda: _open_loop(rows, servers, made["plan"]["rates"]),
        "cpu": lambda: _cpu(made["costs"], servers),
        "backlog": lambda: _backlog(rows, servers, made["plan"]["backlogs"]),
    }
    drawn = {name: make() for name, make in makers.items()}
    return {name: drawing for name, drawing in drawn.items() if drawing is not None}


def save(drawing: Drawing, path: Path) -> None:
    drawing.savefig(path, dpi=DPI, metadata={"Software": None})  # the same figures make the same file


def _sizes(made: Document) -> dict[str, str]:
    """What stands for the mode is {mode} → the label of the bars."""
    return {f"{{mode}}-{size}-{PLAIN}": SIZE_NAMES.get(size, f"{size} B") for size in sorted(made["plan"]["sizes"])}


def _shapes(made: Document) -> dict[str, str]:
    shapes = sorted((shape["links"], shape["queues"]) for shape in made["plan"]["shapes"])
    return {f"{{mode}}-{KIB}-{links}x{queues}": f"{links} on {queues}" for links, queues in shapes}


def _throughput(rows: Rows, servers: Sequence[str], cells: Mapping[str, str], title: str, draw: Draw) -> Drawing | None:
    panels = []
    for mode in MODES:
        keys = [template.format(mode=mode) for template in cells]
        if any(key in rows for key in keys):
            panels.append((MODE_TITLES[mode], _bars(rows, servers, keys)))
    if not panels:
        return None
    drawing = Drawing(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    drawing.suptitle(title)
    for place, (name, bars) in enumerate(panels):
        axes = drawing.add_subplot(1, len(panels), place + 1)
        draw(axes, bars, list(cells.values()))
        axes.set_title(name, fontsize=10)
        if place == 0:
            axes.set_ylabel("messages/s")
    _legend(drawing)
    return drawing


def _one_at_a_time(rows: Rows, servers: Sequence[str]) -> Drawing | None:
    if "unpipelined-rate" not in rows:
        return None
    drawing = Drawing(figsize=(9, 3.6), layout="constrained")
    drawing.suptitle("one send at a time, 1 KiB")
    rate, latency = drawing.subplots(1, 2, width_ratios=(1, 2))
    _draw_bars(rate, _bars(rows, servers, ["unpipelined-rate"]), [""])
    rate.set_ylabel("messages/s")
    quantiles = {f"unpipelined-{key}": name for key, name in QUANTILES.items()}
    _draw_points(latency, _bars(rows, servers, list(quantiles)), list(quantiles.values()))
    latency.set_ylabel("send to accept, ms")
    _legend(drawing)
    return drawing


def _open_loop(rows: Rows, servers: Sequence[str], rates: Sequence[str]) -> Drawing | None:
    measured = [rate for rate in rates if f"openloop-{rate}-ack-p50" in rows]
    if not measured:
        return None
    drawing = Drawing(figsize=(4.2 * len(measured), 3.4 * len(LATENCIES)), layout="constrained")
    drawing.suptitle("open loop, 1 KiB: latency from the intended send time")
    for down, (way, path) in enumerate(LATENCIES.items()):
        for across, rate in enumerate(measured):
            axes = drawing.add_subplot(len(LATENCIES), len(measured), down * len(measured) + across + 1)
            keys = [f"openloop-{rate}-{way}-{quantile}" for quantile in QUANTILES]
            _draw_points(axes, _bars(rows, servers, keys), list(QUANTILES.values()))
            axes.set_title(f"{load_name(rate)}: {path}", fontsize=10)
            if across == 0:
                axes.set_ylabel("ms")
    _legend(drawing)
    return drawing


def _cpu(costs: Sequence[Mapping[str, Any]], servers: Sequence[str]) -> Drawing | None:
    """Of the cells that all plans have: one bar for each server, its processes one above the other."""
    plain = {f"{mode}-{KIB}-{PLAIN}": name for mode, name in MODE_TITLES.items()}
    cells = plain | {"unpipelined": "one send at a time", "openloop-2000": "open loop, 2,000/s"}
    shown = [cost for cost in costs if cost["kind"] == CPU and cost["cell"] in cells]
    if not shown:
        return None
    drawing = Drawing(figsize=(3.2 * len(shown), 4.2), layout="constrained")
    drawing.suptitle("CPU per message of 1 KiB, by process")
    roles = list(dict.fromkeys(role for cost in shown for server in servers for role in _parts(cost, server)))
    for place, cost in enumerate(shown):
        axes = drawing.add_subplot(1, len(shown), place + 1)
        for at, server in enumerate(servers):
            bottom = 0.0
            for role, micros in _parts(cost, server).items():
                axes.bar(at, micros, bottom=bottom, color=SHADES[roles.index(role) % len(SHADES)], label=role)
                bottom += micros
        axes.set_xticks(range(len(servers)), [server.split()[0] for server in servers], rotation=30, fontsize=8)
        axes.set_title(cells[cost["cell"]], fontsize=9)
        if place == 0:
            axes.set_ylabel("µs")
    _legend(drawing)
    return drawing


def _parts(cost: Mapping[str, Any], server: str) -> dict[str, float]:
    """By process, the client last."""
    by_role = cost["by_server"].get(server)
    if by_role is None:
        return {}
    client = {CLIENT: by_role[CLIENT]} if CLIENT in by_role else {}
    return notable(by_role) | client


def _backlog(rows: Rows, servers: Sequence[str], backlogs: Sequence[int]) -> Drawing | None:
    measured = [count for count in backlogs if f"backlog-{count}-used" in rows]
    if not measured:
        return None
    parts = {
        "load": "load, messages/s",
        "used": "growth of memory, MB",
        "restart": "restart to first message, s",
        "drain": "drain, messages/s",
    }
    drawing = Drawing(figsize=(4 * len(parts), 3.6), layout="constrained")
    drawing.suptitle("backlog, 1 KiB")
    for place, (part, name) in enumerate(parts.items()):
        axes = drawing.add_subplot(1, len(parts), place + 1)
        bars = _bars(rows, servers, [f"backlog-{count}-{part}" for count in measured])
        draw = _draw_points if part in ("used", "restart") else _draw_bars
        draw(axes, bars, [f"{count:,}" for count in measured])
        axes.set_title(name, fontsize=10)
    _legend(drawing)
    return drawing


def _bars(rows: Rows, servers: Sequence[str], keys: Sequence[str]) -> Bars:
    def figure(key: str, server: str) -> Mapping[str, float] | None:
        row = rows.get(key)
        found: Mapping[str, float] | None = row["figures"].get(server) if row else None
        return found

    return {server: [figure(key, server) for key in keys] for server in servers}


def _draw_bars(axes: Any, bars: Bars, labels: Sequence[str]) -> None:
    """Medians side by side from zero, the range of the rounds as a line on each."""
    width = 0.8 / len(bars)
    for where, server, figure in _places(bars):
        error = {"yerr": _extent(figure), "error_kw": {"lw": 0.8}}
        axes.bar(where, figure["median"], width, color=COLOURS[server], label=server, **error)
    _label(axes, labels)


def _draw_points(axes: Any, bars: Bars, labels: Sequence[str]) -> None:
    """The same as points on a logarithmic axis, which has no zero for a bar to stand on."""
    for where, server, figure in _places(bars):
        if figure["least"] > 0:
            look = {"fmt": "o", "markersize": 5, "elinewidth": 1, "color": COLOURS[server], "label": server}
            axes.errorbar(where, figure["median"], yerr=_extent(figure), **look)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(axis="y", linewidth=0.3)
    _label(axes, labels)


def _places(bars: Bars) -> Iterator[tuple[float, str, Mapping[str, float]]]:
    width = 0.8 / len(bars)
    for place, (server, figures) in enumerate(bars.items()):
        for at, figure in enumerate(figures):
            if figure is not None:
                yield at - 0.4 + width * (place + 0.5), server, figure


def _extent(figure: Mapping[str, float]) -> list[list[float]]:
    return [[figure["median"] - figure["least"]], [figure["most"] - figure["median"]]]


def _label(axes: Any, labels: Sequence[str]) -> None:
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.set_xticks(range(len(labels)), labels, fontsize=8)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.tick_params(axis="y", labelsize=8)


def _legend(drawing: Drawing) -> None:
    """One for all axes, each name once."""
    handles: dict[str, Any] = {}
    for axes in drawing.axes:
        for handle, name in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(name, handle)
    drawing.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=6, fontsize=8, frameon=False)
