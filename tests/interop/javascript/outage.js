// Sends numbers to a queue for some seconds: `node outage.js CONNECTION_STRING QUEUE SECONDS`. Prints each that is accepted.
import { ServiceBusClient } from "@azure/service-bus";

const [connectionString, queue, seconds] = process.argv.slice(2);
const end = Date.now() + 1000 * Number(seconds);
const client = new ServiceBusClient(connectionString);
const sender = client.createSender(queue);
for (let number = 0; Date.now() < end; number++) {
  try {
    await sender.sendMessages({ body: `${number}`, messageId: `${number}` });
    console.log(number);
  } catch (error) {
    console.error(`${error}`);
  }
  await new Promise((resolve) => setTimeout(resolve, 50));
}
await client.close();
