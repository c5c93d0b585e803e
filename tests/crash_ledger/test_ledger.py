"""The ledger reports what a faulty broker would do, and nothing else."""

import random

import pytest

from tests.crash_ledger import bodies
from tests.crash_ledger.ledger import Breach, Ledger, Outcome, Summary

A, B = "a", "b"  # receivers


def key(number: int, sender: int = 0) -> tuple[int, int]:
    return sender, number


@pytest.fixture
def ledger():
    return Ledger()


def accept(ledger: Ledger, *numbers: int) -> None:
    for number in numbers:
        ledger.sent(key(number))
        ledger.accepted(key(number))


def deliver_and_settle(ledger: Ledger, number: int, outcome: Outcome = Outcome.COMPLETE, receiver: str = A) -> None:
    ledger.delivered(key(number), receiver)
    ledger.settling(key(number), outcome)
    ledger.settled(key(number), outcome)


def breaches(summary: Summary) -> list[Breach]:
    return [violation.breach for violation in summary.violations]


def test_accepted_delivered_and_completed_is_in_order(ledger):
    accept(ledger, 1, 2)
    deliver_and_settle(ledger, 1)
    deliver_and_settle(ledger, 2)
    summary = ledger.close()
    assert (summary.sent, summary.accepted, summary.completed, summary.violations) == (2, 2, 2, ())


def test_an_accepted_message_that_never_comes_is_lost(ledger):
    accept(ledger, 1, 2)
    deliver_and_settle(ledger, 2)
    summary = ledger.close()
    assert breaches(summary) == [Breach.LOST]
    assert summary.violations[0].key == key(1)


def test_a_delivery_without_a_settlement_does_not_excuse_a_loss(ledger):
    accept(ledger, 1)
    ledger.delivered(key(1), A)
    ledger.new_epoch()
    assert breaches(ledger.close()) == [Breach.LOST]


def test_an_abandoned_message_that_does_not_come_back_is_lost(ledger):
    accept(ledger, 1)
    deliver_and_settle(ledger, 1, Outcome.ABANDON)
    assert breaches(ledger.close()) == [Breach.LOST]


def test_a_message_never_answered_may_be_missing_or_come(ledger):
    ledger.sent(key(1))
    ledger.sent(key(2))
    deliver_and_settle(ledger, 2)
    summary = ledger.close()
    assert (summary.unanswered, summary.unanswered_delivered, summary.violations) == (2, 1, ())


def test_a_refused_message_may_be_missing(ledger):
    ledger.sent(key(1))
    ledger.refused(key(1))
    assert ledger.close().violations == ()


@pytest.mark.parametrize("outcome", [Outcome.COMPLETE, Outcome.DEAD_LETTER])
def test_a_message_delivered_after_its_settlement_was_confirmed_is_resurrected(ledger, outcome):
    accept(ledger, 1)
    deliver_and_settle(ledger, 1, outcome)
    ledger.new_epoch()
    ledger.delivered(key(1), B)
    assert Breach.RESURRECTED in breaches(ledger.close())


def test_a_message_never_accepted_may_not_be_resurrected_either(ledger):
    ledger.sent(key(1))
    deliver_and_settle(ledger, 1)
    ledger.delivered(key(1), B)
    assert breaches(ledger.close()) == [Breach.RESURRECTED]


def test_a_settlement_without_confirmation_may_or_may_not_have_happened(ledger):
    accept(ledger, 1, 2)
    for number in (1, 2):
        ledger.delivered(key(number), A)
        ledger.settling(key(number), Outcome.COMPLETE)
    ledger.new_epoch()
    deliver_and_settle(ledger, 2, receiver=B)
    summary = ledger.close()
    assert (summary.settled_unconfirmed, summary.delivered_again, summary.violations) == (1, 1, ())


@pytest.mark.parametrize(("outage", "expected"), [(False, [Breach.LOST]), (True, [])])
def test_a_refused_completion_excuses_a_missing_message_only_during_an_outage(ledger, outage, expected):
    accept(ledger, 1)
    ledger.delivered(key(1), A)
    ledger.settling(key(1), Outcome.COMPLETE)
    ledger.outage = outage
    ledger.settlement_refused(key(1), Outcome.COMPLETE)
    assert breaches(ledger.close()) == expected


