"""The scenarios of `administration_scenarios.py` with azure-servicebus."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from azure.core.exceptions import (
    ClientAuthenticationError,
    HttpResponseError,
    ResourceExistsError,
    ResourceNotFoundError,
)
from azure.servicebus import (
    ServiceBusClient,
    ServiceBusMessage,
    ServiceBusReceiver,
    ServiceBusSubQueue,
    TransportType,
)
from azure.servicebus.aio import ServiceBusClient as AsyncServiceBusClient
from azure.servicebus.exceptions import ServiceBusAuthorizationError
from azure.servicebus.management import (
    AccessRights,
    AuthorizationRule,
    CorrelationRuleFilter,
    ServiceBusAdministrationClient,
    SqlRuleAction,
    SqlRuleFilter,
    TrueRuleFilter,
)
from scene import CONFIG, Scene, body, equal, one, raises, scenario, true

METADATA = "a < b & ü"
SOON = timedelta(minutes=5)


@contextmanager
def administration(connection_string: str = CONFIG["secure"]) -> Iterator[ServiceBusAdministrationClient]:
    with ServiceBusAdministrationClient.from_connection_string(
        connection_string, connection_verify=CONFIG["authority"], retry_total=0
    ) as client:
        yield client


def settings(found: object, expected: dict[str, object]) -> None:
    if getattr(found, "enable_partitioning", False):  # it shows the size of 16 fragments, as the cloud does
        expected = {**expected, "max_size_in_megabytes": 16 * int(str(expected["max_size_in_megabytes"]))}
    equal({name: getattr(found, name) for name in expected}, expected, "settings")


def times(runtime: object) -> None:
    now = datetime.now(UTC)
    created, updated, accessed = (getattr(runtime, f"{name}_at_utc") for name in ("created", "updated", "accessed"))
    true(now - SOON <= created.replace(tzinfo=UTC) <= now + SOON, f"created at {created}")
    true(created <= updated, f"updated at {updated}, created at {created}")
    true(created <= accessed, f"accessed at {accessed}, created at {created}")


def dead_letter_one(receiver: ServiceBusReceiver) -> None:
    with receiver:
        receiver.dead_letter_message(one(receiver))


@scenario("admin-queue")
def admin_queue(scene: Scene) -> None:
    given: dict[str, object] = {
        "lock_duration": timedelta(seconds=30),
        "max_delivery_count": 5,
        "default_message_time_to_live": timedelta(hours=2),
        "dead_lettering_on_message_expiration": True,
        "max_size_in_megabytes": 2048,
        "auto_delete_on_idle": timedelta(hours=1),
        "user_metadata": METADATA,
    }
    with administration() as admin:
        created = admin.create_queue(scene.queue, **given)
        equal(created.name, scene.queue, "name")
        settings(created, given)
        equal(admin.get_queue_runtime_properties(scene.queue).accessed_at_utc.year, 1, "never accessed")
        found = admin.get_queue(scene.queue)
        settings(found, given)
        true(scene.queue in [queue.name for queue in admin.list_queues()], "it is listed")

        found.max_delivery_count, found.lock_duration = 7, timedelta(seconds=45)
        admin.update_queue(found)
        changed = {"max_delivery_count": 7, "lock_duration": timedelta(seconds=45)}
        settings(admin.get_queue(scene.queue), {**given, **changed})

        scene.send("a", "b", "c")
        with scene.client.get_queue_sender(scene.queue) as sender:
            sender.schedule_messages(ServiceBusMessage("later"), datetime.now(UTC) + timedelta(hours=1))
        dead_letter_one(scene.receiver())
        runtime = admin.get_queue_runtime_properties(scene.queue)
        counts = (runtime.active_message_count, runtime.scheduled_message_count, runtime.dead_letter_message_count)
        equal(counts, (2, 1, 1), "active, scheduled and dead-lettered messages")
        equal(runtime.total_message_count, 4, "messages")
        true(runtime.size_in_bytes > 0, "size")
        times(runtime)

        admin.delete_queue(scene.queue)
        raises(ResourceNotFoundError, lambda: admin.get_queue(scene.queue), "getting a deleted queue")


@scenario("admin-topic")
def admin_topic(scene: Scene) -> None:
    given: dict[str, object] = {
        "default_message_time_to_live": timedelta(days=1, minutes=1),
        "requires_duplicate_detection": True,
        "duplicate_detection_history_time_window": timedelta(minutes=3),
        "max_size_in_megabytes": 3072,
        "user_metadata": METADATA,
    }
    with administration() as admin:
        settings(admin.create_topic(scene.queue, **given), given)
        found = admin.get_topic(scene.queue)
        settings(found, given)
        true(scene.queue in [topic.name for topic in admin.list_topics()], "it is listed")

        found.user_metadata, found.default_message_time_to_live = "changed", timedelta(hours=3)
        admin.update_topic(found)
        changed = {"user_metadata": "changed", "default_message_time_to_live": timedelta(hours=3)}
        settings(admin.get_topic(scene.queue), {**given, **changed})

        for name in ("a", "b"):
            admin.create_subscription(scene.queue, name)
        with scene.client.get_topic_sender(scene.queue) as sender:
            sender.schedule_messages(ServiceBusMessage("later"), datetime.now(UTC) + timedelta(hours=1))
        runtime = admin.get_topic_runtime_properties(scene.queue)
        equal((runtime.subscription_count, runtime.scheduled_message_count), (2, 1), "subscriptions and scheduled")
        times(runtime)

        admin.delete_topic(scene.queue)
        raises(ResourceNotFoundError, lambda: admin.get_topic(scene.queue), "getting a deleted topic")


@scenario("admin-subscription")
def admin_subscription(scene: Scene) -> None:
    given: dict[str, object] = {
        "lock_duration": timedelta(seconds=30),
        "max_delivery_count": 4,
        "default_message_time_to_live": timedelta(hours=2),
        "dead_lettering_on_message_expiration": True,
        "dead_lettering_on_filter_evaluation_exceptions": False,
        "user_metadata": METADATA,
    }
    with administration() as admin:
        admin.create_topic(scene.queue)
        settings(admin.create_subscription(scene.queue, "mine", **given), given)
        found = admin.get_subscription(scene.queue, "mine")
        settings(found, given)
        equal([each.name for each in admin.list_subscriptions(scene.queue)], ["mine"], "subscriptions")

        found.max_delivery_count = 9
        admin.update_subscription(scene.queue, found)
        settings(admin.get_subscription(scene.queue, "mine"), {**given, "max_delivery_count": 9})

        with scene.client.get_topic_sender(scene.queue) as sender:
            sender.send_messages([ServiceBusMessage(text) for text in "abc"])
        receiver = scene.client.get_subscription_receiver(scene.queue, "mine")
        dead_letter_one(receiver)
        runtime = admin.get_subscription_runtime_properties(scene.queue, "mine")
        counts = (runtime.active_message_count, runtime.dead_letter_message_count, runtime.total_message_count)
        equal(counts, (2, 1, 3), "active, dead-lettered and all messages")
        times(runtime)

        admin.delete_subscription(scene.queue, "mine")
        raises(ResourceNotFoundError, lambda: admin.get_subscription(scene.queue, "mine"), "getting a deleted one")
        admin.delete_topic(scene.queue)


@scenario("admin-rule")
def admin_rule(scene: Scene) -> None:
    topic = scene.queue

    def published(text: str, amount: int = 0, subject: str = "", **properties: object) -> ServiceBusMessage:
        return ServiceBusMessage(text, subject=subject, application_properties={"amount": amount, **properties})

    def arrived() -> dict[bytes, object]:
        with scene.client.get_subscription_receiver(topic, "mine") as receiver:
            found = {}
            while some := receiver.receive_messages(10, max_wait_time=1):
                for message in some:
                    found[body(message)] = message.application_properties.get(b"checked")
                    receiver.complete_message(message)
            return found

    with administration() as admin:
        admin.create_topic(topic)
        admin.create_subscription(topic, "mine")
        true(isinstance(admin.get_rule(topic, "mine", "$Default").filter, TrueRuleFilter), "the default rule takes all")
        admin.delete_rule(topic, "mine", "$Default")
        sql = SqlRuleFilter("amount > @limit", parameters={"@limit": 10})
        admin.create_rule(topic, "mine", "sql", filter=sql, action=SqlRuleAction("SET checked = 'yes'"))
        chosen = CorrelationRuleFilter(label="invoice", properties={"colour": "red", "number": 3})
        admin.create_rule(topic, "mine", "correlation", filter=chosen)

        found = admin.get_rule(topic, "mine", "sql")
        equal((found.filter.sql_expression, found.filter.parameters), ("amount > @limit", {"@limit": 10}), "filter")
        equal(found.action.sql_expression, "SET checked = 'yes'", "action")
        other = admin.get_rule(topic, "mine", "correlation").filter
        equal((other.label, other.properties), ("invoice", {"colour": "red", "number": 3}), "correlation filter")
        equal(sorted(rule.name for rule in admin.list_rules(topic, "mine")), ["correlation", "sql"], "rules")

        with scene.client.get_topic_sender(topic) as sender:
            sender.send_messages(published("large", amount=20))
            sender.send_messages(published("red", subject="invoice", colour="red", number=3))
            sender.send_messages(published("green", subject="invoice", colour="green", number=3))
            equal(arrived(), {b"large": b"yes", b"red": None}, "what arrives")

            found.filter = SqlRuleFilter("amount > 100")
            admin.update_rule(topic, "mine", found)
            equal(admin.get_rule(topic, "mine", "sql").filter.sql_expression, "amount > 100", "changed filter")
            admin.delete_rule(topic, "mine", "correlation")
            missing = raises(
                ResourceNotFoundError, lambda: admin.get_rule(topic, "mine", "correlation"), "getting a deleted rule"
            )
            true(missing, "an error")
            sender.send_messages(published("large", amount=20))
            sender.send_messages(published("larger", amount=200))
            sender.send_messages(published("red", subject="invoice", colour="red", number=3))
            equal(arrived(), {b"larger": b"yes"}, "what arrives after the change")
        admin.delete_topic(topic)


@scenario("admin-authorization")
def admin_authorization(scene: Scene) -> None:
    key = "a key of the queue's own"
    rule = AuthorizationRule(
        type="SharedAccessAuthorizationRule",
        claim_type="SharedAccessKey",
        key_name="app",
        primary_key=key,
        rights=[AccessRights.SEND],
    )
    with administration() as admin:
        admin.create_queue(scene.queue, authorization_rules=[rule])
        [found] = admin.get_queue(scene.queue).authorization_rules
        equal((found.key_name, found.primary_key, found.rights), ("app", key, [AccessRights.SEND]), "rule")
        general = CONFIG["connection_string"].replace(CONFIG["key_name"], "app").replace(CONFIG["key"], key)
        limited = Scene("admin-authorization", general)
        with limited.client:
            limited.send("x")
            raises(ServiceBusAuthorizationError, lambda: one(limited.receiver()), "receiving with a right to send")
        with scene.receiver() as receiver:
            receiver.complete_message(one(receiver))
        admin.delete_queue(scene.queue)


@scenario("admin-forwarding")
def admin_forwarding(scene: Scene) -> None:
    target = f"{scene.queue}-target"
    with administration() as admin:
        admin.create_queue(target)
        admin.create_queue(scene.queue, forward_to=target, forward_dead_lettered_messages_to=target)
        found = admin.get_queue(scene.queue)
        for destination in (found.forward_to, found.forward_dead_lettered_messages_to):
            true(destination.endswith(f"/{target}"), f"destination {destination}")
        scene.send("x")
        with scene.client.get_queue_receiver(target) as receiver:
            message = one(receiver)
            equal(body(message), b"x", "what arrives")
            receiver.complete_message(message)
        admin.delete_queue(scene.queue)
        admin.delete_queue(target)


@scenario("admin-names")
def admin_names(scene: Scene) -> None:
    mixed, lower = f"{scene.queue}-Mixed.Case", f"{scene.queue}-mixed.case"
    with administration() as admin:
        # The SDK gives names back as they were asked for, and those of the service in lists.
        admin.create_queue(mixed)
        true(lower in [queue.name for queue in admin.list_queues()], "the queue is listed in lower case")
        true(mixed not in [queue.name for queue in admin.list_queues()], "and in no other")
        admin.get_queue(mixed.upper())
        raises(ResourceExistsError, lambda: admin.create_queue(lower), "creating it again")
        with scene.client.get_queue_sender(mixed) as sender:
            sender.send_messages(ServiceBusMessage("x"))
        dead_letter_one(scene.client.get_queue_receiver(mixed.upper()))
        with scene.client.get_queue_receiver(mixed, sub_queue=ServiceBusSubQueue.DEAD_LETTER) as receiver:
            equal(one(receiver).dead_letter_source, lower, "source of the dead letter")
        admin.delete_queue(mixed.upper())
        admin.create_topic(mixed)
        true(lower in [topic.name for topic in admin.list_topics()], "the topic is listed in lower case")
        admin.create_subscription(mixed.upper(), "Mine")
        equal([each.name for each in admin.list_subscriptions(lower)], ["Mine"], "subscriptions")
        admin.delete_topic(mixed)


@scenario("admin-pages")
def admin_pages(scene: Scene) -> None:
    names = [f"s{number:03}" for number in range(120)]
    with administration() as admin:
        admin.create_topic(scene.queue)
        for name in names:
            admin.create_subscription(scene.queue, name)
        equal(sorted(each.name for each in admin.list_subscriptions(scene.queue)), names, "subscriptions")
        equal(admin.get_topic_runtime_properties(scene.queue).subscription_count, 120, "their number")
        admin.delete_topic(scene.queue)


@scenario("admin-namespace")
def admin_namespace(scene: Scene) -> None:
    with administration() as admin:
        found = admin.get_namespace_properties()
        equal(found.name, "peeklock", "name")
        true(found.messaging_sku in ("Basic", "Standard", "Premium"), f"tier {found.messaging_sku}")
        true(found.created_at_utc <= found.modified_at_utc, "times")


@scenario("admin-errors")
def admin_errors(scene: Scene) -> None:
    with administration() as admin:
        admin.create_queue(scene.queue)
        raises(ResourceExistsError, lambda: admin.create_queue(scene.queue), "creating it again")
        raises(ResourceExistsError, lambda: admin.create_topic(scene.queue), "creating a topic of its name")
        raises(ResourceNotFoundError, lambda: admin.get_queue("nothing"), "getting nothing")
        raises(ResourceNotFoundError, lambda: admin.delete_queue("nothing"), "deleting nothing")
        raises(
            HttpResponseError,
            lambda: admin.create_queue(f"{scene.queue}-odd", lock_duration=timedelta(hours=1)),
            "a lock of an hour",
        )
        changed = admin.get_queue(scene.queue)
        changed.requires_session = True
        raises(HttpResponseError, lambda: admin.update_queue(changed), "changing what cannot change")
        with administration(CONFIG["secure_listen_only"]) as limited:
            raises(ClientAuthenticationError, lambda: limited.get_queue(scene.queue), "a key without Manage")
            raises(ClientAuthenticationError, lambda: limited.delete_queue(scene.queue), "a key without Manage")
        admin.delete_queue(scene.queue)


@scenario("websockets")
def websockets(scene: Scene) -> None:
    large = b"x" * 300 * 1024
    texts = [str(number).encode() for number in range(20)]
    options = {"transport_type": TransportType.AmqpOverWebsocket, "connection_verify": CONFIG["authority"]}
    with administration() as admin:
        admin.create_queue(scene.queue)
        with ServiceBusClient.from_connection_string(CONFIG["secure"], retry_total=0, **options) as client:
            with client.get_queue_sender(scene.queue) as sender:
                sender.send_messages(ServiceBusMessage(large))
                sender.send_messages([ServiceBusMessage(text) for text in texts])
            with client.get_queue_receiver(scene.queue) as receiver:
                found = []
                while len(found) < 21 and (some := receiver.receive_messages(21, max_wait_time=60)):
                    for message in some:
                        receiver.complete_message(message)
                    found += [body(message) for message in some]
        equal(sorted(found), sorted([large, *texts]), "what arrives")
        asyncio.run(_by_tasks(scene.queue, options))
        scene.nothing_is_left()
        admin.delete_queue(scene.queue)


async def _by_tasks(queue: str, options: dict[str, object]) -> None:
    async with AsyncServiceBusClient.from_connection_string(CONFIG["secure"], retry_total=0, **options) as client:
        async with client.get_queue_sender(queue) as sender:
            await sender.send_messages(ServiceBusMessage("by a task"))
        async with client.get_queue_receiver(queue) as receiver:
            [message] = await receiver.receive_messages(1, max_wait_time=60)
            equal(body(message), b"by a task", "what arrives")
            await receiver.complete_message(message)
