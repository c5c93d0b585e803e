package peeklock;

import static peeklock.Azure.allOf;
import static peeklock.Azure.bodies;
import static peeklock.Azure.body;
import static peeklock.Azure.causedBy;
import static peeklock.Azure.none;
import static peeklock.Azure.one;
import static peeklock.Azure.reason;
import static peeklock.Azure.sleep;
import static peeklock.Azure.sorted;
import static peeklock.Harness.counting;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.killedWhileHolding;
import static peeklock.Harness.now;
import static peeklock.Harness.truth;

import com.azure.core.amqp.exception.AmqpErrorCondition;
import com.azure.messaging.servicebus.ServiceBusClientBuilder.ServiceBusSessionReceiverClientBuilder;
import com.azure.messaging.servicebus.ServiceBusFailureReason;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusProcessorClient;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverAsyncClient;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusSessionReceiverAsyncClient;
import com.azure.messaging.servicebus.models.DeadLetterOptions;
import com.azure.messaging.servicebus.models.ServiceBusReceiveMode;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Collections;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.ConcurrentHashMap;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicInteger;
import java.util.concurrent.atomic.AtomicReference;
import java.util.function.Predicate;
import java.util.stream.IntStream;
import peeklock.Azure.Scene;

/** The scenarios of session_scenarios.py with azure-messaging-servicebus. */
final class AzureSessions {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final int STATE_LIMIT = 64 * 1024;
    private static final Predicate<Throwable> TAKEN = causedBy(AmqpErrorCondition.SESSION_CANNOT_BE_LOCKED);
    private static final Predicate<Throwable> LOCK_LOST = reason(ServiceBusFailureReason.SESSION_LOCK_LOST);
    private static final Predicate<Throwable> TIMED_OUT =
        error -> error instanceof IllegalStateException && error.getMessage().contains("com.microsoft:timeout");

    private AzureSessions() {}

    private static ServiceBusSessionReceiverClientBuilder accepting(Scene scene) {
        return scene.builder.sessionReceiver().queueName(scene.queue).maxAutoLockRenewDuration(Duration.ZERO);
    }

    /** On a connection of its own: on one this SDK gives a session's link again, even while that is closing. */
    private static ServiceBusSessionReceiverClientBuilder acceptingAlone(Scene scene) {
        return accepting(new Scene(scene.queue, "connection_string"));
    }

    static ServiceBusReceiverClient accept(Scene scene, String sessionId) {
        return acceptingAlone(scene).buildClient().acceptSession(sessionId);
    }

    static ServiceBusReceiverClient acceptNext(Scene scene) {
        return accepting(scene).buildClient().acceptNextSession();
    }

    /** This SDK waits as long as its client's retry options say, and asks the broker to wait a second less. */
    private static Scene hasty(Scene scene, Duration wait) {
        return new Scene(scene.queue, "connection_string", wait);
    }

    private static void noneIsAvailable(Scene scene, String what) {
        fails(() -> acceptNext(hasty(scene, Duration.ofSeconds(3))), TIMED_OUT, what);
    }

    private static ServiceBusMessage message(String sessionId, String body) {
        return new ServiceBusMessage(body).setSessionId(sessionId);
    }

    private static void send(Scene scene, String sessionId, String... bodies) {
        scene.post(Arrays.stream(bodies).map(body -> message(sessionId, body)).toArray(ServiceBusMessage[]::new));
    }

    private static List<String> sessions(Iterable<ServiceBusReceivedMessage> messages) {
        List<String> ids = new ArrayList<>();
        messages.forEach(message -> ids.add(message.getSessionId()));
        return ids;
    }

    private static String described(ServiceBusReceivedMessage message) {
        return body(message) + " " + message.getDeliveryCount();
    }

    private static byte[] bytes(String text) {
        return text.getBytes(StandardCharsets.UTF_8);
    }

    private static List<String> ids(int count) {
        return IntStream.range(0, count).mapToObj("s%02d"::formatted).toList();
    }

