package peeklock;

import static peeklock.Azure.allOf;
import static peeklock.Azure.bodies;
import static peeklock.Azure.body;
import static peeklock.Azure.causedBy;
import static peeklock.Azure.one;
import static peeklock.Azure.sorted;
import static peeklock.Harness.CONFIG;
import static peeklock.Harness.counting;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.truth;

import com.azure.core.amqp.AmqpRetryOptions;
import com.azure.core.amqp.AmqpTransportType;
import com.azure.core.amqp.exception.AmqpErrorCondition;
import com.azure.core.exception.ClientAuthenticationException;
import com.azure.core.exception.HttpResponseException;
import com.azure.core.exception.ResourceExistsException;
import com.azure.core.exception.ResourceNotFoundException;
import com.azure.core.http.policy.FixedDelayOptions;
import com.azure.core.http.policy.RetryOptions;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClient;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClientBuilder;
import com.azure.messaging.servicebus.administration.models.AccessRights;
import com.azure.messaging.servicebus.administration.models.AuthorizationRule;
import com.azure.messaging.servicebus.administration.models.CorrelationRuleFilter;
import com.azure.messaging.servicebus.administration.models.CreateQueueOptions;
import com.azure.messaging.servicebus.administration.models.CreateRuleOptions;
import com.azure.messaging.servicebus.administration.models.CreateSubscriptionOptions;
import com.azure.messaging.servicebus.administration.models.CreateTopicOptions;
import com.azure.messaging.servicebus.administration.models.NamespaceProperties;
import com.azure.messaging.servicebus.administration.models.QueueProperties;
import com.azure.messaging.servicebus.administration.models.QueueRuntimeProperties;
import com.azure.messaging.servicebus.administration.models.RuleProperties;
import com.azure.messaging.servicebus.administration.models.SharedAccessAuthorizationRule;
import com.azure.messaging.servicebus.administration.models.SqlRuleAction;
import com.azure.messaging.servicebus.administration.models.SqlRuleFilter;
import com.azure.messaging.servicebus.administration.models.SubscriptionProperties;
import com.azure.messaging.servicebus.administration.models.SubscriptionRuntimeProperties;
import com.azure.messaging.servicebus.administration.models.TopicProperties;
import com.azure.messaging.servicebus.administration.models.TopicRuntimeProperties;
import com.azure.messaging.servicebus.administration.models.TrueRuleFilter;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.function.Predicate;
import java.util.stream.IntStream;
import peeklock.Azure.Scene;

/** The scenarios of administration_scenarios.py with azure-messaging-servicebus. */
final class AzureAdministration {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final String METADATA = "a < b & ü";
    private static final Predicate<Throwable> MISSING = ResourceNotFoundException.class::isInstance;
    private static final Predicate<Throwable> EXISTS = ResourceExistsException.class::isInstance;
    private static final Predicate<Throwable> UNAUTHORIZED = ClientAuthenticationException.class::isInstance;
    private static final Predicate<Throwable> BAD_REQUEST =
        error -> error instanceof HttpResponseException failure && failure.getResponse().getStatusCode() == 400;

    private AzureAdministration() {}

    private static ServiceBusAdministrationClient administration(String connectionString) {
        return new ServiceBusAdministrationClientBuilder()
            .connectionString(CONFIG.get(connectionString).asText())
            .retryOptions(new RetryOptions(new FixedDelayOptions(0, Duration.ZERO)))
            .buildClient();
    }

    private static ServiceBusAdministrationClient administration() {
        return administration("secure");
    }

    private static void recently(OffsetDateTime created, OffsetDateTime updated, OffsetDateTime accessed) {
        Duration age = Duration.between(created, OffsetDateTime.now()).abs();
        truth(age.compareTo(Duration.ofMinutes(5)) < 0, "created at " + created);
        truth(!updated.isBefore(created), "updated at " + updated + ", created at " + created);
        truth(!accessed.isBefore(created), "accessed at " + accessed + ", created at " + created);
    }

    private static void deadLetterOne(ServiceBusReceiverClient receiver) {
        try (receiver) {
            receiver.deadLetter(one(receiver));
        }
    }