def test_an_unconfirmed_dead_lettering_does_not_excuse_a_message_in_neither_queue(ledger):
    accept(ledger, 1)
    ledger.delivered(key(1), A)
    ledger.settling(key(1), Outcome.DEAD_LETTER)
    assert breaches(ledger.close()) == [Breach.LOST]


def drain_dead_letter(ledger: Ledger, number: int) -> None:
    ledger.delivered(key(number), A, dead_letter=True)
    ledger.settling(key(number), Outcome.COMPLETE)
    ledger.settled(key(number), Outcome.COMPLETE, dead_letter=True)


@pytest.mark.parametrize("confirmed", [True, False])
def test_a_dead_lettered_message_is_found_in_the_dead_letter_queue(ledger, confirmed):
    accept(ledger, 1)
    ledger.delivered(key(1), A)
    ledger.settling(key(1), Outcome.DEAD_LETTER)
    if confirmed:
        ledger.settled(key(1), Outcome.DEAD_LETTER)
    drain_dead_letter(ledger, 1)
    assert ledger.close().violations == ()


def test_a_dead_lettered_message_missing_from_the_dead_letter_queue_is_lost(ledger):
    accept(ledger, 1)
    deliver_and_settle(ledger, 1, Outcome.DEAD_LETTER)
    assert breaches(ledger.close()) == [Breach.LOST_DEAD_LETTER]


def test_a_message_nobody_dead_lettered_may_not_be_in_the_dead_letter_queue(ledger):
    accept(ledger, 1)
    deliver_and_settle(ledger, 1, Outcome.ABANDON)
    drain_dead_letter(ledger, 1)
    assert breaches(ledger.close()) == [Breach.DEAD_LETTERED]


def test_a_message_completed_out_of_the_dead_letter_queue_may_not_come_back_there(ledger):
    accept(ledger, 1)
    deliver_and_settle(ledger, 1, Outcome.DEAD_LETTER)
    drain_dead_letter(ledger, 1)
    drain_dead_letter(ledger, 1)
    assert breaches(ledger.close()) == [Breach.RESURRECTED]


def test_a_message_never_sent_is_unknown(ledger):
    ledger.delivered(key(9), A)
    assert breaches(ledger.close()) == [Breach.UNKNOWN]


def test_first_deliveries_to_one_receiver_keep_the_order_of_their_sender(ledger):
    accept(ledger, 1, 2, 3, 4)
    for number, receiver in ((1, A), (2, B), (4, A), (3, B)):
        deliver_and_settle(ledger, number, receiver=receiver)
    assert ledger.close().violations == ()


def test_a_first_delivery_after_a_later_message_is_reordered(ledger):
    accept(ledger, 1, 2)
    deliver_and_settle(ledger, 2)
    deliver_and_settle(ledger, 1)
    assert breaches(ledger.close()) == [Breach.REORDERED]


def test_a_redelivery_after_a_later_message_is_in_order(ledger):
    accept(ledger, 1, 2)
    deliver_and_settle(ledger, 1, Outcome.ABANDON)
    deliver_and_settle(ledger, 2)
    deliver_and_settle(ledger, 1)
    assert ledger.close().violations == ()


def test_messages_sent_before_a_crash_may_come_late_after_it(ledger):
    accept(ledger, 1, 2)
    ledger.new_epoch()
    accept(ledger, 3)
    for number in (3, 2, 1):
        deliver_and_settle(ledger, number)
    assert ledger.close().violations == ()


def test_a_message_that_was_handed_to_a_lost_link_may_come_late(ledger):
    """The broker does not know yet that it is lost; and until it is there again, nobody knows whether it does."""
    ledger.link_lost()
    accept(ledger, 1, 2)
    deliver_and_settle(ledger, 2)
    deliver_and_settle(ledger, 1)
    accept(ledger, 3)
    ledger.delivered(key(3), A)
    deliver_and_settle(ledger, 3, receiver=B)
    accept(ledger, 4, 5)
    ledger.link_back()
    deliver_and_settle(ledger, 5)
    deliver_and_settle(ledger, 4)
    summary = ledger.close()
    assert (summary.violations, summary.judged) == ((), 0)


