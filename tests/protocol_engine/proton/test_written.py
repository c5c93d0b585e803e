"""What proton writes otherwise than we want it. See docs/design/proton.md."""

from protocol.codec import Described, UInt
from protocol.engine.proton.library import ffi, lib, set_condition
from protocol.symbols import AMQP_HEADER
from tests.protocol_engine.proton.bare import (
    ATTACH,
    BEGIN,
    CLOSE,
    DETACH,
    DISPOSITION,
    END,
    FLOW,
    MAX_FRAME_BYTES,
    MESSAGE,
    OPEN,
    TRANSFER,
    Bare,
    attached,
    begun,
    frame,
    send,
    told,
    transferred,
)

_ACCEPTED = lib.PN_ACCEPTED


def test_every_message_has_the_format_0(bare: Bare) -> None:
    bare.begin()
    send(bare.attach(sends=False), b"1")
    [(code, fields, payload)] = bare.written()
    assert (code, fields, payload) == (TRANSFER, [0, 0, b"1", 0], MESSAGE)


def test_nulls_at_the_end_of_lists_are_left_out(bare: Bare) -> None:
    bare.begin()
    [link] = told(lib.PN_LINK_REMOTE_OPEN, bare.push(attached(sends=False)))
    lib.pn_terminus_copy(lib.pn_link_source(link), lib.pn_link_remote_source(link))
    lib.pn_link_open(link)
    [(code, fields, _)] = bare.written()
    assert (code, len(fields), len(fields[5].value)) == (ATTACH, 11, 5)  # of 14, and of 11


def test_an_error_without_info_has_two_fields(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=True)
    condition = lib.pn_link_condition(link)
    lib.pn_condition_set_name(condition, b"amqp:not-found")
    lib.pn_condition_set_description(condition, b"gone")
    lib.pn_link_close(link)
    [(code, fields, _)] = bare.written()
    assert (code, fields[2].value) == (DETACH, ["amqp:not-found", "gone"])


def test_an_empty_info_is_written(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=True)
    set_condition(lib.pn_link_condition(link), "amqp:not-found", "gone")
    lib.pn_link_close(link)
    [(_, fields, _)] = bare.written()
    assert fields[2].value == ["amqp:not-found", "gone", {}]


def test_a_fault_is_told_by_a_close_without_info(bare: Bare) -> None:
    assert told(lib.PN_TRANSPORT_ERROR, bare.push(frame(DETACH, UInt(0), True)))
    [(code, fields, _)] = bare.written()
    assert (code, fields[0].value) == (CLOSE, ["amqp:not-allowed", "no such channel: 0"])


def test_the_end_of_a_link_settles_its_deliveries(bare: Bare) -> None:
    bare.begin()
    link = bare.attach(sends=False)
    send(link, b"1")
    bare.pull()
    bare.push(frame(DETACH, UInt(0), True))
    lib.pn_link_close(link)
    lib.pn_link_free(link)
    assert [(code, fields) for code, fields, _ in bare.written()] == [
        (DISPOSITION, [False, 0, None, True]),
        (DETACH, [0, True]),
    ]


def test_equal_outcomes_of_several_links_are_one_range(bare: Bare) -> None:
    bare.begin()
    links = [bare.attach(name, handle, sends=True) for handle, name in enumerate(("a", "b"))]
    bare.push(transferred(0, 0), transferred(1, 1, tag=b"u"))
    for link in links:
        delivery = lib.pn_link_current(link)
        lib.pn_delivery_update(delivery, _ACCEPTED)
        lib.pn_delivery_settle(delivery)
    [(code, fields, _)] = bare.written()
    assert (code, fields) == (DISPOSITION, [True, 0, 1, True, Described(_ACCEPTED, [])])


def test_a_change_of_the_window_makes_a_flow_of_the_session(bare: Bare) -> None:
    session = bare.begin()
    bare.attach(sends=True)
    lib.pn_session_set_incoming_capacity(session, 0x7FEF_0000)
    [(code, fields, _)] = bare.written()
    assert (code, len(fields)) == (FLOW, 4)


def test_a_flow_of_a_link_takes_the_place_of_the_sessions(bare: Bare) -> None:
    session = bare.begin()
    link = bare.attach(sends=True)
    lib.pn_session_set_incoming_capacity(session, 0x7FEF_0000)
    lib.pn_link_flow(link, 1)
    [(code, fields, _)] = bare.written()
    assert (code, fields[4], fields[6]) == (FLOW, 0, 11)


