// The scenarios of session_scenarios.py with @azure/service-bus.
import Long from "long";
import { allOf, bodies, code, none, one, Scene } from "./azure-scene.js";
import { config, equal, killedWhileHolding, range, rejects, sleep, truth } from "./harness.js";

const TAKEN = code("SessionCannotBeLocked");
const LOCK_LOST = code("SessionLockLost");
const TIMED_OUT = code("ServiceTimeout");
const STATE_LIMIT = 64 * 1024;
// What this SDK has no code for keeps the name that the AMQP condition has in it.
const NOT_ALLOWED = (error) => error.code === "GeneralError" && error.message.includes("InvalidOperationError: ");
// Without this every session would be renewed in the background, and no lock ever end.
const NOT_RENEWED = { maxAutoLockRenewalDurationInMs: 0 };

const accept = (scene, sessionId, options = {}) => scene.client.acceptSession(scene.queue, sessionId, { ...NOT_RENEWED, ...options });
const acceptNext = (scene, options = {}) => scene.client.acceptNextSession(scene.queue, { ...NOT_RENEWED, ...options });

/** Accept any session, waiting so many milliseconds: this SDK waits as long as its client has for everything. */
async function acceptNextWithin(scene, timeoutInMs, next = acceptNext) {
  const hasty = new Scene(scene.queue, config.connection_string, { timeoutInMs });
  try {
    return await next(hasty);
  } finally {
    await hasty.close();
  }
}

async function send(scene, sessionId, ...texts) {
  const sender = scene.sender();
  for (const body of texts) await sender.sendMessages({ body, sessionId });
  await sender.close();
}

