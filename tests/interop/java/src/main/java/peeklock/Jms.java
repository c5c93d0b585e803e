package peeklock;

import static peeklock.Harness.CONFIG;
import static peeklock.Harness.counting;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.killedWhileHolding;
import static peeklock.Harness.now;
import static peeklock.Harness.queue;
import static peeklock.Harness.truth;

import jakarta.jms.BytesMessage;
import jakarta.jms.CompletionListener;
import jakarta.jms.Connection;
import jakarta.jms.InvalidDestinationException;
import jakarta.jms.InvalidSelectorException;
import jakarta.jms.JMSException;
import jakarta.jms.JMSSecurityException;
import jakarta.jms.MapMessage;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.ObjectMessage;
import jakarta.jms.Queue;
import jakarta.jms.QueueBrowser;
import jakarta.jms.Session;
import jakarta.jms.StreamMessage;
import jakarta.jms.TextMessage;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Predicate;
import java.util.stream.Stream;
import org.apache.qpid.jms.JmsConnectionFactory;

/** The scenarios of scenarios.py with Qpid JMS, a general AMQP 1.0 client behind the JMS API. */
public final class Jms {
    private static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();

    // How this client's acknowledge settles one message: its own session mode and property.
    private static final int INDIVIDUAL_ACKNOWLEDGE = 101;
    private static final String ACK_TYPE = "JMS_AMQP_ACK_TYPE";
    static final int REJECTED = 2;
    private static final int RELEASED = 3;
    static final int MODIFIED_FAILED = 4;
    static final int MODIFIED_FAILED_UNDELIVERABLE = 5;

    private Jms() {}

    /** A connection with one login, and the queue of one scenario. Without prefetch a receive asks for one message. */
    static final class Scene implements AutoCloseable {
        final String name;
        final Connection connection;
        final Session session;

        Scene(String name, String options, String keyName, String key) throws JMSException {
            this.name = name;
            String address = "amqp://%s:%d?jms.prefetchPolicy.all=0&amqp.saslMechanisms=PLAIN&%s"
                .formatted(CONFIG.get("host").asText(), CONFIG.get("port").asInt(), options);
            connection = new JmsConnectionFactory(keyName, key, address).createConnection();
            connection.start();
            session = connection.createSession(INDIVIDUAL_ACKNOWLEDGE);
        }

        Scene(String scenario, String options) throws JMSException {
            this(Harness.queue(scenario), options, CONFIG.get("key_name").asText(), CONFIG.get("key").asText());
        }

        Scene(String scenario) throws JMSException {
            this(scenario, "");
        }

        static Scene login(String scenario, String login) throws JMSException {
            return new Scene(Harness.queue(scenario), "", CONFIG.get(login).get(0).asText(), CONFIG.get(login).get(1).asText());
        }

        Queue queue() {
            try {
                return session.createQueue(name);
            } catch (JMSException error) {
                throw new IllegalStateException(error);
            }
        }

        MessageProducer producer() throws JMSException {
            return session.createProducer(queue());
        }

        /** The message with a session id, which is its partition key, if its order matters. */
        <M extends Message> M keyed(M message) throws JMSException {
            String key = Harness.keyOf(name);
            if (key != null) {
                message.setStringProperty("JMSXGroupID", key);
            }
            return message;
        }

        void send(String... bodies) throws JMSException {
            try (MessageProducer producer = producer()) {
                for (String body : bodies) {
                    producer.send(keyed(session.createTextMessage(body)));
                }
            }
        }

        MessageConsumer consumer() throws JMSException {
            return session.createConsumer(queue());
        }

        MessageConsumer deadLetters() throws JMSException {
            return session.createConsumer(session.createQueue(name + "/$DeadLetterQueue"));
        }

        void nothingIsLeft() throws JMSException {
            try (MessageConsumer consumer = consumer()) {
                equal(consumer.receive(1000), null, "messages left");
            }
        }

        @Override
        public void close() throws JMSException {
            connection.close();
        }
    }

    static Message one(MessageConsumer consumer, long waitMs) throws JMSException {
        Message message = consumer.receive(waitMs);
        truth(message != null, "no message arrived");
        return message;
    }

    static Message one(MessageConsumer consumer) throws JMSException {
        return one(consumer, 10_000);
    }

    static void settle(Message message, int type) throws JMSException {
        message.setIntProperty(ACK_TYPE, type);
        message.acknowledge();
    }

