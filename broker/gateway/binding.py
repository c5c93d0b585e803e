"""Binds an attach to an entity, to a node that answers requests, or to the coordinator of transactions."""

import time
import uuid
from functools import partial
from typing import NamedTuple

from broker.errors import InvalidArgument, NotAllowed, Unauthorized
from broker.gateway.host import Host
from broker.gateway.links.browsers import Browser
from broker.gateway.links.filters import SourceFilters
from broker.gateway.links.filters import read as read_filters
from broker.gateway.links.making import LinkInMaking
from broker.gateway.links.partitioned_receivers import PartitionedReceiver
from broker.gateway.links.partitioned_senders import PartitionedSender
from broker.gateway.links.receivers import ClientReceiver
from broker.gateway.links.senders import ClientSender
from broker.gateway.links.session_links import NextSessionReceiver, SessionReceiver
from broker.gateway.links.subscription_ends import SubscriptionEnd
from broker.gateway.links.topic_receivers import TopicReceiver
from broker.gateway.namespace import Entity
from broker.gateway.nodes.cbs import CbsRequests
from broker.gateway.nodes.coordinator import COORDINATOR_CREDIT, MAX_REQUEST_BYTES, Coordinator
from broker.gateway.nodes.management import ENVELOPE_BYTES, ManagementRequests
from broker.gateway.nodes.namespace import NamespaceRequests
from broker.gateway.nodes.request_links import REQUEST_CREDIT, RequestLink, ResponseLink
from broker.gateway.subscribing import Missing, subscription_of, subscriptions_to_end
from broker.namespace.entities import Right
from broker.namespace.tiers import Sku
from protocol import error_texts, session_filter
from protocol.addresses import Address, Node, Part
from protocol.addresses import parse as parse_address
from protocol.engine.links import Link
from protocol.session_filter import SessionRequest
from protocol.symbols import ENTITY_TYPE, PEEK_MODE, TEMPORARY_TOPIC, TRANSFER_DESTINATION_ADDRESS

# The largest tokens known are some 10 KiB.
MAX_TOKEN_MESSAGE_BYTES = 128 * 1024

_KINDS = ("queue", "topic", "subscription")  # by the numbers of ENTITY_TYPE

Bound = (
    ClientSender
    | ClientReceiver
    | Browser
    | TopicReceiver
    | RequestLink
    | ResponseLink
    | Coordinator
    | LinkInMaking
    | SubscriptionEnd
)


class Destination(NamedTuple):
    """Where an attach goes; `entity` is None for $cbs and for the management node of the namespace."""

    address: Address
    entity: Entity | None


def destination_of(host: Host, link: Link) -> Destination | None:
    """The destination of the attach, if the client has the right; None if it has no address.

    Raises BrokerError, and ProtocolError for an invalid address.
    """
    if link.is_coordinator or link.is_dynamic or link.address is None:
        return None
    address = parse_address(link.address)
    if address.node is Node.CBS:
        return Destination(address, None)
    rights = host.rights
    if not address.path:
        rights.require("", Right.MANAGE, time.time())
        return Destination(address, None)
    right = Right.SEND if not link.is_sender else Right.LISTEN
    if address.node is Node.ENTITY:
        rights.require(address.resource, right, time.time())
    elif not any(rights.allows(address.resource, right, time.time()) for right in Right):
        rights.require(address.resource, Right.LISTEN, time.time())
    entity = host.gateway.namespace.find(address)
    only_sends = right is Right.SEND and address.node is Node.ENTITY
    if entity.is_temporary and not only_sends and entity.entity_id not in host.holding:
        raise Unauthorized(error_texts.temporary_of_another(entity.name))
    return Destination(address, entity)


def bind(host: Host, link: Link, destination: Destination | None) -> Bound:
    """Accept the attach, or ask the partition for the session that it wants. Raises BrokerError and ProtocolError."""
    if destination is None:
        return _bind_without_address(host, link)
    address, entity = destination
    if entity is None or address.node is Node.MANAGEMENT:
        return _bind_node(host, link, address, entity)
    _check_kind(link, address, entity)
    return _bind_receiver(host, link, address, entity) if link.is_sender else _bind_sender(host, link, address, entity)


