"""Tasks of the test with Celery, whose broker is Peeklock through kombu's transport for Service Bus."""

import os
import time
from pathlib import Path

from celery import Celery, Task

app = Celery("tasks", broker=os.environ["BROKER"], backend=f"file://{os.environ['RESULTS']}")
app.conf.update(
    broker_connection_retry_on_startup=True,
    # A worker that dies gives its tasks back when their locks end, or its connection does. No wait shorter than the
    # default: it is also the time for opening a link, and with 1 s, workers on busy processors opened none for minutes.
    broker_transport_options={"peek_lock_seconds": 5},
    task_acks_late=True,
    task_default_queue="celery-tasks",
    worker_prefetch_multiplier=1,
)


@app.task
def add(x: int, y: int) -> int:
    return x + y


@app.task(bind=True, max_retries=3)
def succeed_at_third(self: Task) -> int:
    if self.request.retries < 2:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task
def note(file: str, seconds: float) -> int:
    """How often it was begun, with this time in between."""
    with Path(file).open("a") as notes:
        notes.write("begun\n")
    times = len(Path(file).read_text().splitlines())
    time.sleep(seconds if times == 1 else 0)
    return times
