package peeklock;

import static peeklock.Harness.CONFIG;

import com.azure.core.amqp.exception.AmqpException;
import com.azure.core.exception.HttpResponseException;
import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusException;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.models.ServiceBusReceiveMode;
import com.azure.messaging.servicebus.administration.ServiceBusAdministrationClientBuilder;
import java.time.Duration;
import java.util.Locale;
import java.util.NoSuchElementException;
import java.util.concurrent.Callable;

/** What users of azure-messaging-servicebus wait: the program of waits.py, with what the SDK does by default. Runs until killed. */
final class Waits {
    private static final double PERIOD_S = CONFIG.get("period_s").asDouble();

    private final String operation;
    private final int number;
    private final ServiceBusClientBuilder builder;

    private Waits(String operation, int number, ServiceBusClientBuilder builder) {
        this.operation = operation;
        this.number = number;
        this.builder = builder;
    }

    /** What does an operation once; an exception is of what is not reported. */
    private interface Once {
        void run() throws Exception;
    }

    /** Reports the call. Returns its result; null if it failed. */
    private <T> T timed(Callable<T> call) {
        long wall = System.currentTimeMillis();
        long began = System.nanoTime();
        T result = null;
        String error = "";
        try {
            result = call.call();
        } catch (Exception failure) {
            error = nameOf(failure);
        }
        double seconds = (System.nanoTime() - began) / 1e9;
        System.out.println(String.format(Locale.ROOT,
            "{\"operation\": \"%s\", \"user\": %d, \"began\": %.3f, \"seconds\": %.4f, \"error\": \"%s\"}",
            operation, number, wall / 1e3, seconds, error));
        return result;
    }

    private static String nameOf(Exception failure) {
        if (failure instanceof ServiceBusException known) {
            return known.getReason().toString();
        }
        if (failure instanceof AmqpException known && known.getErrorCondition() != null) {
            return known.getErrorCondition().toString();
        }
        if (failure instanceof HttpResponseException known && known.getResponse() != null) {
            return "" + known.getResponse().getStatusCode();
        }
        return failure.getClass().getSimpleName();
    }

    private static ServiceBusReceivedMessage one(ServiceBusReceiverClient receiver) {
        return receiver.receiveMessages(1, Duration.ofSeconds(60)).stream().findFirst().orElseThrow(NoSuchElementException::new);
    }

    private Once begin() {
        String queue = "waits-" + operation;
        switch (operation) {
            case "send": {
                var sender = builder.sender().queueName(queue).buildClient();
                return () -> timed(() -> {
                    sender.sendMessage(new ServiceBusMessage("m"));
                    return true;
                });
            }
            case "receive": {
                var receiver = builder.receiver().queueName(queue)
                    .receiveMode(ServiceBusReceiveMode.RECEIVE_AND_DELETE).buildClient();
                return () -> timed(() -> one(receiver));
            }
            case "complete": {
                var receiver = builder.receiver().queueName(queue).buildClient();
                return () -> {
                    ServiceBusReceivedMessage message = one(receiver);
                    sleep(500 * PERIOD_S);
                    timed(() -> {
                        receiver.complete(message);
                        return true;
                    });
                };
            }
            case "renew": {
                var receiver = builder.receiver().queueName(queue).maxAutoLockRenewDuration(Duration.ZERO).buildClient();
                var held = new ServiceBusReceivedMessage[1];
                return () -> {
                    if (held[0] == null) {
                        held[0] = one(receiver);
                    }
                    if (timed(() -> receiver.renewMessageLock(held[0])) == null) {
                        held[0] = null; // its lock may be lost
                    }
                };
            }
            case "accept": {
                var sessions = builder.sessionReceiver().queueName(queue).maxAutoLockRenewDuration(Duration.ZERO).buildClient();
                return () -> {
                    ServiceBusReceiverClient receiver = timed(() -> sessions.acceptSession("session-" + number));
                    if (receiver != null) {
                        receiver.close();
                    }
                };
            }
            case "administer": {
                var admin = new ServiceBusAdministrationClientBuilder().connectionString(CONFIG.get("secure").asText()).buildClient();
                var count = new int[1];
                return () -> {
                    String name = "made-" + number + "-" + ProcessHandle.current().pid() + "-" + count[0] / 2;
                    boolean creates = count[0]++ % 2 == 0;
                    timed(() -> {
                        if (creates) {
                            admin.createQueue(name);
                        } else {
                            admin.deleteQueue(name);
                        }
                        return true;
                    });
                };
            }
            default:
                throw new IllegalArgumentException(operation);
        }
    }

    private void run() {
        Once once = begin();
        double point = 1000 * PERIOD_S * number / CONFIG.get("users").asInt(); // in the period: each user has its own
        while (true) {
            sleep(1000 * PERIOD_S - (System.currentTimeMillis() - point) % (1000 * PERIOD_S));
            try {
                once.run();
            } catch (Exception error) {
                System.err.println(operation + ": " + error);
            }
        }
    }

    private static void sleep(double milliseconds) {
        try {
            Thread.sleep((long) milliseconds);
        } catch (InterruptedException error) {
            throw new IllegalStateException(error); // nobody interrupts
        }
    }

    public static void main(String[] arguments) {
        for (var operation : CONFIG.get("operations")) {
            var builder = new ServiceBusClientBuilder().connectionString(CONFIG.get("connection_string").asText());
            for (int number = 0; number < CONFIG.get("users").asInt(); number++) {
                new Thread(new Waits(operation.asText(), number, builder)::run).start();
            }
        }
    }
}
