import com.azure.messaging.servicebus.ServiceBusClientBuilder;
import com.azure.messaging.servicebus.ServiceBusMessage;
import java.time.Duration;

public class FirstMessage {
    private static final String EMULATOR = "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
        + "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true";

    public static void main(String[] arguments) {
        var connectionString = System.getenv().getOrDefault("SERVICEBUS_CONNECTION_STRING", EMULATOR);

        var builder = new ServiceBusClientBuilder().connectionString(connectionString);
        try (var sender = builder.sender().queueName("orders").buildClient()) {
            sender.sendMessage(new ServiceBusMessage("Hello from Java"));
        }
        try (var receiver = builder.receiver().queueName("orders").buildClient()) {
            for (var message : receiver.receiveMessages(1, Duration.ofSeconds(5))) {
                System.out.println(message.getBody());
                receiver.complete(message);
            }
        }
    }
}
