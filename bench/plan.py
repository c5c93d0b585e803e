"""What is measured, and for how long."""

from dataclasses import dataclass

KIB = 1024
MODES = ("send", "recv", "both")
SIZES = (100, KIB, 10 * KIB, 100 * KIB)
RATES = ("2000", "8000", "half")
SIZE_NAMES = {100: "100 B", KIB: "1 KiB", 10 * KIB: "10 KiB", 100 * KIB: "100 KiB"}


@dataclass(frozen=True, order=True)
class Shape:
    """Links, each on a connection of its own, over queues: link k uses queue k modulo `queues`."""

    links: int
    queues: int

    def __str__(self) -> str:
        return f"{self.links}x{self.queues}"

    @property
    def words(self) -> str:
        if self.links == 1:
            return "1 link"
        return f"{self.links} links, {self.queues} queue{'s' if self.queues > 1 else ''}"


PLAIN = Shape(1, 1)
SHAPES = (PLAIN, Shape(4, 1), Shape(16, 1), Shape(16, 16))


@dataclass(frozen=True)
class Cell:
    """Bodies of `size` bytes over a shape."""

    size: int
    shape: Shape

    def key(self, mode: str) -> str:
        return f"{mode}-{self.size}-{self.shape}"

    @property
    def is_plain(self) -> bool:
        return self.shape == PLAIN

    def __str__(self) -> str:
        return f"{SIZE_NAMES.get(self.size, f'{self.size:,} B')}, {self.shape.words}"


def load_name(rate: str) -> str:
    """`rate` is messages per second, or `half` of what a server reached when it was warmed up."""
    return "half the maximum" if rate == "half" else f"{int(rate):,}/s"


@dataclass(frozen=True)
class Plan:
    """The targets are for the defaults."""

    rounds: int = 5
    seconds: float = 5.0
    modes: tuple[str, ...] = MODES
    sizes: tuple[int, ...] = SIZES
    shapes: tuple[Shape, ...] = SHAPES
    cross: bool = False  # every size in every shape; otherwise sizes on one link, and shapes at 1 KiB
    rates: tuple[str, ...] = RATES
    rate_seconds: float = 10.0
    connections: int = 5000
    backlogs: tuple[int, ...] = (1_000_000, 10_000_000)
    backlog_rounds: int = 1  # a round takes minutes for each broker
    sessions: int = 100_000
    ids: int = 1_000_000  # in the window of duplicate detection
    pipeline_messages: int = 300_000  # of the journal, in each measurement of its capture and of Spark
    audit_messages: int = 1_000_000  # with three rows each
    turns: int = 2  # in each round of what the pipeline interleaves
    warm_up_rounds: int = 2
    warm_up_seconds: float = 8.0
    rest_seconds: float = 2.0  # before memory is read

    @property
    def cells(self) -> tuple[Cell, ...]:
        everything = [Cell(size, shape) for size in self.sizes for shape in self.shapes]
        if self.cross:
            return tuple(everything)
        size = KIB if KIB in self.sizes else self.sizes[0]
        shape = PLAIN if PLAIN in self.shapes else self.shapes[0]
        by_size = [cell for cell in everything if cell.shape == shape]
        return (*by_size, *(cell for cell in everything if cell.size == size and cell not in by_size))

    @classmethod
    def tiny(cls) -> "Plan":
        """Everything once, in seconds: this shows that the measurements work, but tells nothing of the broker."""
        return cls(
            rounds=1,
            seconds=0.2,
            sizes=(KIB,),
            shapes=(PLAIN, Shape(4, 2)),
            rate_seconds=0.3,
            connections=50,
            backlogs=(2000,),
            sessions=500,
            ids=2000,
            pipeline_messages=5000,
            turns=1,
            audit_messages=6400,  # a hundred in each queue: one of them is dead-lettered
            warm_up_rounds=1,
            warm_up_seconds=0.3,
            rest_seconds=0.2,
        )
