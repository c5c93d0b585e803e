using Azure.Messaging.ServiceBus;

const string Emulator = "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;"
    + "SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true";
var connectionString = Environment.GetEnvironmentVariable("SERVICEBUS_CONNECTION_STRING") ?? Emulator;

await using var client = new ServiceBusClient(connectionString);
await client.CreateSender("orders").SendMessageAsync(new ServiceBusMessage("Hello from C#"));

var receiver = client.CreateReceiver("orders");
foreach (var message in await receiver.ReceiveMessagesAsync(1, TimeSpan.FromSeconds(5)))
{
    Console.WriteLine(message.Body);
    await receiver.CompleteMessageAsync(message);
}
