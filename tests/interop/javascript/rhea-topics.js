// The scenarios of topic_scenarios.py with rhea.
import { equal, range, rejects, sleep, truth } from "./harness.js";
import {
  abandon,
  allOf,
  annotation,
  bodies,
  complete,
  condition,
  deadLetter,
  deferral,
  ENTITY_DISABLED,
  none,
  NOT_FOUND,
  numbers,
  one,
  opened,
  outcomes,
  post,
  sequenceNumbers,
  take,
  tokens,
  types,
  UUID,
} from "./rhea-scene.js";

const HALF_HOUR = 1_800_000;
const NOT_ALLOWED = condition("amqp:not-allowed");
const isMissing = (error) =>
  error.condition === "amqp:not-found" && /The messaging entity '.*' could not be found/.test(error.description);

const RULE = 0x13700000004;
const EMPTY_ACTION = 0x13700000005;
const SQL_ACTION = 0x13700000006;
const SQL_FILTER = 0x1370000006;
const TRUE_FILTER = 0x1370000007;
const CORRELATION_FILTER = 0x1370000009;

const address = (scene, name) => `${scene.queue}/Subscriptions/${name}`;
const subscription = (scene, name, options = {}) => scene.receiver({ source: address(scene, name), ...options });
const deadLetters = (scene, name) => scene.receiver({ source: `${address(scene, name)}/$DeadLetterQueue` });

/** That many messages and no more, which are completed. */
async function received(opening, count) {
  const receiver = await opening;
  const messages = await allOf(receiver, count);
  await none(receiver, "messages beyond those");
  receiver.close();
  return messages;
}

async function publish(scene, ...messages) {
  const sender = await scene.sender();
  for (const message of messages) await post(sender, message);
  sender.close();
}

const addRule = (scene, name, description) =>
  scene.manage("add-rule", { "rule-name": name, "rule-description": description }, address(scene, "a"));
const removeRule = (scene, name) => scene.manage("remove-rule", { "rule-name": name }, address(scene, "a"));

/** [filter, action, name, creation time] of each rule, as pairs of descriptor and fields where described. */
async function rulesOf(scene, skip = 0, top = 100) {
  const request = { skip: types.wrap_int(skip), top: types.wrap_int(top) };
  const { status, body } = await scene.manage("enumerate-rules", request, address(scene, "a"));
  if (status === 204) return [];
  return body.rules.map((item) => {
    const rule = item["rule-description"];
    equal(Number(rule.descriptor.value), RULE, "descriptor of a rule");
    const [filter, action, name, created] = rule.value;
    return [described(filter), described(action), plain(name), plain(created)];
  });
}

const plain = (value) => (value !== null && typeof value === "object" && "value" in value ? value.value : value);
const described = (value) => [Number(value.descriptor.value), value.value.map(plain)];