    private static void scheduleOne(ServiceBusSenderClient sender) {
        try (sender) {
            sender.scheduleMessage(new ServiceBusMessage("later"), OffsetDateTime.now().plusHours(1));
        }
    }

    private static ServiceBusSenderClient publisher(Scene scene) {
        return scene.builder.sender().topicName(scene.queue).buildClient();
    }

    private static ServiceBusReceiverClient subscription(Scene scene) {
        return scene.builder.receiver().topicName(scene.queue).subscriptionName("mine")
            .maxAutoLockRenewDuration(Duration.ZERO).buildClient();
    }

    private static List<Object> settings(QueueProperties queue) {
        return List.of(queue.getLockDuration(), queue.getMaxDeliveryCount(), queue.getDefaultMessageTimeToLive(),
            queue.isDeadLetteringOnMessageExpiration(), queue.getMaxSizeInMegabytes(), queue.getAutoDeleteOnIdle(),
            queue.getUserMetadata());
    }

    private static List<Object> settings(TopicProperties topic) {
        return List.of(topic.getDefaultMessageTimeToLive(), topic.isDuplicateDetectionRequired(),
            topic.getDuplicateDetectionHistoryTimeWindow(), topic.getMaxSizeInMegabytes(), topic.getUserMetadata());
    }

    private static List<Object> settings(SubscriptionProperties subscription) {
        return List.of(subscription.getLockDuration(), subscription.getMaxDeliveryCount(),
            subscription.getDefaultMessageTimeToLive(), subscription.isDeadLetteringOnMessageExpiration(),
            subscription.isDeadLetteringOnFilterEvaluationExceptions(), subscription.getUserMetadata());
    }

    private static ServiceBusMessage published(String text, int amount, Map<String, Object> more) {
        ServiceBusMessage message = new ServiceBusMessage(text);
        message.getApplicationProperties().put("amount", amount);
        message.getApplicationProperties().putAll(more);
        return message;
    }

    private static ServiceBusMessage invoice(String colour) {
        return published(colour, 0, Map.of("colour", colour, "number", "three")).setSubject("invoice");
    }

    private static Map<String, Object> arrived(Scene scene) {
        Map<String, Object> found = new HashMap<>();
        try (ServiceBusReceiverClient receiver = subscription(scene)) {
            while (true) {
                List<ServiceBusReceivedMessage> some =
                    receiver.receiveMessages(10, Duration.ofSeconds(1)).stream().toList();
                if (some.isEmpty()) {
                    return found;
                }
                for (ServiceBusReceivedMessage message : some) {
                    found.put(body(message), message.getApplicationProperties().getOrDefault("checked", "no"));
                    receiver.complete(message);
                }
            }
        }
    }

    private static List<String> subscriptions(ServiceBusAdministrationClient admin, String topic) {
        return sorted(admin.listSubscriptions(topic).stream().map(SubscriptionProperties::getSubscriptionName).toList());
    }