def _bind_without_address(host: Host, link: Link) -> Bound:
    """The coordinator, which needs no right; a node that is to be made (3.5.3); or the end of a subscription."""
    if link.is_coordinator:
        link.accept(MAX_REQUEST_BYTES, COORDINATOR_CREDIT)
        return Coordinator(host, link)
    if link.is_dynamic:
        return _make_temporary(host, link)
    if link.is_sender and not link.has_source and not link.is_refused:
        ended = subscriptions_to_end(host, link)
        link.node_address, _, _ = ended[0].name.rpartition("/Subscriptions/")
        link.accept()
        return SubscriptionEnd(host, link, ended)
    raise InvalidArgument("The link names no entity: the source or target needs an address.")


def _make_temporary(host: Host, link: Link) -> LinkInMaking:
    """A queue or a topic that exists as long as the link. Raises Unauthorized, NotAllowed, QuotaExceeded."""
    if not host.rights.allows("", Right.MANAGE, time.time()):
        raise Unauthorized(error_texts.TEMPORARY_TO_MAKE)
    kind = "topic" if TEMPORARY_TOPIC in link.capabilities() else "queue"
    if kind == "topic" and link.is_sender:
        raise NotAllowed("A temporary topic is made by a link that sends to it: a topic has no messages to receive.")
    host.holding.begin(link)
    name = f"temporary-{kind}.{uuid.uuid4().hex}"

    def bind(entity: Entity) -> Bound:
        link.node_address = name
        address = parse_address(name)
        return (_bind_receiver if link.is_sender else _bind_sender)(host, link, address, entity)

    return LinkInMaking(host, link, kind, {"name": name, "enable_partitioning": False}, name, bind)


def _check_kind(link: Link, address: Address, entity: Entity) -> None:
    """Some clients say what kind of entity the link is for. A dead-letter queue is of the kind of its entity; clients
    have no word for the one of a topic. Raises NotAllowed.
    """
    number = link.remote_properties().get(ENTITY_TYPE)
    if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number < len(_KINDS):
        return  # nothing that is known
    asked = _KINDS[number]
    if asked != entity.kind and (entity.kind != "topic" or address.part is Part.MAIN):
        raise NotAllowed(error_texts.other_kind_of_entity(entity.name, entity.kind, asked))


def _bind_node(host: Host, link: Link, address: Address, entity: Entity | None) -> RequestLink | ResponseLink:
    if link.is_sender:
        link.accept()
        return ResponseLink(host, link, address, entity)
    most_bytes = host.gateway.settings.amqp.max_message_size_bytes
    if address.node is Node.CBS:
        link.accept(min(most_bytes, MAX_TOKEN_MESSAGE_BYTES), REQUEST_CREDIT)
        return CbsRequests(host, link, address)
    if entity is None:
        link.accept(most_bytes, REQUEST_CREDIT)
        return NamespaceRequests(host, link, address)
    link.accept(max(most_bytes, entity.max_message_bytes(most_bytes)) + ENVELOPE_BYTES, REQUEST_CREDIT)
    return ManagementRequests(host, link, entity, address)


def _bind_sender(host: Host, link: Link, address: Address, entity: Entity) -> ClientSender:
    destination, properties = None, None
    through_to = link.remote_properties().get(TRANSFER_DESTINATION_ADDRESS)
    if through_to is None:
        entity.require_send()
    else:
        entity.require_transfer()
        destination, properties = _transfer_destination(host, through_to), {TRANSFER_DESTINATION_ADDRESS: through_to}
    if address.part is not Part.MAIN:
        raise NotAllowed("Messages cannot be sent to a dead-letter queue; only dead-lettering puts messages there.")
    amqp = host.gateway.settings.amqp
    limit = (destination or entity).max_message_bytes(amqp.max_message_size_bytes)
    asked = link.remote_max_message_bytes
    link.accept(min(asked, limit) if asked else limit, amqp.sender_credit, properties=properties)
    kind = PartitionedSender if entity.is_partitioned else ClientSender
    return kind(host, link, entity, address, destination)


