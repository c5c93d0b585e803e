"""Credit, drains and echoes: what is asked is answered, whether or not proton does it."""

import pytest

from tests.protocol_engine.pair import MESSAGE, Pair, flow, frames, performatives


def test_drain_uses_up_the_credit(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    ours.ask_drain()
    pair.run()
    assert pair.server.named("flow")[-1] == (5, True)
    assert not pair.client.named("flow")
    pair.sent = b""
    theirs.drained()
    pair.run()
    (flow,) = performatives(pair.sent, 0x13)
    assert (flow[5], flow[6], flow[8]) == (5, 0, True)
    assert pair.client.named("flow") == [(0, True)]


def test_credit_may_be_granted_again_after_a_drain(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=5)
    ours.ask_drain()
    pair.run()
    theirs.drained()
    pair.run()
    ours.grant(2)
    pair.run()
    assert pair.server.named("flow")[-1] == (2, False)


def test_a_drain_without_credit_is_answered(pair: Pair) -> None:
    pair.attach(sender=False, credit=0)
    pair.sent = b""
    pair.server.engine.push(flow(0, 0, 0, True, False))
    answer = performatives(pair.server.engine.pull(), 0x13)[-1]
    assert (answer[4], answer[5], answer[6], answer[8]) == (0, 0, 0, True)
    assert len(answer) < 10 or not answer[9]


def test_a_client_answers_a_drain_without_credit_on_a_link_attached_later(pair: Pair) -> None:
    for sender in (False, True):
        pair.client.engine.attach(pair.session, "link", sender=sender, source="q", target="q")
        pair.run()
    pair.client.engine.push(flow(1, 0, 0, True, False))
    answer = performatives(pair.client.engine.pull(), 0x13)[-1]
    assert (answer[4], answer[6], answer[8]) == (1, 0, True)
    assert pair.client.engine.output.attaching == []


def test_a_drain_whose_credit_went_into_deliveries_is_answered_after_them(pair: Pair) -> None:
    ours, theirs = pair.attach(sender=False, credit=2)
    ours.ask_drain()
    pair.run()
    pair.sent = b""
    for tag in (b"a", b"b"):
        theirs.send(tag * 16, MESSAGE, b"", 0, False)
    theirs.drained()
    pair.run()
    assert [frame[10] for frame in frames(pair.sent)] == [0x14, 0x14, 0x13]
    (answer,) = performatives(pair.sent, 0x13)
    assert (answer[4], answer[5], answer[6], answer[8]) == (0, 2, 0, True)
    assert answer[2] == 2, "the next outgoing id is that after the deliveries"
    assert len(pair.client.named("message")) == 2


def test_an_echo_is_answered_with_the_links_state(pair: Pair) -> None:
    pair.attach(sender=False, credit=3)
    pair.server.engine.push(flow(0, 0, 3, False, True))
    answer = performatives(pair.server.engine.pull(), 0x13)[-1]
    assert (answer[4], answer[5], answer[6], answer[8]) == (0, 0, 3, False)


def test_drains_of_several_links_are_all_answered(pair: Pair) -> None:
    for name in ("one", "two", "three"):
        pair.client.engine.attach(pair.session, name, sender=False, source="q", target="q")
    pair.run()
    pair.server.engine.push(b"".join(flow(handle, 0, 0, True, False) for handle in range(3)))
    answers = performatives(pair.server.engine.pull(), 0x13)
    assert sorted(answer[4] for answer in answers) == [0, 1, 2]


def test_an_answered_flow_leaves_the_session_open_for_more_than_its_window(pair: Pair) -> None:
    ours, _ = pair.attach(sender=True)
    count = 40_000  # more than any window that is told
    pair.server.link.grant(count)
    pair.run()
    for _ in range(3):
        pair.sent = b""
        pair.server.engine.push(flow(None, 0, 0, False, True))
        pair.run()
        (answer,) = performatives(pair.sent, 0x13)
        assert answer[1] > 2000
    for number in range(count):
        ours.send(number.to_bytes(4, "big"), MESSAGE, b"", 0, True)
        if number % 1000 == 999:
            pair.run()
    assert len(pair.server.named("message")) == count


@pytest.mark.parametrize("max_frame_size", [512, 65_536, 1 << 20])
def test_a_session_flow_is_said_as_often_as_asked_for_whatever_the_frame_size(max_frame_size: int) -> None:
    pair = Pair(max_frame_size)
    for _ in range(3):
        pair.server.engine.push(flow(None, 0, 0, False, True))
        assert len(performatives(pair.server.engine.pull(), 0x13)) == 1
    pair.attach(sender=False)
    for _ in range(3):
        pair.server.engine.push(flow(None, 0, 0, False, True))
        assert len(performatives(pair.server.engine.pull(), 0x13)) == 1
    pair.client.engine.free()
    pair.server.engine.free()


def test_an_echo_of_the_session_is_answered_with_a_session_flow(pair: Pair) -> None:
    pair.attach(sender=False, credit=3)
    pair.server.engine.push(flow(None, 0, 0, False, True))
    answer = performatives(pair.server.engine.pull(), 0x13)[-1]
    assert len(answer) < 5 or answer[4] is None


def test_a_flow_that_grants_credit_on_another_link_takes_no_answer_away(pair: Pair) -> None:
    """A client waited for ever: its answer came with a later flow, and took back credit that was granted meanwhile."""
    pair.attach(sender=False)
    ours = pair.client.engine.attach(pair.session, "requests", sender=True, source="q", target="q")
    pair.run()
    requests = pair.server.link
    assert requests is not None
    pair.server.engine.push(flow(0, 0, 0, True, False))
    requests.grant(7)
    output = pair.server.engine.pull()
    answers = {answer[4]: (answer[5], answer[6], answer[8:9]) for answer in performatives(output, 0x13)}
    assert answers[0] == (0, 0, [True])
    pair.client.engine.push(output)
    assert ours.credit == 17
    pair.server.engine.push(flow(None, 0, 0, False, True))
    (answer,) = performatives(pair.server.engine.pull(), 0x13)
    assert len(answer) < 5 or answer[4] is None
