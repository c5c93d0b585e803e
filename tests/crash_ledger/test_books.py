"""The books report what a faulty broker would do, and nothing else."""

import pytest

from tests.crash_ledger.books import Chains, Copies, Ending, Ids, Link, Order


@pytest.fixture
def chains():
    return Chains(3)


def start(chain):
    return Link(chain, 0, 0)


def take(chains, transaction, *links, ending=Ending.COMMITTED):
    moves = chains.begun(transaction, list(links))
    chains.ended(transaction, ending)
    return moves


def test_a_committed_transaction_has_moved_each_of_its_chains(chains):
    a, b = take(chains, 1, start(0), start(1))
    chains.close([a, b, start(2)])
    assert chains.breaches == []


@pytest.mark.parametrize("done", [True, False])
def test_a_transaction_with_an_unknown_end_may_be_done_or_not(chains, done):
    moves = take(chains, 1, start(0), start(1), ending=Ending.UNKNOWN)
    chains.close([*(moves if done else [start(0), start(1)]), start(2)])
    assert chains.breaches == []


def test_a_transaction_done_in_part_is_told(chains):
    a, _ = take(chains, 1, start(0), start(1), ending=Ending.UNKNOWN)
    chains.close([a, start(1), start(2)])
    assert "done in part" in chains.breaches[0]


def test_a_committed_transaction_that_is_not_there_is_told(chains):
    take(chains, 1, start(0))
    chains.close([start(0), start(1), start(2)])
    assert any("came again" in breach for breach in chains.breaches)
    assert any("is lost" in breach for breach in chains.breaches)


@pytest.mark.parametrize("left", [[0], [0, 1, 2, 2]])
def test_a_chain_with_no_message_or_two_is_told(chains, left):
    chains.close([start(chain) for chain in left])
    assert any("messages" in breach for breach in chains.breaches)


def test_rolled_back_messages_must_not_come(chains):
    moves = take(chains, 1, start(0), ending=Ending.UNDONE)
    chains.delivered(moves[0])
    assert "rolled back" in chains.breaches[0]
    chains.delivered(Link(1, 5, 9))
    assert "never sent" in chains.breaches[1]


@pytest.fixture
def order():
    order = Order()
    order.locked("s")
    return order


def accept(order, *numbers):
    for number in numbers:
        order.accepted(("s", number))


def receive(order, *numbers, complete=True):
    for number in numbers:
        order.delivered(("s", number))
        if complete:
            order.completing(("s", number))
            order.completed(("s", number))


def test_a_session_in_order_is_sound(order):
    accept(order, 1, 2, 3)
    receive(order, 1, complete=False)
    receive(order, 2)
    order.locked("s")
    receive(order, 1, 3)
    order.close()
    assert order.breaches == []


def test_unanswered_messages_may_come_late_or_not_at_all(order):
    accept(order, 2, 4)
    receive(order, 2, 4, 1)
    order.close()
    assert order.breaches == []


def test_a_completion_without_answer_may_have_happened_or_not(order):
    accept(order, 1, 2, 3)
    receive(order, 1, 2, complete=False)
    for number in (1, 2):
        order.completing(("s", number))
    order.locked("s")
    receive(order, 2, 3)
    order.close()
    assert order.breaches == []


def test_a_message_before_an_earlier_one_is_told(order):
    accept(order, 1, 2)
    receive(order, 2)
    assert "before 1" in order.breaches[0]
    receive(order, 1)
    assert "came after 2" in order.breaches[1]


def test_a_completed_message_that_comes_again_and_a_lost_one_are_told(order):
    accept(order, 1, 2)
    receive(order, 1)
    order.locked("s")
    receive(order, 1)
    assert "came again" in order.breaches[0]
    order.close()
    assert "('s', 2) was accepted and is lost" in order.breaches[1]


def test_a_refused_completion_does_not_excuse_a_loss(order):
    accept(order, 1)
    receive(order, 1, complete=False)
    order.completing(("s", 1))
    order.not_completed(("s", 1))
    order.close()
    assert "is lost" in order.breaches[0]


def test_an_id_with_two_numbers_and_one_that_never_came_are_told():
    ids = Ids()
    ids.accepted |= {"a", "b"}
    ids.delivered("a", 1)
    ids.delivered("a", 1)
    assert ids.breaches == []
    ids.delivered("a", 2)
    ids.close()
    assert ids.breaches == ["id a is that of two messages, 1 and 2", "id b was accepted and is lost"]


def test_an_id_that_comes_again_after_its_completion_is_told():
    ids = Ids()
    ids.delivered("a", 1)
    ids.completed.add("a")
    ids.delivered("a", 1)
    assert "came again" in ids.breaches[0]


def test_messages_without_a_key_that_come_once_are_right():
    book = Copies()
    for number in (1, 2):
        book.sent(number, 0)
        book.accepted(number, 0)
        book.delivered(number, 100 + number)
        book.completed(100 + number)
    book.sent(3, 0)  # never answered, never delivered
    book.close()
    assert book.breaches == []
    assert book.doubled_count == 0


@pytest.mark.parametrize(("sent", "accepted"), [(0, 1), (None, 1), (0, None), (None, None)])
def test_a_message_may_be_there_twice_after_a_kill(sent, accepted):
    book = Copies()
    book.sent(1, sent)
    book.accepted(1, accepted)
    for number in (101, 102):
        book.delivered(1, number)
        book.completed(number)
    book.close()
    assert book.breaches == []
    assert book.doubled_count == 1


def test_a_message_that_is_there_twice_without_a_kill_is_told():
    book = Copies()
    book.sent(1, 0)
    book.accepted(1, 0)
    book.delivered(1, 101)
    book.delivered(1, 102)
    book.close()
    assert "there 2 times" in book.breaches[0]


def test_a_copy_that_comes_again_after_its_completion_is_told():
    book = Copies()
    book.sent(1, None)
    book.delivered(1, 101)
    book.delivered(1, 101)  # its lock was lost
    assert book.breaches == []
    book.completed(101)
    book.delivered(1, 101)
    assert "came again" in book.breaches[0]


def test_what_was_never_sent_or_is_lost_without_a_key_is_told():
    book = Copies()
    book.delivered(7, 101)
    assert "never sent" in book.breaches[0]
    book.sent(1, 0)
    book.accepted(1, 0)
    book.close()
    assert "is lost" in book.breaches[1]
