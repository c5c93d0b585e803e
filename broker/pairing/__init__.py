"""Sends to a primary namespace, and to a backlog in a secondary one while the primary is away.

`health`, `failures`, `backlog` and `aliases` decide, without I/O; `availability`, `sending` and `pairing` are asyncio
around them.
"""
