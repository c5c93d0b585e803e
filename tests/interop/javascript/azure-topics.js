// The scenarios of topic_scenarios.py with @azure/service-bus.
import Long from "long";
import { allOf, bodies, code, none, one, sequenceNumbers } from "./azure-scene.js";
import { equal, range, rejects, sleep, truth } from "./harness.js";

const HALF_HOUR = 1_800_000;
const NOT_FOUND = code("MessagingEntityNotFound");
const DISABLED = code("MessagingEntityDisabled");
// What this SDK has no code for keeps the name that the AMQP condition has in it.
const general = (text) => (error) => error.code === "GeneralError" && error.message.includes(text);

// As in Scene: without this every received message would be renewed in the background.
const subscription = (scene, name, options = {}) =>
  scene.client.createReceiver(scene.queue, name, { maxAutoLockRenewalDurationInMs: 0, ...options });
const deadLetters = (scene, name) => subscription(scene, name, { subQueueType: "deadLetter" });

/** That many messages and no more, which are completed. */
async function received(receiver, count) {
  const messages = await allOf(receiver, count);
  await none(receiver, "messages beyond those");
  await receiver.close();
  return messages;
}

const publish = (scene, ...messages) => scene.sender().sendMessages(messages);

async function names(rules) {
  const found = [];
  for await (const rule of rules.listRules()) found.push(rule.name);
  return found;
}

