package peeklock;

import static peeklock.Azure.allOf;
import static peeklock.Azure.body;
import static peeklock.Azure.one;
import static peeklock.Azure.reason;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.now;
import static peeklock.Harness.truth;

import com.azure.core.util.BinaryData;
import com.azure.messaging.servicebus.ServiceBusFailureReason;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.ServiceBusMessageState;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.HashMap;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import peeklock.Azure.Scene;

/** The scenarios of corner_scenarios.py with azure-messaging-servicebus. */
final class AzureCorners {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final int REASON_LIMIT = 4096; // characters of a reason that are kept

    private AzureCorners() {}

    private static ServiceBusReceiverClient subscription(Scene scene, String name) {
        return scene.builder.receiver().topicName(scene.queue).subscriptionName(name)
            .maxAutoLockRenewDuration(Duration.ZERO).buildClient();
    }

    private static void publish(Scene scene, ServiceBusMessage... messages) {
        try (ServiceBusSenderClient sender = scene.builder.sender().topicName(scene.queue).buildClient()) {
            for (ServiceBusMessage message : messages) {
                sender.sendMessage(message);
            }
        }
    }

    private static ServiceBusReceivedMessage completed(ServiceBusReceiverClient receiver) {
        try (receiver) {
            ServiceBusReceivedMessage message = one(receiver);
            receiver.complete(message);
            return message;
        }
    }

    private static ServiceBusMessage ofSize(int bytes) {
        return new ServiceBusMessage(BinaryData.fromBytes(new byte[bytes]));
    }

    /** How far a copy was enqueued behind the time until which it was delayed. */
    private static Duration late(ServiceBusReceivedMessage message) {
        return Duration.between(message.getScheduledEnqueueTime(), message.getEnqueuedTime());
    }

    static {
        SCENARIOS.put("deferral-count", () -> {
            Scene scene = new Scene("deferral-count");
            scene.send("m");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                equal(message.getDeliveryCount(), 0L, "delivery count at first");
                long number = message.getSequenceNumber();
                receiver.defer(message);
                message = receiver.receiveDeferredMessage(number);
                equal(message.getDeliveryCount(), 1L, "delivery count after a deferral");
                receiver.abandon(message);
                message = receiver.receiveDeferredMessage(number);
                equal(message.getDeliveryCount(), 2L, "delivery count after an abandon");
                receiver.defer(message);
            }
            ServiceBusReceivedMessage letter = completed(scene.deadLetters());
            equal(body(letter) + " " + letter.getDeadLetterReason(), "m MaxDeliveryCountExceeded", "dead letter");
            scene.nothingIsLeft();
        });

        SCENARIOS.put("message-states", () -> {
            Scene scene = new Scene("message-states");
            try (ServiceBusSenderClient sender = scene.sender()) {
                sender.scheduleMessage(new ServiceBusMessage("scheduled"), OffsetDateTime.now().plusSeconds(4));
                for (boolean firstAcquirer : new boolean[] {true, false}) {
                    ServiceBusMessage message = new ServiceBusMessage(String.valueOf(firstAcquirer));
                    message.getRawAmqpMessage().getHeader().setFirstAcquirer(firstAcquirer);
                    sender.sendMessage(message);
                }
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> messages = allOf(receiver, 3, false);
                Map<String, ServiceBusMessageState> states = new HashMap<>();
                for (ServiceBusReceivedMessage message : messages) {
                    states.put(body(message), message.getState());
                    if (!body(message).equals("scheduled")) {
                        Boolean firstAcquirer = message.getRawAmqpMessage().getHeader().isFirstAcquirer();
                        // This SDK shows no value for false.
                        equal(firstAcquirer, body(message).equals("true") ? true : null, "first-acquirer");
                    }
                }
                Map<String, ServiceBusMessageState> expected = Map.of("scheduled", ServiceBusMessageState.SCHEDULED,
                    "true", ServiceBusMessageState.ACTIVE, "false", ServiceBusMessageState.ACTIVE);
                equal(states, expected, "states");
                receiver.defer(messages.get(0));
                ServiceBusReceivedMessage deferred =
                    receiver.receiveDeferredMessage(messages.get(0).getSequenceNumber());
                equal(deferred.getState(), ServiceBusMessageState.DEFERRED, "state of a deferred message");
            }
        });

        SCENARIOS.put("large-requests", () -> {
            Scene scene = new Scene("large-requests");
            OffsetDateTime later = OffsetDateTime.now().plusHours(1);
            try (ServiceBusSenderClient sender = scene.sender(); ServiceBusReceiverClient receiver = scene.receiver()) {
                long number = sender.scheduleMessage(ofSize(262_000), later);
                equal(receiver.peekMessage(number).getBody().toBytes().length, 262_000, "bytes browsed");
                long began = now();
                fails(() -> sender.scheduleMessage(ofSize(300_000), later),
                    reason(ServiceBusFailureReason.MESSAGE_SIZE_EXCEEDED), "scheduling 300,000 bytes");
                truth(now() - began < 15_000, "the error took its time");
                sender.cancelScheduledMessage(number);
            }
        });

        SCENARIOS.put("long-reason", () -> {
            Scene scene = new Scene("long-reason");
            scene.send("bad");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                receiver.deadLetter(one(receiver), new DeadLetterOptions()
                    .setDeadLetterReason("r".repeat(40_000)).setDeadLetterErrorDescription("description"));
            }
            ServiceBusReceivedMessage letter = completed(scene.deadLetters());
            equal(letter.getDeadLetterReason(), "r".repeat(REASON_LIMIT), "reason");
            equal(letter.getDeadLetterErrorDescription(), "description", "description");
        });

        SCENARIOS.put("expiry-forwarded", () -> {
            Scene scene = new Scene("expiry-forwarded");
            scene.send("m");
            ServiceBusReceivedMessage message =
                completed(scene.builder.receiver().queueName(scene.queue + "-1").buildClient());
            equal(body(message) + " " + message.getDeadLetterReason(), "m TTLExpiredException", "message");
        });

        SCENARIOS.put("rule-conversions", () -> {
            Scene scene = new Scene("rule-conversions");
            for (String subject : List.of("n-8", "n-7")) {
                ServiceBusMessage message = new ServiceBusMessage(subject).setSubject(subject);
                message.getApplicationProperties().put("number", 7);
                publish(scene, message);
            }
            ServiceBusReceivedMessage message = completed(subscription(scene, "a"));
            equal(body(message) + " " + message.getCorrelationId(), "n-7 7", "message and correlation id");
            equal(message.getApplicationProperties().get("joined"), "n-7", "text and number");
            equal(message.getTimeToLive(), Duration.ofMinutes(10), "time to live");
        });

        SCENARIOS.put("action-delay", () -> {
            Scene scene = new Scene("action-delay");
            long began = now();
            publish(scene, new ServiceBusMessage("m"));
            ServiceBusReceivedMessage first = completed(subscription(scene, "now"));
            equal(first.getState(), ServiceBusMessageState.ACTIVE, "state of the other copy");
            equal(first.getScheduledEnqueueTime(), null, "its time");
            ServiceBusReceivedMessage message = completed(subscription(scene, "later"));
            truth(now() - began >= 3000, "the copy came too early");
            equal(message.getState(), ServiceBusMessageState.SCHEDULED, "state");
            truth(!late(message).isNegative() && late(message).toSeconds() < 15, "late by " + late(message));
        });
    }
}
