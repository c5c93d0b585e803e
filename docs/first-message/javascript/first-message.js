import { ServiceBusClient } from "@azure/service-bus";

const connectionString =
  process.env.SERVICEBUS_CONNECTION_STRING ??
  "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;";

const client = new ServiceBusClient(connectionString);
await client.createSender("orders").sendMessages({ body: "Hello from JavaScript" });

const receiver = client.createReceiver("orders");
for (const message of await receiver.receiveMessages(1, { maxWaitTimeInMs: 5000 })) {
  console.log(message.body);
  await receiver.completeMessage(message);
}
await client.close();
