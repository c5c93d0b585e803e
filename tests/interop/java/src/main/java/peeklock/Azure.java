package peeklock;

import static peeklock.Harness.CONFIG;
import static peeklock.Harness.counting;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.keyOf;
import static peeklock.Harness.killedWhileHolding;
import static peeklock.Harness.local;
import static peeklock.Harness.now;
import static peeklock.Harness.queue;
import static peeklock.Harness.truth;

import com.azure.core.amqp.AmqpRetryOptions;
import com.azure.core.amqp.exception.AmqpErrorCondition;
import com.azure.core.amqp.exception.AmqpException;
import com.azure.core.amqp.models.AmqpMessageBody;
import com.azure.core.util.BinaryData;
import com.azure.core.util.IterableStream;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusException;
import com.azure.messaging.servicebus.ServiceBusFailureReason;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusMessageBatch;
import com.azure.messaging.servicebus.ServiceBusProcessorClient;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderAsyncClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusTransactionContext;
import com.azure.messaging.servicebus.models.CompleteOptions;
import com.azure.messaging.servicebus.models.AbandonOptions;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.ServiceBusMessageState;
import com.azure.messaging.servicebus.models.ServiceBusReceiveMode;
import com.azure.messaging.servicebus.models.SubQueue;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.UUID;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Predicate;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import reactor.core.publisher.Flux;

/** The scenarios of scenarios.py with azure-messaging-servicebus. */
public final class Azure {
    private static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final Duration WAIT = Duration.ofSeconds(30); // for what comes at once, on a busy machine
    private static final Duration SHORT = Duration.ofSeconds(1);

    private Azure() {}

    /** One connection and the queue of one scenario. */
    static final class Scene {
        final String queue;
        final ServiceBusClientBuilder builder;

        Scene(String queue, String connectionString, Duration tryTimeout) {
            this.queue = queue;
            this.builder = new ServiceBusClientBuilder()
                .connectionString(CONFIG.get(connectionString).asText())
                .retryOptions(new AmqpRetryOptions().setMaxRetries(0).setTryTimeout(tryTimeout));
        }

        Scene(String queue, String connectionString) {
            this(queue, connectionString, Duration.ofSeconds(15));
        }

        Scene(String name) {
            this(queue(name), "connection_string");
        }

        ServiceBusSenderClient sender() {
            return builder.sender().queueName(queue).buildClient();
        }

        /** The message with a partition key, if its order matters. */
        ServiceBusMessage keyed(ServiceBusMessage message) {
            String key = keyOf(queue);
            return key == null ? message : message.setPartitionKey(key);
        }

        ServiceBusMessage keyed(String body) {
            return keyed(new ServiceBusMessage(body));
        }

        void post(ServiceBusMessage... messages) {
            try (ServiceBusSenderClient sender = sender()) {
                for (ServiceBusMessage message : messages) {
                    sender.sendMessage(message);
                }
            }
        }

        void send(String... bodies) {
            post(Arrays.stream(bodies).map(this::keyed).toArray(ServiceBusMessage[]::new));
        }

        ServiceBusClientBuilder.ServiceBusReceiverClientBuilder receiving() {
            return builder.receiver().queueName(queue).maxAutoLockRenewDuration(Duration.ZERO);
        }

        ServiceBusReceiverClient receiver() {
            return receiving().buildClient();
        }

        ServiceBusReceiverClient deadLetters() {
            return receiving().subQueue(SubQueue.DEAD_LETTER_QUEUE).buildClient();
        }

        void nothingIsLeft() {
            try (ServiceBusReceiverClient receiver = receiver()) {
                none(receiver, "messages left");
                equal(bodies(receiver.peekMessages(10, 1)), List.of(), "messages left to browse");
            }
        }
    }

    static ServiceBusReceivedMessage one(ServiceBusReceiverClient receiver, Duration wait) {
        List<ServiceBusReceivedMessage> messages = receiver.receiveMessages(1, wait).stream().toList();
        equal(messages.size(), 1, "messages received");
        return messages.get(0);
    }

    static ServiceBusReceivedMessage one(ServiceBusReceiverClient receiver) {
        return one(receiver, WAIT);
    }

    static void none(ServiceBusReceiverClient receiver, String what) {
        equal(bodies(receiver.receiveMessages(1, SHORT)), List.of(), what);
    }

    static List<ServiceBusReceivedMessage> allOf(ServiceBusReceiverClient receiver, int count, boolean complete) {
        List<ServiceBusReceivedMessage> all = new ArrayList<>();
        while (all.size() < count) {
            List<ServiceBusReceivedMessage> some =
                receiver.receiveMessages(Math.min(100, count - all.size()), WAIT).stream().toList();
            truth(!some.isEmpty(), all.size() + " of " + count + " messages arrived");
            if (complete) {
                some.forEach(receiver::complete);
            }
            all.addAll(some);
        }
        return all;
    }

