"""Rule documents (see broker.namespace.rule_descriptions) as table RULES holds them, and the compiled rules."""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from broker.errors import InvalidArgument
from broker.rules import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    FilterError,
    InvalidRule,
    MessageView,
    Rule,
    SqlFilter,
    TrueFilter,
    compile_action,
    compile_filter,
)
from protocol.codec import decode_exactly
from protocol.errors import ProtocolError
from protocol.symbols import CORRELATION_FIELDS
from storage.quarantine import quarantine
from storage.records import CorruptRecord, decode_document, encode_document, entity_key, rule_key
from storage.store import Store, Table

Document = dict[str, Any]

_ENTITY_KEY_BYTES = 4


class StoredRule(NamedTuple):
    """A rule. `document` is None if it cannot be read; such a rule fails on each message."""

    document: Document | None
    rule: Rule

    @property
    def takes_all(self) -> bool:
        """True if the rule takes every message unchanged."""
        wanted = self.rule.filter
        always = isinstance(wanted, TrueFilter) or (isinstance(wanted, SqlFilter) and wanted.is_always_true)
        return always and not self.rule.changes_copy

    @property
    def kind(self) -> str:
        """The kind of the filter."""
        return "" if self.document is None else self.document["filter"]["kind"]


class FlawedRule(NamedTuple):
    """A stored rule that fails on every message: it was made before such rules were refused."""

    subscription: str
    name: str
    flaw: str


class _Unreadable(Filter):
    def matches(self, message: MessageView) -> bool:
        raise FilterError("the stored rule cannot be read; remove it and add it again")


def default_rule(now_ms: int) -> Document:
    """The rule of a new subscription."""
    return {"name": "$Default", "created_ms": now_ms, "filter": {"kind": "true"}, "action": None}


def compiled(document: Document) -> StoredRule:
    """Compile a rule that is stored somewhere. Raises InvalidArgument, with the position in a wrong expression."""
    action = document["action"]
    try:
        return StoredRule(
            document,
            Rule(
                document["name"],
                _filter(document["filter"]),
                None if action is None else compile_action(action["expression"], _values(action["parameters"])),
            ),
        )
    except (InvalidRule, ProtocolError) as error:
        raise InvalidArgument(str(error)) from None


def compiled_new(document: Document) -> StoredRule:
    """Compile a rule that a client makes. Raises InvalidArgument, also for a rule that fails on every message."""
    stored = compiled(document)
    if (flaw := stored.rule.flaw) is not None:
        raise InvalidArgument(str(flaw))
    return stored


def _filter(document: Mapping[str, Any]) -> Filter:
    match document["kind"]:
        case "true":
            return TrueFilter()
        case "false":
            return FalseFilter()
        case "sql":
            return compile_filter(document["expression"], _values(document["parameters"]))
        case "correlation":
            fields = {name: document.get(name) for name in CORRELATION_FIELDS}
            return CorrelationFilter(**fields, properties=_values(document["properties"]))
    raise InvalidRule(f"There is no filter of the kind '{document['kind']}'.")


def _values(encoded: Mapping[str, bytes]) -> dict[str, Any]:
    return {name: decode_exactly(value) for name, value in encoded.items()}


def read_rules(store: Store, entity_id: int) -> list[StoredRule]:
    """The rules of a subscription, in the order of their creation. Unreadable records go to quarantine."""
    found: list[StoredRule] = []
    for key, value in store.scan(Table.RULES, entity_key(entity_id), entity_key(entity_id + 1), 1 << 32):
        try:
            found.append(compiled(decode_document(value)))
        except (CorruptRecord, InvalidArgument, KeyError, TypeError):
            quarantine(store, Table.RULES, key)
            # A rule that always fails keeps the name, so that no message is lost because its filter was lost.
            store.put(Table.RULES, key, encode_document(None))
            found.append(StoredRule(None, Rule(key[_ENTITY_KEY_BYTES:].decode(errors="replace"), _Unreadable())))
    return sorted(found, key=lambda stored: stored.document["created_ms"] if stored.document else 0)


def flawed(subscription: str, rules: Iterable[StoredRule]) -> list[FlawedRule]:
    """Return the rules that fail on every message."""
    flaws = [(each.rule.name, each.rule.flaw) for each in rules]
    return [FlawedRule(subscription, name, str(flaw)) for name, flaw in flaws if flaw is not None]


def write_rules(store: Store, entity_id: int, rules: Iterable[StoredRule]) -> None:
    store.put_many(
        Table.RULES,
        [(rule_key(entity_id, each.rule.name), encode_document(each.document)) for each in rules],
    )
