package peeklock;

import static peeklock.Harness.equal;
import static peeklock.Harness.now;
import static peeklock.Harness.truth;
import static peeklock.Jms.one;
import static peeklock.Jms.text;

import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.TextMessage;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import peeklock.Jms.Scene;

/** The scenarios of corner_scenarios.py with Qpid JMS. */
final class JmsCorners {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();

    private JmsCorners() {}

    private static Message completed(Scene scene, String address) throws JMSException {
        try (MessageConsumer consumer = scene.session.createConsumer(scene.session.createQueue(address))) {
            Message message = one(consumer);
            message.acknowledge();
            return message;
        }
    }

    static {
        SCENARIOS.put("expiry-forwarded", () -> {
            try (Scene scene = new Scene("expiry-forwarded")) {
                scene.send("m");
                Message message = completed(scene, scene.name + "-1");
                String reason = message.getStringProperty("DeadLetterReason");
                equal(text(message) + " " + reason, "m TTLExpiredException", "message");
            }
        });

        SCENARIOS.put("rule-conversions", () -> {
            try (Scene scene = new Scene("rule-conversions");
                    MessageProducer producer = scene.session.createProducer(scene.session.createTopic(scene.name))) {
                for (String type : List.of("n-8", "n-7")) {
                    TextMessage message = scene.session.createTextMessage(type);
                    message.setJMSType(type);
                    message.setIntProperty("number", 7);
                    producer.send(message);
                }
                long sent = now();
                Message message = completed(scene, scene.name + "/Subscriptions/a");
                equal(text(message) + " " + message.getJMSCorrelationID(), "n-7 7", "message and correlation id");
                equal(message.getStringProperty("joined"), "n-7", "text and number");
                long left = message.getJMSExpiration() - sent;
                truth(left > 590_000 && left < 610_000, "it lives for " + left + " ms");
            }
        });

        SCENARIOS.put("action-delay", () -> {
            try (Scene scene = new Scene("action-delay");
                    MessageProducer producer = scene.session.createProducer(scene.session.createTopic(scene.name))) {
                long began = now();
                producer.send(scene.session.createTextMessage("m"));
                equal(text(completed(scene, scene.name + "/Subscriptions/now")), "m", "the other copy");
                equal(text(completed(scene, scene.name + "/Subscriptions/later")), "m", "the copy");
                truth(now() - began >= 3000, "the copy came too early");
            }
        });
    }
}
