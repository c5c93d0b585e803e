"""The books of the ledger find what must not be."""

from tests.pairing.books import Books, Key, Way

PRIMARY = Way("q", False, False)
BACKLOG = Way("b/0", True, False)


def books(*found: int, **ways: Way) -> Books:
    """Messages 1 to 4 were sent, those in `ways` (m1, ...) accepted; `found` are in the primary, in this order."""
    result = Books()
    keys = {number: Key("q", "s", 0, number) for number in range(1, 5)}
    result.sent |= set(keys.values())
    result.accepted = {keys[int(name[1:])]: way for name, way in ways.items()}
    result.found = [keys.get(number, Key("q", "s", 0, number)) for number in found]
    return result


def test_all_is_well():
    assert books(1, 2, 3, m1=PRIMARY, m2=PRIMARY, m3=PRIMARY).breaches(["q"]) == []


def test_what_was_not_accepted_may_be_there():
    assert books(4, 1, m1=PRIMARY).breaches(["q"]) == []


def test_a_lost_message():
    assert "lost" in str(books(1, m1=PRIMARY, m2=BACKLOG).breaches([]))


def test_a_message_that_is_there_twice():
    assert "2 times" in str(books(1, 1, m1=PRIMARY).breaches([]))


def test_a_message_that_nobody_sent():
    assert "never sent" in str(books(9).breaches([]))


def test_a_ping_that_was_delivered():
    found = books()
    found.pings_seen = 1
    assert "1 pings" in str(found.breaches([]))


def test_order_is_kept_on_each_way_and_not_between_them():
    assert books(1, 4, 2, 3, m1=PRIMARY, m2=BACKLOG, m3=BACKLOG, m4=PRIMARY).breaches(["q"]) == []
    assert "after 3" in str(books(1, 3, 2, m1=PRIMARY, m2=BACKLOG, m3=BACKLOG).breaches(["q"]))
    assert books(1, 3, 2, m1=PRIMARY, m2=BACKLOG, m3=BACKLOG).breaches([]) == []
    assert "after 2" in str(books(2, 1, m1=PRIMARY, m2=PRIMARY).breaches(["q"]))


def test_a_message_that_may_be_in_the_primary_already_has_no_place():
    assert books(3, 2, m2=BACKLOG, m3=BACKLOG._replace(is_repeated=True)).breaches(["q"]) == []


UNKNOWN = Way("", False, False)


def test_messages_whose_way_nobody_knows_come_in_as_many_runs_as_there_are_ways():
    ways = {f"m{number}": UNKNOWN for number in range(1, 5)}
    assert books(3, 1, 4, 2, **ways).breaches(["q"], 2) == []
    assert "2 runs in order, and 1 ways" in str(books(3, 1, 4, 2, **ways).breaches(["q"], 1))
    assert "3 runs in order, and 2 ways" in str(books(4, 3, 1, 2, **ways).breaches(["q"], 2))
    assert books(4, 3, 1, 2, **ways).breaches([], 2) == []
    assert books(4, 3, 1, 2, **ways | {"m3": UNKNOWN._replace(is_repeated=True)}).breaches(["q"], 2) == []