    static String text(Message message) throws JMSException {
        return ((TextMessage) message).getText();
    }

    static int deliveries(Message message) throws JMSException {
        return message.getIntProperty("JMSXDeliveryCount");
    }

    static List<String> allOf(MessageConsumer consumer, int count) throws JMSException {
        List<String> texts = new ArrayList<>();
        while (texts.size() < count) {
            Message message = one(consumer);
            message.acknowledge();
            texts.add(text(message));
        }
        return texts;
    }

    /** What a browser shows, with this selector if it is not null. */
    static List<String> browsed(Session session, Queue queue, String selector) throws JMSException {
        List<String> texts = new ArrayList<>();
        try (QueueBrowser browser = session.createBrowser(queue, selector)) {
            for (Object message : Collections.list(browser.getEnumeration())) {
                texts.add(text((Message) message));
            }
        }
        return texts;
    }

    static Predicate<Throwable> is(Class<? extends Throwable> kind, String part) {
        return error -> kind.isInstance(error) && String.valueOf(error.getMessage()).contains(part);
    }

    static {
        SCENARIOS.put("send-complete", () -> {
            try (Scene scene = new Scene("send-complete")) {
                scene.send("hello");
                try (MessageConsumer consumer = scene.consumer()) {
                    Message message = one(consumer);
                    equal(text(message), "hello", "body");
                    equal(deliveries(message), 1, "delivery count");
                    truth(!message.getJMSRedelivered(), "redelivered");
                    message.acknowledge();
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("browse", () -> {
            try (Scene scene = new Scene("browse")) {
                scene.send("a", "b", "c", "d", "e");
                for (int again = 0; again < 3; again++) {
                    equal(browsed(scene.session, scene.queue(), null), List.of("a", "b", "c", "d", "e"), "browsed");
                }
                Queue dead = scene.session.createQueue(scene.name + "/$DeadLetterQueue");
                try (MessageConsumer consumer = scene.consumer()) {
                    settle(one(consumer), REJECTED);
                    for (int again = 0; again < 2; again++) {
                        equal(browsed(scene.session, dead, null), List.of("a"), "browsed dead letters");
                    }
                    for (String body : List.of("b", "c", "d", "e")) {
                        Message message = one(consumer);
                        equal(text(message), body, "received");
                        equal(deliveries(message), 1, "delivery count");
                        message.acknowledge();
                    }
                }
                equal(browsed(scene.session, scene.queue(), null), List.of(), "browsed when empty");
                try (MessageConsumer consumer = scene.deadLetters()) {
                    equal(allOf(consumer, 1), List.of("a"), "received dead letters");
                }
            }
        });

        SCENARIOS.put("selector", () -> {
            try (Scene scene = new Scene("selector")) {
                List<String> ids = new ArrayList<>();
                for (int number = 0; number < 6; number++) {
                    TextMessage message = scene.session.createTextMessage(String.valueOf(number));
                    message.setStringProperty("color", number % 2 == 0 ? "red" : "blue");
                    message.setIntProperty("n", number);
                    message.setJMSType("type-" + number);
                    message.setJMSCorrelationID("corr-" + number);
                    try (MessageProducer producer = scene.producer()) {
                        producer.setPriority(number);
                        producer.send(message);
                    }
                    ids.add(message.getJMSMessageID());
                }
                List<String> shown = browsed(scene.session, scene.queue(), "color = 'blue'");
                Collections.sort(shown);
                equal(shown, List.of("1", "3", "5"), "browsed");
                Map<String, List<String>> selectors = new LinkedHashMap<>();
                selectors.put("color = 'red' AND n BETWEEN 1 AND 3", List.of("2"));
                selectors.put("JMSCorrelationID = 'corr-3' OR JMSType LIKE 'type-_' AND JMSPriority > 4", List.of("3", "5"));
                selectors.put("JMSMessageID = '" + ids.get(4) + "' AND JMSDeliveryMode = 'PERSISTENT'", List.of("4"));
                selectors.put("color = 'green' OR JMSTimestamp < 1000", List.of());
                for (Map.Entry<String, List<String>> each : selectors.entrySet()) {
                    try (MessageConsumer consumer = scene.session.createConsumer(scene.queue(), each.getKey())) {
                        List<String> texts = allOf(consumer, each.getValue().size());
                        Collections.sort(texts);
                        equal(texts, each.getValue(), each.getKey());
                        equal(consumer.receive(300), null, "more than " + each.getKey());
                    }
                }
                List<String> rest = new ArrayList<>();
                try (MessageConsumer consumer = scene.consumer()) {
                    for (int number = 0; number < 2; number++) {
                        Message message = one(consumer);
                        equal(deliveries(message), 1, "delivery count");
                        message.acknowledge();
                        rest.add(text(message));
                    }
                }
                Collections.sort(rest);
                equal(rest, List.of("0", "1"), "the rest");
                scene.nothingIsLeft();
                fails(() -> scene.session.createConsumer(scene.queue(), "color ="),
                    is(InvalidSelectorException.class, "color ="), "a selector that the library knows to be wrong");
                try (Scene unchecked = new Scene("selector", "jms.validateSelector=false")) {
                    fails(() -> unchecked.session.createConsumer(unchecked.queue(), "color ="),
                        is(JMSException.class, "amqp:invalid-field"), "a wrong selector that it sends");
                }
                fails(() -> scene.session.createConsumer(scene.queue(), "JMSReplyTo = 'x'"),
                    is(JMSException.class, "JMSReplyTo"), "a selector by a header that JMS does not allow");
            }
        });

        SCENARIOS.put("transactions", () -> {
            try (Scene scene = new Scene("transactions");
                    Session session = scene.connection.createSession(true, Session.SESSION_TRANSACTED);
                    MessageProducer producer = session.createProducer(scene.queue());
                    MessageConsumer consumer = session.createConsumer(scene.queue())) {
                scene.send("old");
                equal(text(one(consumer)), "old", "body");
                producer.send(scene.keyed(session.createTextMessage("never")));
                session.rollback();

                Message again = one(consumer);
                equal(text(again), "old", "body after the rollback");
                truth(again.getJMSRedelivered(), "redelivered");
                producer.send(scene.keyed(session.createTextMessage("a")));
                producer.send(scene.keyed(session.createTextMessage("b")));
                try (MessageConsumer other = scene.consumer()) {
                    equal(other.receive(500), null, "messages before the commit");
                }
                session.commit();
                equal(text(one(consumer)), "a", "body");
                equal(text(one(consumer)), "b", "body");
                session.commit();
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("transactions-across", () -> {
            try (Scene scene = new Scene("transactions-across");
                    Session session = scene.connection.createSession(true, Session.SESSION_TRANSACTED)) {
                List<Queue> others = new ArrayList<>();
                List<MessageProducer> producers = new ArrayList<>();
                for (int number = 1; number <= 3; number++) {
                    others.add(session.createQueue(scene.name + "-" + number));
                    producers.add(session.createProducer(others.get(number - 1)));
                }
                scene.send("old");
                MessageConsumer consumer = session.createConsumer(scene.queue());
                for (String body : List.of("never", "a")) {
                    equal(text(one(consumer)), "old", "body");
                    for (MessageProducer producer : producers) {
                        producer.send(scene.keyed(session.createTextMessage(body)));
                    }
                    try (MessageConsumer early = scene.session.createConsumer(others.get(0))) {
                        equal(early.receive(500), null, "messages before the commit");
                    }
                    if (body.equals("never")) {
                        session.rollback();
                    } else {
                        session.commit();
                    }
                }
                for (Queue other : others) {
                    try (MessageConsumer receiving = scene.session.createConsumer(other)) {
                        equal(allOf(receiving, 1), List.of("a"), "bodies in " + other);
                        equal(receiving.receive(500), null, "messages left in " + other);
                    }
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("properties", () -> {
            try (Scene scene = new Scene("properties")) {
                TextMessage sent = scene.session.createTextMessage("x");
                sent.setJMSCorrelationID("correlation");
                sent.setJMSType("subject");
                sent.setJMSReplyTo(scene.session.createQueue("reply-to"));
                sent.setStringProperty("JMS_AMQP_REPLY_TO_GROUP_ID", "reply-session");
                try (MessageProducer producer = scene.producer()) {
                    producer.setPriority(7);
                    producer.setTimeToLive(3_600_000);
                    producer.send(sent);
                }
                Message message = one(scene.consumer());
                equal(message.getJMSMessageID(), sent.getJMSMessageID(), "message id");
                equal(message.getJMSCorrelationID(), "correlation", "correlation id");
                equal(message.getJMSType(), "subject", "subject");
                equal(((Queue) message.getJMSReplyTo()).getQueueName(), "reply-to", "reply to");
                equal(message.getStringProperty("JMS_AMQP_REPLY_TO_GROUP_ID"), "reply-session", "reply to session id");
                equal(message.getJMSPriority(), 7, "priority");
                long left = message.getJMSExpiration() - now();
                truth(left > 3_570_000 && left < 3_605_000, "expires in " + left + " ms");
                message.acknowledge();
            }
        });

        SCENARIOS.put("application-properties", () -> {
            try (Scene scene = new Scene("application-properties")) {
                Map<String, Object> sent = Map.of("text", "grüße 🐇", "byte", (byte) -8, "short", (short) -300,
                    "int", -70000, "long", -(1L << 40), "float", 1.5f, "double", 2.5, "yes", true, "no", false);
                TextMessage message = scene.session.createTextMessage("x");
                for (Map.Entry<String, Object> property : sent.entrySet()) {
                    message.setObjectProperty(property.getKey(), property.getValue());
                }
                scene.producer().send(message);
                Message received = one(scene.consumer());
                Map<String, Object> got = new HashMap<>();
                for (String name : sent.keySet()) {
                    got.put(name, received.getObjectProperty(name));
                }
                equal(got, new HashMap<>(sent), "application properties");
                received.acknowledge();
            }
        });

        SCENARIOS.put("bodies", () -> {
            try (Scene scene = new Scene("bodies"); MessageProducer producer = scene.producer()) {
                byte[] binary = new byte[1024];
                for (int i = 0; i < binary.length; i++) {
                    binary[i] = (byte) i;
                }
                UUID id = UUID.randomUUID();
                BytesMessage bytes = scene.session.createBytesMessage();
                bytes.writeBytes(binary);
                MapMessage map = scene.session.createMapMessage();
                map.setString("text", "value");
                map.setLong("number", 7);
                StreamMessage stream = scene.session.createStreamMessage();
                stream.writeLong(1);
                stream.writeString("b");
                List<Message> sent = List.of(bytes, scene.session.createBytesMessage(), map, stream,
                    scene.session.createObjectMessage(id), scene.session.createMessage());
                for (Message message : sent) {
                    producer.send(scene.keyed(message));
                }
                List<Message> got = new ArrayList<>();
                MessageConsumer consumer = scene.consumer();
                for (int i = 0; i < sent.size(); i++) {
                    Message message = one(consumer);
                    message.acknowledge();
                    got.add(message);
                }
                equal(got.get(0).getBody(byte[].class), binary, "bytes");
                equal(((BytesMessage) got.get(1)).getBodyLength(), 0L, "length of an empty body");
                equal(got.get(2).getBody(Map.class), Map.of("text", "value", "number", 7L), "map");
                equal(((StreamMessage) got.get(3)).readLong(), 1L, "first of a stream");
                equal(((StreamMessage) got.get(3)).readString(), "b", "second of a stream");
                equal(((ObjectMessage) got.get(4)).getObject(), id, "object");
                truth(!(got.get(5) instanceof TextMessage), "a message without body has become a text");
            }
        });

        SCENARIOS.put("large-message", () -> {
            try (Scene scene = new Scene("large-message")) {
                byte[] content = new byte[900 * 1024];
                for (int i = 0; i < content.length; i++) {
                    content[i] = (byte) (i * 31 % 251);
                }
                BytesMessage sent = scene.session.createBytesMessage();
                sent.writeBytes(content);
                scene.producer().send(sent);
                Message message = one(scene.consumer(), 20_000);
                truth(Arrays.equals(message.getBody(byte[].class), content), "the body differs");
                message.acknowledge();
            }
        });

        SCENARIOS.put("pipelined", () -> {
            try (Scene scene = new Scene("pipelined", "jms.prefetchPolicy.all=200")) {
                CountDownLatch done = new CountDownLatch(2000);
                AtomicReference<Exception> failure = new AtomicReference<>();
                CompletionListener listener = new CompletionListener() {
                    @Override
                    public void onCompletion(Message message) {
                        done.countDown();
                    }

                    @Override
                    public void onException(Message message, Exception error) {
                        failure.set(error);
                        done.countDown();
                    }
                };
                try (MessageProducer producer = scene.producer()) {
                    for (int i = 0; i < 2000; i++) {
                        producer.send(scene.session.createTextMessage(String.valueOf(i)), listener);
                    }
                    truth(done.await(30, TimeUnit.SECONDS), done.getCount() + " sends have no outcome");
                }
                equal(failure.get(), null, "error of a send");
                try (MessageConsumer consumer = scene.consumer()) {
                    equal(Set.copyOf(allOf(consumer, 2000)), Set.copyOf(counting(0, 2000)), "bodies");
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("presettled-send", () -> {
            try (Scene scene = new Scene("presettled-send", "jms.presettlePolicy.presettleProducers=true")) {
                scene.send(counting(0, 10).toArray(String[]::new));
                equal(allOf(scene.consumer(), 10), counting(0, 10), "bodies");
            }
        });

        SCENARIOS.put("receive-and-delete", () -> {
            try (Scene scene = new Scene("receive-and-delete", "jms.presettlePolicy.presettleConsumers=true")) {
                scene.send("a", "b");
                try (MessageConsumer consumer = scene.consumer()) {
                    equal(text(one(consumer)) + text(one(consumer)), "ab", "bodies");
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("abandon", () -> {
            try (Scene scene = new Scene("abandon")) {
                scene.send("first", "second");
                MessageConsumer consumer = scene.consumer();
                Message message = one(consumer);
                equal(text(message) + deliveries(message), "first1", "first delivery");
                settle(message, MODIFIED_FAILED);
                Message again = one(consumer);
                equal(text(again) + deliveries(again), "first2", "second delivery");
                equal(again.getJMSMessageID(), message.getJMSMessageID(), "id");
                truth(again.getJMSRedelivered(), "not marked as redelivered");
                settle(again, RELEASED);
                Message released = one(consumer);
                equal(text(released) + deliveries(released), "first2", "after releasing, which is no failed delivery");
                released.acknowledge();
                equal(allOf(consumer, 1), List.of("second"), "next message");
            }
        });

        SCENARIOS.put("defer", () -> {
            try (Scene scene = new Scene("defer")) {
                scene.send("later");
                MessageConsumer consumer = scene.consumer();
                settle(one(consumer), MODIFIED_FAILED_UNDELIVERABLE);
                equal(consumer.receive(1000), null, "deliveries of a deferred message");
            }
        });

        SCENARIOS.put("dead-letter", () -> {
            try (Scene scene = new Scene("dead-letter")) {
                TextMessage sent = scene.session.createTextMessage("bad");
                sent.setStringProperty("kept", "yes");
                scene.producer().send(sent);
                MessageConsumer consumer = scene.consumer();
                settle(one(consumer), REJECTED);
                equal(consumer.receive(1000), null, "messages in the queue itself");
                MessageConsumer letters = scene.deadLetters();
                Message message = one(letters);
                equal(text(message) + message.getJMSMessageID(), "bad" + sent.getJMSMessageID(), "dead-lettered message");
                equal(message.getStringProperty("kept"), "yes", "property of the sender");
                message.acknowledge();
                equal(letters.receive(1000), null, "dead letters left");
            }
        });

        SCENARIOS.put("send-again", () -> {
            try (Scene scene = new Scene("send-again");
                    MessageProducer producer = scene.producer();
                    MessageConsumer consumer = scene.consumer()) {
                TextMessage sent = scene.session.createTextMessage("x");
                sent.setJMSType("subject");
                sent.setStringProperty("k", "v");
                producer.send(sent);
                Message message = one(consumer);
                message.acknowledge();
                producer.send(message);
                Message again = one(consumer);
                again.acknowledge();
                equal(text(again), "x", "body");
                equal(again.getJMSType(), "subject", "subject");
                equal(again.getStringProperty("k"), "v", "property");
            }
        });

        SCENARIOS.put("max-delivery-count", () -> {
            try (Scene scene = new Scene("max-delivery-count")) {
                scene.send("poison");
                MessageConsumer consumer = scene.consumer();
                for (int count = 1; count <= 2; count++) {
                    Message message = one(consumer);
                    equal(deliveries(message), count, "delivery count");
                    settle(message, MODIFIED_FAILED);
                }
                equal(consumer.receive(1000), null, "messages in the queue itself");
                Message message = one(scene.deadLetters());
                equal(text(message), "poison", "dead letter");
                equal(message.getStringProperty("DeadLetterReason"), "MaxDeliveryCountExceeded", "reason");
                message.acknowledge();
            }
        });

        SCENARIOS.put("lock-expiry", () -> {
            try (Scene scene = new Scene("lock-expiry"); Scene other = new Scene("lock-expiry")) {
                scene.send("slow");
                Message message = one(scene.consumer());
                long started = now();
                MessageConsumer second = other.consumer();
                equal(second.receive(1000), null, "messages while locked");
                Message again = one(second, 12_000);
                truth(now() - started > 3500, "delivered again after " + (now() - started) + " ms");
                equal(again.getJMSMessageID(), message.getJMSMessageID(), "id");
                equal(deliveries(again), 2, "delivery count");
                again.acknowledge();
            }
        });

        SCENARIOS.put("time-to-live", () -> {
            try (Scene scene = new Scene("time-to-live"); MessageProducer producer = scene.producer()) {
                producer.setTimeToLive(1000);
                producer.send(scene.session.createTextMessage("short"));
                scene.send("long");
                Thread.sleep(1500);
                equal(allOf(scene.consumer(), 1), List.of("long"), "messages that arrived");
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("time-to-live-dead-letter", () -> {
            // Otherwise this client drops what has expired itself, in a dead-letter queue too.
            String options = "jms.localMessageExpiry=false";
            try (Scene scene = new Scene("time-to-live-dead-letter", options); MessageProducer producer = scene.producer()) {
                producer.setTimeToLive(1000);
                producer.send(scene.session.createTextMessage("short"));
                Thread.sleep(1500);
                equal(scene.consumer().receive(1000), null, "expired messages delivered");
                Message message = one(scene.deadLetters());
                equal(text(message), "short", "dead letter");
                equal(message.getStringProperty("DeadLetterReason"), "TTLExpiredException", "reason");
                message.acknowledge();
            }
        });

        SCENARIOS.put("prompt-return", () -> {
            try (Scene scene = new Scene("prompt-return"); MessageConsumer consumer = scene.consumer()) {
                long started = now();
                equal(consumer.receive(1000), null, "message of an empty queue");
                equal(consumer.receiveNoWait(), null, "message of an empty queue, at once");
                truth(now() - started < 4000, "empty receives took " + (now() - started) + " ms");
                scene.send("a", "b", "c");
                List<String> got = new ArrayList<>();
                for (Message m = consumer.receive(1000); m != null; m = consumer.receive(1000)) {
                    m.acknowledge();
                    got.add(text(m));
                }
                equal(got.stream().sorted().toList(), List.of("a", "b", "c"), "bodies");
                scene.send("d", "e");
                equal(allOf(consumer, 2).stream().sorted().toList(), List.of("d", "e"), "the rest");
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("prefetch", () -> {
            try (Scene scene = new Scene("prefetch", "jms.prefetchPolicy.all=50")) {
                scene.send(counting(0, 100).toArray(String[]::new));
                try (MessageConsumer consumer = scene.consumer()) {
                    equal(allOf(consumer, 100), counting(0, 100), "bodies");
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("push-receive", () -> {
            try (Scene scene = new Scene("push-receive", "jms.prefetchPolicy.all=10")) {
                List<String> received = Collections.synchronizedList(new ArrayList<>());
                CountDownLatch done = new CountDownLatch(20);
                Session session = scene.connection.createSession(Session.AUTO_ACKNOWLEDGE);
                session.createConsumer(scene.queue()).setMessageListener(message -> {
                    try {
                        received.add(text(message));
                    } catch (JMSException error) {
                        received.add(error.toString());
                    }
                    done.countDown();
                });
                scene.send(counting(0, 20).toArray(String[]::new));
                truth(done.await(20, TimeUnit.SECONDS), "messages handled: " + received);
                session.close();
                equal(new ArrayList<>(received), counting(0, 20), "bodies");
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("competing", () -> {
            try (Scene scene = new Scene("competing")) {
                scene.send(counting(100, 60).toArray(String[]::new));
                List<String> received = List.of(0, 1, 2).parallelStream().flatMap(i -> {
                    List<String> mine = new ArrayList<>();
                    try (Scene own = new Scene("competing"); MessageConsumer consumer = own.consumer()) {
                        for (Message m = consumer.receive(1000); m != null; m = consumer.receive(1000)) {
                            m.acknowledge();
                            mine.add(text(m));
                        }
                    } catch (JMSException error) {
                        throw new IllegalStateException(error);
                    }
                    return mine.stream();
                }).sorted().toList();
                equal(received, counting(100, 60), "bodies");
            }
        });

        SCENARIOS.put("connection-reuse", () -> {
            try (Scene scene = new Scene("connection-reuse")) {
                for (int i = 0; i < 4; i++) {
                    scene.send(i + " a", i + " b");
                    try (MessageConsumer first = scene.consumer(); MessageConsumer second = scene.consumer()) {
                        List<String> texts = Stream.of(allOf(first, 1), allOf(second, 1)).flatMap(List::stream).sorted().toList();
                        equal(texts, List.of(i + " a", i + " b"), "bodies");
                    }
                }
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("close-unsettled", () -> {
            try (Scene scene = new Scene("close-unsettled"); Scene other = new Scene("close-unsettled")) {
                scene.send("held");
                one(scene.consumer());
                scene.close();
                Message message = one(other.consumer(), 12_000);
                equal(text(message), "held", "second delivery");
                truth(deliveries(message) <= 2, "delivery count " + deliveries(message));
                message.acknowledge();
            }
        });

        SCENARIOS.put("connection-lost", () -> {
            try (Scene scene = new Scene("connection-lost")) {
                scene.send("held");
                killedWhileHolding(Jms.class, scene.name);
                Message message = one(scene.consumer(), 3000);
                equal(text(message) + deliveries(message), "held2", "second delivery");
                message.acknowledge();
            }
        });

        SCENARIOS.put("unknown-queue", () -> {
            try (Scene scene = new Scene("unknown-queue")) {
                Predicate<Throwable> notFound = is(InvalidDestinationException.class, "could not be found");
                fails(() -> scene.send("x"), notFound, "sending");
                fails(scene::consumer, notFound, "receiving");
            }
        });

        SCENARIOS.put("wrong-key", () -> {
            String keyName = CONFIG.get("key_name").asText();
            fails(() -> new Scene(queue("wrong-key"), "", keyName, "wrong"), is(JMSSecurityException.class, ""), "connecting");
            try (Scene scene = new Scene("wrong-key")) {
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("missing-right", () -> {
            try (Scene listener = Scene.login("missing-right", "listener");
                    Scene sender = Scene.login("missing-right", "sender")) {
                Predicate<Throwable> unauthorized = is(JMSSecurityException.class, "");
                fails(() -> listener.send("x"), unauthorized, "sending without the right");
                sender.send("x");
                fails(sender::consumer, unauthorized, "receiving without the right");
                equal(allOf(listener.consumer(), 1), List.of("x"), "bodies");
            }
        });

        SCENARIOS.put("oversized", () -> {
            try (Scene scene = new Scene("oversized"); MessageProducer producer = scene.producer()) {
                BytesMessage large = scene.session.createBytesMessage();
                large.writeBytes(new byte[100_000]);
                fails(() -> producer.send(large), is(JMSException.class, "limit"), "sending 100,000 bytes");
                producer.send(scene.session.createTextMessage("small"));
                equal(allOf(scene.consumer(), 1), List.of("small"), "messages that arrived");
            }
        });

        Predicate<Throwable> entityDisabled = is(JMSException.class, "entity-disabled");

        SCENARIOS.put("disabled", () -> {
            try (Scene scene = new Scene("disabled")) {
                fails(() -> scene.send("x"), entityDisabled, "sending");
                fails(scene::consumer, entityDisabled, "receiving");
            }
        });

        SCENARIOS.put("send-disabled", () -> {
            try (Scene scene = new Scene("send-disabled")) {
                fails(() -> scene.send("x"), entityDisabled, "sending");
                scene.nothingIsLeft();
            }
        });

        SCENARIOS.put("receive-disabled", () -> {
            try (Scene scene = new Scene("receive-disabled")) {
                scene.send("x");
                fails(scene::consumer, entityDisabled, "receiving");
            }
        });
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("--hold")) {
            Scene scene = new Scene(arguments[1], "", CONFIG.get("key_name").asText(), CONFIG.get("key").asText());
            one(scene.consumer());
            Harness.held();
        }
        SCENARIOS.putAll(JmsTopics.SCENARIOS);
        SCENARIOS.putAll(JmsSessions.SCENARIOS);
        SCENARIOS.putAll(JmsPartitioned.SCENARIOS);
        SCENARIOS.putAll(JmsCorners.SCENARIOS);
        Harness.main(arguments, SCENARIOS);
    }
}
