"""A model of the time that a message takes, by process, and the rates that follow for more processors.

The time of each role is a sum of terms, none of them negative, fitted by least squares of the errors relative to the
total of all roles:

- `message`: what each message takes, however many there are at once.
- `frames`: gateways x workers / links. Of what is in flight on the links, each pair of a gateway and a worker has a
  part. The more pairs there are, the fewer messages a frame has; each frame is written, read, and perhaps a turn.
- `turns`: workers / links. The more workers share the messages in flight, the fewer a commit has.
- `fragments`: partitions. A link's credit and its messages are shared out to so many fragments, each with commands
  of its own.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from typing import Any

from bench.plan import KIB
from bench.recording import BUSY_CORES

MOST_PROCESSES = 64  # the limit of workers, partitions, and gateways on one machine
LINKS_OF_A_GATEWAY = 8  # of clients, in predictions
PREDICTED = (2, 8, 32, 128)


@dataclass(frozen=True)
class Layout:
    """Processes, and the load: `links` with 1,000 messages in flight each, `both` has as many of each kind."""

    gateways: int
    workers: int
    links: int = 8
    partitions: int = 4

    def __str__(self) -> str:
        return f"{self.gateways} x {self.workers}, {self.partitions} partitions, {self.links} links"


TERMS: Mapping[str, Callable[[float, Layout], float]] = {
    "message": lambda gateways, layout: 1.0,
    "frames": lambda gateways, layout: gateways * layout.workers / layout.links,
    "turns": lambda gateways, layout: layout.workers / layout.links,
    "fragments": lambda gateways, layout: float(layout.partitions),
}
OF_ROLE = {
    "gateway": ("message", "frames", "fragments"),
    "worker": ("message", "frames", "turns", "fragments"),
    "checkpointer": ("message",),
}
Point = tuple[Layout, Mapping[str, float]]
Model = Mapping[str, Mapping[str, float]]
"""Role → term → microseconds."""


def fit(points: Sequence[Point]) -> Model:
    return {role: _fit_role(role, names, points) for role, names in OF_ROLE.items()}


def _fit_role(role: str, names: Sequence[str], points: Sequence[Point]) -> dict[str, float]:
    """The best fit of those in which no term is negative."""
    totals = [sum(of[each] for each in OF_ROLE) for _, of in points]
    rows = [
        [TERMS[name](of["gateways"], layout) / whole for name in names]
        for (layout, of), whole in zip(points, totals, strict=True)
    ]
    wanted = [of[role] / whole for (_, of), whole in zip(points, totals, strict=True)]
    best: tuple[float, dict[str, float]] | None = None
    for count in range(1, len(names) + 1):
        for chosen in combinations(range(len(names)), count):
            solution = least_squares([[row[at] for at in chosen] for row in rows], wanted)
            if solution is None or min(solution) < 0:
                continue
            found = dict.fromkeys(names, 0.0) | {names[at]: value for at, value in zip(chosen, solution, strict=True)}
            error = sum(
                (sum(value * each for value, each in zip(found.values(), row, strict=True)) - want) ** 2
                for row, want in zip(rows, wanted, strict=True)
            )
            if best is None or error < best[0]:
                best = error, found
    assert best is not None
    return best[1]


def least_squares(rows: Sequence[Sequence[float]], wanted: Sequence[float]) -> list[float] | None:
    """The factors with the least errors; None if the rows do not tell them."""
    size = len(rows[0])
    matrix = [[sum(row[i] * row[j] for row in rows) for j in range(size)] for i in range(size)]
    right = [sum(row[i] * want for row, want in zip(rows, wanted, strict=True)) for i in range(size)]
    for i in range(size):
        pivot = max(range(i, size), key=lambda at: abs(matrix[at][i]))
        if abs(matrix[pivot][i]) < 1e-12:
            return None
        matrix[i], matrix[pivot], right[i], right[pivot] = matrix[pivot], matrix[i], right[pivot], right[i]
        for below in range(i + 1, size):
            factor = matrix[below][i] / matrix[i][i]
            matrix[below] = [a - factor * b for a, b in zip(matrix[below], matrix[i], strict=True)]
            right[below] -= factor * right[i]
    found = [0.0] * size
    for i in reversed(range(size)):
        found[i] = (right[i] - sum(matrix[i][j] * found[j] for j in range(i + 1, size))) / matrix[i][i]
    return found


def cost(model: Model, role: str, gateways: float, layout: Layout) -> float:
    """Microseconds of CPU for a message."""
    return sum(value * TERMS[name](gateways, layout) for name, value in model[role].items())


def total(model: Model, gateways: float, layout: Layout) -> float:
    return sum(cost(model, role, gateways, layout) for role in OF_ROLE)


def left_out(points: Sequence[Point]) -> list[float]:
    """The relative error of the total of each point, predicted by a model that does not know it."""
    errors = []
    for number, (layout, of) in enumerate(points):
        model = fit([*points[:number], *points[number + 1 :]])
        errors.append(total(model, of["gateways"], layout) / sum(of[role] for role in OF_ROLE) - 1)
    return errors


def root_mean_square(errors: Sequence[float]) -> float:
    return sqrt(sum(error**2 for error in errors) / len(errors))


@dataclass(frozen=True)
class Prediction:
    rate: float  # messages per second
    layout: Layout


def predict(model: Model, processors: int) -> Prediction:
    """The highest rate, and the processes with which it is reached. Checkpointers share the workers' processors."""
    return max(
        (
            Prediction(_rate(model, layout, processors), layout)
            for workers in range(1, min(processors, MOST_PROCESSES + 1))
            for gateways in range(1, min(processors - workers, MOST_PROCESSES) + 1)
            for layout in [Layout(gateways, workers, gateways * LINKS_OF_A_GATEWAY, max(4, workers))]
        ),
        key=lambda prediction: prediction.rate,
    )