    static {
        SCENARIOS.put("admin-queue", () -> {
            Scene scene = new Scene("admin-queue");
            ServiceBusAdministrationClient admin = administration();
            List<Object> given = List.of(
                Duration.ofSeconds(30), 5, Duration.ofHours(2), true, 2048L, Duration.ofHours(1), METADATA);
            QueueProperties created = admin.createQueue(scene.queue, new CreateQueueOptions()
                .setLockDuration(Duration.ofSeconds(30)).setMaxDeliveryCount(5)
                .setDefaultMessageTimeToLive(Duration.ofHours(2)).setDeadLetteringOnMessageExpiration(true)
                .setMaxSizeInMegabytes(2048).setAutoDeleteOnIdle(Duration.ofHours(1)).setUserMetadata(METADATA));
            equal(created.getName(), scene.queue, "name");
            equal(settings(created), given, "settings");
            equal(admin.getQueueRuntimeProperties(scene.queue).getAccessedAt().getYear(), 1, "never accessed");
            QueueProperties found = admin.getQueue(scene.queue);
            equal(settings(found), given, "settings");
            truth(admin.listQueues().stream().anyMatch(each -> each.getName().equals(scene.queue)), "it is listed");

            admin.updateQueue(found.setMaxDeliveryCount(7).setLockDuration(Duration.ofSeconds(45)));
            List<Object> changed = new ArrayList<>(given);
            changed.set(0, Duration.ofSeconds(45));
            changed.set(1, 7);
            equal(settings(admin.getQueue(scene.queue)), changed, "changed settings");

            scene.send("a", "b", "c");
            scheduleOne(scene.sender());
            deadLetterOne(scene.receiver());
            QueueRuntimeProperties runtime = admin.getQueueRuntimeProperties(scene.queue);
            equal(List.of(runtime.getActiveMessageCount(), runtime.getScheduledMessageCount(),
                runtime.getDeadLetterMessageCount()), List.of(2, 1, 1), "active, scheduled and dead-lettered messages");
            equal(runtime.getTotalMessageCount(), 4L, "messages");
            truth(runtime.getSizeInBytes() > 0, "size");
            recently(runtime.getCreatedAt(), runtime.getUpdatedAt(), runtime.getAccessedAt());

            truth(admin.getQueueExists(scene.queue), "it exists");
            admin.deleteQueue(scene.queue);
            truth(!admin.getQueueExists(scene.queue), "it exists no more");
            fails(() -> admin.getQueue(scene.queue), MISSING, "getting a deleted queue");
        });

        SCENARIOS.put("admin-topic", () -> {
            Scene scene = new Scene("admin-topic");
            ServiceBusAdministrationClient admin = administration();
            Duration timeToLive = Duration.ofDays(1).plusMinutes(1);
            List<Object> given = List.of(timeToLive, true, Duration.ofMinutes(3), 3072L, METADATA);
            equal(settings(admin.createTopic(scene.queue, new CreateTopicOptions()
                .setDefaultMessageTimeToLive(timeToLive).setDuplicateDetectionRequired(true)
                .setDuplicateDetectionHistoryTimeWindow(Duration.ofMinutes(3)).setMaxSizeInMegabytes(3072)
                .setUserMetadata(METADATA))), given, "settings");
            TopicProperties found = admin.getTopic(scene.queue);
            equal(settings(found), given, "settings");
            truth(admin.listTopics().stream().anyMatch(each -> each.getName().equals(scene.queue)), "it is listed");

            admin.updateTopic(found.setUserMetadata("changed").setDefaultMessageTimeToLive(Duration.ofHours(3)));
            List<Object> changed = List.of(Duration.ofHours(3), true, Duration.ofMinutes(3), 3072L, "changed");
            equal(settings(admin.getTopic(scene.queue)), changed, "changed settings");

            admin.createSubscription(scene.queue, "a");
            admin.createSubscription(scene.queue, "b");
            scheduleOne(publisher(scene));
            TopicRuntimeProperties runtime = admin.getTopicRuntimeProperties(scene.queue);
            equal(List.of(runtime.getSubscriptionCount(), runtime.getScheduledMessageCount()), List.of(2, 1),
                "subscriptions and scheduled messages");
            recently(runtime.getCreatedAt(), runtime.getUpdatedAt(), runtime.getAccessedAt());

            admin.deleteTopic(scene.queue);
            truth(!admin.getTopicExists(scene.queue), "it exists no more");
            fails(() -> admin.getTopic(scene.queue), MISSING, "getting a deleted topic");
        });

        SCENARIOS.put("admin-subscription", () -> {
            Scene scene = new Scene("admin-subscription");
            ServiceBusAdministrationClient admin = administration();
            List<Object> given = List.of(Duration.ofSeconds(30), 4, Duration.ofHours(2), true, false, METADATA);
            admin.createTopic(scene.queue);
            equal(settings(admin.createSubscription(scene.queue, "mine", new CreateSubscriptionOptions()
                .setLockDuration(Duration.ofSeconds(30)).setMaxDeliveryCount(4)
                .setDefaultMessageTimeToLive(Duration.ofHours(2)).setDeadLetteringOnMessageExpiration(true)
                .setEnableDeadLetteringOnFilterEvaluationExceptions(false).setUserMetadata(METADATA))), given, "settings");
            SubscriptionProperties found = admin.getSubscription(scene.queue, "mine");
            equal(settings(found), given, "settings");
            equal(subscriptions(admin, scene.queue), List.of("mine"), "subscriptions");

            admin.updateSubscription(found.setMaxDeliveryCount(9));
            List<Object> changed = new ArrayList<>(given);
            changed.set(1, 9);
            changed.set(2, admin.getSubscription(scene.queue, "mine").getDefaultMessageTimeToLive()); // left out
            equal(settings(admin.getSubscription(scene.queue, "mine")), changed, "changed settings");

            try (ServiceBusSenderClient sender = publisher(scene)) {
                sender.sendMessages(counting(0, 3).stream().map(ServiceBusMessage::new).toList());
            }
            deadLetterOne(subscription(scene));
            SubscriptionRuntimeProperties runtime = admin.getSubscriptionRuntimeProperties(scene.queue, "mine");
            equal(List.of(runtime.getActiveMessageCount(), runtime.getDeadLetterMessageCount()), List.of(2, 1),
                "active and dead-lettered messages");
            equal(runtime.getTotalMessageCount(), 3L, "messages");
            recently(runtime.getCreatedAt(), runtime.getUpdatedAt(), runtime.getAccessedAt());

            admin.deleteSubscription(scene.queue, "mine");
            truth(!admin.getSubscriptionExists(scene.queue, "mine"), "it exists no more");
            fails(() -> admin.getSubscription(scene.queue, "mine"), MISSING, "getting a deleted subscription");
            admin.deleteTopic(scene.queue);
        });

        SCENARIOS.put("admin-rule", () -> {
            Scene scene = new Scene("admin-rule");
            String topic = scene.queue;
            ServiceBusAdministrationClient admin = administration();
            admin.createTopic(topic);
            admin.createSubscription(topic, "mine");
            truth(admin.getRule(topic, "mine", "$Default").getFilter() instanceof TrueRuleFilter, "the default takes all");
            admin.deleteRule(topic, "mine", "$Default");
            SqlRuleFilter sql = new SqlRuleFilter("amount > 10 AND grade = @grade");
            sql.getParameters().put("@grade", "high");
            SqlRuleAction action = new SqlRuleAction("SET checked = 'yes'");
            admin.createRule(topic, "sql", "mine", new CreateRuleOptions(sql).setAction(action));
            CorrelationRuleFilter chosen = new CorrelationRuleFilter().setLabel("invoice");
            chosen.getProperties().putAll(Map.of("colour", "red", "number", "three"));
            admin.createRule(topic, "correlation", "mine", new CreateRuleOptions(chosen));

            RuleProperties found = admin.getRule(topic, "mine", "sql");
            equal(((SqlRuleFilter) found.getFilter()).getSqlExpression(), "amount > 10 AND grade = @grade", "filter");
            equal(((SqlRuleFilter) found.getFilter()).getParameters(), Map.of("@grade", "high"), "parameters");
            equal(((SqlRuleAction) found.getAction()).getSqlExpression(), "SET checked = 'yes'", "action");
            CorrelationRuleFilter other = (CorrelationRuleFilter) admin.getRule(topic, "mine", "correlation").getFilter();
            equal(other.getLabel(), "invoice", "label");
            equal(other.getProperties(), Map.of("colour", "red", "number", "three"), "properties");
            equal(sorted(admin.listRules(topic, "mine").stream().map(RuleProperties::getName).toList()),
                List.of("correlation", "sql"), "rules");

            try (ServiceBusSenderClient sender = publisher(scene)) {
                sender.sendMessage(published("large", 20, Map.of("grade", "high")));
                sender.sendMessage(invoice("red"));
                sender.sendMessage(invoice("green"));
                equal(arrived(scene), Map.of("large", "yes", "red", "no"), "what arrives");

                admin.updateRule(topic, "mine", found.setFilter(new SqlRuleFilter("amount > 100")));
                SqlRuleFilter changed = (SqlRuleFilter) admin.getRule(topic, "mine", "sql").getFilter();
                equal(changed.getSqlExpression(), "amount > 100", "changed filter");
                admin.deleteRule(topic, "mine", "correlation");
                fails(() -> admin.getRule(topic, "mine", "correlation"), MISSING, "getting a deleted rule");
                sender.sendMessage(published("large", 20, Map.of("grade", "high")));
                sender.sendMessage(published("larger", 200, Map.of()));
                sender.sendMessage(invoice("red"));
                equal(arrived(scene), Map.of("larger", "yes"), "what arrives after the change");
            }
            admin.deleteTopic(topic);
        });

        SCENARIOS.put("admin-authorization", () -> {
            Scene scene = new Scene("admin-authorization");
            ServiceBusAdministrationClient admin = administration();
            String key = "a key of the queue's own";
            CreateQueueOptions options = new CreateQueueOptions();
            options.getAuthorizationRules()
                .add(new SharedAccessAuthorizationRule("app", key, "another", List.of(AccessRights.SEND)));
            admin.createQueue(scene.queue, options);
            List<AuthorizationRule> rules = admin.getQueue(scene.queue).getAuthorizationRules();
            equal(rules.size(), 1, "rules");
            equal(List.of(rules.get(0).getKeyName(), rules.get(0).getPrimaryKey(), rules.get(0).getSecondaryKey()),
                List.of("app", key, "another"), "rule");
            equal(rules.get(0).getAccessRights(), List.of(AccessRights.SEND), "rights");
            String limited = CONFIG.get("connection_string").asText()
                .replace(CONFIG.get("key_name").asText(), "app").replace(CONFIG.get("key").asText(), key);
            ServiceBusClientBuilder builder = new ServiceBusClientBuilder().connectionString(limited)
                .retryOptions(new AmqpRetryOptions().setMaxRetries(0).setTryTimeout(Duration.ofSeconds(15)));
            try (ServiceBusSenderClient sender = builder.sender().queueName(scene.queue).buildClient();
                 ServiceBusReceiverClient receiver = builder.receiver().queueName(scene.queue).buildClient()) {
                sender.sendMessage(new ServiceBusMessage("x"));
                fails(() -> one(receiver), causedBy(AmqpErrorCondition.UNAUTHORIZED_ACCESS), "receiving with Send");
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("x"), "what arrives");
            }
            admin.deleteQueue(scene.queue);
        });

