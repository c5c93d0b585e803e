"""The rules of one topic: for a message, which subscriptions take it and by which rules.

Filters are indexed by the values that properties must have: correlation filters by all their conditions, SQL filters
by their guards (`broker.rules.guards`). So thousands of them cost one look-up for each combination of properties (a
shape) that filters of the topic name. SQL filters are tried if one of their guards holds, those without guards always.
A filter that is always true costs nothing but the copy.
"""

from bisect import insort
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Final

from broker.rules.actions import Action
from broker.rules.errors import FilterError, RuleSyntaxError, failure_of
from broker.rules.filters import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    SqlFilter,
    TrueFilter,
    getters,
    key_of,
)
from broker.rules.guards import Condition, Guard
from broker.rules.message import MAX_STEPS, Getter, MessageView

RULE_NAME: Final = "RuleName"  # application property of a copy that a rule with an action made: the rule's name
FREE_STEPS: Final = MAX_STEPS // 4  # of expressions, that are not counted


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """A filter and perhaps an action; an action with a blank expression counts as none."""

    name: str
    filter: Filter
    action: Action | None = None

    @property
    def changes_copy(self) -> bool:
        return self.action is not None and not self.action.is_empty

    @property
    def flaw(self) -> RuleSyntaxError | None:
        """Why the rule fails on every message; None if it does not. Such a rule is not made any more, but some are."""
        flaw = self.filter.flaw if isinstance(self.filter, SqlFilter) else None
        return flaw or (None if self.action is None else self.action.flaw)


@dataclass(frozen=True, slots=True)
class Match:
    """The copies of one message for one subscription.

    `is_plain`: it takes one copy as published, because rules without an action match. Each rule in `changed` makes a
    further copy, which the rule's action changes, with the property RULE_NAME. `errors` are the rules whose filters had
    no result. Rules are in the order in which they were added.
    """

    subscription: Hashable
    is_plain: bool = False
    changed: tuple[Rule, ...] = ()
    errors: tuple[tuple[Rule, FilterError], ...] = ()


class _Entry:
    """A rule with its position; `alone` is the match if no other rule of the subscription matches.

    `trial` is the filter that must be tried, None if it is enough to find the entry in the index.
    """

    __slots__ = ("alone", "order", "rule", "subscription", "trial")

    def __init__(self, subscription: Hashable, order: tuple[int, int], rule: Rule) -> None:
        self.subscription = subscription
        self.order = order
        self.rule = rule
        self.trial = None if isinstance(rule.filter, CorrelationFilter) else rule.filter
        self.alone = _match(subscription, [self], {})


def _match(subscription: Hashable, entries: Iterable[_Entry], errors: dict[_Entry, FilterError]) -> Match:
    matching = [entry.rule for entry in entries if entry not in errors]
    return Match(
        subscription,
        is_plain=any(not rule.changes_copy for rule in matching),
        changed=tuple(rule for rule in matching if rule.changes_copy),
        errors=tuple((entry.rule, errors[entry]) for entry in entries if entry in errors),
    )


class _Shape:
    """The filters with guards that look at the same properties, by the values of these."""

    __slots__ = ("by_key", "read")

    def __init__(self, conditions: tuple[Condition, ...]) -> None:
        self.read: tuple[Getter, ...] = getters(conditions)
        self.by_key: dict[tuple[object, ...], dict[_Entry, None]] = {}


_order = attrgetter("order")