def _rate(model: Model, layout: Layout, processors: int) -> float:
    """No process takes more than one processor, and all together no more than there are."""
    of = {role: cost(model, role, layout.gateways, layout) for role in OF_ROLE}
    return 1e6 * min(layout.gateways / of["gateway"], layout.workers / of["worker"], processors / sum(of.values()))


def range_of(points: Sequence[Point], processors: int) -> tuple[float, float]:
    """The lowest and the highest rate that models predict which do not know one of the points."""
    rates = [predict(fit([*points[:number], *points[number + 1 :]]), processors).rate for number in range(len(points))]
    return min(rates), max(rates)


# --- the page

NAMES = {"send": "send", "recv": "receive, lock and complete", "both": "send and receive at once"}
INTRODUCTION = """# How the throughput grows with processors

Made by `python -m bench.scaling`, with no figure typed by hand; [bench/README.md](../../bench/README.md) says how.
A partitioned queue, messages of 1 KiB without a key; each link is on a connection of its own, with 1,000 messages in
flight.

The load tool has a processor of its own, and all processes of the broker share the others. So the rates here are not
those of more processors. What counts is the **CPU time of a message**: if it stays nearly the same while processes are
added, then more processors do as much more.
"""
LIMITS = """## What else decides

- **What grows** is above all *fragments*. A partitioned queue has one in each partition, and each worker has some; so
  it grows with the workers, because there are at least as many partitions.
- **One link is on one gateway.** It reaches the rate of one gateway at most, whatever the number of processors.
- **A key, and a session, is on one fragment.** The messages of one key reach the rate of one worker at most.
- **The home and its catalog** are not on the path of a message.
- **The disk.** Each commit is one write and one sync of its worker's log; the tables above say how many there are for
  1,000 messages. A message of 1 KiB is written to the log, and to the tables if it is still there when a checkpoint
  begins. With one disk, its syncs or its bytes per second may be the limit before the processors are.
- **The network.** 10 Gbit/s are some 1.1 million messages of 1 KiB per second each way. On loopback the kernel's work
  for a packet counts for its sender; the interrupts of a network card are not in these figures.
- **Processors that work at once** share memory, caches and power. In these runs the processes of the broker took turns
  on the same processors, which fills the caches anew for each. So real figures may differ to either side.
- **Processes that are not busy** make smaller turns, and take more time for a message. These figures are of a broker
  that does as much as it can.
- **{links} links for each gateway** are assumed. With fewer, less is in flight, and turns are smaller.
- **Limits**: 64 gateways and 64 workers on one machine, 64 partitions.
"""


def page(made: Mapping[str, Any], points: Mapping[str, Sequence[Point]], disturbed: tuple[int, int]) -> str:
    parts = [INTRODUCTION, _how(made, disturbed), *_measured(points)]
    models = {mode: fit(of) for mode, of in points.items()}
    parts += [_model(models, points), _predictions(models, points), LIMITS.format(links=LINKS_OF_A_GATEWAY)]
    return "\n".join(parts)


