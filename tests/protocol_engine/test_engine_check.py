"""`Engine.check` finds what must not be."""

from collections.abc import Callable

import pytest

from protocol.engine.engine import Engine
from protocol.engine.links import Link
from tests.protocol_engine.pair import MESSAGE, Pair

Damage = Callable[[Engine, Link], object]

DAMAGES: dict[str, Damage] = {
    "a link that no session has": lambda engine, link: link.session.links.clear(),
    "a link of a session that has it under another pointer": lambda engine, link: engine.links.clear(),
    "a session that is to be noted": lambda engine, link: engine.sending.clear(),
    "a handle of a link that has ended": lambda engine, link: engine.links.pop(link.pointer),
    "a channel of a session that has ended": lambda engine, link: engine.sessions.clear() or engine.links.clear(),
    "a sent delivery that its link does not count": lambda engine, link: engine.sent.clear(),
    "an offered delivery that its link does not count": lambda engine, link: setattr(link, "offered", 1),
    "credit that is not proton's": lambda engine, link: setattr(link, "known_credit", link.credit + 1),
    "buffers that are not in the sum": lambda engine, link: setattr(engine, "buffer_bytes", 1),
    "parts that are not counted": lambda engine, link: setattr(link, "partial", b"part"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_engine_is_found(pair: Pair, damage: Damage) -> None:
    link, _ = pair.attach(sender=True)
    link.send(b"1", MESSAGE, b"", 0, False)
    engine = pair.client.engine
    engine.check()
    kept = dict(engine.links), dict(engine.sessions)
    damage(engine, link)
    with pytest.raises(AssertionError):
        engine.check()
    engine.links, engine.sessions = kept
