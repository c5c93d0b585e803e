"""The tiers of Azure Service Bus, and the sizes that they have (PE7, management.md 1.7).

A namespace without a tier shows Standard, and takes the sizes of both tiers.
"""

from collections.abc import Iterator
from enum import StrEnum
from typing import Final

from broker.namespace.entities import Description, SubscriptionDescription

STANDARD_FRAGMENTS: Final = 16  # of a partitioned entity
STANDARD_MB: Final = 5 * 1024
PREMIUM_MB: Final = (1024, 80 * 1024)
_STANDARD_SIZES_MB: Final = (1024, 2048, 3072, 4096, STANDARD_MB)
_ALL_SIZES_MB: Final = (*_STANDARD_SIZES_MB, 10_240, 20_480, 40_960, 81_920)
PREMIUM_MESSAGE_KB: Final = (1024, 100 * 1024)


class Sku(StrEnum):
    STANDARD = "standard"
    PREMIUM = "premium"


def size_factor(sku: Sku | None, fragments: int) -> int:
    """Return by what the size of a partitioned entity is multiplied, for all its fragments together.

    In Standard it is 16, whatever the number of fragments here, but where there are more each has the whole size: so
    they had it before sizes were multiplied.
    """
    return fragments if sku is Sku.PREMIUM else max(STANDARD_FRAGMENTS, fragments)


def share_bytes(max_size_mb: int, sku: Sku | None, fragments: int) -> int:
    """The size of each fragment of a partitioned entity, so that all have what is shown."""
    return (max_size_mb << 20) * size_factor(sku, fragments) // fragments


def size_refusal(sku: Sku | None, max_size_mb: int) -> str | None:
    """Why a client of the administration API cannot ask for this size, in the service's words; None if it can.

    Without a tier, in files of settings and in Peeklock's own requests any size is one, since small entities are useful
    in tests.
    """
    sizes = _STANDARD_SIZES_MB if sku is Sku.STANDARD else _ALL_SIZES_MB
    if sku is None or max_size_mb in sizes:
        return None
    return (
        f"The specified value {max_size_mb} is invalid. The property MaxSizeInMegabytes, must be one of the following "
        f"values: {';'.join(map(str, sizes))}."
    )


def refusals(sku: Sku | None, wanted: Description, before: Description | None = None) -> Iterator[tuple[str, str]]:
    """Each field of a new or changed entity whose value the tier does not have, and why."""
    if sku is None or isinstance(wanted, SubscriptionDescription):
        return
    for field, (least, most) in _RANGES[sku].items():
        value = getattr(wanted, field)
        if value is None or (before is not None and getattr(before, field) == value):
            continue
        if most == 0:
            yield field, f"The value for '{field}' can only be set in a namespace of the tier Premium."
        elif not least <= value <= most:
            yield field, f"The value for '{field}' must be between {least} and {most}."


_RANGES: Final[dict[Sku, dict[str, tuple[int, int]]]] = {
    Sku.STANDARD: {"max_size_mb": (1, STANDARD_MB), "max_message_size_kb": (0, 0)},
    Sku.PREMIUM: {"max_size_mb": PREMIUM_MB, "max_message_size_kb": PREMIUM_MESSAGE_KB},
}
