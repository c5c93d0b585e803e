"""Runs the process that follows the logs of the workers, writes the journal and serves it to gateways.

`following` is a thread that reads and writes, `serving` answers gateways on a unix socket, and `properties` decodes
messages.
"""
