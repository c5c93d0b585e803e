package peeklock;

import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;

/** Sends numbers to a queue for some seconds: CONNECTION_STRING QUEUE SECONDS. Prints each that is accepted. */
final class Outage {
    private Outage() {}

    public static void main(String[] arguments) throws InterruptedException {
        long end = System.nanoTime() + (long) (1e9 * Double.parseDouble(arguments[2]));
        var builder = new ServiceBusClientBuilder().connectionString(arguments[0]);
        try (var sender = builder.sender().queueName(arguments[1]).buildClient()) {
            for (int number = 0; System.nanoTime() < end; number++) {
                try {
                    sender.sendMessage(new ServiceBusMessage("" + number).setMessageId("" + number));
                    System.out.println(number);
                } catch (RuntimeException error) {
                    System.err.println(error);
                }
                Thread.sleep(50);
            }
        }
    }
}
