"""How long entities have been idle that are deleted when nobody uses them: the state that `idleness` keeps."""


class Idle:
    """The idle time of an entity as of `looked_ms`, and whether META has a record of it."""

    __slots__ = ("entity_id", "has_agreed", "idle_ms", "is_fragment", "limit_ms", "looked_ms", "recorded")

    def __init__(self, entity_id: int, limit_ms: int, looked_ms: int, is_fragment: bool) -> None:
        self.entity_id = entity_id
        self.limit_ms = limit_ms
        self.looked_ms = looked_ms
        self.is_fragment = is_fragment  # of an entity that is on other partitions, too
        self.idle_ms = 0
        self.recorded = False
        self.has_agreed = False  # to the deletion of the entity, so it refuses uses


class IdleTimes:
    def __init__(self) -> None:
        self.of: dict[int, Idle] = {}  # by entity id
        self.kept: dict[int, tuple[Idle, ...]] = {}  # entity id -> the idle times that a use of it resets
        self.auto_deleted: dict[int, str] = {}  # entities deleted as unused, and still in the catalog -> name
        self.newly_auto_deleted: dict[int, str] = {}  # those of them that were not taken yet
        self.newly_unused: set[int] = set()  # entities with unused fragments here that the home is to be told of
        self.auto_deletions = 0  # the number of such entities since the start
