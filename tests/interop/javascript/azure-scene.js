// What the scenarios with @azure/service-bus share: a client with an entity, and what is done with its messages.
import { ServiceBusClient } from "@azure/service-bus";
import { config, equal, keyOf, local, truth } from "./harness.js";

const RETRY = { maxRetries: 0, timeoutInMs: 60_000 };

export class Scene {
  constructor(queue, connectionString = config.connection_string, retryOptions = {}) {
    this.queue = queue;
    this.keyed = keyOf(queue) && { partitionKey: keyOf(queue) };
    this.client = new ServiceBusClient(connectionString, { retryOptions: { ...RETRY, ...retryOptions } });
  }
  sender() {
    return this.client.createSender(this.queue);
  }
  receiver(options = {}) {
    // Otherwise every received message is renewed in the background, and no lock ever ends.
    return this.client.createReceiver(this.queue, { maxAutoLockRenewalDurationInMs: 0, ...options });
  }
  deadLetters() {
    return this.receiver({ subQueueType: "deadLetter" });
  }
  async send(...bodies) {
    const sender = this.sender();
    for (const body of bodies) await sender.sendMessages({ body, ...this.keyed });
    await sender.close();
  }
  async nothingIsLeft() {
    const receiver = this.receiver();
    equal(await receiver.receiveMessages(1, { maxWaitTimeInMs: 1000 }), [], "messages left");
    equal(await receiver.peekMessages(10), [], "messages left to browse");
    await receiver.close();
  }
  close() {
    return this.client.close();
  }
}

export async function one(receiver, wait = 60_000) {
  const messages = await receiver.receiveMessages(1, { maxWaitTimeInMs: wait });
  equal(messages.length, 1, "messages received");
  return messages[0];
}

export async function none(receiver, what) {
  equal((await receiver.receiveMessages(1, { maxWaitTimeInMs: 1000 })).map((m) => m.body), [], what);
}

export async function allOf(receiver, count, { complete = true } = {}) {
  const received = [];
  while (received.length < count) {
    const some = await receiver.receiveMessages(Math.min(500, count - received.length), { maxWaitTimeInMs: 60_000 });
    truth(some.length, `${received.length} of ${count} messages arrived`);
    if (complete) await Promise.all(some.map((message) => receiver.completeMessage(message)));
    received.push(...some);
  }
  return received;
}

export const bodies = (messages) => messages.map((message) => message.body);
export const sequenceNumbers = (messages) => messages.map((message) => local(message.sequenceNumber.toNumber()));
export const code = (expected) => (error) => error.code === expected;