def _transfer_destination(host: Host, name: object) -> Entity:
    """The entity to which a client wants to send through another (amqp.md 10.4).

    Whether it is disabled is checked when messages arrive there. Raises BrokerError and ProtocolError.
    """
    if not isinstance(name, str):
        raise InvalidArgument(f"{TRANSFER_DESTINATION_ADDRESS} is not the address of an entity.")
    address = parse_address(name)
    if address.node is not Node.ENTITY or address.part is not Part.MAIN:
        raise NotAllowed(f"'{name}' is neither a queue nor a topic: messages cannot be sent to it.")
    host.rights.require(address.resource, Right.SEND, time.time())
    entity = host.gateway.namespace.find(address)
    if entity.kind == "subscription":
        raise NotAllowed(error_texts.sender_on_subscription(entity.name))
    return entity


def _bind_on_topic(host: Host, link: Link, address: Address, topic: Entity) -> Bound:
    """A receiver on a topic itself: it means one of the subscriptions, or to look at scheduled messages."""
    found = subscription_of(host, link, topic)
    if found is None:
        if link.browses:
            raise NotAllowed(error_texts.receiver_on_topic(topic.name))
        link.accept(filters=read_filters(link.source_filter()).in_place)
        return TopicReceiver(host, link, topic, address)
    if not isinstance(found, Missing):
        return _bind_subscriber(host, link, found)
    if found.is_temporary:
        host.holding.begin(link)
    fields = {"topic": found.topic, "name": found.name, **found.properties}
    return LinkInMaking(host, link, "subscription", fields, found.path, partial(_bind_subscriber, host, link))


def _bind_subscriber(host: Host, link: Link, subscription: Entity) -> Bound:
    return _bind_receiver(host, link, parse_address(subscription.name), subscription, is_subscriber=True)


def _bind_receiver(host: Host, link: Link, address: Address, entity: Entity, *, is_subscriber: bool = False) -> Bound:
    """`is_subscriber`: the link names the topic of this subscription."""
    entity.require_receive(address.part)
    filters, properties = link.source_filter(), link.remote_properties()
    if session_filter.is_non_exclusive(filters) and host.gateway.settings.sku is Sku.STANDARD:
        raise NotAllowed(error_texts.invalid_filter_type(link.name))
    session = session_filter.read(filters, properties)
    has_sessions = entity.requires_session and address.part is Part.MAIN
    if session is not None and not has_sessions:
        raise NotAllowed(error_texts.SESSION_RECEIVER_NOT_SUPPORTED)
    if entity.kind == "topic" and address.part is Part.MAIN:
        return _bind_on_topic(host, link, address, entity)
    others = read_filters(filters, ignores_no_local=is_subscriber)  # Service Bus ignores it there, too
    # A durable subscriber asks for copies of the topic's messages (Qpid JMS), and not to browse the subscription.
    browses = link.browses and not (is_subscriber and link.outlives_connection)
    if browses or properties.get(PEEK_MODE) is True:
        return _bind_browser(host, link, address, entity, session, others)
    if session is not None:
        if session.session_id is not None:
            partition = entity.partition_of_session(session.session_id)
            return SessionReceiver(host, link, entity, address, partition, session, others)
        if entity.is_partitioned:
            return NextSessionReceiver(host, link, entity, address, session, others)
        return SessionReceiver(host, link, entity, address, entity.partition, session, others)
    if has_sessions:
        raise NotAllowed(error_texts.SESSION_RECEIVER_REQUIRED)
    link.accept(filters=others.in_place)
    if entity.is_partitioned:
        return PartitionedReceiver(host, link, entity, address, others.selector)
    return ClientReceiver(host, link, entity, address, entity.partitions, others.selector)


def _bind_browser(
    host: Host,
    link: Link,
    address: Address,
    entity: Entity,
    session: SessionRequest | None,
    others: SourceFilters,
) -> Browser:
    """A browser of one session, or of all messages; it takes no session, so it does not wait for the next one either.

    So the filter for any session is not in place, and not in the answer.
    """
    session_id = None if session is None else session.session_id
    filters = others.in_place
    if session is not None and session_id is not None:
        filters |= session_filter.accepted_filters(session, session_id)
    link.accept(filters=filters, copies=True)
    return Browser(host, link, entity, address, session_id, others.selector)
