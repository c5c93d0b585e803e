"""The rules of subscriptions: filters and actions in the language of Service Bus, and the rule set of a topic.

This package is pure; a MessageView has everything that rules need to know of a message.
"""

from broker.rules.actions import Action, Changes, compile_action
from broker.rules.errors import ActionError, FilterError, InvalidRule, RuleSyntaxError
from broker.rules.filters import (
    CorrelationFilter,
    FalseFilter,
    Filter,
    SqlFilter,
    TrueFilter,
    compile_filter,
    load_language,
)
from broker.rules.message import MessageView
from broker.rules.rule_set import RULE_NAME, Match, Rule, RuleSet
from broker.rules.values import Duration, Instant

__all__ = [
    "RULE_NAME",
    "Action",
    "ActionError",
    "Changes",
    "CorrelationFilter",
    "Duration",
    "FalseFilter",
    "Filter",
    "FilterError",
    "Instant",
    "InvalidRule",
    "Match",
    "MessageView",
    "Rule",
    "RuleSet",
    "RuleSyntaxError",
    "SqlFilter",
    "TrueFilter",
    "compile_action",
    "compile_filter",
    "load_language",
]
