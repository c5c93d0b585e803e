package peeklock;

import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.now;
import static peeklock.Azure.sorted;
import static peeklock.Harness.truth;
import static peeklock.Jms.deliveries;
import static peeklock.Jms.is;
import static peeklock.Jms.one;
import static peeklock.Jms.settle;
import static peeklock.Jms.text;

import jakarta.jms.DeliveryMode;
import jakarta.jms.InvalidDestinationException;
import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import jakarta.jms.TextMessage;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.function.Predicate;
import peeklock.Jms.Scene;

/**
 * The scenarios of topic_scenarios.py with Qpid JMS: a topic is a JMS topic to send to, and a subscription a JMS queue to
 * receive from.
 */
final class JmsTopics {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final Predicate<Throwable> DISABLED = is(JMSException.class, "entity-disabled");
    private static final Predicate<Throwable> MISSING = is(InvalidDestinationException.class, "could not be found");
    private static final Predicate<Throwable> NOT_ALLOWED = is(JMSException.class, "amqp:not-allowed");
    // The attach is taken, and the link is detached when it gives credit.
    private static final Predicate<Throwable> REFUSED = error -> NOT_ALLOWED.test(error) || NOT_ALLOWED.test(error.getCause());

    private JmsTopics() {}

    private static String address(Scene scene, String name) {
        return scene.name + "/Subscriptions/" + name;
    }

    private static MessageConsumer subscription(Scene scene, String name) throws JMSException {
        return scene.session.createConsumer(scene.session.createQueue(address(scene, name)));
    }

    private static MessageConsumer deadLetters(Scene scene, String name) throws JMSException {
        return subscription(scene, name + "/$DeadLetterQueue");
    }

    private static MessageProducer producer(Scene scene) throws JMSException {
        return scene.session.createProducer(scene.session.createTopic(scene.name));
    }

    private static void publish(Scene scene, Message... messages) throws JMSException {
        try (MessageProducer producer = producer(scene)) {
            for (Message message : messages) {
                producer.send(message);
            }
        }
    }

    private static TextMessage message(Scene scene, String body) throws JMSException {
        return scene.session.createTextMessage(body);
    }

    private static TextMessage message(Scene scene, String body, Map<String, Object> properties) throws JMSException {
        TextMessage message = message(scene, body);
        for (Map.Entry<String, Object> property : properties.entrySet()) {
            message.setObjectProperty(property.getKey(), property.getValue());
        }
        return message;
    }

    /** Application properties, without those that JMS itself defines. */
    private static Map<String, Object> properties(Message message) throws JMSException {
        Map<String, Object> found = new TreeMap<>();
        for (Object name : Collections.list(message.getPropertyNames())) {
            if (!name.toString().startsWith("JMS")) {
                found.put(name.toString(), message.getObjectProperty(name.toString()));
            }
        }
        return found;
    }

    /** That many messages and no more, which are completed. */
    private static List<Message> received(MessageConsumer consumer, int count) throws JMSException {
        try (consumer) {
            List<Message> messages = new ArrayList<>();
            while (messages.size() < count) {
                Message message = one(consumer);
                message.acknowledge();
                messages.add(message);
            }
            equal(consumer.receive(1000), null, "messages beyond those");
            return messages;
        }
    }

    private static List<Message> received(Scene scene, String name, int count) throws JMSException {
        return received(subscription(scene, name), count);
    }

    private static List<String> texts(List<Message> messages) throws JMSException {
        List<String> texts = new ArrayList<>();
        for (Message message : messages) {
            texts.add(text(message));
        }
        return texts;
    }

