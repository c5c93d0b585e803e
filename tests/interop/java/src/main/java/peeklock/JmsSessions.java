package peeklock;

import static peeklock.Harness.fails;
import static peeklock.Jms.is;

import jakarta.jms.JMSException;
import jakarta.jms.Message;
import jakarta.jms.MessageProducer;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.function.Predicate;
import peeklock.Jms.Scene;

/** Those scenarios of session_scenarios.py for which no session has to be asked for. */
final class JmsSessions {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final Predicate<Throwable> NOT_ALLOWED = is(JMSException.class, "requires sessions");

    private JmsSessions() {}

    private static void send(Scene scene, String sessionId, String body) throws JMSException {
        try (MessageProducer producer = scene.producer()) {
            Message message = scene.session.createTextMessage(body);
            message.setStringProperty("JMSXGroupID", sessionId);
            producer.send(message);
        }
    }

    static {
        SCENARIOS.put("session-receiver-required", () -> {
            try (Scene scene = new Scene("session-receiver-required")) {
                send(scene, "a", "x");
                fails(scene::consumer, NOT_ALLOWED, "receiving");
            }
        });

        SCENARIOS.put("session-id-required", () -> {
            try (Scene scene = new Scene("session-id-required")) {
                fails(() -> scene.send("bare"), NOT_ALLOWED, "sending");
                send(scene, "a", "good");
            }
        });
    }
}
