package peeklock;

import static peeklock.Azure.sorted;
import static peeklock.Harness.counting;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Jms.allOf;
import static peeklock.Jms.is;
import static peeklock.Jms.one;
import static peeklock.Jms.text;

import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import jakarta.jms.TextMessage;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.stream.IntStream;
import peeklock.Jms.Scene;

/** The scenarios of partitioned_scenarios.py with Qpid JMS: its partition keys are session ids. */
final class JmsPartitioned {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final List<String> TEXTS = sorted(counting(0, 20));
    private static final List<String> KEYS = IntStream.range(0, 8).mapToObj(i -> "key-" + i).toList();

    private JmsPartitioned() {}

    private static TextMessage keyed(Session session, String key, String body) throws JMSException {
        TextMessage message = session.createTextMessage(body);
        message.setStringProperty("JMSXGroupID", key);
        return message;
    }

    static {
        SCENARIOS.put("partitioned-spread", () -> {
            try (Scene scene = new Scene("partitioned-spread")) {
                scene.send(TEXTS.toArray(String[]::new));
                try (MessageConsumer consumer = scene.consumer()) {
                    equal(sorted(allOf(consumer, TEXTS.size())), TEXTS, "messages");
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("partitioned-keys", () -> {
            try (Scene scene = new Scene("partitioned-keys"); MessageProducer producer = scene.producer()) {
                for (String turn : counting(0, 5)) {
                    for (String key : KEYS) {
                        producer.send(keyed(scene.session, key, turn));
                    }
                }
                Map<String, List<String>> found = new TreeMap<>();
                try (MessageConsumer consumer = scene.consumer()) {
                    for (int i = 0; i < 5 * KEYS.size(); i++) {
                        Message message = one(consumer);
                        found.computeIfAbsent(message.getStringProperty("JMSXGroupID"), key -> new ArrayList<>()).add(text(message));
                        message.acknowledge();
                    }
                }
                for (String key : KEYS) {
                    equal(found.get(key), counting(0, 5), "messages of " + key);
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("partitioned-topic", () -> {
            try (Scene scene = new Scene("partitioned-topic");
                    MessageProducer producer = scene.session.createProducer(scene.session.createTopic(scene.name))) {
                for (String text : TEXTS) {
                    TextMessage message = scene.session.createTextMessage(text);
                    message.setIntProperty("number", Integer.parseInt(text));
                    producer.send(message);
                }
                Map<String, List<String>> wanted = Map.of("a", TEXTS, "some", sorted(counting(10, 10)));
                for (Map.Entry<String, List<String>> each : wanted.entrySet()) {
                    String address = scene.name + "/Subscriptions/" + each.getKey();
                    try (MessageConsumer consumer = scene.session.createConsumer(scene.session.createQueue(address))) {
                        equal(sorted(allOf(consumer, each.getValue().size())), each.getValue(), "messages in " + address);
                        equal(consumer.receive(1000), null, "messages beyond those");
                    }
                }
            }
        });

        SCENARIOS.put("partitioned-transactions", () -> {
            try (Scene scene = new Scene("partitioned-transactions");
                    Session session = scene.connection.createSession(true, Session.SESSION_TRANSACTED);
                    MessageProducer producer = session.createProducer(scene.queue());
                    MessageConsumer consumer = session.createConsumer(scene.queue())) {
                for (Message wrong : List.of(session.createTextMessage("never"), keyed(session, "b", "never"))) {
                    fails(() -> {
                        producer.send(keyed(session, "a", "never"));
                        producer.send(wrong);
                        session.commit();
                    }, is(JMSException.class, ""), "a message without a key, or with another");
                    session.rollback();
                }
                try (MessageProducer outside = scene.producer()) {
                    outside.send(keyed(scene.session, "a", "old"));
                }
                equal(text(one(consumer)), "old", "the first message");
                producer.send(keyed(session, "a", "1"));
                producer.send(keyed(session, "a", "2"));
                session.commit();
                equal(text(one(consumer)) + text(one(consumer)), "12", "messages");
                session.commit();
                scene.nothingIsLeft();
            }
        });
    }
}
