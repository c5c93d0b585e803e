"""The form in which a message is stored: `annotation pairs ‖ bare message`, and a layout that says where the parts are.

- The pairs of the message annotations map are stored as they were encoded. Delivery annotations, which Service Bus
  shows to receivers as well, are the first of these pairs, under a key that no client can use. Few messages have them.
- The header's first-acquirer, if it is not null, is the first of the delivery annotations, again under a key that no
  client can use. It is no flag, because gateways of earlier versions could not deliver a message with an unknown flag;
  so they deliver it, and this annotation too.
- The bare message is properties, application properties, body and footer, each with a descriptor of the form 00 53 xx.
- The layout also has the flag durable and the priority of the header.
"""

import struct
from typing import Final, NamedTuple

# Flags
DURABLE: Final = 1
HAS_PRIORITY: Final = 2
HAS_DELIVERY_ANNOTATIONS: Final = 4  # the first annotation pair has those of the sender, a map of 32-bit size


class Layout(NamedTuple):
    """Where the parts of stored bytes are; 16 bytes, big-endian, in this order.

    `flags` are DURABLE, HAS_PRIORITY and HAS_DELIVERY_ANNOTATIONS; `priority` is 0 without its flag.
    `annotation_values` counts keys and values, as the count of an AMQP map does. The lengths of the sections include
    their descriptors, 0 is no section.
    """

    flags: int
    priority: int
    annotation_values: int
    annotation_bytes: int
    properties_bytes: int
    application_properties_bytes: int


LAYOUT: Final = struct.Struct(">BBHIII")


def unpack_layout(layout: bytes) -> Layout:
    return Layout(*LAYOUT.unpack(layout))