export const topicScenarios = {
  async "topic-publish"(scene) {
    await publish(scene, { body: "first", ...scene.keyed }, { body: "second", subject: "second", ...scene.keyed });
    let messages = await received(subscription(scene, "a"), 2);
    equal(bodies(messages), ["first", "second"], "messages in a subscription");
    equal(sequenceNumbers(messages), [1, 2], "their sequence numbers");
    equal(messages[0].delivery_count ?? 0, 0, "delivery count");
    equal(bodies(await received(subscription(scene, "b"), 2)), ["first", "second"], "messages in another");
    messages = await received(subscription(scene, "second"), 1);
    equal(bodies(messages), ["second"], "messages where a rule selects");
    equal(sequenceNumbers(messages), [1], "their sequence numbers");
  },

  async "topic-batch"(scene) {
    const inner = range(100).map((i) => outcomes.encode({ body: i }));
    const envelope = outcomes.encode({ body: outcomes.data_sections(inner) });
    await post(await scene.sender(), envelope, undefined, 0x80013700);
    for (const name of "ab") {
      const messages = await received(subscription(scene, name), 100);
      equal(bodies(messages), range(100), "bodies");
      equal(sequenceNumbers(messages), range(100, 1), "sequence numbers");
    }
  },

  async "topic-schedule"(scene) {
    const due = new Date(Date.now() + 6000);
    const later = (body) => ({ body, message_id: body, message_annotations: { "x-opt-scheduled-enqueue-time": due } });
    const messages = ["kept", "cancelled"].map((body) => ({
      "message-id": body,
      message: types.wrap_binary(outcomes.encode(later(body))),
    }));
    const { body } = await scene.manage("schedule-message", { messages });
    await publish(scene, later("kept too"));
    const request = { "sequence-numbers": numbers(body["sequence-numbers"][1]) };
    await scene.manage("cancel-scheduled-message", request);
    await rejects(() => scene.manage("cancel-scheduled-message", request), NOT_FOUND, "a second cancel");
    equal((await scene.peek(5)).map(({ body }) => body).sort(), ["kept", "kept too"], "scheduled messages");
    const receiver = await subscription(scene, "a");
    await none(receiver, "messages before their time");
    const got = await allOf(receiver, 2);
    const late = Date.now() - due;
    truth(late >= 0 && late < 5000, `delivered ${late} ms late`);
    equal(bodies(got).sort(), ["kept", "kept too"], "messages in a subscription");
    equal(bodies(await received(subscription(scene, "b"), 2)).sort(), ["kept", "kept too"], "messages in another");
  },

  async "topic-time-to-live"(scene) {
    await publish(scene, { body: "x" }, { body: "half", ttl: HALF_HOUR });
    await sleep(1500);
    await received(subscription(scene, "brief"), 0);
    const letters = await received(deadLetters(scene, "brief"), 2);
    equal(bodies(letters).sort(), ["half", "x"], "dead letters");
    for (const { application_properties: set } of letters) equal(set.DeadLetterReason, "TTLExpiredException", "reason");
    await received(subscription(scene, "dropped"), 0);
    await received(deadLetters(scene, "dropped"), 0);
    const long = await received(subscription(scene, "long"), 2);
    const lives = Object.fromEntries(long.map((message) => [message.body, message.ttl]));
    equal(lives, { x: 2 * HALF_HOUR, half: HALF_HOUR }, "messages that live");
  },

  async "topic-disabled"(scene) {
    await rejects(() => scene.send("x"), ENTITY_DISABLED, "sending");
    await received(subscription(scene, "a"), 0);
  },

  async "topic-not-allowed"(scene) {
    const receiver = await scene.receiver(); // taken for one that means to peek
    const refused = opened(receiver, "receiver_open", ["receiver_error"]);
    receiver.add_credit(1);
    await rejects(() => refused, NOT_ALLOWED, "receiving from a topic");
    await rejects(() => scene.sender({ target: address(scene, "a") }), NOT_ALLOWED, "sending to a subscription");
    await received(subscription(scene, "a"), 0);
  },

  async "unknown-topic"(scene) {
    await rejects(() => scene.sender({ target: `${scene.queue}-not` }), isMissing, "a topic");
    await rejects(() => subscription(scene, "not"), isMissing, "a subscription");
  },

  async "subscription-settle"(scene) {
    await scene.send("x");
    for (const name of ["a", "strict"]) {
      const receiver = await subscription(scene, name);
      await abandon(await one(receiver));
      receiver.close();
    }
    const [again] = await received(subscription(scene, "a"), 1);
    equal([again.body, again.delivery_count], ["x", 1], "second delivery");
    await received(subscription(scene, "strict"), 0);
    const [letter] = await received(deadLetters(scene, "strict"), 1);
    equal([letter.body, letter.application_properties.DeadLetterReason], ["x", "MaxDeliveryCountExceeded"], "dead letter");
  },

  async "subscription-defer"(scene) {
    await scene.send("later");
    const receiver = await subscription(scene, "a");
    const context = await one(receiver);
    await deferral(context);
    await none(receiver, "deliveries of a deferred message");
    const request = {
      "sequence-numbers": numbers(annotation(context.message, "x-opt-sequence-number")),
      "receiver-settle-mode": types.wrap_uint(1),
    };
    const receiveDeferred = () => scene.manage("receive-by-sequence-number", request, address(scene, "a"));
    const [{ message, "lock-token": token }, ...others] = (await receiveDeferred()).body.messages;
    equal([outcomes.decode(message).body, others.length], ["later", 0], "deferred message");
    const settlement = { "disposition-status": "completed", "lock-tokens": types.wrap_array([token], UUID) };
    await scene.manage("update-disposition", settlement, address(scene, "a"));
    await rejects(receiveDeferred, NOT_FOUND, "a completed message");
    equal(bodies(await received(subscription(scene, "b"), 1)), ["later"], "messages in the other subscription");
  },

  async "subscription-dead-letter"(scene) {
    const spellings = [
      `${scene.queue}/Subscriptions/a/$DeadLetterQueue`,
      `${scene.queue.toUpperCase()}/subscriptions/A/$deadletterqueue`,
      `/${scene.queue}/Subscriptions/a/$DeadLetterQueue`,
      `amqps://localhost:5671/${scene.queue}/subscriptions/%61/%24DeadLetterQueue`,
    ];
    const sent = { body: "bad", message_id: "id", application_properties: { kept: "yes" } };
    await publish(scene, ...spellings.map(() => sent));
    const receiver = await subscription(scene, "a");
    const info = { DeadLetterReason: "my reason", DeadLetterErrorDescription: "my description" };
    for (const context of await take(receiver, spellings.length, 60_000)) await deadLetter(context, info);
    await none(receiver, "messages in the subscription itself");
    for (const source of spellings) {
      const letters = await scene.receiver({ source });
      const context = await one(letters);
      const { body, message_id, application_properties } = context.message;
      equal([body, message_id], ["bad", "id"], "dead letter");
      equal(application_properties, { ...info, kept: "yes" }, "its properties");
      equal(annotation(context.message, "x-opt-deadletter-source"), address(scene, "a"), "source");
      await complete(context);
      letters.close();
    }
    await received(deadLetters(scene, "a"), 0);
    const others = await received(subscription(scene, "b"), spellings.length);
    for (const other of others) equal(other.application_properties, { kept: "yes" }, "properties in the other subscription");
    await received(deadLetters(scene, "b"), 0);
  },

  async "subscription-lock"(scene) {
    await scene.send("slow");
    const receiver = await subscription(scene, "a");
    const context = await one(receiver);
    const lockedUntil = ({ message }) => annotation(message, "x-opt-locked-until");
    const before = lockedUntil(context);
    const apart = lockedUntil(await one(await subscription(scene, "b"))) - before;
    truth(apart > 50_000 && apart < 60_000, `the ends of the locks are ${apart} ms apart`);
    await sleep(2000);
    const { body } = await scene.manage("renew-lock", { "lock-tokens": tokens(context) }, address(scene, "a"));
    truth(body.expirations[0] - before > 1000, `renewed from ${before} to ${body.expirations[0]}`);
    await sleep(4000);
    await complete(context);
    await none(receiver, "messages left");
  },

  async "subscription-peek"(scene) {
    await scene.send(..."abcde");
    await received(subscription(scene, "b"), 5);
    const peek = (count, from) => scene.peek(count, from, address(scene, "a"));
    const browsed = await peek(10, 1);
    equal(bodies(browsed), [..."abcde"], "browsed");
    const some = await peek(2, annotation(browsed[2], "x-opt-sequence-number"));
    equal(bodies(some), ["c", "d"], "browsed from a number");
    equal(sequenceNumbers(some), [3, 4], "their numbers");
    await received(subscription(scene, "a"), 5);
    equal(await peek(10, 1), [], "browsed when empty");
  },

  async "subscription-receive-and-delete"(scene) {
    await scene.send("x", "y");
    const receiver = await subscription(scene, "a", { snd_settle_mode: 1, rcv_settle_mode: 0 });
    const contexts = await take(receiver, 2, 60_000);
    equal(contexts.map(({ message }) => message.body), ["x", "y"], "bodies");
    receiver.close();
    await received(subscription(scene, "a"), 0);
    equal(bodies(await received(subscription(scene, "b"), 2)), ["x", "y"], "messages in the other subscription");
  },

  async "subscription-disabled"(scene) {
    await scene.send("x");
    await rejects(() => subscription(scene, "off"), ENTITY_DISABLED, "receiving");
    equal(bodies(await received(subscription(scene, "a"), 1)), ["x"], "messages in the other subscription");
  },

  async "sql-filter"(scene) {
    await publish(
      scene,
      { body: "1", application_properties: { price: 150, color: "red" } },
      { body: "2", application_properties: { price: 50.5, color: "red" }, subject: "abc" },
      { body: "3", message_id: "x" },
      { body: "4", application_properties: { price: types.wrap_double(101), color: "red" } },
    );
    equal(bodies(await received(subscription(scene, "dear"), 2)).sort(), ["1", "4"], "by price and color");
    equal(bodies(await received(subscription(scene, "named"), 2)).sort(), ["2", "3"], "by label or id");
    equal(bodies(await received(subscription(scene, "bare"), 1)), ["3"], "without color and price");
  },

  async "correlation-filter"(scene) {
    const kinds = ["byte", "ubyte", "short", "ushort", "int", "uint", "long", "ulong", "float", "double"];
    const sevens = kinds.map((kind) => ({ body: kind, application_properties: { count: types[`wrap_${kind}`](7) } }));
    await publish(
      scene,
      { body: "1", subject: "a", correlation_id: "c" },
      { body: "2", subject: "a", application_properties: { color: "red" } },
      ...sevens,
      { body: "other", application_properties: { count: 7.5, color: "RED" } },
      { body: "text", application_properties: { count: "7" } },
    );
    equal(bodies(await received(subscription(scene, "labelled"), 1)), ["1"], "by label and correlation id");
    equal(bodies(await received(subscription(scene, "red"), 1)), ["2"], "by a string");
    equal(bodies(await received(subscription(scene, "seven"), kinds.length)).sort(), kinds.sort(), "by a number");
  },

  async "filter-error"(scene) {
    await publish(
      scene,
      { body: "good", application_properties: { amount: 10, parts: 5 } },
      { body: "bad", application_properties: { amount: 10, parts: 0 } },
    );
    for (const name of ["kept", "dropped"]) {
      equal(bodies(await received(subscription(scene, name), 1)), ["good"], "messages selected");
    }
    const [letter] = await received(deadLetters(scene, "kept"), 1);
    const { DeadLetterReason: reason, DeadLetterErrorDescription: description } = letter.application_properties;
    equal([letter.body, reason], ["bad", "FilterException"], "dead letter");
    truth(/kept/.test(description), `description: ${description}`);
    await received(deadLetters(scene, "dropped"), 0);
    equal(bodies(await received(subscription(scene, "a"), 2)).sort(), ["bad", "good"], "messages in another subscription");
  },

  async "rule-action"(scene) {
    const sent = { price: 150, color: "red", kept: true };
    await publish(scene, { body: "x", subject: "dear", application_properties: sent });
    const [changed] = await received(subscription(scene, "half"), 1);
    equal([changed.body, changed.subject], ["x", "cheap"], "changed copy");
    equal(changed.application_properties, { price: 75, kept: true, RuleName: "half" }, "its properties");
    const [same] = await received(subscription(scene, "a"), 1);
    equal([same.body, same.subject], ["x", "dear"], "other copy");
    equal(same.application_properties, sent, "its properties");
  },

  async "rule-copies"(scene) {
    await publish(scene, { body: "x", application_properties: { color: "red" } });
    const messages = await received(subscription(scene, "a"), 3);
    equal(bodies(messages), ["x", "x", "x"], "bodies");
    equal(sequenceNumbers(messages), [1, 2, 3], "sequence numbers");
    const shown = messages.map(({ application_properties: set }) => `${set.RuleName} ${set.number}`);
    equal(shown.sort(), ["one 1", "two 2", "undefined undefined"], "names of rules, and what they set");
  },

  async "rule-default"(scene) {
    const [[filter, action, name, created], ...others] = await rulesOf(scene);
    equal([filter, action, name], [[TRUE_FILTER, []], [EMPTY_ACTION, []], "$Default"], "rule of a new subscription");
    truth(Math.abs(Date.now() - created) < 600_000, `created ${created}`);
    equal(others, [], "other rules");
    await scene.send("before");
    await removeRule(scene, "$Default");
    equal(await rulesOf(scene), [], "rules left");
    await scene.send("nowhere");
    await addRule(scene, "$Default", { "sql-filter": { expression: "1=1" } });
    await scene.send("after");
    equal(bodies(await received(subscription(scene, "a"), 2)).sort(), ["after", "before"], "messages that arrived");
  },

  async "rule-manager"(scene) {
    const properties = { color: "red", count: types.wrap_int(7), ratio: 2.5, good: true, when: new Date(86_400_000) };
    await addRule(scene, "sql", {
      "sql-filter": { expression: "price > 100" },
      "sql-rule-action": { expression: "SET price = price / 2" },
    });
    await addRule(scene, "correlation", { "correlation-filter": { label: "s", "reply-to": null, properties } });
    await removeRule(scene, "$Default");
    const [correlation, sql, ...others] = await rulesOf(scene);
    equal(sql.slice(0, 3), [[SQL_FILTER, ["price > 100", 20]], [SQL_ACTION, ["SET price = price / 2", 20]], "sql"], "a rule");
    const [[kind, fields], action, name] = correlation;
    equal([kind, action, name], [CORRELATION_FILTER, [EMPTY_ACTION, []], "correlation"], "another rule");
    equal(fields.slice(0, 8), [null, null, null, null, "s", null, null, null], "fields of its filter");
    // The library leaves a map within a described list as names and values in turn, with their types.
    const typed = fields[8].map((item) => `${item.type.name} ${plain(item).valueOf()}`);
    const names = Object.keys(properties).map((key) => `Str8 ${key}`);
    const values = ["Str8 red", "SmallInt 7", "Double 2.5", "True true", "Timestamp 86400000"];
    equal(typed, names.flatMap((key, i) => [key, values[i]]), "properties of its filter");
    equal(others, [], "other rules");
    equal((await rulesOf(scene, 1, 1)).map(([, , rule]) => rule), ["sql"], "rules of the second page");
    const matching = (body) => ({ body, subject: "s", application_properties: { ...properties, count: types.wrap_double(7) } });
    await publish(
      scene,
      { body: "1", application_properties: { price: 150 } },
      matching("2"),
      { body: "3", subject: "s", application_properties: { ...properties, good: false } },
    );
    await removeRule(scene, "sql");
    await publish(scene, { body: "4", application_properties: { price: 150 } }, matching("5"));
    const messages = (await received(subscription(scene, "a"), 3)).sort((a, b) => a.body - b.body);
    equal(bodies(messages), ["1", "2", "5"], "messages that arrived");
    equal(messages[0].application_properties, { price: 75, RuleName: "sql" }, "properties after the action");
  },

  async "rule-errors"(scene) {
    const every = { "sql-filter": { expression: "1=1" } };
    const there = condition("com.microsoft:entity-already-exists");
    await rejects(() => addRule(scene, "$Default", every), there, "a name that is there");
    await rejects(() => removeRule(scene, "not"), isMissing, "a missing rule");
    const wrongAt = (place) => (error) =>
      error.condition === "com.microsoft:argument-error" && error.description.includes(`[Token line=1, column=${place},`);
    await rejects(() => addRule(scene, "wrong", { "sql-filter": { expression: "price > > 1" } }), wrongAt(9), "a wrong filter");
    const action = { "sql-rule-action": { expression: "SET a = 1 +" } };
    await rejects(() => addRule(scene, "wrong", { ...every, ...action }), wrongAt(12), "a wrong action");
    equal((await rulesOf(scene)).map(([, , name]) => name), ["$Default"], "names");
  },
};
