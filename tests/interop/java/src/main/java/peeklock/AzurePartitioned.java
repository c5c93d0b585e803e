package peeklock;

import static peeklock.Azure.allOf;
import static peeklock.Azure.bodies;
import static peeklock.Azure.none;
import static peeklock.Azure.one;
import static peeklock.Azure.sleep;
import static peeklock.Azure.sorted;
import static peeklock.Harness.counting;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.truth;

import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import com.azure.messaging.servicebus.ServiceBusTransactionContext;
import com.azure.messaging.servicebus.models.CompleteOptions;
import java.time.Duration;
import java.time.OffsetDateTime;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.function.Function;
import java.util.stream.Collectors;
import java.util.stream.IntStream;
import java.util.stream.Stream;
import peeklock.Azure.Scene;

/** The scenarios of partitioned_scenarios.py with azure-messaging-servicebus. */
final class AzurePartitioned {
    static final Map<String, Harness.Scenario> SCENARIOS = new LinkedHashMap<>();
    private static final int COUNT = 20;
    private static final List<String> TEXTS = sorted(counting(0, COUNT));
    private static final List<String> KEYS = IntStream.range(0, 8).mapToObj(i -> "key-" + i).toList();

    private AzurePartitioned() {}

    private static ServiceBusMessage keyed(String key, String body) {
        return new ServiceBusMessage(body).setPartitionKey(key);
    }

    private static void post(Scene scene, Stream<ServiceBusMessage> messages) {
        scene.post(messages.toArray(ServiceBusMessage[]::new));
    }

    private static List<Long> numbers(List<ServiceBusReceivedMessage> messages) {
        return messages.stream().map(ServiceBusReceivedMessage::getSequenceNumber).toList();
    }

    private static Set<Long> partitions(List<Long> numbers) {
        return numbers.stream().map(number -> number >>> 48).collect(Collectors.toSet());
    }

    private static void onSeveralPartitions(List<Long> numbers) {
        truth(partitions(numbers).size() > 1, "all messages are on partition " + partitions(numbers));
    }

    /** All messages from this sequence number on, in as many calls as that takes. */
    private static List<ServiceBusReceivedMessage> browsed(ServiceBusReceiverClient receiver, long from) {
        List<ServiceBusReceivedMessage> found = new ArrayList<>();
        while (true) {
            List<ServiceBusReceivedMessage> some = receiver.peekMessages(100, from).stream().toList();
            if (some.isEmpty()) {
                return found;
            }
            found.addAll(some);
            from = some.get(some.size() - 1).getSequenceNumber() + 1;
        }
    }

