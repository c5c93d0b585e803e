"""The definitions of a namespace's entities, beside the rows: a file each time that they had changed.

    definitions/<time>-<checksum>.json    the time in milliseconds since 1970, 15 digits; XXH3 of the content

The content is what the broker answers to GET /$journal/entities; here nobody looks into it but for the namespace.
"""

import json
import re
from typing import Any, Final, NamedTuple

from xxhash import xxh3_64_hexdigest

from storage.capture.errors import AnotherNamespace, DamagedFile
from storage.capture.place import Place

FOLDER: Final = "definitions"
_NAME: Final = re.compile(rf"{FOLDER}/(\d{{15}})-([0-9a-f]{{16}})\.json")


class Kept(NamedTuple):
    time_ms: int
    checksum: str

    @property
    def path(self) -> str:
        return f"{FOLDER}/{self.time_ms:015}-{self.checksum}.json"


def kept(place: Place) -> list[Kept]:
    """All that there are, the earliest first. Raises OSError."""
    names = [found for stored in place.files(FOLDER) if (found := _NAME.fullmatch(stored.path))]
    return sorted(Kept(int(found[1]), found[2]) for found in names)


def keep(place: Place, document: dict[str, Any], now_ms: int) -> bool:
    """Write the document unless the last one is the same. Returns whether it did. Raises OSError."""
    content = _encoded(document)
    found = Kept(now_ms, xxh3_64_hexdigest(content))
    before = kept(place)
    if before and before[-1].checksum == found.checksum:
        return False
    place.write(found.path, content)
    return True


def read(place: Place, file: Kept, namespace: str) -> dict[str, Any]:
    """Read and check a file of definitions. Raises DamagedFile, AnotherNamespace, OSError."""
    where = place.uri(file.path)
    try:
        content = place.read(file.path).to_pybytes()
    except FileNotFoundError:
        raise DamagedFile(where, "is missing") from None
    if xxh3_64_hexdigest(content) != file.checksum:
        raise DamagedFile(where, "the checksum does not match")
    document: dict[str, Any] = json.loads(content)
    if document.get("namespace") != namespace:
        raise AnotherNamespace(f"{where}: is of the namespace {document.get('namespace')!r}, not {namespace!r}")
    return document


def _encoded(document: dict[str, Any]) -> bytes:
    return f"{json.dumps(document, sort_keys=True, indent=1)}\n".encode()
