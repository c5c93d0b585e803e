"""The expressions of declared rules: which cannot be compiled, and which fail on every message.

The language takes a while to load, and most brokers declare no rules, so it is loaded by the first one.
"""

from collections.abc import Iterable

from broker.namespace.rule_descriptions import CorrelationFilter, RuleDescription, SqlFilter, amqp_values
from broker.settings.config import Place
from protocol.symbols import CORRELATION_FIELDS


def wrong_expressions(rule: RuleDescription) -> Iterable[tuple[Place, str]]:
    """Yield the expressions of a rule that cannot be compiled: field, and what is wrong."""
    from broker.rules import CorrelationFilter as CompiledCorrelation
    from broker.rules import InvalidRule, compile_action, compile_filter

    described = rule.filter
    try:
        if isinstance(described, SqlFilter):
            compile_filter(described.expression, amqp_values(described.parameters))
        elif isinstance(described, CorrelationFilter):
            fields = {name: getattr(described, name) for name in CORRELATION_FIELDS}
            CompiledCorrelation(**fields, properties=amqp_values(described.properties))
    except InvalidRule as error:
        yield ("filter", "expression") if isinstance(described, SqlFilter) else ("filter", "properties"), str(error)
    try:
        if rule.action is not None:
            compile_action(rule.action.expression, amqp_values(rule.action.parameters))
    except InvalidRule as error:
        yield ("action", "expression"), str(error)


def futile_expressions(rule: RuleDescription) -> Iterable[tuple[Place, str]]:
    """Yield the expressions of a rule, all of which can be compiled, that fail on every message: field, and why."""
    from broker.rules import compile_action, compile_filter

    described = rule.filter
    if isinstance(described, SqlFilter):
        flaw = compile_filter(described.expression, amqp_values(described.parameters)).flaw
        if flaw is not None:
            yield ("filter", "expression"), str(flaw)
    if rule.action is not None:
        flaw = compile_action(rule.action.expression, amqp_values(rule.action.parameters)).flaw
        if flaw is not None:
            yield ("action", "expression"), str(flaw)
