"""Parses message selectors of JMS to trees."""

from functools import cache
from typing import Any, Final

from broker.rules import tree
from broker.rules.errors import SelectorNotSupported
from broker.rules.syntax import (
    TOO_LARGE,
    Builder,
    Mistake,
    Parser,
    begin_of,
    depth_around,
    double,
    integer,
    parse,
    parser_of,
    unquoted,
    value_of,
)
from broker.rules.tree import Node, Predicate, Property, Value

MAX_CHARACTERS: Final = 8192
MAX_DIGITS: Final = 64  # of an integer; many may be zeros

MESSAGE_ID, CORRELATION_ID = "message-id", "correlation-id"
PRIORITY, DURABLE, DELIVERY_MODE = "priority", "durable", "delivery-mode"
DELIVERY_COUNT, TIMES_DELIVERED = "delivery-count", "times-delivered"
# Of these clients show the ids with a prefix that says the type (`_bare`).
_IDS: Final = frozenset((MESSAGE_ID, CORRELATION_ID))

# What selectors may name of a message besides its application properties. First the headers and properties of JMS, as
# far as it allows them in selectors (3.8.1.1), then the same in AMQP's words, for clients that know nothing of JMS.
HEADERS: Final = {
    "JMSMessageID": MESSAGE_ID,
    "JMSCorrelationID": CORRELATION_ID,
    "JMSType": "subject",
    "JMSTimestamp": "creation-time",
    "JMSPriority": PRIORITY,
    "JMSDeliveryMode": DELIVERY_MODE,
    "JMSXGroupID": "group-id",
    "JMSXGroupSeq": "group-sequence",
    "JMSXUserID": "user-id",
    "JMSXDeliveryCount": TIMES_DELIVERED,
    "JMS_AMQP_REPLY_TO_GROUP_ID": "reply-to-group-id",
    "amqp.message_id": MESSAGE_ID,
    "amqp.user_id": "user-id",
    "amqp.to": "to",
    "amqp.subject": "subject",
    "amqp.reply_to": "reply-to",
    "amqp.correlation_id": CORRELATION_ID,
    "amqp.content_type": "content-type",
    "amqp.content_encoding": "content-encoding",
    "amqp.absolute_expiry_time": "absolute-expiry-time",
    "amqp.creation_time": "creation-time",
    "amqp.group_id": "group-id",
    "amqp.group_sequence": "group-sequence",
    "amqp.reply_to_group_id": "reply-to-group-id",
    "amqp.durable": DURABLE,
    "amqp.priority": PRIORITY,
    "amqp.delivery_count": DELIVERY_COUNT,
}


def parse_selector(text: str) -> Predicate:
    """Parse a JMS selector. Raises RuleSyntaxError, SelectorNotSupported."""
    if len(text) > MAX_CHARACTERS:
        raise SelectorNotSupported(f"A selector has at most {MAX_CHARACTERS} characters, this one has {len(text)}.")
    result = parse(_parser(), text, "selector", MAX_CHARACTERS)
    assert isinstance(result, Predicate)
    return result


@cache
def _parser() -> Parser:
    return parser_of("selector.lark", ["selector"], _SelectorBuilder())


class _SelectorBuilder(Builder):
    def predicate(self, node: Node) -> Predicate:
        """A property may be a condition: it holds if it is true."""
        if isinstance(node, Property) or (isinstance(node, tree.Literal) and isinstance(node.value, bool)):
            return tree.Truth(node.at, depth_around(node), node)
        return super().predicate(node)

    def selector(self, children: list[Any]) -> Predicate:
        return self.predicate(children[0])

    def comparison(self, children: list[Any]) -> tree.Comparison:
        left, symbol, right = children
        if symbol not in ("=", "<>", "!="):
            for side in (left, right):
                if isinstance(side, tree.Literal) and isinstance(side.value, str | bool):
                    raise Mistake(side.at, "strings and booleans are compared by = and <> only")
        return super().comparison([_bare_beside(right, left), symbol, _bare_beside(left, right)])

    def between(self, children: list[Any]) -> Predicate:
        is_negated = len(children) == 4
        value, low, high = children[0], *children[-2:]
        both = self.all_of([self.comparison([value, ">=", low]), self.comparison([value, "<=", high])])
        return tree.Not(both.at, depth_around(both), both) if is_negated else both

    def among(self, children: list[Any]) -> tree.In:
        found = super().among(children)
        items = tuple(_bare_beside(found.value, item) for item in found.items)
        return tree.In(found.at, found.depth, found.is_negated, found.value, items)

    def number(self, children: list[Any]) -> tree.Literal:
        """Read a number as Java does: with a suffix for its type, and octal with a leading zero."""
        [token] = children
        at, text = begin_of(token), token.lower()
        if text.startswith("0x"):
            return integer(at, int(text.removesuffix("l"), 16))
        digits = text.rstrip("ldf")
        if not digits.isdigit() or text[-1] in "df":
            return double(at, digits)
        if len(digits) > MAX_DIGITS:
            raise Mistake(at, TOO_LARGE)
        is_octal = digits[0] == "0"
        if is_octal and not set(digits) <= set("01234567"):
            raise Mistake(at, "an integer that begins with 0 is octal")
        return integer(at, int(digits, 8 if is_octal else 10))

    def property(self, children: list[Any]) -> Property:
        [token] = children
        name, at = unquoted(token), begin_of(token)
        if not name:
            raise Mistake(at, "the name of a property is not empty")
        header = HEADERS.get(name)
        if header is not None:
            return Property(at, 1, True, header)
        if name.startswith("amqp.") or (name.startswith("JMS") and not name.startswith("JMS_")):
            raise SelectorNotSupported(f"A selector cannot refer to {name}; it may to {', '.join(HEADERS)}.")
        return Property(at, 1, False, name)


def _bare_beside(other: Node, node: Node) -> Value:
    """The node; if it is a text to compare with an id, without the prefix by which clients say the type of the id."""
    if (
        isinstance(other, Property)
        and other.is_system
        and other.name in _IDS
        and isinstance(node, tree.Literal)
        and isinstance(node.value, str)
    ):
        return tree.Literal(node.at, node.depth, bare_id(node.value))
    return value_of(node)


def bare_id(text: str) -> str:
    """An id of JMS as its text in AMQP: `ID:AMQP_UUID:…` and the like have a prefix, `ID:…` itself has not."""
    kind, _, rest = text.removeprefix("ID:").partition(":")
    if not text.startswith("ID:AMQP_") or kind not in _PREFIXES:
        return text
    return rest.lower() if kind in _IN_LOWER_CASE else rest


_IN_LOWER_CASE: Final = frozenset(("AMQP_UUID", "AMQP_BINARY"))
_PREFIXES: Final = _IN_LOWER_CASE | {"AMQP_ULONG", "AMQP_STRING", "AMQP_NO_PREFIX"}