    static List<ServiceBusReceivedMessage> allOf(ServiceBusReceiverClient receiver, int count) {
        return allOf(receiver, count, true);
    }

    static String body(ServiceBusReceivedMessage message) {
        return message.getBody().toString();
    }

    static List<String> bodies(Iterable<ServiceBusReceivedMessage> messages) {
        List<String> texts = new ArrayList<>();
        messages.forEach(message -> texts.add(body(message)));
        return texts;
    }

    static List<String> sorted(List<String> texts) {
        return texts.stream().sorted().toList();
    }

    static Predicate<Throwable> reason(ServiceBusFailureReason expected) {
        return error -> error instanceof ServiceBusException failure && failure.getReason().equals(expected);
    }

    /** A receiver that could not be opened says only that it is terminated; the broker's error is among its causes. */
    static Predicate<Throwable> causedBy(AmqpErrorCondition expected) {
        return error -> {
            for (Throwable cause = error; cause != null; cause = cause.getCause()) {
                if (cause instanceof AmqpException failure && failure.getErrorCondition() == expected) {
                    return true;
                }
            }
            return false;
        };
    }

    static void sleep(long milliseconds) {
        try {
            Thread.sleep(milliseconds);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error);
        }
    }

    static {
        SCENARIOS.put("send-complete", () -> {
            Scene scene = new Scene("send-complete");
            scene.send("hello");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                equal(body(message), "hello", "body");
                equal(message.getDeliveryCount(), 0L, "delivery count");
                receiver.complete(message);
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("duplicates", () -> {
            Scene scene = new Scene("duplicates");
            scene.post(new ServiceBusMessage("a").setMessageId("1"), new ServiceBusMessage("b").setMessageId("1"),
                new ServiceBusMessage("c").setMessageId("2"));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(sorted(bodies(allOf(receiver, 2))), List.of("a", "c"), "bodies");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("transactions", () -> {
            Scene scene = new Scene("transactions");
            scene.send("old");
            try (ServiceBusReceiverClient receiver = scene.receiver(); ServiceBusSenderClient sender = scene.sender()) {
                ServiceBusReceivedMessage old = one(receiver);
                ServiceBusTransactionContext rolledBack = sender.createTransaction();
                sender.sendMessage(scene.keyed("never"), rolledBack);
                receiver.complete(old, new CompleteOptions().setTransactionContext(rolledBack));
                sender.rollbackTransaction(rolledBack);
                receiver.renewMessageLock(old);

                ServiceBusTransactionContext committed = sender.createTransaction();
                sender.sendMessage(scene.keyed("a"), committed);
                sender.sendMessages(List.of(scene.keyed("b"), scene.keyed("c")), committed);
                none(receiver, "messages before the commit");
                sender.commitTransaction(committed);
                equal(bodies(allOf(receiver, 3)), List.of("a", "b", "c"), "bodies");

                scene.send("last");
                ServiceBusReceivedMessage last = one(receiver);
                ServiceBusTransactionContext settling = sender.createTransaction();
                receiver.complete(last, new CompleteOptions().setTransactionContext(settling));
                sender.commitTransaction(settling);
                fails(() -> receiver.renewMessageLock(last), reason(ServiceBusFailureReason.MESSAGE_LOCK_LOST), "renewing");
            }
        });

        SCENARIOS.put("transactions-across", () -> {
            Scene scene = new Scene("transactions-across");
            List<String> others = List.of(scene.queue + "-1", scene.queue + "-2", scene.queue + "-3");
            ServiceBusClientBuilder across = new ServiceBusClientBuilder()
                .connectionString(CONFIG.get("connection_string").asText())
                .retryOptions(new AmqpRetryOptions().setMaxRetries(0).setTryTimeout(Duration.ofSeconds(15)))
                .enableCrossEntityTransactions();
            scene.send("old", "last");
            try (ServiceBusReceiverClient receiver = across.receiver().queueName(scene.queue)
                    .maxAutoLockRenewDuration(Duration.ZERO).buildClient()) {
                ServiceBusReceivedMessage old = one(receiver);
                List<ServiceBusSenderClient> senders = others.stream()
                    .map(other -> across.sender().queueName(other).buildClient()).toList();
                ServiceBusTransactionContext rolledBack = senders.get(0).createTransaction();
                receiver.complete(old, new CompleteOptions().setTransactionContext(rolledBack));
                senders.forEach(sender -> sender.sendMessage(scene.keyed("never"), rolledBack));
                senders.get(0).rollbackTransaction(rolledBack);
                receiver.renewMessageLock(old); // the SDK itself does not settle it again

                ServiceBusReceivedMessage last = one(receiver);
                ServiceBusTransactionContext committed = senders.get(0).createTransaction();
                senders.forEach(sender -> sender.sendMessage(scene.keyed("a"), committed));
                receiver.complete(last, new CompleteOptions().setTransactionContext(committed));
                senders.forEach(sender -> sender.sendMessages(List.of(scene.keyed("b")), committed));
                try (ServiceBusReceiverClient early = scene.builder.receiver().queueName(others.get(0)).buildClient()) {
                    none(early, "messages before the commit");
                }
                senders.get(0).commitTransaction(committed);
                equal(bodies(receiver.peekMessages(10, 1)), List.of("old"), "messages left");
                senders.forEach(ServiceBusSenderClient::close);
            }
            for (String other : others) {
                try (ServiceBusReceiverClient receiver = scene.builder.receiver().queueName(other).buildClient()) {
                    equal(bodies(allOf(receiver, 2)), List.of("a", "b"), "bodies in " + other);
                    none(receiver, "messages left in " + other);
                }
            }
        });

        SCENARIOS.put("properties", () -> {
            Scene scene = new Scene("properties");
            scene.post(new ServiceBusMessage("x").setMessageId("id-1").setSubject("subject")
                .setCorrelationId("correlation").setContentType("text/plain").setTo("to-somebody").setReplyTo("reply-to")
                .setReplyToSessionId("reply-session").setPartitionKey("key").setTimeToLive(Duration.ofHours(1)));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                equal(message.getMessageId(), "id-1", "message id");
                equal(message.getSubject(), "subject", "subject");
                equal(message.getCorrelationId(), "correlation", "correlation id");
                equal(message.getContentType(), "text/plain", "content type");
                equal(message.getTo(), "to-somebody", "to");
                equal(message.getReplyTo(), "reply-to", "reply to");
                equal(message.getReplyToSessionId(), "reply-session", "reply to session id");
                equal(message.getPartitionKey(), "key", "partition key");
                equal(message.getTimeToLive(), Duration.ofHours(1), "time to live");
                equal(local(message.getSequenceNumber()), 1L, "sequence number");
                OffsetDateTime enqueued = message.getEnqueuedTime();
                truth(Math.abs(enqueued.toInstant().toEpochMilli() - now()) < 30_000, "enqueued " + enqueued);
                truth(message.getLockedUntil().isAfter(OffsetDateTime.now()), "locked until " + message.getLockedUntil());
                equal(message.getExpiresAt(), enqueued.plusHours(1), "expires");
                equal(UUID.fromString(message.getLockToken()).toString(), message.getLockToken(), "lock token");
                receiver.complete(message);
            }
        });

        SCENARIOS.put("application-properties", () -> {
            Scene scene = new Scene("application-properties");
            Map<String, Object> sent = new HashMap<>(Map.of("text", "grüße 🐇", "byte", (byte) -8, "short", (short) -300,
                "int", -70000, "long", -(1L << 40), "float", 1.5f, "double", 2.5, "yes", true, "no", false));
            sent.put("uuid", UUID.fromString("00112233-4455-6677-8899-aabbccddeeff"));
            sent.put("char", 'ß');
            ServiceBusMessage message = new ServiceBusMessage("x");
            message.getApplicationProperties().putAll(sent);
            OffsetDateTime when = OffsetDateTime.parse("2024-01-02T03:04:05.678Z");
            message.getApplicationProperties().put("when", when);
            message.getApplicationProperties().put("duration", Duration.ofSeconds(90));
            scene.post(message);
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage received = one(receiver);
                Map<String, Object> got = new HashMap<>(received.getApplicationProperties());
                equal(((OffsetDateTime) got.remove("when")).toInstant(), when.toInstant(), "date");
                equal(got.remove("duration"), Duration.ofSeconds(90), "duration");
                equal(got, sent, "application properties");
                receiver.complete(received);
            }
        });

        SCENARIOS.put("bodies", () -> {
            Scene scene = new Scene("bodies");
            byte[] binary = new byte[1024];
            for (int i = 0; i < binary.length; i++) {
                binary[i] = (byte) i;
            }
            List<Object> sequence = List.of(1L, "b", true);
            scene.post(Stream.of(new ServiceBusMessage(binary), new ServiceBusMessage(new byte[0]),
                new ServiceBusMessage(AmqpMessageBody.fromValue("value")),
                new ServiceBusMessage(AmqpMessageBody.fromValue(7L)),
                new ServiceBusMessage(AmqpMessageBody.fromSequence(sequence)))
                .map(scene::keyed).toArray(ServiceBusMessage[]::new));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<AmqpMessageBody> got =
                    allOf(receiver, 5).stream().map(message -> message.getRawAmqpMessage().getBody()).toList();
                truth(Arrays.equals(got.get(0).getFirstData(), binary), "binary body");
                equal(got.get(1).getFirstData().length, 0, "length of an empty body");
                equal(got.get(2).getValue(), "value", "value body");
                equal(got.get(3).getValue(), 7L, "number as value body");
                equal(got.get(4).getSequence(), sequence, "sequence body");
            }
        });

        SCENARIOS.put("batch", () -> {
            Scene scene = new Scene("batch");
            try (ServiceBusSenderClient sender = scene.sender()) {
                ServiceBusMessageBatch batch = sender.createMessageBatch();
                for (int i = 0; i < 100; i++) {
                    ServiceBusMessage message = new ServiceBusMessage("message " + i).setMessageId(String.valueOf(i));
                    truth(batch.tryAddMessage(message), "the batch is full");
                }
                sender.sendMessages(batch);
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> messages = allOf(receiver, 100);
                for (int i = 0; i < 100; i++) {
                    ServiceBusReceivedMessage message = messages.get(i);
                    equal(message.getMessageId(), String.valueOf(i), "id");
                    equal(local(message.getSequenceNumber()), i + 1L, "sequence number");
                    equal(body(message), "message " + i, "body");
                }
            }
        });

        SCENARIOS.put("large-message", () -> {
            Scene scene = new Scene("large-message");
            byte[] content = new byte[900 * 1024];
            for (int i = 0; i < content.length; i++) {
                content[i] = (byte) (i * 31 % 251);
            }
            scene.post(new ServiceBusMessage(content));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver, Duration.ofSeconds(20));
                truth(Arrays.equals(message.getBody().toBytes(), content), "the body differs");
                receiver.complete(message);
            }
        });

        SCENARIOS.put("pipelined", () -> {
            Scene scene = new Scene("pipelined");
            String content = "x".repeat(100);
            try (ServiceBusSenderAsyncClient sender = scene.builder.sender().queueName(scene.queue).buildAsyncClient()) {
                Flux.range(0, 2000)
                    .flatMap(i -> sender.sendMessage(new ServiceBusMessage(content).setMessageId(String.valueOf(i))), 100)
                    .then()
                    .block(Duration.ofSeconds(40));
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                Set<String> ids = new HashSet<>();
                allOf(receiver, 2000).forEach(message -> ids.add(message.getMessageId()));
                equal(ids.size(), 2000, "distinct ids");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("receive-and-delete", () -> {
            Scene scene = new Scene("receive-and-delete");
            scene.send("a", "b");
            try (ServiceBusReceiverClient receiver = scene.builder.receiver().queueName(scene.queue)
                    .receiveMode(ServiceBusReceiveMode.RECEIVE_AND_DELETE).buildClient()) {
                equal(bodies(allOf(receiver, 2, false)), List.of("a", "b"), "bodies");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("abandon", () -> {
            Scene scene = new Scene("abandon");
            scene.post(scene.keyed("first").setMessageId("id"), scene.keyed("second"));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                equal(body(message) + message.getDeliveryCount(), "first0", "first delivery");
                receiver.abandon(message);
                ServiceBusReceivedMessage again = one(receiver);
                equal(body(again) + again.getDeliveryCount() + again.getMessageId(), "first1id", "second delivery");
                truth(!again.getLockToken().equals(message.getLockToken()), "the lock token is the old one");
                receiver.complete(again);
                ServiceBusReceivedMessage last = one(receiver);
                equal(body(last), "second", "next message");
                receiver.complete(last);
            }
        });

        SCENARIOS.put("abandon-properties", () -> {
            Scene scene = new Scene("abandon-properties");
            ServiceBusMessage sent = new ServiceBusMessage("x");
            sent.getApplicationProperties().putAll(Map.of("kept", 1, "changed", "before"));
            scene.post(sent);
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                Map<String, Object> change = Map.of("changed", "after", "added", 5);
                receiver.abandon(one(receiver), new AbandonOptions().setPropertiesToModify(change));
                ServiceBusReceivedMessage message = one(receiver);
                Map<String, Object> expected = Map.of("kept", 1, "changed", "after", "added", 5);
                equal(new HashMap<>(message.getApplicationProperties()), new HashMap<>(expected), "application properties");
                receiver.complete(message);
            }
        });

        SCENARIOS.put("defer", () -> {
            Scene scene = new Scene("defer");
            scene.send("later");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                receiver.defer(message);
                none(receiver, "deliveries of a deferred message");
                long number = message.getSequenceNumber();
                ServiceBusReceivedMessage deferred = receiver.receiveDeferredMessage(number);
                equal(body(deferred), "later", "deferred message");
                equal(deferred.getState(), ServiceBusMessageState.DEFERRED, "state");
                receiver.complete(deferred);
                // This SDK takes message-not-found for an empty answer.
                equal(bodies(receiver.receiveDeferredMessageBatch(List.of(number))), List.of(), "a completed message");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("dead-letter", () -> {
            Scene scene = new Scene("dead-letter");
            ServiceBusMessage sent = new ServiceBusMessage("bad").setMessageId("id");
            sent.getApplicationProperties().put("kept", "yes");
            scene.post(sent);
            try (ServiceBusReceiverClient receiver = scene.receiver(); ServiceBusReceiverClient letters = scene.deadLetters()) {
                receiver.deadLetter(one(receiver), new DeadLetterOptions().setDeadLetterReason("my reason")
                    .setDeadLetterErrorDescription("my description").setPropertiesToModify(Map.of("added", 7)));
                none(receiver, "messages in the queue itself");
                ServiceBusReceivedMessage message = one(letters);
                equal(body(message) + message.getMessageId(), "badid", "dead-lettered message");
                equal(message.getDeadLetterReason(), "my reason", "reason");
                equal(message.getDeadLetterErrorDescription(), "my description", "description");
                equal(message.getApplicationProperties().get("kept"), "yes", "property of the sender");
                equal(message.getApplicationProperties().get("added"), 7, "property of the receiver");
                equal(message.getDeadLetterSource(), scene.queue, "source");
                letters.complete(message);
                none(letters, "dead letters left");
            }
        });

        SCENARIOS.put("dead-letter-queue", () -> {
            Scene scene = new Scene("dead-letter-queue");
            scene.post(new ServiceBusMessage("bad").setTimeToLive(Duration.ofSeconds(3)));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                receiver.deadLetter(one(receiver), new DeadLetterOptions().setDeadLetterReason("because"));
            }
            sleep(3500);
            try (ServiceBusReceiverClient letters = scene.deadLetters()) {
                equal(bodies(letters.peekMessages(5, 1)), List.of("bad"), "browsed");
                ServiceBusReceivedMessage message = one(letters);
                letters.abandon(message);
                ServiceBusReceivedMessage again = one(letters);
                equal(again.getDeliveryCount(), message.getDeliveryCount(), "delivery count");
                equal(again.getDeadLetterReason(), "because", "reason");
                letters.complete(again);
                equal(bodies(letters.peekMessages(5, 1)), List.of(), "left");
            }
        });

        SCENARIOS.put("max-delivery-count", () -> {
            Scene scene = new Scene("max-delivery-count");
            scene.send("poison");
            try (ServiceBusReceiverClient receiver = scene.receiver(); ServiceBusReceiverClient letters = scene.deadLetters()) {
                for (long count = 0; count < 2; count++) {
                    ServiceBusReceivedMessage message = one(receiver);
                    equal(message.getDeliveryCount(), count, "delivery count");
                    receiver.abandon(message);
                }
                none(receiver, "messages in the queue itself");
                ServiceBusReceivedMessage message = one(letters);
                equal(body(message), "poison", "dead letter");
                equal(message.getDeadLetterReason(), "MaxDeliveryCountExceeded", "reason");
                letters.complete(message);
            }
        });

        SCENARIOS.put("lock-expiry", () -> {
            Scene scene = new Scene("lock-expiry");
            scene.send("slow");
            try (ServiceBusReceiverClient first = scene.receiver(); ServiceBusReceiverClient second = scene.receiver()) {
                ServiceBusReceivedMessage message = one(first);
                long started = now();
                none(second, "messages while locked");
                ServiceBusReceivedMessage again = one(second, Duration.ofSeconds(12));
                truth(now() - started > 3500, "delivered again after " + (now() - started) + " ms");
                equal(again.getMessageId(), message.getMessageId(), "id");
                equal(again.getDeliveryCount(), 1L, "delivery count");
                second.complete(again);
            }
        });

        SCENARIOS.put("renew-lock", () -> {
            Scene scene = new Scene("renew-lock");
            scene.send("slow");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                OffsetDateTime before = message.getLockedUntil();
                sleep(3000);
                OffsetDateTime until = receiver.renewMessageLock(message);
                truth(until.isAfter(before.plusSeconds(2)), "renewed from " + before + " to " + until);
                sleep(3500);
                receiver.complete(message);
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("auto-renew", () -> {
            Scene scene = new Scene("auto-renew");
            scene.send("slow");
            AtomicReference<Throwable> failure = new AtomicReference<>();
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                receiver.renewMessageLock(message, Duration.ofSeconds(60), failure::set);
                sleep(8000);
                equal(failure.get(), null, "error of the renewer");
                receiver.complete(message);
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("auto-renew-many", () -> {
            Scene scene = new Scene("auto-renew-many");
            List<ServiceBusMessage> sent = new ArrayList<>();
            for (int i = 0; i < 300; i++) {
                sent.add(new ServiceBusMessage("x"));
            }
            try (ServiceBusSenderClient sender = scene.sender()) {
                sender.sendMessages(sent);
            }
            AtomicReference<Throwable> failure = new AtomicReference<>();
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> held = allOf(receiver, 300, false);
                held.forEach(message -> receiver.renewMessageLock(message, Duration.ofSeconds(60), failure::set));
                sleep(47_000);
                equal(failure.get(), null, "error of the renewer");
                held.forEach(receiver::complete);
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("send-again", () -> {
            Scene scene = new Scene("send-again");
            ServiceBusMessage sent = new ServiceBusMessage("x").setMessageId("id").setSubject("s");
            sent.setSessionId("ключ").setPartitionKey("ключ").getApplicationProperties().put("k", "v");
            scene.post(sent);
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                receiver.complete(message);
                scene.post(new ServiceBusMessage(message));
                ServiceBusReceivedMessage again = one(receiver);
                receiver.complete(again);
                equal(List.of(again.getMessageId(), again.getSubject(), again.getSessionId(), again.getPartitionKey()),
                    List.of("id", "s", "ключ", "ключ"), "what it had");
                equal(again.getApplicationProperties().get("k"), "v", "property");
            }
        });

        SCENARIOS.put("lock-lost", () -> {
            Scene scene = new Scene("lock-lost");
            scene.send("slow");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver);
                sleep(6000);
                Predicate<Throwable> lost = reason(ServiceBusFailureReason.MESSAGE_LOCK_LOST);
                fails(() -> receiver.renewMessageLock(message), lost, "renewing a lost lock");
                fails(() -> receiver.complete(message), lost, "completing after the lock");
                ServiceBusReceivedMessage again = one(receiver);
                equal(again.getMessageId(), message.getMessageId(), "id");
                equal(again.getDeliveryCount(), 1L, "delivery count");
                receiver.complete(again);
            }
        });

        SCENARIOS.put("peek", () -> {
            Scene scene = new Scene("peek");
            scene.send("a", "b", "c", "d", "e");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> browsed = receiver.peekMessages(10).stream().toList();
                equal(bodies(browsed), List.of("a", "b", "c", "d", "e"), "browsed");
                long third = browsed.get(2).getSequenceNumber();
                List<ServiceBusReceivedMessage> some = receiver.peekMessages(2, third).stream().toList();
                equal(bodies(some), List.of("c", "d"), "browsed from a number");
                equal(local(third), 3L, "its number");
                truth(browsed.stream().allMatch(message -> message.getLockedUntil() == null), "browsed as locked");
                ServiceBusReceivedMessage locked = one(receiver);
                List<ServiceBusReceivedMessage> looked = receiver.peekMessages(2, locked.getSequenceNumber()).stream().toList();
                equal(looked.get(0).getLockedUntil(), locked.getLockedUntil(), "end of the lock");
                equal(looked.get(1).getLockedUntil(), null, "end of the lock of the next");
                receiver.complete(locked);
                equal(allOf(receiver, 4).size(), 4, "received after browsing");
                equal(bodies(receiver.peekMessages(10, 1)), List.of(), "browsed when empty");
            }
        });

        SCENARIOS.put("schedule", () -> {
            Scene scene = new Scene("schedule");
            OffsetDateTime due = OffsetDateTime.now().plusSeconds(6);
            long number;
            try (ServiceBusSenderClient sender = scene.sender()) {
                number = sender.scheduleMessage(new ServiceBusMessage("later"), due);
                sender.sendMessage(new ServiceBusMessage("later too").setScheduledEnqueueTime(due));
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> browsed = receiver.peekMessages(5).stream().toList();
                equal(sorted(bodies(browsed)), List.of("later", "later too"), "browsed");
                truth(browsed.stream().allMatch(m -> m.getState() == ServiceBusMessageState.SCHEDULED), "state");
                truth(browsed.stream().anyMatch(m -> m.getSequenceNumber() == number), "the number returned is not there");
                none(receiver, "messages before their time");
                List<ServiceBusReceivedMessage> messages = allOf(receiver, 2);
                Duration late = Duration.between(due, OffsetDateTime.now());
                truth(!late.isNegative() && late.toSeconds() < 5, "late by " + late);
                equal(sorted(bodies(messages)), List.of("later", "later too"), "bodies");
            }
        });

        SCENARIOS.put("cancel-scheduled", () -> {
            Scene scene = new Scene("cancel-scheduled");
            try (ServiceBusSenderClient sender = scene.sender()) {
                List<ServiceBusMessage> messages = List.of(new ServiceBusMessage("kept"), new ServiceBusMessage("cancelled"));
                List<Long> numbers = new ArrayList<>();
                sender.scheduleMessages(messages, OffsetDateTime.now().plusSeconds(6)).forEach(numbers::add);
                sender.cancelScheduledMessage(numbers.get(1));
                sender.cancelScheduledMessage(numbers.get(1)); // this SDK takes message-not-found for success
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("kept"), "messages that arrived");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("time-to-live", () -> {
            Scene scene = new Scene("time-to-live");
            scene.post(new ServiceBusMessage("short").setTimeToLive(SHORT), new ServiceBusMessage("long"));
            sleep(1500);
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("long"), "messages that arrived");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("time-to-live-dead-letter", () -> {
            Scene scene = new Scene("time-to-live-dead-letter");
            scene.post(new ServiceBusMessage("short").setTimeToLive(SHORT));
            sleep(1500);
            try (ServiceBusReceiverClient receiver = scene.receiver(); ServiceBusReceiverClient letters = scene.deadLetters()) {
                none(receiver, "expired messages delivered");
                ServiceBusReceivedMessage message = allOf(letters, 1).get(0);
                equal(body(message), "short", "dead letter");
                equal(message.getDeadLetterReason(), "TTLExpiredException", "reason");
            }
        });

        SCENARIOS.put("settle-elsewhere", () -> {
            Scene scene = new Scene("settle-elsewhere");
            scene.send("x");
            ServiceBusReceivedMessage message;
            try (ServiceBusReceiverClient first = scene.receiver()) {
                message = one(first);
            }
            try (ServiceBusReceiverClient second = scene.receiver()) {
                second.complete(message);
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("prompt-return", () -> {
            Scene scene = new Scene("prompt-return");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                long started = now();
                equal(bodies(receiver.receiveMessages(10, SHORT)), List.of(), "messages of an empty queue");
                truth(now() - started < 6000, "an empty receive took " + (now() - started) + " ms");
                scene.send("a", "b", "c");
                started = now();
                List<ServiceBusReceivedMessage> got = receiver.receiveMessages(10, Duration.ofSeconds(20)).stream().toList();
                truth(now() - started < 10_000, "a short receive took " + (now() - started) + " ms");
                got.forEach(receiver::complete);
                scene.send("d", "e");
                List<String> texts = bodies(got);
                texts.addAll(bodies(allOf(receiver, 5 - got.size())));
                equal(sorted(texts), List.of("a", "b", "c", "d", "e"), "bodies");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("prefetch", () -> {
            Scene scene = new Scene("prefetch");
            scene.send(counting(0, 100).toArray(String[]::new));
            try (ServiceBusReceiverClient receiver = scene.receiving().prefetchCount(50).buildClient()) {
                equal(bodies(allOf(receiver, 100)), counting(0, 100), "bodies");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("push-receive", () -> {
            Scene scene = new Scene("push-receive");
            List<String> received = Collections.synchronizedList(new ArrayList<>());
            AtomicReference<Throwable> failure = new AtomicReference<>();
            CountDownLatch done = new CountDownLatch(20);
            try (ServiceBusProcessorClient processor = scene.builder.processor().queueName(scene.queue)
                    .processMessage(context -> {
                        received.add(context.getMessage().getBody().toString());
                        done.countDown();
                    })
                    .processError(context -> failure.set(context.getException()))
                    .buildProcessorClient()) {
                processor.start();
                scene.send(counting(0, 20).toArray(String[]::new));
                truth(done.await(30, TimeUnit.SECONDS), "messages handled: " + received + ", error: " + failure.get());
                sleep(500); // the processor completes after the handler has returned
            }
            equal(failure.get(), null, "error of the processor");
            equal(new ArrayList<>(received), counting(0, 20), "bodies");
            scene.nothingIsLeft();
        });

        SCENARIOS.put("competing", () -> {
            Scene scene = new Scene("competing");
            scene.send(counting(100, 60).toArray(String[]::new));
            List<String> received = IntStream.range(0, 3).boxed().collect(Collectors.toList()).parallelStream()
                .flatMap(i -> {
                    List<String> mine = new ArrayList<>();
                    try (ServiceBusReceiverClient receiver = scene.receiver()) {
                        while (true) {
                            IterableStream<ServiceBusReceivedMessage> stream = receiver.receiveMessages(5, Duration.ofSeconds(3));
                            List<ServiceBusReceivedMessage> some = stream.stream().toList();
                            if (some.isEmpty()) {
                                return mine.stream();
                            }
                            some.forEach(receiver::complete);
                            mine.addAll(bodies(some));
                        }
                    }
                }).toList();
            equal(sorted(received), counting(100, 60), "bodies");
        });

        SCENARIOS.put("connection-reuse", () -> {
            Scene scene = new Scene("connection-reuse");
            for (int i = 0; i < 4; i++) {
                List<String> expected = List.of(i + " a", i + " b");
                scene.send(expected.toArray(String[]::new));
                try (ServiceBusReceiverClient first = scene.receiver(); ServiceBusReceiverClient second = scene.receiver()) {
                    List<ServiceBusReceivedMessage> messages = List.of(one(first), one(second));
                    equal(sorted(bodies(messages)), expected, "bodies");
                    first.complete(messages.get(0));
                    second.complete(messages.get(1));
                }
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("close-unsettled", () -> {
            Scene scene = new Scene("close-unsettled");
            scene.send("held");
            try (ServiceBusReceiverClient first = scene.receiver()) {
                one(first);
            }
            try (ServiceBusReceiverClient second = scene.receiver()) {
                ServiceBusReceivedMessage message = one(second, Duration.ofSeconds(12));
                equal(body(message) + message.getDeliveryCount(), "held1", "second delivery");
                second.complete(message);
            }
        });

        SCENARIOS.put("connection-lost", () -> {
            Scene scene = new Scene("connection-lost");
            scene.send("held");
            killedWhileHolding(Azure.class, scene.queue);
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = one(receiver, Duration.ofSeconds(3));
                equal(body(message) + message.getDeliveryCount(), "held1", "second delivery");
                receiver.complete(message);
            }
        });

        SCENARIOS.put("unknown-queue", () -> {
            Scene scene = new Scene("unknown-queue");
            long started = now();
            Predicate<Throwable> notFound = reason(ServiceBusFailureReason.MESSAGING_ENTITY_NOT_FOUND);
            fails(() -> scene.send("x"), notFound, "sending");
            fails(() -> one(scene.receiver()), causedBy(AmqpErrorCondition.NOT_FOUND), "receiving");
            truth(now() - started < 15_000, "the error took its time");
        });

        SCENARIOS.put("wrong-key", () -> {
            Scene other = new Scene(queue("wrong-key"), "wrong_key");
            fails(() -> other.send("x"), reason(ServiceBusFailureReason.UNAUTHORIZED), "sending");
            new Scene("wrong-key").nothingIsLeft();
        });

        SCENARIOS.put("signature", () -> {
            Scene signed = new Scene(queue("signature"), "signature");
            signed.send("x");
            try (ServiceBusReceiverClient receiver = signed.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("x"), "bodies");
            }
            new Scene("signature").nothingIsLeft();
        });

        SCENARIOS.put("missing-right", () -> {
            Scene listener = new Scene(queue("missing-right"), "listen_only");
            Scene sender = new Scene(queue("missing-right"), "send_only");
            Predicate<Throwable> unauthorized = reason(ServiceBusFailureReason.UNAUTHORIZED);
            fails(() -> listener.send("x"), unauthorized, "sending without the right");
            sender.send("x");
            fails(() -> one(sender.receiver()), causedBy(AmqpErrorCondition.UNAUTHORIZED_ACCESS),
                "receiving without the right");
            try (ServiceBusReceiverClient receiver = listener.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("x"), "bodies");
            }
        });

        SCENARIOS.put("oversized", () -> {
            Scene scene = new Scene("oversized");
            try (ServiceBusSenderClient sender = scene.sender()) {
                ServiceBusMessage large = new ServiceBusMessage(BinaryData.fromBytes(new byte[100_000]));
                fails(() -> sender.sendMessage(large), reason(ServiceBusFailureReason.MESSAGE_SIZE_EXCEEDED),
                    "sending 100,000 bytes");
                sender.sendMessage(new ServiceBusMessage("small".getBytes(StandardCharsets.UTF_8)));
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("small"), "messages that arrived");
            }
        });

        Predicate<Throwable> entityDisabled = reason(ServiceBusFailureReason.MESSAGING_ENTITY_DISABLED);

        SCENARIOS.put("disabled", () -> {
            Scene scene = new Scene("disabled");
            fails(() -> scene.send("x"), entityDisabled, "sending");
            fails(() -> one(scene.receiver()), causedBy(AmqpErrorCondition.ENTITY_DISABLED_ERROR), "receiving");
        });

        SCENARIOS.put("send-disabled", () -> {
            Scene scene = new Scene("send-disabled");
            fails(() -> scene.send("x"), entityDisabled, "sending");
            scene.nothingIsLeft();
        });

        SCENARIOS.put("receive-disabled", () -> {
            Scene scene = new Scene("receive-disabled");
            scene.send("x");
            fails(() -> one(scene.receiver()), causedBy(AmqpErrorCondition.ENTITY_DISABLED_ERROR), "receiving");
        });
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("--hold")) {
            Scene scene = new Scene(arguments[1], "connection_string");
            one(arguments.length > 2 ? AzureSessions.accept(scene, arguments[2]) : scene.receiver());
            Harness.held();
        }
        SCENARIOS.putAll(AzureTopics.SCENARIOS);
        SCENARIOS.putAll(AzureSessions.SCENARIOS);
        SCENARIOS.putAll(AzureAdministration.SCENARIOS);
        SCENARIOS.putAll(AzurePartitioned.SCENARIOS);
        SCENARIOS.putAll(AzureCorners.SCENARIOS);
        Harness.main(arguments, SCENARIOS);
    }
}
