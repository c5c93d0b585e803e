"""Moves the messages of backlog queues to their destinations in the primary namespace.

`moving` and `destinations` decide, and `draining` does it while `leases` has the lease. `beside` keeps that going in a
process with other work.
"""
