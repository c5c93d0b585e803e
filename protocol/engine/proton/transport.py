"""A transport of proton with its connection and events: how it is set up, what it writes, and how it is freed."""

from protocol.engine.proton.library import SCRATCH_BYTES, condition_of, lib, scratch

_peek, _pop, _pop_event = lib.pn_transport_peek, lib.pn_transport_pop, lib.pn_collector_pop

# The smallest size of proton's output buffer. If there is less output, it is all that there is.
_OUTPUT_BUFFER_BYTES = 8 << 10


class Transport:
    """The C objects of one connection. `finished`: nothing will be written any more, as of the last output."""

    __slots__ = ("collector", "connection", "finished", "pointer")

    def __init__(
        self,
        *,
        server: bool,
        container_id: str,
        hostname: str | None,
        max_frame_size: int,
        channel_max: int,
        idle_time_out_ms: int,
    ) -> None:
        self.finished = False
        pointer = self.pointer = lib.pn_transport()
        if server:
            lib.pn_transport_set_server(pointer)
        lib.pn_transport_set_max_frame(pointer, max_frame_size)
        lib.pn_transport_set_channel_max(pointer, channel_max)
        # Proton advertises half of the time that it enforces, so that a peer's heartbeat may be late.
        lib.pn_transport_set_idle_timeout(pointer, 2 * idle_time_out_ms)
        connection = self.connection = lib.pn_connection()
        lib.pn_connection_set_container(connection, container_id.encode())
        if hostname:
            lib.pn_connection_set_hostname(connection, hostname.encode())
        self.collector = lib.pn_collector()
        lib.pn_connection_collect(connection, self.collector)
        lib.pn_transport_bind(pointer, connection)

    def take_written(self, is_due: bool) -> bytes:
        """Take the output, in whole frames. `is_due`: it may have more than transfers, flows and dispositions."""
        pointer = self.pointer
        size = _peek(pointer, scratch.buffer, SCRATCH_BYTES)
        if size <= 0:
            self.finished = size < 0
            return b""
        output: bytes = scratch.view[0:size]
        _pop(pointer, size)
        if size >= _OUTPUT_BUFFER_BYTES or is_due:  # else there is no more, and this is not the end
            chunks = [output]
            while (size := _peek(pointer, scratch.buffer, SCRATCH_BYTES)) > 0:
                chunks.append(scratch.view[0:size])
                _pop(pointer, size)
            self.finished = size < 0
            output = b"".join(chunks)
        # Taking output makes events that nobody needs, such as one for each link on which a delivery was written.
        collector = self.collector
        while _pop_event(collector):
            pass
        return output

    def fault(self) -> tuple[str, str]:
        """Return condition and text of a fault that proton found in the peer's frames; empty if there is none."""
        return condition_of(lib.pn_transport_condition(self.pointer))

    def free(self) -> None:
        """Free the C objects. This must be the last call."""
        lib.pn_transport_unbind(self.pointer)
        lib.pn_collector_release(self.collector)
        lib.pn_connection_release(self.connection)
        lib.pn_decref(self.connection)  # releasing it does not free it
        lib.pn_decref(self.pointer)
        lib.pn_collector_free(self.collector)
