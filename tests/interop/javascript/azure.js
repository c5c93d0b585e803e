// The scenarios of scenarios.py with @azure/service-bus: `node azure.js SCENARIO...`.
import Long from "long";
import { allOf, bodies, code, none, one, Scene, sequenceNumbers } from "./azure-scene.js";
import { administrationScenarios } from "./azure-administration.js";
import { cornerScenarios } from "./azure-corners.js";
import { partitionedScenarios } from "./azure-partitioned.js";
import { hold, sessionScenarios } from "./azure-sessions.js";
import { topicScenarios } from "./azure-topics.js";
import { config, equal, killedWhileHolding, main, range, rejects, sleep, truth } from "./harness.js";

const dead = (reason) => ({ deadLetterReason: reason, deadLetterErrorDescription: "my description" });

const scenarios = {
  async "send-complete"(scene) {
    await scene.send("hello");
    const receiver = scene.receiver();
    const message = await one(receiver);
    equal(message.body, "hello", "body");
    equal(message.deliveryCount, 0, "delivery count");
    await receiver.completeMessage(message);
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async duplicates(scene) {
    const sender = scene.client.createSender(scene.queue);
    for (const [body, messageId] of [["a", "1"], ["b", "1"], ["c", "2"]]) await sender.sendMessages({ body, messageId });
    await sender.close();
    const receiver = scene.receiver();
    equal(bodies(await allOf(receiver, 2)).sort(), ["a", "c"], "bodies");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async properties(scene) {
    const sent = {
      messageId: "id-1",
      subject: "subject",
      correlationId: "correlation",
      contentType: "text/plain",
      to: "to-somebody",
      replyTo: "reply-to",
      replyToSessionId: "reply-session",
      partitionKey: "key",
      timeToLive: 3_600_000,
    };
    await scene.sender().sendMessages({ body: "x", ...sent });
    const receiver = scene.receiver();
    const message = await one(receiver);
    for (const [name, value] of Object.entries(sent)) equal(message[name], value, name);
    equal(sequenceNumbers([message]), [1], "sequence number");
    truth(Math.abs(message.enqueuedTimeUtc - Date.now()) < 30_000, `enqueued ${message.enqueuedTimeUtc}`);
    truth(message.lockedUntilUtc > new Date(), `locked until ${message.lockedUntilUtc}`);
    equal(message.expiresAtUtc - message.enqueuedTimeUtc, 3_600_000, "expires");
    truth(/^[0-9a-f-]{36}$/.test(message.lockToken), `lock token ${message.lockToken}`);
    equal(message.state, "active", "state");
    await receiver.completeMessage(message);
  },

  async "application-properties"(scene) {
    const sent = {
      text: "grüße 🐇",
      zero: 0,
      negative: -7,
      uint: 4_294_967_295,
      large: 2 ** 40,
      double: 2.5,
      yes: true,
      no: false,
      none: null,
      when: new Date(Date.UTC(2024, 0, 2, 3, 4, 5, 678)),
    };
    await scene.sender().sendMessages({ body: "x", applicationProperties: sent });
    const receiver = scene.receiver();
    const message = await one(receiver);
    // This SDK shows dates in application properties as milliseconds.
    equal(message.applicationProperties, { ...sent, when: sent.when.getTime() }, "application properties");
    await receiver.completeMessage(message);
  },

  async bodies(scene) {
    const sender = scene.sender();
    const binary = Buffer.from(range(1024).map((i) => i % 256));
    const value = { text: "value", number: 7, list: [1, 2, 3] };
    await sender.sendMessages({ body: binary, ...scene.keyed });
    await sender.sendMessages({ body: Buffer.alloc(0), ...scene.keyed });
    const keyed = { messageAnnotations: { "x-opt-partition-key": scene.keyed?.partitionKey } };
    await sender.sendMessages({ bodyType: "value", body: value, ...keyed });
    await sender.sendMessages({ bodyType: "sequence", body: [[1, 2, 3], ["a", "b"]], ...keyed });
    const receiver = scene.receiver();
    const messages = await allOf(receiver, 4);
    truth(binary.equals(messages[0].body), "binary body");
    equal(messages[1].body.length, 0, "length of an empty body");
    equal(messages[2]._rawAmqpMessage.bodyType, "value", "type of a value body");
    equal(messages[2].body, value, "value body");
    equal(messages[3]._rawAmqpMessage.bodyType, "sequence", "type of a sequence body");
    equal(messages[3].body, [[1, 2, 3], ["a", "b"]], "sequence body");
  },

  async batch(scene) {
    const sender = scene.sender();
    const batch = await sender.createMessageBatch();
    for (const i of range(100)) truth(batch.tryAddMessage({ body: `message ${i}`, messageId: String(i) }), "batch full");
    await sender.sendMessages(batch);
    const messages = await allOf(scene.receiver(), 100);
    equal(messages.map((m) => m.messageId), range(100).map(String), "ids");
    equal(sequenceNumbers(messages), range(100, 1), "sequence numbers");
    equal(messages[99].body, "message 99", "body");
  },

  async "large-message"(scene) {
    const body = Buffer.alloc(900 * 1024);
    for (let i = 0; i < body.length; i++) body[i] = (i * 31) % 251;
    await scene.send(body);
    const receiver = scene.receiver();
    const message = await one(receiver);
    truth(body.equals(message.body), "the body differs");
    await receiver.completeMessage(message);
  },

  async pipelined(scene) {
    const sender = scene.sender();
    for (const start of range(5)) {
      const sends = range(400, start * 400).map((i) => sender.sendMessages({ body: "x".repeat(100), messageId: String(i) }));
      await Promise.all(sends);
    }
    const receiver = scene.receiver();
    const messages = await allOf(receiver, 2000);
    equal(messages.map((m) => Number(m.messageId)).sort((a, b) => a - b), range(2000), "ids");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "receive-and-delete"(scene) {
    await scene.send("a", "b");
    const receiver = scene.receiver({ receiveMode: "receiveAndDelete" });
    equal(bodies(await allOf(receiver, 2, { complete: false })), ["a", "b"], "bodies");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async abandon(scene) {
    const sender = scene.sender();
    await sender.sendMessages([{ body: "first", messageId: "id" }, { body: "second" }]);
    const receiver = scene.receiver();
    const message = await one(receiver);
    equal([message.body, message.deliveryCount], ["first", 0], "first delivery");
    await receiver.abandonMessage(message);
    const again = await one(receiver);
    equal([again.body, again.deliveryCount, again.messageId], ["first", 1, "id"], "second delivery");
    truth(again.lockToken !== message.lockToken, "the lock token is the old one");
    await receiver.completeMessage(again);
    const last = await one(receiver);
    equal(last.body, "second", "next message");
    await receiver.completeMessage(last);
  },

  async "abandon-properties"(scene) {
    await scene.sender().sendMessages({ body: "x", applicationProperties: { kept: 1, changed: "before" } });
    const receiver = scene.receiver();
    await receiver.abandonMessage(await one(receiver), { changed: "after", added: 5 });
    const message = await one(receiver);
    equal(message.applicationProperties, { kept: 1, changed: "after", added: 5 }, "application properties");
    await receiver.completeMessage(message);
  },

  async defer(scene) {
    await scene.send("later");
    const receiver = scene.receiver();
    const message = await one(receiver);
    await receiver.deferMessage(message, { note: "deferred" });
    await none(receiver, "deliveries of a deferred message");
    const [deferred] = await receiver.receiveDeferredMessages(message.sequenceNumber);
    equal([deferred.body, deferred.state], ["later", "deferred"], "deferred message");
    equal(deferred.applicationProperties.note, "deferred", "property set while deferring");
    await receiver.completeMessage(deferred);
    await rejects(() => receiver.receiveDeferredMessages(message.sequenceNumber), code("MessageNotFound"), "a completed message");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "dead-letter"(scene) {
    await scene.sender().sendMessages({ body: "bad", messageId: "id", applicationProperties: { kept: "yes" } });
    const receiver = scene.receiver();
    await receiver.deadLetterMessage(await one(receiver), { ...dead("my reason"), added: 7 });
    await none(receiver, "messages in the queue itself");
    const letters = scene.deadLetters();
    const message = await one(letters);
    equal([message.body, message.messageId], ["bad", "id"], "dead-lettered message");
    equal([message.deadLetterReason, message.deadLetterErrorDescription], ["my reason", "my description"], "reason");
    equal([message.applicationProperties.kept, message.applicationProperties.added], ["yes", 7], "properties");
    equal(message.deadLetterSource, scene.queue, "source");
    await letters.completeMessage(message);
    await none(letters, "dead letters left");
  },

  async "dead-letter-queue"(scene) {
    await scene.sender().sendMessages({ body: "bad", timeToLive: 3000 });
    const receiver = scene.receiver();
    await receiver.deadLetterMessage(await one(receiver), dead("because"));
    await sleep(3500);
    const letters = scene.deadLetters();
    equal(bodies(await letters.peekMessages(5)), ["bad"], "browsed");
    const message = await one(letters);
    await letters.abandonMessage(message);
    const again = await one(letters);
    equal(again.deliveryCount, message.deliveryCount, "delivery count");
    equal(again.deadLetterReason, "because", "reason");
    await letters.completeMessage(again);
    equal(bodies(await letters.peekMessages(5, { fromSequenceNumber: Long.ONE })), [], "left");
  },

  async "max-delivery-count"(scene) {
    await scene.send("poison");
    const receiver = scene.receiver();
    for (const count of range(2)) {
      const message = await one(receiver);
      equal(message.deliveryCount, count, "delivery count");
      await receiver.abandonMessage(message);
    }
    await none(receiver, "messages in the queue itself");
    const letters = scene.deadLetters();
    const message = await one(letters);
    equal([message.body, message.deadLetterReason], ["poison", "MaxDeliveryCountExceeded"], "dead letter");
    await letters.completeMessage(message);
  },

  async "lock-expiry"(scene) {
    await scene.send("slow");
    const [first, second] = [scene.receiver(), scene.receiver()];
    const message = await one(first);
    const started = Date.now();
    await none(second, "messages while locked");
    const again = await one(second);
    truth(Date.now() - started > 3500, `delivered again after ${Date.now() - started} ms`);
    equal([again.messageId, again.deliveryCount], [message.messageId, 1], "second delivery");
    await second.completeMessage(again);
  },

  async "renew-lock"(scene) {
    await scene.send("slow");
    const receiver = scene.receiver();
    const message = await one(receiver);
    const before = message.lockedUntilUtc;
    await sleep(3000);
    const until = await receiver.renewMessageLock(message);
    truth(until - before > 2000, `renewed from ${before} to ${until}`);
    await sleep(3500);
    await receiver.completeMessage(message);
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "auto-renew"(scene) {
    await scene.send("slow");
    const receiver = scene.receiver({ maxAutoLockRenewalDurationInMs: 60_000 });
    const message = await one(receiver);
    await sleep(8000);
    await receiver.completeMessage(message);
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "auto-renew-many"(scene) {
    const sender = scene.sender();
    await sender.sendMessages(range(300).map((i) => ({ body: `${i}` })));
    const receiver = scene.receiver({ maxAutoLockRenewalDurationInMs: 60_000 });
    const held = await allOf(receiver, 300, { complete: false });
    await sleep(47_000);
    await Promise.all(held.map((message) => receiver.completeMessage(message)));
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "send-again"(scene) {
    const sender = scene.sender();
    const receiver = scene.receiver();
    const given = { messageId: "id", subject: "s", sessionId: "ключ", partitionKey: "ключ" };
    await sender.sendMessages({ body: "x", applicationProperties: { k: "v", n: 1 }, ...given });
    for (const several of [false, true]) {
      const message = await one(receiver);
      await receiver.completeMessage(message);
      await sender.sendMessages(several ? [message] : message);
    }
    const again = await one(receiver);
    await receiver.completeMessage(again);
    equal(Object.fromEntries(Object.keys(given).map((name) => [name, again[name]])), given, "what it had");
    equal([again.body, again.applicationProperties], ["x", { k: "v", n: 1 }], "body and properties");
  },

  async "lock-lost"(scene) {
    await scene.send("slow");
    const receiver = scene.receiver();
    const message = await one(receiver);
    await sleep(6000);
    await rejects(() => receiver.renewMessageLock(message), code("MessageLockLost"), "renewing a lost lock");
    await rejects(() => receiver.completeMessage(message), code("MessageLockLost"), "completing after the lock");
    const again = await one(receiver);
    equal([again.messageId, again.deliveryCount], [message.messageId, 1], "second delivery");
    await receiver.completeMessage(again);
  },

  async peek(scene) {
    await scene.send(..."abcde");
    const receiver = scene.receiver();
    const browsed = await receiver.peekMessages(10);
    equal(bodies(browsed), [..."abcde"], "browsed");
    const some = await receiver.peekMessages(2, { fromSequenceNumber: browsed[2].sequenceNumber });
    equal([bodies(some), sequenceNumbers(some)], [["c", "d"], [3, 4]], "browsed from a number");
    equal(browsed.map((message) => message.lockedUntilUtc), Array(5).fill(undefined), "browsed as locked");
    const locked = await one(receiver);
    const looked = await receiver.peekMessages(2, { fromSequenceNumber: locked.sequenceNumber });
    equal(looked.map((message) => message.lockedUntilUtc), [locked.lockedUntilUtc, undefined], "ends of locks");
    await receiver.completeMessage(locked);
    equal((await allOf(receiver, 4)).length, 4, "received after browsing");
    equal(await receiver.peekMessages(10, { fromSequenceNumber: Long.ONE }), [], "browsed when empty");
  },

  async schedule(scene) {
    const due = new Date(Date.now() + 6000);
    const sender = scene.sender();
    const [number] = await sender.scheduleMessages({ body: "later" }, due);
    await sender.sendMessages({ body: "later too", scheduledEnqueueTimeUtc: due });
    const receiver = scene.receiver();
    const browsed = await receiver.peekMessages(5);
    equal(browsed.map((m) => `${m.body}: ${m.state}`).sort(), ["later too: scheduled", "later: scheduled"], "browsed");
    truth(browsed.some((m) => m.sequenceNumber.equals(number)), "the number returned is not there");
    await none(receiver, "messages before their time");
    const messages = await allOf(receiver, 2);
    const late = Date.now() - due;
    truth(late >= 0 && late < 5000, `delivered ${late} ms late`);
    equal(bodies(messages).sort(), ["later", "later too"], "bodies");
  },

  async "cancel-scheduled"(scene) {
    const sender = scene.sender();
    const numbers = await sender.scheduleMessages([{ body: "kept" }, { body: "cancelled" }], new Date(Date.now() + 6000));
    await sender.cancelScheduledMessages(numbers[1]);
    await rejects(() => sender.cancelScheduledMessages(numbers[1]), code("MessageNotFound"), "a second cancel");
    const receiver = scene.receiver();
    const message = await one(receiver);
    equal(message.body, "kept", "message that arrived");
    await receiver.completeMessage(message);
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "time-to-live"(scene) {
    await scene.sender().sendMessages([{ body: "short", timeToLive: 1000 }, { body: "long" }]);
    await sleep(1500);
    const receiver = scene.receiver();
    const message = await one(receiver);
    equal(message.body, "long", "message that arrived");
    await receiver.completeMessage(message);
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "time-to-live-dead-letter"(scene) {
    await scene.sender().sendMessages({ body: "short", timeToLive: 1000 });
    await sleep(1500);
    await none(scene.receiver(), "expired messages delivered");
    const letters = scene.deadLetters();
    const message = await one(letters);
    equal([message.body, message.deadLetterReason], ["short", "TTLExpiredException"], "dead letter");
    await letters.completeMessage(message);
  },

  async "settle-elsewhere"(scene) {
    await scene.send("x");
    const first = scene.receiver();
    const message = await one(first);
    await first.close();
    await scene.receiver().completeMessage(message);
    await scene.nothingIsLeft();
  },

  async "prompt-return"(scene) {
    const receiver = scene.receiver();
    let started = Date.now();
    equal(await receiver.receiveMessages(10, { maxWaitTimeInMs: 1000 }), [], "messages of an empty queue");
    truth(Date.now() - started < 6000, `an empty receive took ${Date.now() - started} ms`);
    await scene.send("a", "b", "c");
    started = Date.now();
    const got = await receiver.receiveMessages(10, { maxWaitTimeInMs: 20_000 });
    truth(Date.now() - started < 10_000, `a short receive took ${Date.now() - started} ms`);
    await Promise.all(got.map((m) => receiver.completeMessage(m)));
    await scene.send("d", "e");
    const rest = await allOf(receiver, 5 - got.length);
    equal(bodies([...got, ...rest]).sort(), [..."abcde"], "bodies");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async prefetch(scene) {
    // This SDK prefetches only while a handler runs: as many as may be worked on at once.
    await scene.sender().sendMessages(range(100).map((i) => ({ body: "x", messageId: String(i) })));
    const receiver = scene.receiver();
    const ids = [];
    await handle(receiver, 100, { maxConcurrentCalls: 50 }, (message) => ids.push(message.messageId));
    equal(ids, range(100).map(String), "ids");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async "push-receive"(scene) {
    const receiver = scene.receiver();
    const received = [];
    const done = handle(receiver, 20, {}, (message) => received.push(message.body));
    await scene.send(...range(20).map(String));
    await done;
    equal(received, range(20).map(String), "bodies");
    await receiver.close();
    await scene.nothingIsLeft();
  },

  async competing(scene) {
    await scene.sender().sendMessages(range(60).map((i) => ({ body: "x", messageId: String(i) })));
    const ids = [];
    await Promise.all(
      range(3).map(async () => {
        const receiver = scene.receiver();
        for (;;) {
          const messages = await receiver.receiveMessages(5, { maxWaitTimeInMs: 3000 });
          if (!messages.length) return receiver.close();
          await Promise.all(messages.map((m) => receiver.completeMessage(m)));
          ids.push(...messages.map((m) => Number(m.messageId)));
        }
      }),
    );
    equal(ids.sort((a, b) => a - b), range(60), "ids");
  },

  async "connection-reuse"(scene) {
    for (const i of range(4)) {
      await scene.send(`${i} a`, `${i} b`);
      const [first, second] = [scene.receiver(), scene.receiver()];
      const messages = [await one(first), await one(second)];
      equal(bodies(messages).sort(), [`${i} a`, `${i} b`], "bodies");
      await first.completeMessage(messages[0]);
      await second.completeMessage(messages[1]);
      await Promise.all([first.close(), second.close()]);
    }
    await scene.nothingIsLeft();
  },

  async "close-unsettled"(scene) {
    await scene.send("held");
    const first = scene.receiver();
    await one(first);
    await first.close();
    const second = scene.receiver();
    const message = await one(second);
    equal([message.body, message.deliveryCount], ["held", 1], "second delivery");
    await second.completeMessage(message);
  },

  async "connection-lost"(scene) {
    await scene.send("held");
    await killedWhileHolding(scene.queue);
    const receiver = scene.receiver();
    const message = await one(receiver, 3000);
    equal([message.body, message.deliveryCount], ["held", 1], "second delivery");
    await receiver.completeMessage(message);
  },

  async "unknown-queue"(scene) {
    const started = Date.now();
    await rejects(() => scene.send("x"), code("MessagingEntityNotFound"), "sending");
    await rejects(() => one(scene.receiver()), code("MessagingEntityNotFound"), "receiving");
    truth(Date.now() - started < 15_000, "the error took its time");
  },

  async "wrong-key"(scene) {
    const other = new Scene(scene.queue, config.wrong_key);
    await rejects(() => other.send("x"), code("UnauthorizedAccess"), "sending");
    await other.close();
    await scene.nothingIsLeft();
  },

  async signature(scene) {
    const signed = new Scene(scene.queue, config.signature);
    await signed.send("x");
    const receiver = signed.receiver();
    await receiver.completeMessage(await one(receiver));
    await signed.close();
    await scene.nothingIsLeft();
  },

  async "missing-right"(scene) {
    const listener = new Scene(scene.queue, config.listen_only);
    const sender = new Scene(scene.queue, config.send_only);
    await rejects(() => listener.send("x"), code("UnauthorizedAccess"), "sending without the right");
    await sender.send("x");
    await rejects(() => one(sender.receiver()), code("UnauthorizedAccess"), "receiving without the right");
    const receiver = listener.receiver();
    await receiver.completeMessage(await one(receiver));
    await Promise.all([listener.close(), sender.close()]);
  },

  async oversized(scene) {
    const sender = scene.sender();
    await rejects(() => sender.sendMessages({ body: "x".repeat(100_000) }), code("MessageSizeExceeded"), "sending 100,000 bytes");
    await sender.sendMessages({ body: "small" });
    const receiver = scene.receiver();
    const message = await one(receiver);
    equal(message.body, "small", "message that arrived");
    await receiver.completeMessage(message);
  },

  async disabled(scene) {
    await rejects(() => scene.send("x"), code("MessagingEntityDisabled"), "sending");
    await rejects(() => one(scene.receiver()), code("MessagingEntityDisabled"), "receiving");
  },

  async "send-disabled"(scene) {
    await rejects(() => scene.send("x"), code("MessagingEntityDisabled"), "sending");
    await scene.nothingIsLeft();
  },

  async "receive-disabled"(scene) {
    await scene.send("x");
    await rejects(() => one(scene.receiver()), code("MessagingEntityDisabled"), "receiving");
  },
};

/** Subscribe until `count` messages were handled and completed; rejects on the first error or after 30 s. */
async function handle(receiver, count, options, onMessage) {
  let handled = 0;
  let subscription;
  try {
    await new Promise((resolve, reject) => {
      setTimeout(() => reject(new Error(`${handled} of ${count} messages were handled in 30 s`)), 30_000).unref();
      subscription = receiver.subscribe(
        {
          async processMessage(message) {
            onMessage(message);
            await receiver.completeMessage(message);
            if (++handled === count) resolve();
          },
          async processError(args) {
            reject(args.error);
          },
        },
        { autoCompleteMessages: false, ...options },
      );
    });
  } finally {
    await subscription?.close();
  }
}

await main(
  { ...scenarios, ...topicScenarios, ...sessionScenarios, ...administrationScenarios, ...partitionedScenarios, ...cornerScenarios },
  (queue) => new Scene(queue),
  (scene, sessionId) => (sessionId === undefined ? one(scene.receiver()) : hold(scene, sessionId)),
);