def test_a_window_is_told_in_whole_frames(bare: Bare) -> None:
    session = bare.begin()
    for capacity in (3 * MAX_FRAME_BYTES, 4 * MAX_FRAME_BYTES - 1):
        lib.pn_session_set_incoming_capacity(session, capacity)
        [(_, fields, _)] = bare.written()
        assert fields[1] == 3


def test_flows_are_before_transfers(bare: Bare) -> None:
    bare.begin()
    out, into = bare.attach("out", 0, sends=False), bare.attach("in", 1, sends=True)
    send(out, b"1")
    lib.pn_link_flow(into, 5)
    assert [code for code, _, _ in bare.written()] == [FLOW, TRANSFER]


def test_the_answer_to_a_begin_leaves_out_the_channel_of_a_session_that_has_ended(bare: Bare) -> None:
    [session] = told(lib.PN_SESSION_REMOTE_OPEN, bare.push(begun(channel=4)))
    bare.push(frame(END, channel=4))
    lib.pn_session_open(session)
    [(code, fields, _)] = bare.written()
    assert (code, fields[0]) == (BEGIN, None)


def test_the_highest_handle_cannot_be_set(bare: Bare) -> None:
    [session] = told(lib.PN_SESSION_REMOTE_OPEN, bare.push(begun()))
    lib.pn_session_open(session)
    [(_, fields, _)] = bare.written()
    assert fields[4] == 2**31 - 1
    assert [name for name in dir(lib) if "handle_max" in name] == []


def test_half_of_the_idle_time_out_is_told() -> None:
    bare = Bare()
    lib.pn_transport_set_idle_timeout(bare.transport, 1000)
    bare.push(AMQP_HEADER)
    lib.pn_connection_open(bare.connection)
    [(code, fields, _)] = bare.written()
    assert (code, fields[4]) == (OPEN, 500)
    bare.free()


def test_there_is_no_close_before_the_peers_open() -> None:
    bare = Bare()
    bare.push(AMQP_HEADER)
    lib.pn_connection_open(bare.connection)
    lib.pn_connection_close(bare.connection)
    assert [code for code, _, _ in bare.written()] == [OPEN]
    bare.free()


def test_what_is_written_of_a_delivery_at_a_time_is_a_transfer(bare: Bare) -> None:
    """So one byte at a time stands for each frame of a message whose payload the extension writes."""
    bare.begin()
    link = bare.attach(sends=False)
    tag = ffi.new("char[]", b"t")
    lib.pn_delivery(link, ffi.new("pn_delivery_tag_t *", (1, tag))[0])
    written = []
    for byte in (b"x", b"y"):
        lib.pn_link_send(link, byte, 1)
        written += bare.written()
    lib.pn_link_send(link, b"z", 1)
    lib.pn_link_advance(link)
    written += bare.written()
    assert [(fields[1:], payload) for _, fields, payload in written] == [
        ([0, b"t", 0, None, True], b"x"),
        ([0, b"t", 0, None, True], b"y"),
        ([0, b"t", 0], b"z"),
    ]


def test_taking_output_makes_an_event_of_each_link(bare: Bare) -> None:
    bare.begin()
    links = [bare.attach(name, handle, sends=False) for handle, name in enumerate(("a", "b"))]
    for link in links:
        send(link, b"1")
    bare.events()
    bare.pull()
    assert told(lib.PN_LINK_FLOW, bare.events()) == links


def test_output_of_less_than_8_kib_is_all_that_there_is(bare: Bare) -> None:
    """More may come in several pieces, however large the buffer is."""
    bare.begin()
    link = bare.attach(sends=False, credit=1000)
    buffer = ffi.new("char[]", 1 << 20)
    sizes = []
    for number in range(100):
        send(link, b"%d" % number, bytes(1000))
    while (size := lib.pn_transport_peek(bare.transport, buffer, len(buffer))) > 0:
        sizes.append(size)
        lib.pn_transport_pop(bare.transport, size)
    assert sum(sizes) > 100_000
    assert len(sizes) > 1
    assert min(sizes[:-1]) >= 8 << 10