    static {
        SCENARIOS.put("partitioned-spread", () -> {
            Scene scene = new Scene("partitioned-spread");
            post(scene, TEXTS.stream().map(ServiceBusMessage::new));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> shown = browsed(receiver, 1);
                equal(sorted(bodies(shown)), TEXTS, "browsed");
                List<Long> numbers = numbers(shown);
                onSeveralPartitions(numbers);
                equal(numbers, numbers.stream().sorted().toList(), "sequence numbers");
                equal(numbers(browsed(receiver, numbers.get(7))), numbers.subList(7, COUNT), "browsed from a number");
                equal(sorted(bodies(allOf(receiver, COUNT))), TEXTS, "messages");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("partitioned-keys", () -> {
            Scene scene = new Scene("partitioned-keys");
            for (String turn : counting(0, 5)) {
                post(scene, KEYS.stream().map(key -> keyed(key, turn)));
            }
            try (ServiceBusSenderClient sender = scene.sender()) {
                List<ServiceBusMessage> batch = KEYS.stream().map(key -> keyed(key, "never")).toList();
                fails(() -> sender.sendMessages(batch), AzureTopics.notAllowed("The messages of a batch"), "a batch with several keys");
            }
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                List<ServiceBusReceivedMessage> messages = allOf(receiver, 5 * KEYS.size());
                onSeveralPartitions(numbers(messages));
                for (String key : KEYS) {
                    List<ServiceBusReceivedMessage> mine =
                        messages.stream().filter(message -> message.getPartitionKey().equals(key)).toList();
                    equal(bodies(mine), counting(0, 5), "messages of " + key);
                    equal(partitions(numbers(mine)).size(), 1, "partitions of " + key);
                }
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("partitioned-key-mismatch", () -> {
            Scene scene = new Scene("partitioned-key-mismatch");
            fails(() -> scene.post(keyed("b", "never").setSessionId("a")), error -> error instanceof IllegalArgumentException,
                "a different partition key");
            scene.post(keyed("a", "x").setSessionId("a"));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(bodies(allOf(receiver, 1)), List.of("x"), "messages");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("partitioned-numbers", () -> {
            Scene scene = new Scene("partitioned-numbers");
            post(scene, TEXTS.stream().map(ServiceBusMessage::new));
            try (ServiceBusReceiverClient receiver = scene.receiver(); ServiceBusSenderClient sender = scene.sender()) {
                List<ServiceBusReceivedMessage> messages = allOf(receiver, COUNT, false);
                onSeveralPartitions(numbers(messages));
                messages.forEach(receiver::defer);
                List<ServiceBusReceivedMessage> deferred =
                    receiver.receiveDeferredMessageBatch(numbers(messages)).stream().toList();
                equal(sorted(bodies(deferred)), TEXTS, "deferred messages");
                deferred.forEach(receiver::complete);
                OffsetDateTime due = OffsetDateTime.now().plusSeconds(6);
                List<Long> scheduled = KEYS.stream().map(key -> sender.scheduleMessage(keyed(key, key), due)).toList();
                onSeveralPartitions(scheduled);
                sender.cancelScheduledMessages(scheduled.subList(0, 4));
                equal(sorted(bodies(allOf(receiver, 4))), KEYS.subList(4, 8), "messages that arrived");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("partitioned-duplicates", () -> {
            Scene scene = new Scene("partitioned-duplicates");
            post(scene, Stream.of("a", "b", "a").map(key -> keyed(key, key).setMessageId("1")));
            for (int turn = 0; turn < 2; turn++) {
                post(scene, TEXTS.stream().map(text -> new ServiceBusMessage(text).setMessageId("id-" + text)));
            }
            List<String> expected = Stream.concat(TEXTS.stream(), Stream.of("a", "b")).toList();
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                equal(sorted(bodies(allOf(receiver, COUNT + 2))), expected, "messages");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("partitioned-sessions", () -> {
            Scene scene = new Scene("partitioned-sessions");
            for (String turn : counting(0, 3)) {
                post(scene, KEYS.stream().map(key -> new ServiceBusMessage(turn).setSessionId(key)));
            }
            List<ServiceBusReceiverClient> accepted = new ArrayList<>();
            for (int i = 0; i < KEYS.size(); i++) {
                accepted.add(AzureSessions.acceptNext(scene));
            }
            equal(accepted.stream().map(ServiceBusReceiverClient::getSessionId).sorted().toList(), KEYS, "sessions");
            List<Long> numbers = new ArrayList<>();
            for (ServiceBusReceiverClient receiver : accepted) {
                List<ServiceBusReceivedMessage> messages = allOf(receiver, 3);
                equal(bodies(messages), counting(0, 3), "messages of a session");
                receiver.setSessionState(receiver.getSessionId().getBytes());
                numbers.addAll(numbers(messages));
            }
            onSeveralPartitions(numbers);
            Thread sending = new Thread(() -> {
                sleep(1500);
                scene.post(new ServiceBusMessage("x").setSessionId("late"));
            });
            sending.start();
            try (ServiceBusReceiverClient late = AzureSessions.acceptNext(scene)) {
                sending.join();
                equal(late.getSessionId(), "late", "session waited for");
                equal(bodies(allOf(late, 1)), List.of("x"), "its messages");
            }
            accepted.forEach(ServiceBusReceiverClient::close);
            for (String key : KEYS) {
                try (ServiceBusReceiverClient receiver = AzureSessions.accept(scene, key)) {
                    equal(new String(receiver.getSessionState()), key, "state when accepted again");
                }
            }
        });

        SCENARIOS.put("partitioned-topic", () -> {
            Scene scene = new Scene("partitioned-topic");
            Function<String, ServiceBusMessage> numbered = text -> {
                ServiceBusMessage message = new ServiceBusMessage(text);
                message.getApplicationProperties().put("number", Integer.valueOf(text));
                return message;
            };
            post(scene, TEXTS.stream().map(numbered));
            Map<String, List<String>> wanted = Map.of("a", TEXTS, "some", sorted(counting(10, 10)));
            wanted.forEach((name, expected) -> {
                try (ServiceBusReceiverClient receiver = scene.builder.receiver().topicName(scene.queue)
                        .subscriptionName(name).maxAutoLockRenewDuration(Duration.ZERO).buildClient()) {
                    List<ServiceBusReceivedMessage> messages = allOf(receiver, expected.size());
                    equal(sorted(bodies(messages)), expected, "messages in " + name);
                    onSeveralPartitions(numbers(messages));
                    none(receiver, "messages beyond those");
                }
            });
        });

        SCENARIOS.put("partitioned-transactions", () -> {
            Scene scene = new Scene("partitioned-transactions");
            scene.post(keyed("a", "old"));
            try (ServiceBusReceiverClient receiver = scene.receiver(); ServiceBusSenderClient sender = scene.sender()) {
                ServiceBusReceivedMessage old = one(receiver);
                for (ServiceBusMessage wrong : List.of(new ServiceBusMessage("never"), keyed("b", "never"))) {
                    ServiceBusTransactionContext refused = sender.createTransaction();
                    sender.sendMessage(keyed("a", "never"), refused);
                    sender.sendMessage(wrong, refused); // this SDK takes any answer to it for success
                    fails(() -> sender.commitTransaction(refused), error -> error.toString().contains("transaction:rollback"), "a commit");
                }
                ServiceBusTransactionContext committed = sender.createTransaction();
                sender.sendMessage(keyed("a", "1"), committed);
                sender.sendMessages(List.of(keyed("a", "2"), keyed("a", "3")), committed);
                receiver.complete(old, new CompleteOptions().setTransactionContext(committed));
                sender.commitTransaction(committed);
                equal(bodies(allOf(receiver, 3)), List.of("1", "2", "3"), "messages");
            }
            scene.nothingIsLeft();
        });

        SCENARIOS.put("partitioned-annotations", () -> {
            Scene scene = new Scene("partitioned-annotations");
            post(scene, KEYS.stream().map(key -> keyed(key, key).setMessageId(key + " id")));
            post(scene, TEXTS.stream().map(text -> new ServiceBusMessage(text).setMessageId(text)));
            try (ServiceBusReceiverClient receiver = scene.receiver()) {
                for (ServiceBusReceivedMessage message : allOf(receiver, KEYS.size() + COUNT)) {
                    equal(message.getPartitionKey(), message.getBody().toString(), "key");
                    Object partition = message.getRawAmqpMessage().getMessageAnnotations().get("x-opt-partition-id");
                    equal(((Number) partition).longValue(), message.getSequenceNumber() >>> 48, "partition");
                }
            }
        });
    }
}
