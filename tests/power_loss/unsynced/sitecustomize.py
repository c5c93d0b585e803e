"""In the path of a broker that is to lose messages: its LMDB environments do not sync."""

from functools import partial
from typing import Any

import lmdb

unsynced: Any = partial(lmdb.open, sync=False)
lmdb.open = unsynced
