import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import com.azure.messaging.servicebus.ServiceBusReceivedMessage;
import com.azure.messaging.servicebus.ServiceBusReceiverClient;
import com.azure.messaging.servicebus.ServiceBusSenderClient;
import java.time.Duration;

public class FirstMessage {
    private static final String EMULATOR = "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
        + "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true";

    public static void main(String[] arguments) {
        String connectionString = System.getenv().getOrDefault("SERVICEBUS_CONNECTION_STRING", EMULATOR);
        ServiceBusClientBuilder builder = new ServiceBusClientBuilder().connectionString(connectionString);

        try (ServiceBusSenderClient sender = builder.sender().queueName("orders").buildClient()) {
            sender.sendMessage(new ServiceBusMessage("Hello from Java"));
        }
        try (ServiceBusReceiverClient receiver = builder.receiver().queueName("orders").buildClient()) {
            for (ServiceBusReceivedMessage message : receiver.receiveMessages(1, Duration.ofSeconds(5))) {
                System.out.println(message.getBody());
                receiver.complete(message);
            }
        }
    }
}
