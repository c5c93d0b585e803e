"""Message-ids for messages that are sent without one.

The cloud gives such a message an id. @azure/service-bus uses the id as the key of its lock renewals, so without an id
the client fails to complete the message.
"""

import os
from itertools import count


class MessageIds:
    """Each call makes an id: an encoded string of 32 hex digits, half random for the process, half a counter."""

    def __init__(self) -> None:
        self._format = b"\xa1\x20" + os.urandom(8).hex().encode() + b"%016x"
        self._numbers = count(1)

    def __call__(self) -> bytes:
        return self._format % next(self._numbers)
