"""Runs one AMQP connection without I/O: bytes in, calls of a handler, bytes out.

`engine` is the connection, `links` and `deliveries` are its links and deliveries. In `proton`, `incoming` and
`outgoing` check and correct the frames that go into and come out of the library, which only `library` imports.
"""