def _how(made: Mapping[str, Any], disturbed: tuple[int, int]) -> str:
    on = made["machine"]
    return (
        f"Measured {made['began'][:10]}: {made['broker']}, {on['processor']}, {on['cores']} cores, Linux {on['linux']},"
        f" Python {on['python']}. Medians of {made['rounds']} rounds, each with all layouts; {made['seconds']:g} s of"
        " sending in each run, and as many messages received."
        f" The tool was on processor {_listed(made['tool_on'])}, the broker on {_listed(made['broker_on'])}."
        f" During {disturbed[0]} of {disturbed[1]} runs others used more than {BUSY_CORES} cores of the machine.\n"
    )


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _measured(points: Mapping[str, Sequence[Point]]) -> Iterator[str]:
    yield "## Measured\n"
    yield (
        "µs of CPU for a message, of all processes of a kind together. *Used* is the number of gateways among which the"
        " kernel has divided the connections, which it does at random. *Error* is that of the total, as predicted by a"
        " model that does not know the row.\n"
    )
    for mode, of in points.items():
        yield f"### {NAMES[mode].capitalize()}\n"
        head = ("gateways", "used", "workers", "partitions", "links", "gateway", "worker", "checkpointer", "total")
        rows = []
        usual = sum(of[0][1][role] for role in OF_ROLE)
        for (layout, figures), error in zip(of, left_out(of), strict=True):
            whole = sum(figures[role] for role in OF_ROLE)
            rows.append(
                (
                    str(layout.gateways),
                    f"{figures['gateways']:.1f}",
                    *map(str, (layout.workers, layout.partitions, layout.links)),
                    *(f"{figures[role]:.2f}" for role in OF_ROLE),
                    f"{whole:.2f}",
                    f"{whole / usual:.2f}",
                    f"{error:+.1%}",
                    f"{figures['commits']:.1f}",
                )
            )
        yield table((*head, "of the first", "error", "commits for 1,000"), rows)


def _model(models: Mapping[str, Model], points: Mapping[str, Sequence[Point]]) -> str:
    rows = []
    for mode, model in models.items():
        for role, terms in model.items():
            shown = [f"{terms[name]:.3g}" if name in terms else "" for name in TERMS]
            rows.append((NAMES[mode], role, *shown))
    errors = [
        (NAMES[mode], f"{root_mean_square(left_out(of)):.1%}", f"{max(map(abs, left_out(of))):.1%}")
        for mode, of in points.items()
    ]
    return (
        "## The model\n\n"
        "µs = *message* + *frames* x gateways x workers / links + *turns* x workers / links + *fragments* x partitions,"
        " for each kind of process. Terms that would be negative are 0. The reasons for the terms are in"
        " `bench/scaling_model.py`.\n\n"
        + table(("", "process", *TERMS), rows)
        + "\nErrors of the total, each row predicted by a model that does not know it:\n\n"
        + table(("", "root mean square", "greatest"), errors)
    )


def _predictions(models: Mapping[str, Model], points: Mapping[str, Sequence[Point]]) -> str:
    rows = []
    for mode, model in models.items():
        for processors in PREDICTED:
            best = predict(model, processors)
            least, most = range_of(points[mode], processors)
            layout = best.layout
            rows.append(
                (
                    NAMES[mode],
                    str(processors),
                    f"{layout.gateways} + {layout.workers}",
                    f"{best.rate:,.0f}",
                    f"{least:,.0f} to {most:,.0f}",
                    f"{best.rate / processors / (predict(model, 2).rate / 2):.2f}",
                    f"{best.rate / layout.gateways:,.0f}",
                    f"{total(model, layout.gateways, layout):.1f}",
                    f"{best.rate * KIB / (1 << 20):,.0f}",
                )
            )
    head = (
        "",
        "processors",
        "gateways + workers",
        "messages/s",
        "leaving out one row",
        "per processor, of 2's",
    )
    return (
        "## Predicted\n\n"
        "The highest rate, and the processes with which the model reaches it, on processors like these, for the broker"
        f" alone. Each gateway has {LINKS_OF_A_GATEWAY} links, and the queue a partition for each worker (4 at least)."
        " Beyond what was measured this is an extrapolation: the range shows what one row of the table decides, and not"
        " what no row has.\n\n" + table((*head, "rate of a gateway", "µs for a message", "MiB/s of bodies"), rows)
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