export const topicScenarios = {
  async "topic-publish"(scene) {
    await scene.send("first");
    await scene.sender().sendMessages({ body: "second", subject: "second", ...scene.keyed });
    let messages = await received(subscription(scene, "a"), 2);
    equal(bodies(messages), ["first", "second"], "messages in a subscription");
    equal(sequenceNumbers(messages), [1, 2], "their sequence numbers");
    equal(messages[0].deliveryCount, 0, "delivery count");
    equal(bodies(await received(subscription(scene, "b"), 2)), ["first", "second"], "messages in another");
    messages = await received(subscription(scene, "second"), 1);
    equal(bodies(messages), ["second"], "messages where a rule selects");
    equal(sequenceNumbers(messages), [1], "their sequence numbers");
  },

  async "topic-batch"(scene) {
    const sender = scene.sender();
    const batch = await sender.createMessageBatch();
    for (const i of range(100)) truth(batch.tryAddMessage({ body: i }), "batch full");
    await sender.sendMessages(batch);
    for (const name of "ab") {
      const messages = await received(subscription(scene, name), 100);
      equal(bodies(messages), range(100), "bodies");
      equal(sequenceNumbers(messages), range(100, 1), "sequence numbers");
    }
  },

  async "topic-schedule"(scene) {
    const due = new Date(Date.now() + 6000);
    const sender = scene.sender();
    const numbers = await sender.scheduleMessages([{ body: "kept" }, { body: "cancelled" }], due);
    await sender.sendMessages({ body: "kept too", scheduledEnqueueTimeUtc: due });
    await sender.cancelScheduledMessages(numbers[1]);
    await rejects(() => sender.cancelScheduledMessages(numbers[1]), code("MessageNotFound"), "a second cancel");
    const scheduled = await scene.receiver().peekMessages(5);
    equal(bodies(scheduled).sort(), ["kept", "kept too"], "scheduled messages");
    equal(scheduled.map(({ state }) => state), ["scheduled", "scheduled"], "their states");
    const receiver = subscription(scene, "a");
    await none(receiver, "messages before their time");
    const messages = await allOf(receiver, 2);
    const late = Date.now() - due;
    truth(late >= 0 && late < 5000, `delivered ${late} ms late`);
    equal(bodies(messages).sort(), ["kept", "kept too"], "messages in a subscription");
    equal(bodies(await received(subscription(scene, "b"), 2)).sort(), ["kept", "kept too"], "messages in another");
  },

  async "topic-time-to-live"(scene) {
    await publish(scene, { body: "x" }, { body: "half", timeToLive: HALF_HOUR });
    await sleep(1500);
    await received(subscription(scene, "brief"), 0);
    const letters = await received(deadLetters(scene, "brief"), 2);
    equal(bodies(letters).sort(), ["half", "x"], "dead letters");
    for (const letter of letters) equal(letter.deadLetterReason, "TTLExpiredException", "reason");
    await received(subscription(scene, "dropped"), 0);
    await received(deadLetters(scene, "dropped"), 0);
    const long = await received(subscription(scene, "long"), 2);
    equal(long.map((m) => [m.body, m.timeToLive]), [["x", 2 * HALF_HOUR], ["half", HALF_HOUR]], "messages that live");
  },

  async "topic-disabled"(scene) {
    await rejects(() => scene.send("x"), DISABLED, "sending");
    await received(subscription(scene, "a"), 0);
  },

  async "topic-not-allowed"(scene) {
    const started = Date.now();
    const notAllowed = general("InvalidOperationError: ");
    await rejects(() => one(scene.receiver()), notAllowed, "receiving from a topic");
    const sender = scene.client.createSender(`${scene.queue}/Subscriptions/a`);
    await rejects(() => sender.sendMessages({ body: "x" }), notAllowed, "sending to a subscription");
    truth(Date.now() - started < 15_000, "the error took its time");
    await received(subscription(scene, "a"), 0);
  },

  async "unknown-topic"(scene) {
    const started = Date.now();
    const sender = scene.client.createSender(`${scene.queue}-not`);
    await rejects(() => sender.sendMessages({ body: "x" }), NOT_FOUND, "a topic");
    await rejects(() => one(subscription(scene, "not")), NOT_FOUND, "a subscription");
    truth(Date.now() - started < 15_000, "the error took its time");
  },

  async "subscription-settle"(scene) {
    await scene.send("x");
    for (const name of ["a", "strict"]) {
      const receiver = subscription(scene, name);
      await receiver.abandonMessage(await one(receiver));
      await receiver.close();
    }
    const [again] = await received(subscription(scene, "a"), 1);
    equal([again.body, again.deliveryCount], ["x", 1], "second delivery");
    await received(subscription(scene, "strict"), 0);
    const [letter] = await received(deadLetters(scene, "strict"), 1);
    equal([letter.body, letter.deadLetterReason], ["x", "MaxDeliveryCountExceeded"], "dead letter");
  },

  async "subscription-defer"(scene) {
    await scene.send("later");
    const receiver = subscription(scene, "a");
    const message = await one(receiver);
    await receiver.deferMessage(message);
    await none(receiver, "deliveries of a deferred message");
    const [deferred] = await receiver.receiveDeferredMessages(message.sequenceNumber);
    equal([deferred.body, deferred.state], ["later", "deferred"], "deferred message");
    await receiver.completeMessage(deferred);
    await rejects(() => receiver.receiveDeferredMessages(message.sequenceNumber), code("MessageNotFound"), "a completed message");
    equal(bodies(await received(subscription(scene, "b"), 1)), ["later"], "messages in the other subscription");
  },

  async "subscription-dead-letter"(scene) {
    await publish(scene, { body: "bad", messageId: "id", applicationProperties: { kept: "yes" } });
    const receiver = subscription(scene, "a");
    const told = { deadLetterReason: "my reason", deadLetterErrorDescription: "my description" };
    await receiver.deadLetterMessage(await one(receiver), told);
    await none(receiver, "messages in the subscription itself");
    const [letter] = await received(deadLetters(scene, "a"), 1);
    equal([letter.body, letter.messageId], ["bad", "id"], "dead letter");
    equal([letter.deadLetterReason, letter.deadLetterErrorDescription], ["my reason", "my description"], "reason");
    equal(letter.applicationProperties.kept, "yes", "application property");
    equal(letter.deadLetterSource, `${scene.queue}/Subscriptions/a`, "source");
    const [other] = await received(subscription(scene, "b"), 1);
    equal([other.body, other.applicationProperties], ["bad", { kept: "yes" }], "message in the other subscription");
    await received(deadLetters(scene, "b"), 0);
  },

  async "subscription-lock"(scene) {
    await scene.send("slow");
    const receiver = subscription(scene, "a");
    const message = await one(receiver);
    const before = message.lockedUntilUtc;
    const apart = (await one(subscription(scene, "b"))).lockedUntilUtc - before;
    truth(apart > 50_000 && apart < 60_000, `the ends of the locks are ${apart} ms apart`);
    await sleep(2000);
    const until = await receiver.renewMessageLock(message);
    truth(until - before > 1000, `renewed from ${before} to ${until}`);
    await sleep(4000);
    await receiver.completeMessage(message);
    await none(receiver, "messages left");
  },

  async "subscription-peek"(scene) {
    await scene.send(..."abcde");
    await received(subscription(scene, "b"), 5);
    const receiver = subscription(scene, "a");
    const browsed = await receiver.peekMessages(10);
    equal(bodies(browsed), [..."abcde"], "browsed");
    const some = await receiver.peekMessages(2, { fromSequenceNumber: browsed[2].sequenceNumber });
    equal(bodies(some), ["c", "d"], "browsed from a number");
    equal(sequenceNumbers(some), [3, 4], "their numbers");
    await allOf(receiver, 5);
    equal(await receiver.peekMessages(10, { fromSequenceNumber: Long.ONE }), [], "browsed when empty");
  },

  async "subscription-receive-and-delete"(scene) {
    await scene.send("x", "y");
    const receiver = subscription(scene, "a", { receiveMode: "receiveAndDelete" });
    equal(bodies(await allOf(receiver, 2, { complete: false })), ["x", "y"], "bodies");
    await receiver.close();
    await received(subscription(scene, "a"), 0);
    equal(bodies(await received(subscription(scene, "b"), 2)), ["x", "y"], "messages in the other subscription");
  },

  async "subscription-disabled"(scene) {
    await scene.send("x");
    await rejects(() => one(subscription(scene, "off")), DISABLED, "receiving");
    equal(bodies(await received(subscription(scene, "a"), 1)), ["x"], "messages in the other subscription");
  },

  async "sql-filter"(scene) {
    await publish(
      scene,
      { body: "1", applicationProperties: { price: 150, color: "red" } },
      { body: "2", applicationProperties: { price: 50.5, color: "red" }, subject: "abc" },
      { body: "3", messageId: "x" },
      { body: "4", applicationProperties: { price: 100.5, color: "red" } },
    );
    equal(bodies(await received(subscription(scene, "dear"), 2)), ["1", "4"], "by price and color");
    equal(bodies(await received(subscription(scene, "named"), 2)), ["2", "3"], "by label or id");
    equal(bodies(await received(subscription(scene, "bare"), 1)), ["3"], "without color and price");
  },

  async "correlation-filter"(scene) {
    await publish(
      scene,
      { body: "1", subject: "a", correlationId: "c" },
      { body: "2", subject: "a", applicationProperties: { color: "red" } },
      { body: "3", applicationProperties: { count: 7, color: "RED" } },
      { body: "4", applicationProperties: { count: 7.5 } },
      { body: "5", applicationProperties: { count: "7" } },
    );
    equal(bodies(await received(subscription(scene, "labelled"), 1)), ["1"], "by label and correlation id");
    equal(bodies(await received(subscription(scene, "red"), 1)), ["2"], "by a string");
    equal(bodies(await received(subscription(scene, "seven"), 1)), ["3"], "by a number");
  },

  async "filter-error"(scene) {
    await publish(
      scene,
      { body: "good", applicationProperties: { amount: 10, parts: 5 } },
      { body: "bad", applicationProperties: { amount: 10, parts: 0 } },
    );
    for (const name of ["kept", "dropped"]) {
      equal(bodies(await received(subscription(scene, name), 1)), ["good"], "messages selected");
    }
    const [letter] = await received(deadLetters(scene, "kept"), 1);
    equal([letter.body, letter.deadLetterReason], ["bad", "FilterException"], "dead letter");
    truth(/kept/.test(letter.deadLetterErrorDescription), `description: ${letter.deadLetterErrorDescription}`);
    await received(deadLetters(scene, "dropped"), 0);
    equal(bodies(await received(subscription(scene, "a"), 2)), ["good", "bad"], "messages in another subscription");
  },

  async "rule-action"(scene) {
    const sent = { price: 150, color: "red", kept: true };
    await publish(scene, { body: "x", subject: "dear", applicationProperties: sent });
    const [changed] = await received(subscription(scene, "half"), 1);
    equal([changed.body, changed.subject], ["x", "cheap"], "changed copy");
    equal(changed.applicationProperties, { price: 75, kept: true, RuleName: "half" }, "its properties");
    const [plain] = await received(subscription(scene, "a"), 1);
    equal([plain.body, plain.subject], ["x", "dear"], "other copy");
    equal(plain.applicationProperties, sent, "its properties");
  },

  async "rule-copies"(scene) {
    await publish(scene, { body: "x", applicationProperties: { color: "red" } });
    const messages = await received(subscription(scene, "a"), 3);
    equal(bodies(messages), ["x", "x", "x"], "bodies");
    equal(sequenceNumbers(messages), [1, 2, 3], "sequence numbers");
    const shown = messages.map((m) => `${m.applicationProperties.RuleName} ${m.applicationProperties.number}`);
    equal(shown.sort(), ["one 1", "two 2", "undefined undefined"], "names of rules, and what they set");
  },

  async "rule-default"(scene) {
    const rules = scene.client.createRuleManager(scene.queue, "a");
    const found = await rules.getRules();
    equal(found, [{ name: "$Default", filter: { sqlExpression: "1=1" }, action: {} }], "rules of a new subscription");
    await scene.send("before");
    await rules.deleteRule("$Default");
    equal(await rules.getRules(), [], "rules left");
    await scene.send("nowhere");
    await rules.createRule("$Default", { sqlExpression: "1=1" });
    await scene.send("after");
    equal(bodies(await received(subscription(scene, "a"), 2)).sort(), ["after", "before"], "messages that arrived");
  },

  async "rule-manager"(scene) {
    const rules = scene.client.createRuleManager(scene.queue, "a");
    const sql = { sqlExpression: "price > 100" };
    const action = { sqlExpression: "SET price = price / 2" };
    // This SDK has numbers of one type only.
    const correlation = { subject: "s", applicationProperties: { color: "red", count: 7, ratio: 2.5, good: true } };
    await rules.createRule("sql", sql, action);
    await rules.createRule("correlation", correlation);
    await rules.createRule("never", { sqlExpression: "1=0" });
    await rules.deleteRule("$Default");
    const found = Object.fromEntries((await rules.getRules()).map((rule) => [rule.name, rule]));
    equal(Object.keys(found), ["correlation", "never", "sql"], "names, in order");
    equal([found.sql.filter, found.sql.action], [sql, action], "a rule with an SQL filter and an action");
    equal([found.never.filter, found.never.action], [{ sqlExpression: "1=0" }, {}], "a rule that never holds");
    const { subject, applicationProperties, ...others } = found.correlation.filter;
    equal({ subject, applicationProperties }, correlation, "a rule with a correlation filter");
    truth(Object.values(others).every((value) => value == null), "fields that were not set");
    equal(await names(rules), ["correlation", "never", "sql"], "names, page by page");
    const { count, ...rest } = correlation.applicationProperties;
    await publish(
      scene,
      { body: "1", applicationProperties: { price: 150 } },
      { body: "2", ...correlation },
      { body: "3", subject: "s", applicationProperties: { ...rest, count: 8 } },
    );
    await rules.deleteRule("sql");
    await publish(scene, { body: "4", applicationProperties: { price: 150 } }, { body: "5", ...correlation });
    const messages = (await received(subscription(scene, "a"), 3)).sort((a, b) => a.body - b.body);
    equal(bodies(messages), ["1", "2", "5"], "messages that arrived");
    equal(messages[0].applicationProperties, { price: 75, RuleName: "sql" }, "properties after the action");
    equal(messages[1].applicationProperties, correlation.applicationProperties, "properties without an action");
  },

  async "rule-errors"(scene) {
    const rules = scene.client.createRuleManager(scene.queue, "a");
    const all = { sqlExpression: "1=1" };
    await rejects(() => rules.createRule("$Default", all), code("MessagingEntityAlreadyExists"), "a name that is there");
    await rejects(() => rules.deleteRule("not"), NOT_FOUND, "a missing rule");
    const wrongFilter = general("ArgumentError: There was an error parsing the SQL expression. [Token line=1, column=9,");
    await rejects(() => rules.createRule("wrong", { sqlExpression: "price > > 1" }), wrongFilter, "a wrong filter");
    const wrongAction = general("ArgumentError: There was an error parsing the SQL expression. [Token line=1, column=12,");
    await rejects(() => rules.createRule("wrong", all, { sqlExpression: "SET a = 1 +" }), wrongAction, "a wrong action");
    equal(await names(rules), ["$Default"], "names");
  },
};
