// The scenarios of corner_scenarios.py with @azure/service-bus.
import { allOf, code, one, Scene } from "./azure-scene.js";
import { config, equal, rejects, truth } from "./harness.js";

const REASON_LIMIT = 4096; // characters of a reason that are kept
const TEN_MINUTES = 600_000;

const subscription = (scene, name) =>
  scene.client.createReceiver(scene.queue, name, { maxAutoLockRenewalDurationInMs: 0 });

export const cornerScenarios = {
  async "deferral-count"(scene) {
    await scene.send("m");
    const receiver = scene.receiver();
    let message = await one(receiver);
    equal(message.deliveryCount, 0, "delivery count at first");
    const number = message.sequenceNumber;
    await receiver.deferMessage(message);
    [message] = await receiver.receiveDeferredMessages(number);
    equal(message.deliveryCount, 1, "delivery count after a deferral");
    await receiver.abandonMessage(message);
    [message] = await receiver.receiveDeferredMessages(number);
    equal(message.deliveryCount, 2, "delivery count after an abandon");
    await receiver.deferMessage(message);
    const letters = scene.deadLetters();
    const letter = await one(letters);
    equal([letter.body, letter.deadLetterReason], ["m", "MaxDeliveryCountExceeded"], "dead letter");
    await letters.completeMessage(letter);
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "message-states"(scene) {
    const sender = scene.sender();
    await sender.scheduleMessages({ body: "scheduled" }, new Date(Date.now() + 4000));
    for (const firstAcquirer of [true, false]) {
      await sender.sendMessages({ bodyType: "value", body: String(firstAcquirer), header: { firstAcquirer } });
    }
    const receiver = scene.receiver();
    const messages = await allOf(receiver, 3, { complete: false });
    const states = Object.fromEntries(messages.map((message) => [message.body, message.state]));
    equal(states, { scheduled: "scheduled", true: "active", false: "active" }, "states");
    for (const { body, _rawAmqpMessage } of messages) {
      if (body !== "scheduled") equal(String(_rawAmqpMessage.header.firstAcquirer), body, "first-acquirer");
    }
    await receiver.deferMessage(messages[0]);
    const [deferred] = await receiver.receiveDeferredMessages(messages[0].sequenceNumber);
    equal(deferred.state, "deferred", "state of a deferred message");
  },

  async "large-requests"(scene) {
    const later = new Date(Date.now() + 3_600_000);
    const sender = scene.sender();
    const [number] = await sender.scheduleMessages({ body: Buffer.alloc(262_000) }, later);
    const [browsed] = await scene.receiver().peekMessages(1, { fromSequenceNumber: number });
    equal(browsed.body.length, 262_000, "bytes browsed");
    const began = Date.now();
    const schedule = () => sender.scheduleMessages({ body: Buffer.alloc(300_000) }, later);
    await rejects(schedule, code("MessageSizeExceeded"), "scheduling 300,000 bytes");
    truth(Date.now() - began < 15_000, "the error took its time");
    await sender.cancelScheduledMessages(number);
  },

  async "long-reason"(scene) {
    await scene.send("bad");
    const receiver = scene.receiver();
    await receiver.deadLetterMessage(await one(receiver), {
      deadLetterReason: "r".repeat(40_000),
      deadLetterErrorDescription: "description",
    });
    const letters = scene.deadLetters();
    const letter = await one(letters);
    equal(letter.deadLetterReason, "r".repeat(REASON_LIMIT), "reason");
    equal(letter.deadLetterErrorDescription, "description", "description");
    await letters.completeMessage(letter);
  },

  async "empty-batch"(scene) {
    // The SDK does not pass the end of the link on to who sends, who waits for the time-out.
    const impatient = new Scene(scene.queue, config.connection_string, { timeoutInMs: 3000 });
    const sender = impatient.sender();
    const send = async () => sender.sendMessages(await sender.createMessageBatch());
    await rejects(send, code("ServiceTimeout"), "an empty batch");
    await impatient.close();
    await scene.send("next");
    equal((await allOf(scene.receiver(), 1))[0].body, "next", "the next message");
    await scene.nothingIsLeft();
  },

  async "expiry-forwarded"(scene) {
    await scene.send("m");
    const receiver = scene.client.createReceiver(`${scene.queue}-1`);
    const message = await one(receiver);
    equal([message.body, message.deadLetterReason], ["m", "TTLExpiredException"], "message");
    await receiver.completeMessage(message);
  },

  async "rule-conversions"(scene) {
    const sender = scene.sender();
    for (const subject of ["n-8", "n-7"]) {
      await sender.sendMessages({ body: subject, subject, applicationProperties: { number: 7 } });
    }
    const receiver = subscription(scene, "a");
    const message = await one(receiver);
    equal([message.body, message.correlationId], ["n-7", "7"], "message and correlation id");
    equal(message.applicationProperties.joined, "n-7", "text and number");
    equal(message.timeToLive, TEN_MINUTES, "time to live");
    await receiver.completeMessage(message);
  },

  async "action-delay"(scene) {
    const began = Date.now();
    await scene.send("m");
    const now = subscription(scene, "now");
    const first = await one(now);
    equal([first.state, first.scheduledEnqueueTimeUtc], ["active", undefined], "copy");
    await now.completeMessage(first);
    const later = subscription(scene, "later");
    const message = await one(later);
    truth(Date.now() - began >= 3000, "the copy came too early");
    equal(message.state, "scheduled", "state");
    const late = message.enqueuedTimeUtc - message.scheduledEnqueueTimeUtc;
    truth(late >= 0 && late < 15_000, `enqueued ${late} ms behind the time that is shown`);
    await later.completeMessage(message);
  },
};
