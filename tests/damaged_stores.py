"""Damage to single pages of a store's file, as tests do it: chosen by the table, and by what it does to a reader."""

import struct
from collections.abc import Callable
from pathlib import Path

from storage.pages import check_pages

PAGE = 4096
BRANCH, LEAF = 0x01, 0x02
FREE_PAGES = "the tree of free pages"  # has a name beside those of the tables

Damage = Callable[[bytearray, int], None]  # of the page at an offset


def zeros(data: bytearray, at: int) -> None:
    """LMDB finds this by itself."""
    data[at : at + PAGE] = bytes(PAGE)


def lone_branch(data: bytearray, at: int) -> None:
    """A branch with one child: LMDB asserts that there is none, and its reader dies of SIGABRT."""
    struct.pack_into("<HH", data, at + 10, BRANCH, 16 + 2)


def wild_pointer(data: bytearray, at: int) -> None:
    """The first node's place is the last byte of the page."""
    struct.pack_into("<H", data, at + 16, PAGE - 1)


def leaves(file: Path, tree: str) -> list[int]:
    """Offsets of the leaves that a tree has in use; the file is as before afterwards."""
    sound = file.read_bytes()
    found = []
    for at in range(0, len(sound), PAGE):
        if struct.unpack_from("<QHH", sound, at) == (at // PAGE, 0, LEAF):
            tried = bytearray(sound)
            tried[at : at + 8] = b"\xff" * 8
            file.write_bytes(tried)
            if any(f"{tree}: page" in finding.text for finding in check_pages(file)):
                found.append(at)
    file.write_bytes(sound)
    return found


def damage(file: Path, tree: str, how: Damage) -> bytes:
    """Do it to all leaves of one tree. Returns what is in the file now."""
    places = leaves(file, tree)
    assert places
    data = bytearray(file.read_bytes())
    for at in places:
        how(data, at)
    file.write_bytes(data)
    return bytes(data)