    static {
        SCENARIOS.put("topic-publish", () -> {
            try (Scene scene = new Scene("topic-publish")) {
                TextMessage second = message(scene, "second");
                second.setJMSType("second");
                publish(scene, scene.keyed(message(scene, "first")), scene.keyed(second));
                List<Message> messages = received(scene, "a", 2);
                equal(texts(messages), List.of("first", "second"), "messages in a subscription");
                equal(deliveries(messages.get(0)), 1, "delivery count");
                MessageConsumer asTopic = scene.session.createConsumer(scene.session.createTopic(address(scene, "b")));
                equal(texts(received(asTopic, 2)), List.of("first", "second"), "messages in another, taken as a topic");
                equal(texts(received(scene, "second", 1)), List.of("second"), "messages where a rule selects");
            }
        });

        SCENARIOS.put("topic-time-to-live", () -> {
            // Otherwise this client drops what has expired itself, in a dead-letter queue too.
            try (Scene scene = new Scene("topic-time-to-live", "jms.localMessageExpiry=false");
                    MessageProducer producer = producer(scene)) {
                producer.send(message(scene, "x"));
                producer.send(message(scene, "half"), DeliveryMode.PERSISTENT, 4, 1_800_000);
                Thread.sleep(1500);
                received(scene, "brief", 0);
                List<Message> letters = received(deadLetters(scene, "brief"), 2);
                equal(texts(letters).stream().sorted().toList(), List.of("half", "x"), "dead letters");
                for (Message letter : letters) {
                    equal(letter.getStringProperty("DeadLetterReason"), "TTLExpiredException", "reason");
                }
                received(scene, "dropped", 0);
                received(deadLetters(scene, "dropped"), 0);
                List<Message> lasting = received(scene, "long", 2);
                Map<String, Long> expire = new HashMap<>();
                for (Message message : lasting) {
                    expire.put(text(message), message.getJMSExpiration());
                }
                equal(expire.keySet(), Set.of("x", "half"), "messages that live");
                long apart = expire.get("x") - expire.get("half");
                truth(Math.abs(apart - 1_800_000) < 10_000, "they expire " + apart + " ms apart");
            }
        });

        SCENARIOS.put("topic-disabled", () -> {
            try (Scene scene = new Scene("topic-disabled")) {
                fails(() -> publish(scene, message(scene, "x")), DISABLED, "sending");
                received(scene, "a", 0);
            }
        });

        SCENARIOS.put("topic-not-allowed", () -> {
            try (Scene scene = new Scene("topic-not-allowed")) {
                fails(() -> scene.consumer().receive(5000), REFUSED, "receiving from a topic");
                fails(() -> scene.session.createProducer(scene.session.createQueue(address(scene, "a"))), NOT_ALLOWED,
                    "sending to a subscription");
                received(scene, "a", 0);
            }
        });

        SCENARIOS.put("unknown-topic", () -> {
            try (Scene scene = new Scene("unknown-topic")) {
                long started = now();
                Session session = scene.session;
                fails(() -> session.createProducer(session.createTopic(scene.name + "-not")), MISSING, "a topic");
                fails(() -> subscription(scene, "not"), MISSING, "a subscription");
                truth(now() - started < 15_000, "the error took its time");
            }
        });

        SCENARIOS.put("subscription-settle", () -> {
            try (Scene scene = new Scene("subscription-settle")) {
                publish(scene, message(scene, "x"));
                for (String name : List.of("a", "strict")) {
                    try (MessageConsumer consumer = subscription(scene, name)) {
                        settle(one(consumer), Jms.MODIFIED_FAILED);
                    }
                }
                Message again = received(scene, "a", 1).get(0);
                equal(text(again) + deliveries(again), "x2", "second delivery");
                received(scene, "strict", 0);
                Message letter = received(deadLetters(scene, "strict"), 1).get(0);
                equal(text(letter), "x", "dead letter");
                equal(letter.getStringProperty("DeadLetterReason"), "MaxDeliveryCountExceeded", "reason");
            }
        });

        SCENARIOS.put("subscription-defer", () -> {
            try (Scene scene = new Scene("subscription-defer")) {
                publish(scene, message(scene, "later"));
                MessageConsumer consumer = subscription(scene, "a");
                settle(one(consumer), Jms.MODIFIED_FAILED_UNDELIVERABLE);
                equal(consumer.receive(1000), null, "deliveries of a deferred message");
                equal(texts(received(scene, "b", 1)), List.of("later"), "messages in the other subscription");
            }
        });

        SCENARIOS.put("subscription-dead-letter", () -> {
            try (Scene scene = new Scene("subscription-dead-letter")) {
                TextMessage sent = message(scene, "bad", Map.of("kept", "yes"));
                publish(scene, sent);
                MessageConsumer consumer = subscription(scene, "a");
                settle(one(consumer), Jms.REJECTED);
                equal(consumer.receive(1000), null, "messages in the subscription itself");
                Message letter = received(deadLetters(scene, "a"), 1).get(0);
                equal(text(letter) + letter.getJMSMessageID(), "bad" + sent.getJMSMessageID(), "dead letter");
                equal(letter.getStringProperty("kept"), "yes", "application property");
                Message other = received(scene, "b", 1).get(0);
                equal(text(other), "bad", "message in the other subscription");
                equal(properties(other), Map.of("kept", "yes"), "its properties");
                received(deadLetters(scene, "b"), 0);
            }
        });

        SCENARIOS.put("subscription-receive-and-delete", () -> {
            try (Scene scene = new Scene("subscription-receive-and-delete");
                    Scene deleting = new Scene("subscription-receive-and-delete", "jms.presettlePolicy.presettleConsumers=true")) {
                publish(scene, scene.keyed(message(scene, "x")), scene.keyed(message(scene, "y")));
                try (MessageConsumer consumer = subscription(deleting, "a")) {
                    equal(text(one(consumer)) + text(one(consumer)), "xy", "bodies");
                }
                received(scene, "a", 0);
                equal(texts(received(scene, "b", 2)), List.of("x", "y"), "messages in the other subscription");
            }
        });

        SCENARIOS.put("subscription-disabled", () -> {
            try (Scene scene = new Scene("subscription-disabled")) {
                publish(scene, message(scene, "x"));
                fails(() -> subscription(scene, "off"), DISABLED, "receiving");
                equal(texts(received(scene, "a", 1)), List.of("x"), "messages in the other subscription");
            }
        });

        SCENARIOS.put("sql-filter", () -> {
            try (Scene scene = new Scene("sql-filter")) {
                TextMessage second = message(scene, "2", Map.of("price", 50.5, "color", "red"));
                second.setJMSType("abc");
                publish(scene, message(scene, "1", Map.of("price", 150, "color", "red")), second, message(scene, "3"),
                    message(scene, "4", Map.of("price", 100.5f, "color", "red")),
                    message(scene, "5", Map.of("price", 100L, "color", "red")));
                equal(sorted(texts(received(scene, "dear", 2))), List.of("1", "4"), "by price and color");
                equal(texts(received(scene, "named", 1)), List.of("2"), "by label");
                equal(texts(received(scene, "bare", 1)), List.of("3"), "without color and price");
            }
        });

        SCENARIOS.put("correlation-filter", () -> {
            try (Scene scene = new Scene("correlation-filter")) {
                TextMessage first = message(scene, "1");
                first.setJMSType("a");
                first.setJMSCorrelationID("c");
                TextMessage second = message(scene, "2", Map.of("color", "red"));
                second.setJMSType("a");
                publish(scene, first, second);
                for (Object seven : List.of((byte) 7, (short) 7, 7, 7L, 7f, 7.0)) {
                    publish(scene, message(scene, seven.getClass().getSimpleName(), Map.of("count", seven)));
                }
                publish(scene, message(scene, "other", Map.of("count", 7.5, "color", "RED")),
                    message(scene, "text", Map.of("count", "7")));
                equal(texts(received(scene, "labelled", 1)), List.of("1"), "by label and correlation id");
                equal(texts(received(scene, "red", 1)), List.of("2"), "by a string");
                List<String> types = List.of("Byte", "Double", "Float", "Integer", "Long", "Short");
                equal(sorted(texts(received(scene, "seven", 6))), types, "by a number");
            }
        });

        SCENARIOS.put("filter-error", () -> {
            try (Scene scene = new Scene("filter-error")) {
                publish(scene, message(scene, "good", Map.of("amount", 10, "parts", 5)),
                    message(scene, "bad", Map.of("amount", 10, "parts", 0)));
                for (String name : List.of("kept", "dropped")) {
                    equal(texts(received(scene, name, 1)), List.of("good"), "messages selected");
                }
                Message letter = received(deadLetters(scene, "kept"), 1).get(0);
                equal(text(letter), "bad", "dead letter");
                equal(letter.getStringProperty("DeadLetterReason"), "FilterException", "reason");
                String description = letter.getStringProperty("DeadLetterErrorDescription");
                truth(description.contains("kept"), "description: " + description);
                received(deadLetters(scene, "dropped"), 0);
                equal(sorted(texts(received(scene, "a", 2))), List.of("bad", "good"), "messages in another subscription");
            }
        });

        SCENARIOS.put("rule-action", () -> {
            try (Scene scene = new Scene("rule-action")) {
                Map<String, Object> set = Map.of("price", 150L, "color", "red", "kept", true);
                TextMessage sent = message(scene, "x", set);
                sent.setJMSType("dear");
                publish(scene, sent);
                Message changed = received(scene, "half", 1).get(0);
                equal(text(changed) + " " + changed.getJMSType(), "x cheap", "changed copy");
                equal(properties(changed), Map.of("price", 75L, "kept", true, "RuleName", "half"), "its properties");
                Message plain = received(scene, "a", 1).get(0);
                equal(text(plain) + " " + plain.getJMSType(), "x dear", "other copy");
                equal(properties(plain), set, "its properties");
            }
        });

        SCENARIOS.put("rule-copies", () -> {
            try (Scene scene = new Scene("rule-copies")) {
                publish(scene, message(scene, "x", Map.of("color", "red")));
                List<Message> messages = received(scene, "a", 3);
                equal(texts(messages), List.of("x", "x", "x"), "bodies");
                List<String> shown = new ArrayList<>();
                for (Message message : messages) {
                    shown.add(message.getStringProperty("RuleName") + " " + message.getObjectProperty("number"));
                }
                equal(shown.stream().sorted().toList(), List.of("null null", "one 1", "two 2"), "rules, and what they set");
            }
        });
    }
}
