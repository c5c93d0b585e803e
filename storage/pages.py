"""Checks the pages of a store's file without LMDB, which trusts its pages and crashes on damaged ones.

A file of LMDB 0.9 consists of pages of one size. The first two are roots ("meta" pages), of which the one with the
higher transaction id counts. It names two B+trees: the tree of free pages, and the tree of the tables, each of which is
a tree again. Every other page has its own number in it, so a page that was written to a wrong place is found.

Each page up to the last one is in exactly one place: in one tree, or in the list of free pages. This module checks all
of that; `storage.verification` checks the keys and values.
"""

import mmap
import struct
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from storage.store import Table

MAGIC: Final = 0xBEEFC0DE
DATA_VERSION: Final = 1
FINDINGS_MAX: Final = 100  # for one file; more would not help

_HEADER: Final = struct.Struct("<QHHHH")  # page number, unused, flags, end of the pointers, begin of the nodes
_NODE: Final = struct.Struct(
    "<HHHH"
)  # size or child (low bits), the same (high bits), flags or child (highest bits), bytes of the key
_TREE: Final = struct.Struct("<IHHQQQQQ")
_META: Final = struct.Struct("<IIQQ")  # magic, version, address, size of the map
_META_END: Final = struct.Struct("<QQ")  # last page, transaction id
_ROOT_PAGES: Final = 2
_NO_PAGE: Final = (1 << 64) - 1
_BRANCH, _LEAF, _OVERFLOW = 0x01, 0x02, 0x04
_BIG_DATA, _SUB_TREE = 0x01, 0x02  # flags of a node
_PAGE_SIZES: Final = frozenset(1 << bits for bits in range(8, 17))
_DEPTH_MAX: Final = 32  # as LMDB's own cursors have


class _Tree(NamedTuple):
    """The description of one tree, from a root or from the tree of tables."""

    page_bytes: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Root(NamedTuple):
    free: _Tree
    tables: _Tree
    last_page: int
    transaction: int


class PageFinding(NamedTuple):
    """The problem and its table; None if the page belongs to no table."""

    table: Table | None
    text: str


class RootReplaced(Exception):
    """The root of the commit was overwritten, because two commits have followed it. This is no damage."""


class _Damaged(Exception):
    """A page is damaged; pages below it are not looked at."""


def check_pages(file: Path, transaction: int | None = None) -> list[PageFinding]:
    """The problems of the pages of the store in `file`, up to FINDINGS_MAX.

    If a process may write to the store, pass the id of a read transaction that is open meanwhile, because its pages
    stay as they are. Otherwise the latest commit is checked. Raises OSError, RootReplaced.
    """
    with file.open("rb") as opened:
        if not opened.seek(0, 2):
            return [PageFinding(None, f"{file}: empty")]
        with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            check = _Check(data, file)
            try:
                check.run(transaction)
            except _Damaged as error:
                check.add(None, str(error))
            return check.findings[:FINDINGS_MAX]