export const sessionScenarios = {
  async "session-accept"(scene) {
    await send(scene, "a", "1", "2");
    await send(scene, "b", "other");
    await send(scene, "a", "3");
    const receiver = await accept(scene, "a");
    equal(receiver.sessionId, "a", "session id");
    const left = receiver.sessionLockedUntilUtc - Date.now();
    truth(left > 40_000 && left <= 60_000, `locked for ${left} ms`);
    const messages = await allOf(receiver, 3);
    equal(bodies(messages), ["1", "2", "3"], "bodies");
    equal(messages.map((m) => m.sessionId), ["a", "a", "a"], "session ids of the messages");
    await none(receiver, "messages left in the session");
    equal(bodies(await allOf(await accept(scene, "b"), 1)), ["other"], "messages of the other session");
  },

  async "session-next"(scene) {
    await send(scene, "b", "first");
    await send(scene, "a", "second");
    await send(scene, "b", "third");
    const first = await acceptNext(scene);
    const second = await acceptNext(scene);
    equal([first.sessionId, second.sessionId], ["b", "a"], "sessions");
    equal(bodies(await allOf(first, 2)), ["first", "third"], "messages of one");
    equal(bodies(await allOf(second, 1)), ["second"], "messages of the other");
    const waiting = acceptNext(scene);
    await sleep(1500);
    await send(scene, "c", "fourth");
    const third = await waiting;
    equal(third.sessionId, "c", "session waited for");
    equal(bodies(await allOf(third, 1)), ["fourth"], "its messages");
  },

  async "session-timeout"(scene) {
    const started = Date.now();
    await rejects(() => acceptNextWithin(scene, 2000), TIMED_OUT, "accepting any session");
    const took = Date.now() - started;
    truth(took > 1500 && took < 8000, `that took ${took} ms`);
  },

  async "session-taken"(scene) {
    await accept(scene, "a");
    const started = Date.now();
    await rejects(() => accept(scene, "a"), TAKEN, "accepting it again");
    truth(Date.now() - started < 5000, "the error took its time");
    equal((await accept(scene, "b")).sessionId, "b", "other session");
  },

  async "session-close"(scene) {
    await send(scene, "a", "held", "next");
    const first = await accept(scene, "a");
    equal((await one(first)).body, "held", "first delivery");
    await first.close();
    const messages = await allOf(await accept(scene, "a"), 2);
    equal(messages.map((m) => [m.body, m.deliveryCount]), [["held", 0], ["next", 0]], "messages and deliveries");
  },

  async "session-connection-lost"(scene) {
    await send(scene, "a", "held");
    await killedWhileHolding(scene.queue, "a");
    const [message] = await allOf(await acceptNext(scene), 1);
    equal([message.body, message.deliveryCount], ["held", 1], "second delivery");
  },

  async "session-renew"(scene) {
    await send(scene, "a", "slow");
    const receiver = await accept(scene, "a");
    const message = await one(receiver);
    const before = receiver.sessionLockedUntilUtc;
    await sleep(3000);
    const until = await receiver.renewSessionLock();
    truth(until - before > 2000, `renewed from ${before} to ${until}`);
    equal(receiver.sessionLockedUntilUtc, until, "end of the lock");
    await sleep(3000);
    await receiver.completeMessage(message);
    await receiver.close();
    await none(await accept(scene, "a"), "messages left");
  },

  async "session-auto-renew"(scene) {
    await send(scene, "a", "slow");
    const receiver = await accept(scene, "a", { maxAutoLockRenewalDurationInMs: 60_000 });
    const message = await one(receiver);
    await sleep(8000);
    await receiver.completeMessage(message);
    await none(receiver, "messages left");
  },

  async "session-lock-lost"(scene) {
    await send(scene, "a", "held");
    const receiver = await accept(scene, "a");
    const message = await one(receiver);
    await sleep(6000);
    await rejects(() => receiver.completeMessage(message), LOCK_LOST, "settling");
    await rejects(() => receiver.renewSessionLock(), LOCK_LOST, "renewing");
    await rejects(() => receiver.getSessionState(), LOCK_LOST, "reading the state");
    await rejects(() => receiver.setSessionState("x"), LOCK_LOST, "setting the state");
    await rejects(() => one(receiver), LOCK_LOST, "receiving");
    const next = await acceptNext(scene);
    const [again] = await allOf(next, 1);
    equal([again.body, again.deliveryCount], ["held", 1], "second delivery");
    equal(await next.getSessionState(), null, "state");
  },

  async "session-state"(scene) {
    await send(scene, "a", "x");
    const receiver = await accept(scene, "a");
    equal(await receiver.getSessionState(), null, "state before it is set");
    const binary = Buffer.from(range(1024).map((i) => (i * 7) % 256));
    for (const state of ["one", { step: 2, names: ["ä"] }, binary]) {
      await receiver.setSessionState(state);
      equal(await receiver.getSessionState(), state, "state");
    }
    await receiver.setSessionState(Buffer.alloc(0));
    equal(await receiver.getSessionState(), null, "state when emptied");
    await receiver.setSessionState(binary);
    await allOf(receiver, 1);
    await receiver.close();
    await rejects(() => acceptNextWithin(scene, 1000), TIMED_OUT, "accepting a session that has only a state");
    const again = await accept(scene, "a");
    equal(await again.getSessionState(), binary, "state when accepted again");
    await again.setSessionState(null);
    equal(await again.getSessionState(), null, "state when cleared");
    equal(await (await accept(scene, "b")).getSessionState(), null, "state of another session");
  },

  async "session-state-limit"(scene) {
    const receiver = await accept(scene, "a");
    const largest = Buffer.alloc(STATE_LIMIT, "x");
    await receiver.setSessionState(largest);
    const above = Buffer.alloc(STATE_LIMIT + 1, "y");
    await rejects(() => receiver.setSessionState(above), code("MessageSizeExceeded"), "a byte more");
    equal(await receiver.getSessionState(), largest, "state");
  },

  async "session-abandon"(scene) {
    await send(scene, "a", "first", "second");
    const receiver = await accept(scene, "a");
    const message = await one(receiver);
    equal([message.body, message.deliveryCount], ["first", 0], "first delivery");
    await receiver.abandonMessage(message);
    const again = await one(receiver);
    equal([again.body, again.deliveryCount], ["first", 1], "second delivery");
    await receiver.completeMessage(again);
    equal(bodies(await allOf(receiver, 1)), ["second"], "next message");
  },

  async "session-defer"(scene) {
    await send(scene, "a", "later", "now");
    const receiver = await accept(scene, "a");
    const message = await one(receiver);
    await receiver.deferMessage(message);
    equal(bodies(await allOf(receiver, 1)), ["now"], "message after the deferred one");
    await none(receiver, "deliveries of a deferred message");
    await receiver.close();
    const number = message.sequenceNumber;
    const other = await accept(scene, "b");
    await rejects(() => other.receiveDeferredMessages(number), code("MessageNotFound"), "in another session");
    const again = await accept(scene, "a");
    const [deferred] = await again.receiveDeferredMessages(number);
    equal([deferred.body, deferred.sessionId, deferred.state], ["later", "a", "deferred"], "deferred message");
    await again.completeMessage(deferred);
    await rejects(() => again.receiveDeferredMessages(number), code("MessageNotFound"), "a completed message");
  },

  async "session-dead-letter"(scene) {
    await send(scene, "a", "bad", "good");
    const receiver = await accept(scene, "a");
    const told = { deadLetterReason: "my reason", deadLetterErrorDescription: "my description" };
    await receiver.deadLetterMessage(await one(receiver), told);
    equal(bodies(await allOf(receiver, 1)), ["good"], "message after it");
    const letters = scene.deadLetters();
    const [letter] = await allOf(letters, 1);
    equal([letter.body, letter.sessionId], ["bad", "a"], "dead letter");
    equal([letter.deadLetterReason, letter.deadLetterErrorDescription], ["my reason", "my description"], "reason");
    await none(letters, "dead letters left");
  },

  async "session-schedule"(scene) {
    const due = new Date(Date.now() + 6000);
    const messages = ["kept", "cancelled"].map((body) => ({ body, sessionId: "a" }));
    const numbers = await scene.sender().scheduleMessages(messages, due);
    await scene.sender().cancelScheduledMessages(numbers[1]);
    await rejects(() => acceptNextWithin(scene, 1000), TIMED_OUT, "accepting the session before its time");
    const receiver = await acceptNext(scene);
    const late = Date.now() - due;
    truth(late >= 0 && late < 5000, `available ${late} ms late`);
    equal(receiver.sessionId, "a", "session");
    equal(bodies(await allOf(receiver, 1)), ["kept"], "messages");
    await none(receiver, "other messages");
  },

  async "session-peek"(scene) {
    for (const [sessionId, body] of [["a", "1"], ["b", "2"], ["a", "3"], ["a", "4"], ["b", "5"]]) await send(scene, sessionId, body);
    const receiver = await accept(scene, "a");
    const browsed = await receiver.peekMessages(10);
    equal(bodies(browsed), ["1", "3", "4"], "browsed");
    equal(browsed.map((m) => m.sessionId), ["a", "a", "a"], "session ids");
    const some = await receiver.peekMessages(10, { fromSequenceNumber: browsed[0].sequenceNumber.add(1) });
    equal(bodies(some), ["3", "4"], "browsed from a number that is none of the session");
    equal(bodies(await allOf(receiver, 3)), ["1", "3", "4"], "messages, which browsing does not lock");
    equal(await receiver.peekMessages(10, { fromSequenceNumber: Long.ONE }), [], "browsed when empty");
  },

  async "session-receive-and-delete"(scene) {
    await send(scene, "a", "x", "y");
    await send(scene, "b", "z");
    const receiver = await accept(scene, "a", { receiveMode: "receiveAndDelete" });
    equal(bodies(await allOf(receiver, 2, { complete: false })), ["x", "y"], "bodies");
    await receiver.close();
    const next = await acceptNext(scene);
    equal(next.sessionId, "b", "session that is left");
    equal(bodies(await allOf(next, 1)), ["z"], "its messages");
  },

  async "session-wait"(scene) {
    await send(scene, "a", "x");
    const receiver = await accept(scene, "a", { receiveMode: "receiveAndDelete" });
    equal(bodies(await allOf(receiver, 1, { complete: false })), ["x"], "bodies");
    equal(await receiver.receiveMessages(1, { maxWaitTimeInMs: 5500 }), [], "messages while the lock ends");
    await receiver.close();
  },

  async "session-push"(scene) {
    const expected = range(10).map(String);
    const handler = await accept(scene, "a");
    const received = [];
    let handling;
    await new Promise((resolve, reject) => {
      setTimeout(() => reject(new Error(`handled in 30 s: ${received}`)), 30_000).unref();
      const processMessage = async (message) => {
        received.push(message.body);
        await handler.completeMessage(message);
        if (received.length === expected.length) resolve();
      };
      const processError = async ({ error }) => reject(error);
      handling = handler.subscribe({ processMessage, processError }, { autoCompleteMessages: false });
      send(scene, "a", ...expected).catch(reject);
    });
    await handling.close();
    equal(received, expected, "bodies the handler received");
    await handler.close();
    await none(await accept(scene, "a"), "messages left");
    await send(scene, "b", ...expected);
    const iterator = await accept(scene, "b");
    const iterated = [];
    for await (const message of iterator.getMessageIterator()) {
      iterated.push(message.body);
      await iterator.completeMessage(message);
      if (iterated.length === expected.length) break;
    }
    equal(iterated, expected, "bodies the iterator received");
  },

  async "session-many"(scene) {
    const ids = range(20).map((i) => `s${String(i).padStart(2, "0")}`);
    for (const turn of range(3)) for (const id of ids) await send(scene, id, `${id} ${turn}`);
    const receivers = [];
    for (const _ of ids) receivers.push(await acceptNext(scene));
    equal(receivers.map((receiver) => receiver.sessionId).sort(), ids, "sessions");
    for (const turn of range(3)) {
      for (const receiver of receivers) {
        const message = await one(receiver);
        equal(message.body, `${receiver.sessionId} ${turn}`, "message");
        await receiver.completeMessage(message);
      }
    }
    for (const receiver of receivers) await receiver.close();
    await rejects(() => acceptNextWithin(scene, 1000), TIMED_OUT, "accepting a session when all are empty");
  },

  async "session-receiver-required"(scene) {
    await send(scene, "a", "x");
    await rejects(() => one(scene.receiver()), NOT_ALLOWED, "receiving");
    equal(bodies(await allOf(await accept(scene, "a"), 1)), ["x"], "messages");
  },

  async "session-id-required"(scene) {
    const sender = scene.sender();
    const bare = { body: "bare" };
    await rejects(() => sender.sendMessages(bare), NOT_ALLOWED, "sending");
    await rejects(() => sender.sendMessages([{ body: "one", sessionId: "a" }, bare]), NOT_ALLOWED, "sending a batch");
    await rejects(() => sender.scheduleMessages(bare, new Date(Date.now() + 3_600_000)), NOT_ALLOWED, "scheduling");
    await sender.sendMessages({ body: "good", sessionId: "a" });
    equal(bodies(await (await accept(scene, "a")).peekMessages(10)), ["good"], "messages");
  },

  async "session-not-required"(scene) {
    await send(scene, "a", "x");
    // This SDK takes every refusal of a session by its name for one that is locked.
    await rejects(() => accept(scene, "a"), TAKEN, "accepting a session");
    await rejects(() => acceptNext(scene), NOT_ALLOWED, "accepting any session");
    const [message] = await allOf(scene.receiver(), 1);
    equal([message.body, message.sessionId], ["x", "a"], "message");
  },

  async "session-subscription"(scene) {
    const next = ({ client, queue }) => client.acceptNextSession(queue, "a", NOT_RENEWED);
    for (const [sessionId, body] of [["a", "1"], ["b", "2"], ["a", "3"]]) await send(scene, sessionId, body);
    const second = await scene.client.acceptSession(scene.queue, "a", "b", NOT_RENEWED);
    const sameName = await scene.client.acceptSession(scene.queue, "b", "b", NOT_RENEWED);
    const first = await next(scene);
    equal([first.sessionId, second.sessionId], ["a", "b"], "sessions");
    equal(bodies(await allOf(first, 2)), ["1", "3"], "messages of one");
    equal(bodies(await allOf(second, 1)), ["2"], "messages of the other");
    equal(bodies(await allOf(sameName, 1)), ["2"], "messages of the session of the same name");
    await first.setSessionState("state");
    equal(await first.getSessionState(), "state", "state");
    await rejects(() => scene.client.acceptSession(scene.queue, "a", "a", NOT_RENEWED), TAKEN, "accepting it again");
    await rejects(() => acceptNextWithin(scene, 1000, next), TIMED_OUT, "accepting any session when all are empty");
    const plain = await allOf(scene.client.createReceiver(scene.queue, "plain"), 3);
    equal(bodies(plain).sort(), ["1", "2", "3"], "messages of a subscription without sessions");
  },
};

/** For the process that is killed while it holds a session. */
export const hold = async (scene, sessionId) => one(await accept(scene, sessionId));