class RuleSet:
    """Subscriptions are any hashable names. Matches are in the order in which these got their first rules."""

    def __init__(self) -> None:
        self._subscriptions: dict[Hashable, dict[str, _Entry]] = {}
        self._places: dict[Hashable, int] = {}
        self._next_place = 0
        self._always: list[_Entry] = []  # by order
        self._always_matches: tuple[Match, ...] | None = ()  # the matches of a message that no other rule matches
        self._shapes: dict[tuple[Condition, ...], _Shape] = {}
        self._unguarded: dict[_Entry, None] = {}  # they are tried on each message
        self._readers: dict[str, dict[_Entry, None]] = {}  # by section: to be tried if that cannot be decoded
        self._steps = 0  # of all filters that may be tried on one message

    def __len__(self) -> int:
        """The number of rules."""
        return sum(map(len, self._subscriptions.values()))

    @property
    def tried(self) -> int:
        """The number of filters that are tried on each message; `MessageView.tried` counts all that were."""
        return len(self._unguarded)

    def rules(self, subscription: Hashable) -> Iterator[Rule]:
        """Yield the rules in the order in which they were added."""
        return (entry.rule for entry in self._subscriptions.get(subscription, {}).values())

    def add(self, subscription: Hashable, rule: Rule) -> None:
        """Add a rule. Raises KeyError if the subscription has a rule of this name."""
        rules = self._subscriptions.setdefault(subscription, {})
        if rule.name in rules:
            raise KeyError(rule.name)
        place = self._places.get(subscription)
        if place is None:
            place = self._places[subscription] = self._next()
        entry = rules[rule.name] = _Entry(subscription, (place, self._next()), rule)
        match rule.filter:
            case CorrelationFilter(guard=guard):
                self._index(entry, guard)
            case TrueFilter() | SqlFilter(is_always_true=True):
                insort(self._always, entry, key=_order)
                self._always_matches = None
            case FalseFilter() | SqlFilter(is_never_true=True):
                pass
            case SqlFilter(guards=list() as guards) as guarded:
                for guard in guards:
                    self._index(entry, guard)
                for section in guarded.other_sections:
                    self._readers.setdefault(section, {})[entry] = None
                self._steps += guarded.steps
            case _:
                self._unguarded[entry] = None
                self._steps += _steps(rule.filter)

    def _index(self, entry: _Entry, guard: Guard) -> None:
        shape = self._shapes.get(guard.shape)
        if shape is None:
            shape = self._shapes[guard.shape] = _Shape(guard.shape)
        shape.by_key.setdefault(guard.key, {})[entry] = None

    def remove(self, subscription: Hashable, name: str) -> Rule:
        """Remove a rule, and return it. Raises KeyError if the subscription has no such rule."""
        rules = self._subscriptions[subscription]
        entry = rules.pop(name)
        self._forget(entry)
        return entry.rule

    def remove_subscription(self, subscription: Hashable) -> None:
        """Remove a subscription with all its rules, if it has any."""
        for entry in self._subscriptions.pop(subscription, {}).values():
            self._forget(entry)
        self._places.pop(subscription, None)

    def match(self, message: MessageView) -> Sequence[Match]:
        """The subscriptions that take the message, or have a rule that fails on it. No message makes it raise.

        All rules share the steps of the message (`MessageView.spend`). When there are none left, the remaining rules
        fail. The length of expressions is counted only in a topic with very many long ones.
        """
        found: list[_Entry] = []
        errors: dict[_Entry, FilterError] = {}
        trials: list[_Entry] = []
        for shape in self._shapes.values():
            try:
                entries = shape.by_key.get(key_of(message, shape.read) or ())
            except Exception as error:
                reason = failure_of(FilterError, error)
                for entries in shape.by_key.values():
                    errors.update((entry, reason) for entry in entries if entry.trial is None)
                    trials += [entry for entry in entries if entry.trial is not None]
                continue
            if entries:
                for entry in entries:
                    (found if entry.trial is None else trials).append(entry)
        for section, readers in self._readers.items():
            try:
                getattr(message, section)
            except Exception:
                trials += readers
        self._try(message, trials, found, errors)
        if not found and not errors:
            return self._matches_of_always()
        found += self._always
        found += errors
        found.sort(key=_order)
        return _grouped(found, errors)

    def _try(
        self, message: MessageView, trials: list[_Entry], found: list[_Entry], errors: dict[_Entry, FilterError]
    ) -> None:
        """Try the filters of these entries and of those without guards; add to `found` and `errors`."""
        is_long = self._steps > FREE_STEPS
        entries = {**dict.fromkeys(trials), **self._unguarded} if trials else self._unguarded
        message.tried += len(entries)
        for entry in entries:
            assert entry.trial is not None
            try:
                if is_long:
                    message.spend(_steps(entry.trial))
                if entry.trial.matches(message):
                    found.append(entry)
            except Exception as error:
                errors[entry] = failure_of(FilterError, error)

    def _matches_of_always(self) -> tuple[Match, ...]:
        matches = self._always_matches
        if matches is None:
            matches = self._always_matches = _grouped(self._always, {})
        return matches

    def _forget(self, entry: _Entry) -> None:
        match entry.rule.filter:
            case CorrelationFilter(guard=guard):
                self._drop(entry, guard)
            case TrueFilter() | SqlFilter(is_always_true=True):
                self._always.remove(entry)
                self._always_matches = None
            case FalseFilter() | SqlFilter(is_never_true=True):
                pass
            case SqlFilter(guards=list() as guards) as guarded:
                for guard in guards:
                    self._drop(entry, guard)
                for section in guarded.other_sections:
                    del self._readers[section][entry]
                    if not self._readers[section]:
                        del self._readers[section]
                self._steps -= guarded.steps
            case _:
                del self._unguarded[entry]
                self._steps -= _steps(entry.rule.filter)

    def _drop(self, entry: _Entry, guard: Guard) -> None:
        by_key = self._shapes[guard.shape].by_key
        del by_key[guard.key][entry]
        if not by_key[guard.key]:
            del by_key[guard.key]
        if not by_key:
            del self._shapes[guard.shape]

    def _next(self) -> int:
        self._next_place += 1
        return self._next_place


def _steps(tried: Filter) -> int:
    return tried.steps if isinstance(tried, SqlFilter) else 0


def _grouped(entries: list[_Entry], errors: dict[_Entry, FilterError]) -> tuple[Match, ...]:
    """One match for each subscription; `entries` are in order."""
    matches = []
    for subscription, group in groupby(entries, attrgetter("subscription")):
        of_one = list(group)
        alone = len(of_one) == 1 and of_one[0] not in errors
        matches.append(of_one[0].alone if alone else _match(subscription, of_one, errors))
    return tuple(matches)
