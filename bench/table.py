"""The rows of a document as text: for the terminal, and for the page."""

from collections.abc import Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from bench.document import Document
from bench.rows import PEEKLOCK

MET = {True: "[green]pass[/]", False: "[red]FAIL[/]", None: "[dim]not judged[/]"}


def table(made: Document) -> Table:
    machine, plan = made["machine"], made["plan"]
    title = (
        f"Medians of {plan['rounds']} rounds \\[min..max]\n{machine['processor']}, {machine['cores']} cores,"
        f" {machine['memory_gib']} GiB, Linux {machine['linux']}, Python {machine['python']}"
    )
    servers = list(made["servers"])
    others = [server for server in servers if server != PEEKLOCK]
    shown = Table(title=title)
    shown.add_column("what")
    shown.add_column("unit")
    for server in servers:
        shown.add_column(server, justify="right")
    for server in others:
        shown.add_column(f"÷ {server}", justify="right")
    shown.add_column("target")
    shown.add_column("")
    group = ""
    for row in made["rows"]:
        if group and row["group"] != group:
            shown.add_section()
        group = row["group"]
        figures = [escape(figure(row["figures"].get(server))) for server in servers]
        ratios = [ratio(row["ratios"], server) for server in others]
        texts = "\n".join(target["text"] for target in row["targets"])
        verdict = "\n".join(MET[target["met"]] for target in row["targets"])
        shown.add_row(row["label"], row["unit"], *figures, *ratios, texts, verdict)
    return shown


def figure(of: Mapping[str, Any] | None) -> str:
    """The median, with the range where there is one."""
    if of is None:
        return ""
    if of["least"] == of["most"]:
        return number(of["median"])
    return f"{number(of['median'])} [{number(of['least'])}..{number(of['most'])}]"


def ratio(ratios: Mapping[str, float], server: str) -> str:
    return f"{ratios[server]:.2f}" if server in ratios else ""


def number(value: float) -> str:
    """Three significant digits below 100, whole numbers above."""
    if abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"
