// The scenarios of partitioned_scenarios.py with @azure/service-bus.
import Long from "long";
import { allOf, bodies, none, one } from "./azure-scene.js";
import { equal, range, rejects, sleep, truth } from "./harness.js";

const TEXTS = range(20).map(String).sort();
const KEYS = range(8).map((i) => `key-${i}`);
const NOT_RENEWED = { maxAutoLockRenewalDurationInMs: 0 };

const sorted = (messages) => bodies(messages).sort();
const numbersOf = (messages) => messages.map((message) => message.sequenceNumber);
const partitions = (numbers) => new Set(numbers.map((number) => number.shiftRightUnsigned(48).toNumber()));

function onSeveralPartitions(numbers) {
  truth(partitions(numbers).size > 1, `all messages are on partition ${[...partitions(numbers)]}`);
}

/** One after the other, so that each is a message and not a part of a batch. */
async function post(scene, ...messages) {
  const sender = scene.sender();
  for (const message of messages) await sender.sendMessages(message);
  await sender.close();
}

/** All messages from this sequence number on, in as many calls as that takes. */
async function browsed(receiver, from) {
  const found = [];
  for (;;) {
    const some = await receiver.peekMessages(100, { fromSequenceNumber: from });
    if (!some.length) return found;
    found.push(...some);
    from = some.at(-1).sequenceNumber.add(1);
  }
}

export const partitionedScenarios = {
  async "partitioned-spread"(scene) {
    await post(scene, ...TEXTS.map((body) => ({ body })));
    const receiver = scene.receiver();
    const shown = await browsed(receiver, Long.ONE);
    equal(sorted(shown), TEXTS, "browsed");
    const numbers = numbersOf(shown);
    onSeveralPartitions(numbers);
    truth(numbers.every((number, i) => i === 0 || numbers[i - 1].lessThan(number)), `sequence numbers ${numbers}`);
    equal(numbersOf(await browsed(receiver, numbers[7])), numbers.slice(7), "browsed from a number");
    equal(sorted(await allOf(receiver, 20)), TEXTS, "messages");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-keys"(scene) {
    for (const turn of range(5)) await post(scene, ...KEYS.map((partitionKey) => ({ body: turn, partitionKey })));
    const batch = KEYS.map((partitionKey) => ({ body: "never", partitionKey }));
    const notAllowed = (error) => error.code === "GeneralError" && error.message.includes("InvalidOperationError: ");
    await rejects(() => scene.sender().sendMessages(batch), notAllowed, "a batch with several keys");
    const receiver = scene.receiver();
    const messages = await allOf(receiver, 5 * KEYS.length);
    onSeveralPartitions(numbersOf(messages));
    for (const key of KEYS) {
      const mine = messages.filter((message) => message.partitionKey === key);
      equal(bodies(mine), range(5), `messages of ${key}`);
      equal(partitions(numbersOf(mine)).size, 1, `partitions of ${key}`);
    }
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-key-mismatch"(scene) {
    const different = { body: "never", sessionId: "a", partitionKey: "b" };
    const checked = (error) => /sessionId|session/i.test(error.message) && /partitionKey|partition key/i.test(error.message);
    await rejects(() => post(scene, different), checked, "a different partition key");
    await post(scene, { body: "x", sessionId: "a", partitionKey: "a" });
    const receiver = scene.receiver();
    equal(bodies(await allOf(receiver, 1)), ["x"], "messages");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-numbers"(scene) {
    await post(scene, ...TEXTS.map((body) => ({ body })));
    const receiver = scene.receiver();
    const messages = await allOf(receiver, 20, { complete: false });
    onSeveralPartitions(numbersOf(messages));
    await Promise.all(messages.map((message) => receiver.deferMessage(message)));
    const deferred = await receiver.receiveDeferredMessages(numbersOf(messages));
    equal(sorted(deferred), TEXTS, "deferred messages");
    await Promise.all(deferred.map((message) => receiver.completeMessage(message)));
    const due = new Date(Date.now() + 6000);
    const sender = scene.sender();
    const scheduled = [];
    for (const key of KEYS) scheduled.push(...(await sender.scheduleMessages({ body: key, partitionKey: key }, due)));
    onSeveralPartitions(scheduled);
    await sender.cancelScheduledMessages(scheduled.slice(0, 4));
    equal(sorted(await allOf(receiver, 4)), KEYS.slice(4), "messages that arrived");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-duplicates"(scene) {
    await post(scene, ...["a", "b", "a"].map((key) => ({ body: key, messageId: "1", partitionKey: key })));
    for (const _ of range(2)) await post(scene, ...TEXTS.map((body) => ({ body, messageId: `id-${body}` })));
    const receiver = scene.receiver();
    equal(sorted(await allOf(receiver, 22)), [...TEXTS, "a", "b"], "messages");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-sessions"(scene) {
    const acceptNext = () => scene.client.acceptNextSession(scene.queue, NOT_RENEWED);
    for (const turn of range(3)) await post(scene, ...KEYS.map((sessionId) => ({ body: turn, sessionId })));
    const accepted = [];
    for (const _ of KEYS) accepted.push(await acceptNext());
    equal(accepted.map((receiver) => receiver.sessionId).sort(), KEYS, "sessions");
    const numbers = [];
    for (const receiver of accepted) {
      const messages = await allOf(receiver, 3);
      equal(bodies(messages), range(3), "messages of a session");
      await receiver.setSessionState(receiver.sessionId);
      numbers.push(...numbersOf(messages));
    }
    onSeveralPartitions(numbers);
    const sending = sleep(1500).then(() => post(scene, { body: "x", sessionId: "late" }));
    const late = await acceptNext();
    await sending;
    equal(late.sessionId, "late", "session waited for");
    equal((await one(late)).body, "x", "its message");
    for (const receiver of accepted) await receiver.close();
    for (const key of KEYS) {
      const receiver = await scene.client.acceptSession(scene.queue, key, NOT_RENEWED);
      equal(await receiver.getSessionState(), key, "state when accepted again");
      await receiver.close();
    }
  },

  async "partitioned-topic"(scene) {
    await post(scene, ...range(20).map((number) => ({ body: String(number), applicationProperties: { number } })));
    for (const [name, expected] of [["a", range(20)], ["some", range(10, 10)]]) {
      const receiver = scene.client.createReceiver(scene.queue, name, NOT_RENEWED);
      const messages = await allOf(receiver, expected.length);
      equal(sorted(messages), expected.map(String).sort(), `messages in ${name}`);
      onSeveralPartitions(numbersOf(messages));
      await none(receiver, "messages beyond those");
    }
  },

  async "partitioned-annotations"(scene) {
    const keyed = KEYS.map((key) => ({ body: key, messageId: `${key} id`, partitionKey: key }));
    await post(scene, ...keyed, ...TEXTS.map((text) => ({ body: text, messageId: text })));
    for (const message of await allOf(scene.receiver(), KEYS.length + TEXTS.length)) {
      equal(message.partitionKey, message.body, "key");
      const partition = message._rawAmqpMessage.messageAnnotations["x-opt-partition-id"];
      equal([partition], [...partitions([message.sequenceNumber])], "partition");
    }
  },
};
