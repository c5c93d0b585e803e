"""Atom documents of the management API: entries, feeds and errors around descriptions (management.md 1.5, 1.8, 1.15).

JavaScript's client takes names from `id`, the others from `title`; Python's follows the second link of a feed if there
are exactly two.
"""

from collections.abc import Iterable
from typing import NamedTuple
from xml.etree.ElementTree import Element

from broker.atom import xml
from broker.errors import InvalidArgument

ENTRY_TYPE = "application/atom+xml;type=entry;charset=utf-8"
FEED_TYPE = "application/atom+xml;type=feed;charset=utf-8"
ERROR_TYPE = "application/xml; charset=utf-8"
_STANDARD = "<MessagingSKU>Standard</MessagingSKU>"


class Entry(NamedTuple):
    """`url` is absolute, `title` the last part of the name, `content` the description element. Times are texts."""

    url: str
    title: str
    content: str
    published: str
    updated: str


class Page(NamedTuple):
    """A part of a list; `next_url` is that of the next part, if there is one."""

    url: str
    title: str
    updated: str
    entries: Iterable[str]
    next_url: str | None = None


def write_entry(entry: Entry, author: str) -> str:
    return _entry(entry, author, f' xmlns="{xml.ATOM}"')


def _entry(entry: Entry, author: str, declaration: str = "") -> str:
    url = xml.written(entry.url)
    return (
        f'<entry{declaration}><id>{url}</id><title type="text">{xml.written(entry.title)}</title>'
        f"<published>{entry.published}</published><updated>{entry.updated}</updated>"
        f'<author><name>{xml.written(author)}</name></author><link rel="self" href="{url}"/>'
        f'<content type="application/xml">{entry.content}</content></entry>'
    )


def write_feed_entry(entry: Entry, author: str) -> str:
    """Write an entry of `Page.entries`."""
    return _entry(entry, author)


def write_feed(page: Page) -> str:
    url = xml.written(page.url)
    following = "" if page.next_url is None else f'<link rel="next" href="{xml.written(page.next_url)}"/>'
    return (
        f'<feed xmlns="{xml.ATOM}"><title type="text">{xml.written(page.title)}</title><id>{url}</id>'
        f'<updated>{page.updated}</updated><link rel="self" href="{url}"/>{following}'
        f"{''.join(page.entries)}</feed>"
    )


def write_error(status: int, detail: str) -> str:
    """Write an error without a namespace, which would hide the detail from some clients."""
    return f"<Error><Code>{status}</Code>{xml.element('Detail', detail)}</Error>"


def read_description(body: bytes, *names: str) -> tuple[str, Element]:
    """The description element in an entry, which must have one of these names. Raises InvalidArgument."""
    root = xml.parse(body)
    if root.tag != f"{{{xml.ATOM}}}entry":
        raise InvalidArgument(f"The body must be an entry of the namespace {xml.ATOM}, not {_tag(root)}.")
    content = xml.child(root, "content", xml.ATOM)
    wanted = " or ".join(names)
    if content is None or len(content) != 1:
        raise InvalidArgument(f"The entry must have content with one element, {wanted}.")
    for name, found in xml.children(content):
        if name in names:
            return name, found
    raise InvalidArgument(f"The content must be {wanted} of the namespace {xml.SERVICE_BUS}, not {_tag(content[0])}.")


def _tag(element: Element) -> str:
    return repr(str(element.tag)[:200])


def write_namespace(name: str, created: str, modified: str, *, is_premium: bool = False) -> str:
    """NamespaceInfo. A namespace of the tier Premium has messaging units, which clients must be told."""
    tier = "<MessagingSKU>Premium</MessagingSKU><MessagingUnits>1</MessagingUnits>" if is_premium else _STANDARD
    return (
        f'<NamespaceInfo xmlns="{xml.SERVICE_BUS}" xmlns:i="{xml.INSTANCE}"><CreatedTime>{created}</CreatedTime>'
        f"{tier}<ModifiedTime>{modified}</ModifiedTime>{xml.element('Name', name)}"
        "<NamespaceType>Messaging</NamespaceType></NamespaceInfo>"
    )