        SCENARIOS.put("admin-forwarding", () -> {
            Scene scene = new Scene("admin-forwarding");
            ServiceBusAdministrationClient admin = administration();
            String target = scene.queue + "-target";
            admin.createQueue(target);
            admin.createQueue(scene.queue,
                new CreateQueueOptions().setForwardTo(target).setForwardDeadLetteredMessagesTo(target));
            QueueProperties found = admin.getQueue(scene.queue);
            for (String destination : List.of(found.getForwardTo(), found.getForwardDeadLetteredMessagesTo())) {
                truth(destination.endsWith("/" + target), "destination " + destination);
            }
            scene.send("x");
            try (ServiceBusReceiverClient receiver = scene.builder.receiver().queueName(target).buildClient()) {
                equal(bodies(allOf(receiver, 1)), List.of("x"), "what arrives");
            }
            admin.deleteQueue(scene.queue);
            admin.deleteQueue(target);
        });

        SCENARIOS.put("admin-names", () -> {
            Scene scene = new Scene("admin-names-Mixed.Case");
            String mixed = scene.queue;
            String lower = mixed.toLowerCase(Locale.ROOT);
            String upper = mixed.toUpperCase(Locale.ROOT);
            ServiceBusAdministrationClient admin = administration();
            equal(admin.createQueue(mixed).getName(), lower, "name of the new queue");
            for (String each : List.of(mixed, upper, lower)) {
                equal(admin.getQueue(each).getName(), lower, "name");
            }
            truth(admin.listQueues().stream().anyMatch(each -> each.getName().equals(lower)), "it is listed");
            scene.send("x");
            deadLetterOne(scene.receiver());
            try (ServiceBusReceiverClient dead = scene.deadLetters()) {
                equal(one(dead).getDeadLetterSource(), lower, "source of the dead letter");
            }
            admin.deleteQueue(upper);

            equal(admin.createTopic(mixed).getName(), lower, "name of the new topic");
            truth(admin.listTopics().stream().anyMatch(each -> each.getName().equals(lower)), "it is listed");
            equal(admin.createSubscription(upper, "Mine").getSubscriptionName(), "Mine", "name of the subscription");
            equal(subscriptions(admin, lower), List.of("Mine"), "subscriptions");
            admin.deleteTopic(mixed);
        });