    static {
        SCENARIOS.put("session-accept", () -> {
            Scene scene = new Scene("session-accept");
            send(scene, "a", "1", "2");
            send(scene, "b", "other");
            send(scene, "a", "3");
            try (ServiceBusReceiverClient receiver = accept(scene, "a"); ServiceBusReceiverClient other = accept(scene, "b")) {
                equal(receiver.getSessionId(), "a", "session id");
                List<ServiceBusReceivedMessage> messages = allOf(receiver, 3);
                equal(bodies(messages), List.of("1", "2", "3"), "bodies");
                equal(sessions(messages), List.of("a", "a", "a"), "session ids of the messages");
                Duration left = Duration.between(OffsetDateTime.now(), messages.get(0).getLockedUntil());
                truth(left.toSeconds() >= 40 && left.toSeconds() <= 60, "locked for " + left);
                none(receiver, "messages left in the session");
                equal(bodies(allOf(other, 1)), List.of("other"), "messages of the other session");
            }
        });

        SCENARIOS.put("session-next", () -> {
            Scene scene = new Scene("session-next");
            send(scene, "b", "first");
            send(scene, "a", "second");
            send(scene, "b", "third");
            try (ServiceBusReceiverClient first = acceptNext(scene); ServiceBusReceiverClient second = acceptNext(scene)) {
                equal(first.getSessionId() + second.getSessionId(), "ba", "sessions");
                equal(bodies(allOf(first, 2)), List.of("first", "third"), "messages of one");
                equal(bodies(allOf(second, 1)), List.of("second"), "messages of the other");
                Thread sending = new Thread(() -> {
                    sleep(1500);
                    send(scene, "c", "fourth");
                });
                sending.start();
                try (ServiceBusReceiverClient third = acceptNext(scene)) {
                    equal(third.getSessionId(), "c", "session waited for");
                    equal(bodies(allOf(third, 1)), List.of("fourth"), "its messages");
                }
                sending.join();
            }
        });

        SCENARIOS.put("session-timeout", () -> {
            Scene scene = hasty(new Scene("session-timeout"), Duration.ofSeconds(4));
            long started = now();
            fails(() -> acceptNext(scene), TIMED_OUT, "accepting any session");
            long took = now() - started;
            truth(took >= 3000 && took < 8000, "that took " + took + " ms");
        });

        SCENARIOS.put("session-taken", () -> {
            Scene scene = new Scene("session-taken");
            try (ServiceBusReceiverClient holder = accept(scene, "a")) {
                long started = now();
                fails(() -> accept(scene, "a"), TAKEN, "accepting it again");
                truth(now() - started < 5000, "the error took its time");
                try (ServiceBusReceiverClient other = accept(scene, "b")) {
                    equal(holder.getSessionId() + other.getSessionId(), "ab", "sessions");
                }
            }
        });

        SCENARIOS.put("session-close", () -> {
            Scene scene = new Scene("session-close");
            send(scene, "a", "held", "next");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                equal(body(one(receiver)), "held", "first delivery");
            }
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                List<String> messages = allOf(receiver, 2).stream().map(AzureSessions::described).toList();
                equal(messages, List.of("held 0", "next 0"), "messages and deliveries");
            }
        });

        SCENARIOS.put("session-connection-lost", () -> {
            Scene scene = new Scene("session-connection-lost");
            send(scene, "a", "held");
            killedWhileHolding(Azure.class, scene.queue, "a");
            try (ServiceBusReceiverClient receiver = acceptNext(scene)) {
                equal(described(allOf(receiver, 1).get(0)), "held 1", "second delivery");
            }
        });

        SCENARIOS.put("session-renew", () -> {
            Scene scene = new Scene("session-renew");
            send(scene, "a", "slow");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                ServiceBusReceivedMessage message = one(receiver);
                sleep(3000);
                OffsetDateTime until = receiver.renewSessionLock();
                Duration moved = Duration.between(message.getLockedUntil(), until);
                truth(moved.toMillis() > 2000, "renewed by " + moved);
                sleep(3000);
                receiver.complete(message);
            }
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                none(receiver, "messages left");
            }
        });

        SCENARIOS.put("session-auto-renew", () -> {
            Scene scene = new Scene("session-auto-renew");
            send(scene, "a", "slow");
            try (ServiceBusReceiverClient receiver = accepting(scene).maxAutoLockRenewDuration(Duration.ofMinutes(1))
                    .buildClient().acceptSession("a")) {
                ServiceBusReceivedMessage message = one(receiver);
                sleep(8000);
                receiver.complete(message);
                none(receiver, "messages left");
            }
        });

        SCENARIOS.put("session-lock-lost", () -> {
            Scene scene = new Scene("session-lock-lost");
            send(scene, "a", "held");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                ServiceBusReceivedMessage message = one(receiver);
                sleep(6000);
                fails(() -> receiver.complete(message), LOCK_LOST, "settling");
                fails(receiver::renewSessionLock, LOCK_LOST, "renewing");
                fails(receiver::getSessionState, LOCK_LOST, "reading the state");
                fails(() -> receiver.setSessionState(bytes("x")), LOCK_LOST, "setting the state");
            }
            try (ServiceBusReceiverClient receiver = acceptNext(scene)) {
                equal(described(allOf(receiver, 1).get(0)), "held 1", "second delivery");
                equal(receiver.getSessionState(), null, "state");
            }
        });

        SCENARIOS.put("session-state", () -> {
            Scene scene = new Scene("session-state");
            send(scene, "a", "x");
            byte[] binary = new byte[10_240];
            for (int i = 0; i < binary.length; i++) {
                binary[i] = (byte) i;
            }
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                equal(receiver.getSessionState(), null, "state before it is set");
                for (byte[] state : List.of(bytes("one"), new byte[0], binary)) {
                    receiver.setSessionState(state);
                    equal(receiver.getSessionState(), state.length == 0 ? null : state, "state");
                }
                allOf(receiver, 1);
            }
            noneIsAvailable(scene, "accepting a session that has only a state");
            try (ServiceBusReceiverClient receiver = accept(scene, "a"); ServiceBusReceiverClient other = accept(scene, "b")) {
                equal(receiver.getSessionState(), binary, "state when accepted again");
                receiver.setSessionState(null);
                equal(receiver.getSessionState(), null, "state when cleared");
                equal(other.getSessionState(), null, "state of another session");
            }
        });

        SCENARIOS.put("session-state-limit", () -> {
            Scene scene = new Scene("session-state-limit");
            byte[] largest = bytes("x".repeat(STATE_LIMIT));
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                receiver.setSessionState(largest);
                fails(() -> receiver.setSessionState(bytes("y".repeat(STATE_LIMIT + 1))),
                    reason(ServiceBusFailureReason.MESSAGE_SIZE_EXCEEDED), "a byte more");
                equal(receiver.getSessionState(), largest, "state");
            }
        });

        SCENARIOS.put("session-abandon", () -> {
            Scene scene = new Scene("session-abandon");
            send(scene, "a", "first", "second");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                ServiceBusReceivedMessage message = one(receiver);
                equal(described(message), "first 0", "first delivery");
                receiver.abandon(message);
                ServiceBusReceivedMessage again = one(receiver);
                equal(described(again), "first 1", "second delivery");
                receiver.complete(again);
                equal(bodies(allOf(receiver, 1)), List.of("second"), "next message");
            }
        });

        SCENARIOS.put("session-defer", () -> {
            Scene scene = new Scene("session-defer");
            send(scene, "a", "later", "now");
            long number;
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                ServiceBusReceivedMessage message = one(receiver);
                number = message.getSequenceNumber();
                receiver.defer(message);
                equal(bodies(allOf(receiver, 1)), List.of("now"), "message after the deferred one");
                none(receiver, "deliveries of a deferred message");
            }
            // This SDK takes message-not-found for an empty answer.
            try (ServiceBusReceiverClient receiver = accept(scene, "b")) {
                equal(bodies(receiver.receiveDeferredMessageBatch(List.of(number))), List.of(), "in another session");
            }
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                ServiceBusReceivedMessage deferred = receiver.receiveDeferredMessage(number);
                equal(body(deferred) + " " + deferred.getSessionId(), "later a", "deferred message");
                receiver.complete(deferred);
                equal(bodies(receiver.receiveDeferredMessageBatch(List.of(number))), List.of(), "a completed message");
            }
        });

        SCENARIOS.put("session-dead-letter", () -> {
            Scene scene = new Scene("session-dead-letter");
            send(scene, "a", "bad", "good");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                receiver.deadLetter(one(receiver), new DeadLetterOptions().setDeadLetterReason("my reason")
                    .setDeadLetterErrorDescription("my description"));
                equal(bodies(allOf(receiver, 1)), List.of("good"), "message after it");
            }
            try (ServiceBusReceiverClient letters = scene.deadLetters()) {
                ServiceBusReceivedMessage letter = allOf(letters, 1).get(0);
                equal(body(letter) + " " + letter.getSessionId(), "bad a", "dead letter");
                equal(letter.getDeadLetterReason(), "my reason", "reason");
                equal(letter.getDeadLetterErrorDescription(), "my description", "description");
                none(letters, "dead letters left");
            }
        });

        SCENARIOS.put("session-schedule", () -> {
            Scene scene = new Scene("session-schedule");
            OffsetDateTime due = OffsetDateTime.now().plusSeconds(6);
            try (ServiceBusSenderClient sender = scene.sender()) {
                sender.scheduleMessage(message("a", "kept"), due);
                sender.cancelScheduledMessage(sender.scheduleMessage(message("a", "cancelled"), due));
            }
            noneIsAvailable(scene, "accepting the session before its time");
            try (ServiceBusReceiverClient receiver = acceptNext(scene)) {
                long late = Duration.between(due, OffsetDateTime.now()).toMillis();
                truth(late >= 0 && late < 5000, "available " + late + " ms late");
                equal(receiver.getSessionId(), "a", "session");
                equal(bodies(allOf(receiver, 1)), List.of("kept"), "messages");
                none(receiver, "other messages");
            }
        });

        SCENARIOS.put("session-peek", () -> {
            Scene scene = new Scene("session-peek");
            scene.post(message("a", "1"), message("b", "2"), message("a", "3"), message("a", "4"), message("b", "5"));
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                List<ServiceBusReceivedMessage> browsed = receiver.peekMessages(10, 1).stream().toList();
                equal(bodies(browsed), List.of("1", "3", "4"), "browsed");
                equal(sessions(browsed), List.of("a", "a", "a"), "session ids");
                long next = browsed.get(0).getSequenceNumber() + 1;
                equal(bodies(receiver.peekMessages(10, next)), List.of("3", "4"), "browsed from a number of no message");
                equal(bodies(allOf(receiver, 3)), List.of("1", "3", "4"), "messages, which browsing does not lock");
                equal(bodies(receiver.peekMessages(10, 1)), List.of(), "browsed when empty");
            }
        });

        SCENARIOS.put("session-receive-and-delete", () -> {
            Scene scene = new Scene("session-receive-and-delete");
            send(scene, "a", "x", "y");
            send(scene, "b", "z");
            try (ServiceBusReceiverClient receiver = scene.builder.sessionReceiver().queueName(scene.queue)
                    .receiveMode(ServiceBusReceiveMode.RECEIVE_AND_DELETE).buildClient().acceptSession("a")) {
                equal(bodies(allOf(receiver, 2, false)), List.of("x", "y"), "bodies");
            }
            try (ServiceBusReceiverClient receiver = acceptNext(scene)) {
                equal(receiver.getSessionId(), "b", "session that is left");
                equal(bodies(allOf(receiver, 1)), List.of("z"), "its messages");
            }
        });

        SCENARIOS.put("session-wait", () -> {
            Scene scene = new Scene("session-wait");
            send(scene, "a", "x");
            try (ServiceBusReceiverClient receiver = scene.builder.sessionReceiver().queueName(scene.queue)
                    .receiveMode(ServiceBusReceiveMode.RECEIVE_AND_DELETE).buildClient().acceptSession("a")) {
                equal(bodies(allOf(receiver, 1, false)), List.of("x"), "bodies");
                equal(bodies(receiver.receiveMessages(1, Duration.ofMillis(5500))), List.of(), "messages while the lock ends");
            }
        });

        SCENARIOS.put("session-push", () -> {
            Scene scene = new Scene("session-push");
            List<String> received = Collections.synchronizedList(new ArrayList<>());
            try (ServiceBusSessionReceiverAsyncClient sessions = accepting(scene).disableAutoComplete().buildAsyncClient();
                    ServiceBusReceiverAsyncClient receiver = sessions.acceptSession("a").block(Duration.ofSeconds(10))) {
                CountDownLatch done = new CountDownLatch(10);
                receiver.receiveMessages()
                    .concatMap(message -> receiver.complete(message).thenReturn(body(message)))
                    .subscribe(body -> {
                        received.add(body);
                        done.countDown();
                    }, error -> received.add(error.toString()));
                send(scene, "a", counting(0, 10).toArray(String[]::new));
                truth(done.await(20, TimeUnit.SECONDS), "messages handled: " + received);
            }
            equal(new ArrayList<>(received), counting(0, 10), "bodies");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                none(receiver, "messages left");
            }
        });

        SCENARIOS.put("session-processor", () -> {
            Scene scene = new Scene("session-processor");
            List<String> ids = ids(10);
            try (ServiceBusSenderClient sender = scene.sender()) {
                for (String body : counting(0, 5)) {
                    ids.forEach(id -> sender.sendMessage(message(id, body)));
                }
            }
            Map<String, List<String>> received = new ConcurrentHashMap<>();
            AtomicReference<Throwable> failure = new AtomicReference<>();
            AtomicInteger most = new AtomicInteger();
            AtomicInteger running = new AtomicInteger();
            CountDownLatch done = new CountDownLatch(50);
            try (ServiceBusProcessorClient processor = scene.builder.sessionProcessor().queueName(scene.queue)
                    .maxConcurrentSessions(4).sessionIdleTimeout(Duration.ofSeconds(1))
                    .processMessage(context -> {
                        most.accumulateAndGet(running.incrementAndGet(), Math::max);
                        sleep(50);
                        ServiceBusReceivedMessage message = context.getMessage();
                        received.computeIfAbsent(message.getSessionId(), id -> new ArrayList<>()).add(body(message));
                        running.decrementAndGet();
                        done.countDown();
                    })
                    .processError(context -> failure.set(context.getException()))
                    .buildProcessorClient()) {
                processor.start();
                truth(done.await(30, TimeUnit.SECONDS), "messages handled: " + received + ", error: " + failure.get());
                sleep(500); // the processor completes after the handler has returned
                equal(failure.get(), null, "error of the processor");
            }
            truth(most.get() > 1 && most.get() <= 4, most.get() + " sessions at a time");
            for (String id : ids) {
                equal(received.get(id), counting(0, 5), "bodies of " + id);
                try (ServiceBusReceiverClient receiver = accept(scene, id)) {
                    equal(bodies(receiver.peekMessages(10, 1)), List.of(), "left of " + id);
                }
            }
        });

        SCENARIOS.put("session-many", () -> {
            Scene scene = new Scene("session-many");
            List<String> ids = ids(20);
            try (ServiceBusSenderClient sender = scene.sender()) {
                for (String turn : counting(0, 3)) {
                    ids.forEach(id -> sender.sendMessage(message(id, id + " " + turn)));
                }
            }
            List<ServiceBusReceiverClient> receivers = new ArrayList<>();
            for (int i = 0; i < ids.size(); i++) {
                receivers.add(acceptNext(scene));
            }
            equal(receivers.stream().map(ServiceBusReceiverClient::getSessionId).sorted().toList(), ids, "sessions");
            for (String turn : counting(0, 3)) {
                for (ServiceBusReceiverClient receiver : receivers) {
                    ServiceBusReceivedMessage message = one(receiver);
                    equal(body(message), receiver.getSessionId() + " " + turn, "message");
                    receiver.complete(message);
                }
            }
            receivers.forEach(ServiceBusReceiverClient::close);
            noneIsAvailable(scene, "accepting a session when all are empty");
        });

        SCENARIOS.put("session-receiver-required", () -> {
            Scene scene = new Scene("session-receiver-required");
            send(scene, "a", "x");
            fails(() -> one(scene.receiver()), AzureTopics.notAllowed("It is not possible for an entity"), "receiving");
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                equal(bodies(allOf(receiver, 1)), List.of("x"), "messages");
            }
        });

        SCENARIOS.put("session-id-required", () -> {
            Scene scene = new Scene("session-id-required");
            Predicate<Throwable> refused = AzureTopics.notAllowed("");
            try (ServiceBusSenderClient sender = scene.sender()) {
                ServiceBusMessage bare = new ServiceBusMessage("bare");
                fails(() -> sender.sendMessage(bare), refused, "sending");
                fails(() -> sender.sendMessages(List.of(message("a", "one"), bare)), refused, "sending a batch");
                OffsetDateTime later = OffsetDateTime.now().plusHours(1);
                fails(() -> sender.scheduleMessage(bare, later), refused, "scheduling");
                sender.sendMessage(message("a", "good"));
            }
            try (ServiceBusReceiverClient receiver = accept(scene, "a")) {
                equal(bodies(receiver.peekMessages(10, 1)), List.of("good"), "messages");
            }
        });

        SCENARIOS.put("session-not-required", () -> {
            Scene scene = new Scene("session-not-required");
            send(scene, "a", "x");
            Predicate<Throwable> refused = AzureTopics.notAllowed("");
            fails(() -> accept(scene, "a"), refused, "accepting a session");
            fails(() -> acceptNext(scene), refused, "accepting any session");
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                ServiceBusReceivedMessage message = allOf(receiver, 1).get(0);
                equal(body(message) + " " + message.getSessionId(), "x a", "message");
            }
        });

        SCENARIOS.put("session-subscription", () -> {
            Scene scene = new Scene("session-subscription");
            try (ServiceBusSenderClient sender = scene.builder.sender().topicName(scene.queue).buildClient()) {
                List.of(message("a", "1"), message("b", "2"), message("a", "3")).forEach(sender::sendMessage);
            }
            try (ServiceBusReceiverClient second = subscription(scene, "a").buildClient().acceptSession("b");
                    ServiceBusReceiverClient sameName = subscription(scene, "b").buildClient().acceptSession("b");
                    ServiceBusReceiverClient first = subscription(scene, "a").buildClient().acceptNextSession()) {
                equal(first.getSessionId() + second.getSessionId(), "ab", "sessions");
                equal(bodies(allOf(first, 2)), List.of("1", "3"), "messages of one");
                equal(bodies(allOf(second, 1)), List.of("2"), "messages of the other");
                equal(bodies(allOf(sameName, 1)), List.of("2"), "messages of the session of the same name");
                first.setSessionState(bytes("state"));
                equal(first.getSessionState(), bytes("state"), "state");
                fails(() -> subscription(scene, "a").buildClient().acceptSession("a"), TAKEN, "accepting it again");
            }
            Scene hasty = hasty(scene, Duration.ofSeconds(3));
            fails(() -> subscription(hasty, "a").buildClient().acceptNextSession(), TIMED_OUT, "accepting when all are empty");
            try (ServiceBusReceiverClient plain =
                    scene.builder.receiver().topicName(scene.queue).subscriptionName("plain").buildClient()) {
                equal(sorted(bodies(allOf(plain, 3))), List.of("1", "2", "3"), "messages of a subscription without sessions");
            }
        });
    }

    private static ServiceBusSessionReceiverClientBuilder subscription(Scene scene, String name) {
        return scene.builder.sessionReceiver().topicName(scene.queue).subscriptionName(name)
            .maxAutoLockRenewDuration(Duration.ZERO);
    }
}
