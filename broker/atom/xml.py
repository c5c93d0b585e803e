"""XML of the management API: elements by their namespaces, and text that all SDKs read (management.md 1.5).

Clients write other prefixes and another order of elements than the service does, so nothing is read by these. The
writer is made of strings, because some clients find elements by prefix: Atom must be the default namespace of an entry,
and types must be called `i:type`.
"""

import re
from collections.abc import Iterator
from typing import Final
from xml.etree.ElementTree import Element, ParseError
from xml.sax.saxutils import escape

from defusedxml.common import DefusedXmlException
from defusedxml.ElementTree import fromstring

from broker.errors import InvalidArgument

ATOM: Final = "http://www.w3.org/2005/Atom"
SERVICE_BUS: Final = "http://schemas.microsoft.com/netservices/2010/10/servicebus/connect"
COUNTS: Final = "http://schemas.microsoft.com/netservices/2011/06/servicebus"
INSTANCE: Final = "http://www.w3.org/2001/XMLSchema-instance"
SCHEMA: Final = "http://www.w3.org/2001/XMLSchema"

# Characters that XML 1.0 cannot have, in any form.
_ILLEGAL: Final = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def parse(body: bytes) -> Element:
    """The root element. Raises InvalidArgument, also for XML that defines entities: a small one may become huge."""
    try:
        root: Element = fromstring(body, forbid_dtd=True)
    except DefusedXmlException:
        raise InvalidArgument("The XML must not have a document type or entities.") from None
    except (ParseError, ValueError, LookupError) as error:
        raise InvalidArgument(f"The body is not well-formed XML: {error}.") from None
    return root


def children(element: Element, namespace: str = SERVICE_BUS) -> Iterator[tuple[str, Element]]:
    """The children of this namespace, by local name."""
    prefix = f"{{{namespace}}}"
    for child in element:
        if isinstance(child.tag, str) and child.tag.startswith(prefix):
            yield child.tag.removeprefix(prefix), child


def child(element: Element, name: str, namespace: str = SERVICE_BUS) -> Element | None:
    """The first child of this name."""
    return element.find(f"{{{namespace}}}{name}")


def text_of(element: Element | None) -> str:
    """The text without blanks around it; empty if there is no such element."""
    return (element.text or "").strip() if element is not None else ""


def type_of(element: Element) -> str:
    """The local name in the element's type attribute, whatever its prefix; empty if there is none."""
    return element.get(f"{{{INSTANCE}}}type", "").rpartition(":")[2].strip()


def is_nil(element: Element) -> bool:
    return element.get(f"{{{INSTANCE}}}nil", "").strip() in ("true", "1")


def written(text: str) -> str:
    """The text as it stands in XML, between tags or in an attribute with double quotes."""
    return escape(_ILLEGAL.sub("\ufffd", text), {'"': "&quot;", "\r": "&#13;"})


def is_writable(text: str) -> bool:
    """True if XML can have all characters of the text."""
    return _ILLEGAL.search(text) is None


def element(name: str, text: str) -> str:
    return f"<{name}>{written(text)}</{name}>"