        SCENARIOS.put("admin-pages", () -> {
            Scene scene = new Scene("admin-pages");
            ServiceBusAdministrationClient admin = administration();
            List<String> names = IntStream.range(0, 120).mapToObj(number -> "s%03d".formatted(number)).toList();
            admin.createTopic(scene.queue);
            names.forEach(name -> admin.createSubscription(scene.queue, name));
            equal(subscriptions(admin, scene.queue), names, "subscriptions");
            equal(admin.getTopicRuntimeProperties(scene.queue).getSubscriptionCount(), 120, "their number");
            admin.deleteTopic(scene.queue);
        });

        SCENARIOS.put("admin-namespace", () -> {
            NamespaceProperties found = administration().getNamespaceProperties();
            equal(found.getName(), "peeklock", "name");
            truth(List.of("Basic", "Standard", "Premium").contains(found.getMessagingSku().toString()),
                "tier " + found.getMessagingSku());
            truth(!found.getModifiedTime().isBefore(found.getCreatedTime()), "times");
        });

        SCENARIOS.put("admin-errors", () -> {
            Scene scene = new Scene("admin-errors");
            ServiceBusAdministrationClient admin = administration();
            admin.createQueue(scene.queue);
            fails(() -> admin.createQueue(scene.queue), EXISTS, "creating it again");
            fails(() -> admin.createTopic(scene.queue), EXISTS, "creating a topic of its name");
            fails(() -> admin.getQueue("nothing"), MISSING, "getting nothing");
            fails(() -> admin.deleteQueue("nothing"), MISSING, "deleting nothing");
            fails(() -> admin.createQueue(scene.queue + "-odd", new CreateQueueOptions()
                .setLockDuration(Duration.ofHours(1))), BAD_REQUEST, "a lock of an hour");
            ServiceBusAdministrationClient limited = administration("secure_listen_only");
            fails(() -> limited.getQueue(scene.queue), UNAUTHORIZED, "a key without Manage");
            fails(() -> limited.deleteQueue(scene.queue), UNAUTHORIZED, "a key without Manage");
            admin.deleteQueue(scene.queue);
        });

        SCENARIOS.put("websockets", () -> {
            Scene scene = new Scene("websockets");
            ServiceBusAdministrationClient admin = administration();
            admin.createQueue(scene.queue);
            ServiceBusClientBuilder builder = new ServiceBusClientBuilder()
                .connectionString(CONFIG.get("secure").asText())
                .transportType(AmqpTransportType.AMQP_WEB_SOCKETS)
                .retryOptions(new AmqpRetryOptions().setMaxRetries(0));
            String large = "x".repeat(300 * 1024);
            List<String> texts = counting(0, 20);
            try (ServiceBusSenderClient sender = builder.sender().queueName(scene.queue).buildClient();
                 ServiceBusReceiverClient receiver = builder.receiver().queueName(scene.queue).buildClient()) {
                sender.sendMessage(new ServiceBusMessage(large));
                sender.sendMessages(texts.stream().map(ServiceBusMessage::new).toList());
                List<String> expected = new ArrayList<>(texts);
                expected.add(large);
                equal(sorted(bodies(allOf(receiver, 21))), sorted(expected), "what arrives");
            }
            scene.nothingIsLeft();
            admin.deleteQueue(scene.queue);
        });
    }
}
