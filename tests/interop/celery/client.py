"""Sends tasks and waits for their results: `client.py tasks`, `client.py note FILE` or `client.py result ID`."""

import sys

from celery import group
from tasks import add, app, note, succeed_at_third

PATIENCE_S = 30.0

match sys.argv[1:]:
    case ["tasks"]:
        assert add.delay(2, 3).get(timeout=PATIENCE_S) == 5
        sums = group(add.s(number, number) for number in range(20))().get(timeout=PATIENCE_S)
        assert sums == [2 * number for number in range(20)], sums
        assert succeed_at_third.delay().get(timeout=PATIENCE_S) == 2
        print("all as expected")
    case ["note", file]:
        print(note.delay(file, 60.0).id)
    case ["result", task]:
        print(app.AsyncResult(task).get(timeout=PATIENCE_S))
