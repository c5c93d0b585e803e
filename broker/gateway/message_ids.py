"""Message-ids for messages that are sent without one.

The cloud gives such a message an id, and @azure/service-bus keeps its lock renewals by it: without one, completing a
message fails in the client.
"""

import os
from itertools import count


class MessageIds:
    """Calling it makes an encoded string of 32 hex digits: half of them random for the process, half a counter."""

    def __init__(self) -> None:
        self._format = b"\xa1\x20" + os.urandom(8).hex().encode() + b"%016x"
        self._numbers = count(1)

    def __call__(self) -> bytes:
        return self._format % next(self._numbers)
