"""The subscriptions of one topic and their rules, compiled.

Most subscriptions take every message as it is, without a look at the message. So they are kept apart from the rules
that must be tried.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence

from broker.partition.state.stored_rules import StoredRule
from broker.rules import RuleSet


class Topic:
    """Subscriptions are identified by their entity ids.

    Invariant: if each rule of a subscription takes every message unchanged, the subscription is in `for_all` (if it has
    a rule). Otherwise all its rules are in `rule_set`.
    """

    def __init__(self) -> None:
        self.for_all: list[int] = []
        self.rule_set = RuleSet()
        self.has_rules = False  # True if rule_set has rules
        self.filters: Counter[str] = Counter()  # by kind, of all subscriptions
        self._rules: dict[int, dict[str, StoredRule]] = {}  # by entity id and name in lower case
        self._selective: Counter[int] = Counter()  # entity id -> rules that do not take every message unchanged
        # The subscription that was listed last, and its rules by name, until rules change: lists are read page by page.
        self._listed: tuple[int, list[StoredRule]] | None = None

    def rules(self, entity_id: int) -> list[StoredRule]:
        """The rules in the order in which they were added."""
        return list(self._rules[entity_id].values())

    def rules_by_name(self, entity_id: int) -> Sequence[StoredRule]:
        """The rules in the order of their names in lower case."""
        if self._listed is None or self._listed[0] != entity_id:
            self._listed = entity_id, [stored for _, stored in sorted(self._rules[entity_id].items())]
        return self._listed[1]

    def rule(self, entity_id: int, name: str) -> StoredRule | None:
        """The rule of this name; names are compared without regard to case."""
        return self._rules[entity_id].get(name.lower())

    def add_subscription(self, entity_id: int, rules: Iterable[StoredRule]) -> None:
        self._rules[entity_id] = {}
        for rule in rules:
            self.add_rule(entity_id, rule)

    def remove_subscription(self, entity_id: int) -> None:
        self._listed = None
        for stored in self._rules.pop(entity_id).values():
            self.filters[stored.kind] -= 1
        self.rule_set.remove_subscription(entity_id)
        self._selective.pop(entity_id, None)
        self._leave_for_all(entity_id)
        self.has_rules = bool(self._selective)

    def add_rule(self, entity_id: int, stored: StoredRule) -> None:
        """Add a rule; the subscription has none of this name."""
        self._listed = None
        rules = self._rules[entity_id]
        if not stored.takes_all:
            if not self._selective[entity_id]:
                for each in rules.values():
                    self.rule_set.add(entity_id, each.rule)
                self._leave_for_all(entity_id)
            self._selective[entity_id] += 1
            self.has_rules = True
        rules[stored.rule.name.lower()] = stored
        self.filters[stored.kind] += 1
        if self._selective[entity_id]:
            self.rule_set.add(entity_id, stored.rule)
        elif len(rules) == 1:
            insort(self.for_all, entity_id)

    def remove_rule(self, entity_id: int, name: str) -> None:
        self._listed = None
        rules = self._rules[entity_id]
        stored = rules.pop(name.lower())
        self.filters[stored.kind] -= 1
        if self._selective[entity_id]:
            self.rule_set.remove(entity_id, stored.rule.name)
        if not stored.takes_all:
            self._selective[entity_id] -= 1
            if not self._selective[entity_id]:
                del self._selective[entity_id]
                self.rule_set.remove_subscription(entity_id)
                if rules:
                    insort(self.for_all, entity_id)
        elif not rules:
            self._leave_for_all(entity_id)
        self.has_rules = bool(self._selective)

    def _leave_for_all(self, entity_id: int) -> None:
        at = bisect_left(self.for_all, entity_id)
        if at < len(self.for_all) and self.for_all[at] == entity_id:
            del self.for_all[at]