def test_when_all_lost_links_are_back_the_order_is_judged(ledger):
    ledger.link_lost()
    ledger.link_lost()
    ledger.link_back()
    ledger.link_back()
    accept(ledger, 1, 2)
    deliver_and_settle(ledger, 2)
    deliver_and_settle(ledger, 1)
    assert Breach.REORDERED in breaches(ledger.close())


def test_a_delivery_that_was_long_on_its_way_is_no_resurrection(ledger):
    accept(ledger, 1)
    ledger.delivered(key(1), A, 200)
    ledger.settling(key(1), Outcome.COMPLETE)
    ledger.settled(key(1), Outcome.COMPLETE)
    ledger.delivered(key(1), A, 199)
    assert (ledger.close().violations, ledger.close().late) == ((), 1)
    ledger.delivered(key(1), A, 200)
    assert breaches(ledger.close()) == [Breach.RESURRECTED]


def test_one_message_at_two_receivers_is_locked_twice(ledger):
    accept(ledger, 1)
    ledger.delivered(key(1), A)
    ledger.delivered(key(1), B)
    assert Breach.LOCKED_TWICE in breaches(ledger.close())


def test_what_a_lost_link_had_locked_may_come_to_another_before_the_loss_is_known(ledger):
    accept(ledger, 1, 2)
    ledger.delivered(key(1), A)
    ledger.delivered(key(2), B)
    ledger.delivered(key(1), B)
    ledger.delivered(key(2), A)
    ledger.link_lost(A)
    assert [each.key for each in ledger.close().violations if each.breach == Breach.LOCKED_TWICE] == [key(2)]


@pytest.mark.parametrize("released_by", ["abandon", "crash"])
def test_a_message_whose_lock_was_released_may_go_to_another_receiver(ledger, released_by):
    accept(ledger, 1)
    ledger.delivered(key(1), A)
    if released_by == "abandon":
        ledger.settling(key(1), Outcome.ABANDON)
    else:
        ledger.new_epoch()
    deliver_and_settle(ledger, 1, receiver=B)
    assert ledger.close().violations == ()


def test_doctored_history_is_reported_exactly(ledger):
    """A sound history of 2,000 messages, with losses, resurrections and damage put in at known places."""
    chance = random.Random(7)
    numbers = list(range(2000))
    accept(ledger, *numbers)
    lost = set(chance.sample(numbers, 5))
    resurrected = set(chance.sample([number for number in numbers if number not in lost], 3))
    for number in numbers:
        if number not in lost:
            deliver_and_settle(ledger, number)
    ledger.new_epoch()
    for number in resurrected:
        ledger.delivered(key(number), B)
    ledger.corrupt("digest")
    summary = ledger.close()
    found = {breach: {v.key for v in summary.violations if v.breach is breach} for breach in Breach}
    assert found[Breach.LOST] == {key(number) for number in lost}
    assert found[Breach.RESURRECTED] == {key(number) for number in resurrected}
    assert len(summary.violations) == 5 + 3 + 1
    assert "lost: 5" in str(summary)
    assert "resurrected: 3" in str(summary)
    assert "corrupt: 1" in str(summary)


def test_a_body_tells_its_key_and_time():
    for number in range(200):
        assert bodies.read(bodies.make((3, number), 42)) == ((3, number), 42)


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "empty", "foreign"])
def test_a_damaged_body_is_noticed(damage):
    whole = bodies.make((3, 5), 42)
    at = len(whole) // 2
    damaged = {
        "bit": whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        "cut": whole[:-1],
        "longer": whole + b"\0",
        "empty": b"",
        "foreign": b"x" * len(whole),
    }[damage]
    with pytest.raises(bodies.Damaged):
        bodies.read(damaged)