class _Check:
    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self._data = data
        self._file = file
        self.page_bytes = 0
        self._last_page = 0
        self._owners = bytearray()  # by page: 0 if it has no owner yet, else 1 + the number of its tree
        self._names: list[str] = []
        self.findings: list[PageFinding] = []

    def add(self, table: Table | None, text: str) -> None:
        self.findings.append(PageFinding(table, f"{self._file}: {text}"))

    def run(self, transaction: int | None) -> None:
        root = self._root(transaction)
        self._last_page = root.last_page
        if (root.last_page + 1) * self.page_bytes > len(self._data):
            raise _Damaged(f"truncated: {len(self._data)} bytes of {(root.last_page + 1) * self.page_bytes}")
        self._owners = bytearray(root.last_page + 1)
        self._claim(0, _ROOT_PAGES, self._owner("the roots"))
        tables: dict[str, _Tree] = {}
        for key, value in self._walk("the tree of tables", root.tables, None):
            if len(value) != _TREE.size:
                self.add(None, f"the table {key!r} is not described")
            else:
                tables[key.decode(errors="replace")] = _Tree(*_TREE.unpack(value))
        for table in Table:
            tree = tables.pop(table.name.lower(), None)
            if tree is None:
                self.add(table, f"there is no table {table.name}")
                continue
            for _ in self._walk(table.name, tree, table):
                pass
        for name in tables:
            self.add(None, f"there is a table {name!r}, which nobody made")
        self._free_pages(root.free)

    def _root(self, transaction: int | None) -> _Root:
        """The root that counts; a problem of the other one is a finding. Raises _Damaged if there is none."""
        roots: list[_Root] = []
        for page in range(_ROOT_PAGES):
            try:
                roots.append(self._read_root(page))
            except _Damaged as error:
                self.add(None, str(error))
        if len(roots) == _ROOT_PAGES and roots[0].transaction and abs(roots[0].transaction - roots[1].transaction) != 1:
            self.add(None, f"roots of the transactions {roots[0].transaction} and {roots[1].transaction}")
        wanted = [root for root in roots if transaction in (None, root.transaction)]
        if not wanted and transaction is not None and roots and min(root.transaction for root in roots) > transaction:
            raise RootReplaced
        if not wanted:
            raise _Damaged("no root can be read")
        return max(wanted, key=lambda root: root.transaction)

    def _read_root(self, page: int) -> _Root:
        at = page * self.page_bytes if self.page_bytes else self._second_root() if page else 0
        if at + _HEADER.size + _META.size + 2 * _TREE.size + _META_END.size > len(self._data):
            raise _Damaged(f"page {page}: no root")
        number, _, flags, _, _ = _HEADER.unpack_from(self._data, at)
        at += _HEADER.size
        magic, version, _, _ = _META.unpack_from(self._data, at)
        at += _META.size
        free, tables = (_Tree(*_TREE.unpack_from(self._data, at + index * _TREE.size)) for index in range(2))
        last_page, transaction = _META_END.unpack_from(self._data, at + 2 * _TREE.size)
        if (number, flags, magic, version) != (page, 0x08, MAGIC, DATA_VERSION):
            raise _Damaged(f"page {page}: not a root of LMDB 0.9")
        if free.page_bytes not in _PAGE_SIZES or last_page < _ROOT_PAGES - 1:
            raise _Damaged(f"page {page}: a root with pages of {free.page_bytes} bytes and the last page {last_page}")
        if transaction and transaction % _ROOT_PAGES != page:
            raise _Damaged(f"page {page}: the root of transaction {transaction}, which belongs on the other")
        self.page_bytes = free.page_bytes
        return _Root(free, tables, last_page, transaction)

    def _second_root(self) -> int:
        """The offset of the second root, if the first cannot be read and so the size of pages is unknown."""
        for size in sorted(_PAGE_SIZES):
            found = self._data[size + _HEADER.size : size + _HEADER.size + 4]
            if found == MAGIC.to_bytes(4, "little"):
                return size
        raise _Damaged("page 1: no root")

    def _owner(self, name: str) -> int:
        self._names.append(name)
        return len(self._names)

    def _claim(self, first: int, count: int, owner: int) -> None:
        """Note that these pages are in the tree `owner`. Raises _Damaged if they are in another place, too."""
        if first + count - 1 > self._last_page:
            raise _Damaged(f"page {first + count - 1} is behind the last one, {self._last_page}")
        for page in range(first, first + count):
            if self._owners[page]:
                both = f"{self._names[self._owners[page] - 1]} and in {self._names[owner - 1]}"
                raise _Damaged(f"page {page} is in {both}")
            self._owners[page] = owner

    def _walk(self, name: str, tree: _Tree, table: Table | None) -> Iterator[tuple[bytes, bytes]]:
        """Items of a tree, without values that have pages of their own. A damaged branch is a finding, and skipped."""
        walk = _Walk(self, tree, self._owner(name))
        yield from walk.items(lambda text: self.add(table, f"{name}: {text}"))

    def _free_pages(self, tree: _Tree) -> None:
        listed = self._owner("the list of free pages")
        name = "the tree of free pages"
        walk = _Walk(self, tree, self._owner(name), with_values=True)
        for key, value in walk.items(lambda text: self.add(None, f"{name}: {text}")):
            count = int.from_bytes(value[:8], "little")
            if len(key) != 8 or len(value) < 8 * (count + 1):
                self.add(None, f"{name}: a list of {count} pages has {len(value)} bytes")
                continue
            numbers = struct.unpack_from(f"<{count}Q", value, 8)
            for number in numbers:
                try:
                    self._claim(number, 1, listed)
                except _Damaged as error:
                    self.add(None, str(error))
                    if len(self.findings) >= FINDINGS_MAX:
                        return
        lost = self._owners.count(0)
        if lost and not self.findings:
            self.add(None, f"{lost} pages are in no table and are not listed as free")

    # -- pages

    def page(self, number: int, kinds: int, owner: int) -> tuple[int, int]:
        """Claim a page and check its header; returns its kind and the end of its pointers. Raises _Damaged."""
        self._claim(number, 1, owner)
        found, _, flags, lower, upper = _HEADER.unpack_from(self._data, number * self.page_bytes)
        if found != number:
            raise _Damaged(f"page {number} is one that was written for page {found}")
        if flags not in (_BRANCH, _LEAF) or not flags & kinds:
            raise _Damaged(f"page {number} has the flags {flags:#x}")
        if not _HEADER.size <= lower <= upper <= self.page_bytes or lower & 1:
            raise _Damaged(f"page {number}: its nodes begin at {upper}, its pointers end at {lower}")
        return flags, lower

    def overflow(self, number: int, size: int, owner: int) -> bytes:
        """Claim the pages of a large value, and return its bytes. Raises _Damaged."""
        count = -(-(size + _HEADER.size) // self.page_bytes)
        self._claim(number, count, owner)
        at = number * self.page_bytes
        found, _, flags = struct.unpack_from("<QHH", self._data, at)
        (pages,) = struct.unpack_from("<I", self._data, at + 12)
        if (found, flags, pages) != (number, _OVERFLOW, count):
            raise _Damaged(f"page {number} should begin a value of {count} pages")
        return self._data[at + _HEADER.size : at + _HEADER.size + size]

    def nodes(self, number: int, lower: int, is_leaf: bool) -> list[tuple[bytes, int, int, int]]:
        """Key, flags, size of the value or number of the child, and offset of the value, of each node of a page."""
        data, begin, end = self._data, number * self.page_bytes, self.page_bytes
        count = (lower - _HEADER.size) >> 1
        found = []
        for pointer in struct.unpack_from(f"<{count}H", data, begin + _HEADER.size):
            if not lower <= pointer <= end - _NODE.size:
                raise _Damaged(f"page {number}: a node at {pointer}")
            low, high, flags, key_bytes = _NODE.unpack_from(data, begin + pointer)
            at = pointer + _NODE.size + key_bytes
            value = low | high << 16
            if not is_leaf:
                value |= flags << 32
                stored = 0
            else:
                stored = 8 if flags & _BIG_DATA else value
            if at + stored > end:
                raise _Damaged(f"page {number}: a node at {pointer} goes beyond the page")
            found.append((data[begin + at - key_bytes : begin + at], flags, value, begin + at))
        return found

    def bytes_at(self, at: int, size: int) -> bytes:
        return self._data[at : at + size]


class _Walk:
    """A walk of one tree, depth first, so that items come in the order of their keys."""

    def __init__(self, check: _Check, tree: _Tree, owner: int, with_values: bool = False) -> None:
        self._check = check
        self._tree = tree
        self._owner = owner
        self._with_values = with_values  # also values that have pages of their own; then keys are native numbers
        self._branches = self._leaves = self._overflows = self._entries = 0
        self._is_whole = True

    def items(self, found: Callable[[str], None]) -> Iterator[tuple[bytes, bytes]]:
        tree = self._tree
        if tree.root == _NO_PAGE:
            if tree.entries:
                found(f"has no pages, and should have {tree.entries} records")
            return
        stack: list[tuple[int, int, bytes | None, bytes | None]] = [(tree.root, 1, None, None)]
        while stack:
            number, depth, low, high = stack.pop()
            try:
                children, items = self._page(number, depth, low, high)
            except _Damaged as error:
                self._is_whole = False
                found(str(error))
                continue
            stack += reversed(children)
            yield from items
        said = (tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries)
        counted = (self._branches, self._leaves, self._overflows, self._entries)
        if self._is_whole and said != counted:
            found(f"has {counted} branches, leaves, overflow pages and records, and should have {said}")

    def _page(
        self, number: int, depth: int, low: bytes | None, high: bytes | None
    ) -> tuple[list[tuple[int, int, bytes | None, bytes | None]], list[tuple[bytes, bytes]]]:
        """The children and items of a page. Their keys must be at `low` or above, and below `high`."""
        if depth > min(self._tree.depth, _DEPTH_MAX):
            raise _Damaged(f"page {number} is deeper than {self._tree.depth}")
        kind, lower = self._check.page(number, _LEAF if depth == self._tree.depth else _BRANCH, self._owner)
        nodes = self._check.nodes(number, lower, kind == _LEAF)
        keys = [self._order(key) for key, _, _, _ in nodes]
        if kind == _BRANCH:
            keys = keys[1:]  # the first child has no key: it has everything below the second key
        if (
            any(before >= after for before, after in pairwise(keys))
            or (keys and low is not None and keys[0] < low)
            or (keys and high is not None and keys[-1] >= high)
        ):
            raise _Damaged(f"page {number}: its keys are not in order")
        if kind == _BRANCH:
            if len(nodes) < 2:
                raise _Damaged(f"page {number} is a branch with {len(nodes)} children")
            self._branches += 1
            bounds = [low, *keys, high]
            pages = [page for _, _, page, _ in nodes]
            return [(page, depth + 1, bounds[at], bounds[at + 1]) for at, page in enumerate(pages)], []
        self._leaves += 1
        self._entries += len(nodes)
        return [], [(key, self._value(flags, size, at)) for key, flags, size, at in nodes]

    def _order(self, key: bytes) -> bytes:
        return key[::-1] if self._with_values else key  # keys of the list of free pages are native numbers

    def _value(self, flags: int, size: int, at: int) -> bytes:
        if not flags & _BIG_DATA:
            return self._check.bytes_at(at, size) if self._with_values or flags & _SUB_TREE else b""
        number = int.from_bytes(self._check.bytes_at(at, 8), "little")
        value = self._check.overflow(number, size, self._owner)
        self._overflows += -(-(size + _HEADER.size) // self._check.page_bytes)
        return value if self._with_values else b""
