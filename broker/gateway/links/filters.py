"""The filters of a receiver's source that are in place, besides that of its session."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from broker.errors import InvalidFilter, NotImplementedByBroker
from broker.rules.errors import InvalidRule, SelectorNotSupported
from broker.rules.selecting import joined
from protocol import source_filters
from protocol.errors import InvalidField


class SourceFilters(NamedTuple):
    """`selector`: the link wants only messages that this selects. `in_place`: as they were asked for."""

    selector: str | None
    in_place: dict[Any, Any]


def read(filters: Mapping[Any, Any], *, ignores_no_local: bool = False) -> SourceFilters:
    """Filters that are not known are left out, so that the client sees that they are not in place (3.5.8).

    Raises InvalidFilter for one that cannot be read, NotImplementedByBroker for one that cannot be evaluated.
    """
    try:
        asked = source_filters.read(filters)
        if asked.wants_no_local and not ignores_no_local:
            raise NotImplementedByBroker("No link is without the messages that its own connection sends (no-local).")
        return SourceFilters(joined(asked.selectors) if asked.selectors else None, dict(asked.entries))
    except SelectorNotSupported as error:
        raise NotImplementedByBroker(str(error)) from None
    except (InvalidField, InvalidRule) as error:
        raise InvalidFilter(str(error)) from None
