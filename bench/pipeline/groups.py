"""The groups of rows of the pipeline, each with the broker that it needs and the function that measures it."""

from collections.abc import Callable

from bench.pipeline.auditing import audit
from bench.pipeline.brokers import PeeklockWithJournal, PeeklockWithoutJournal
from bench.pipeline.capturing import capture
from bench.pipeline.journaling import journal
from bench.pipeline.latency import latency
from bench.pipeline.reads import reads
from bench.pipeline.sink import sink
from bench.recording import Recorder
from bench.servers import Peeklock

PIPELINE_OF_COMMITS = ("journal", "capture")  # the others run Spark, with the package of this checkout
PIPELINE: dict[str, tuple[type[Peeklock], Callable[[Recorder, Peeklock], None]]] = {
    "journal": (PeeklockWithJournal, journal),
    "capture": (PeeklockWithJournal, capture),
    "spark-reads": (PeeklockWithJournal, reads),
    "spark-latency": (PeeklockWithJournal, latency),
    "spark-sink": (PeeklockWithoutJournal, sink),
    "audit": (PeeklockWithoutJournal, audit),
}
