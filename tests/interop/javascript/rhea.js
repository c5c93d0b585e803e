// The scenarios of scenarios.py with rhea, a general AMQP 1.0 client: `node rhea.js SCENARIO...`.
// What the Azure SDKs do over $management is done here request by request.
import { config, equal, killedWhileHolding, main, range, rejects, sleep, truth } from "./harness.js";
import {
  abandon,
  allOf,
  annotation,
  bodies,
  browsed,
  complete,
  condition,
  deadLetter,
  deferral,
  ENTITY_DISABLED,
  LOCK_LOST,
  none,
  NOT_FOUND,
  numbers,
  one,
  opened,
  outcomes,
  post,
  Scene,
  sequenceNumbers,
  SETTLED,
  settle,
  take,
  text,
  tokens,
  types,
  UNAUTHORIZED,
  UNSETTLED,
  UUID,
} from "./rhea-scene.js";
import rhea from "rhea";
import { cornerScenarios } from "./rhea-corners.js";
import { partitionedScenarios } from "./rhea-partitioned.js";
import { hold, sessionScenarios } from "./rhea-sessions.js";
import { topicScenarios } from "./rhea-topics.js";

const { filter } = rhea;
const lockedUntil = (message) => annotation(message, "x-opt-locked-until");

const scenarios = {
  async "send-complete"(scene) {
    await scene.send("hello");
    const receiver = await scene.receiver();
    const context = await one(receiver);
    equal(context.message.body, "hello", "body");
    equal(context.message.delivery_count ?? 0, 0, "delivery count");
    equal(context.delivery.tag.length, 16, "bytes of the delivery tag");
    truth(outcomes.is_accepted(await complete(context)) !== undefined, "an answer to accepted");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async duplicates(scene) {
    const sender = await scene.sender();
    for (const [body, message_id] of [["a", "1"], ["b", "1"], ["c", "2"]]) sender.send({ body, message_id });
    const receiver = await scene.receiver();
    equal(bodies(await allOf(receiver, 2)).sort(), ["a", "c"], "bodies");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async properties(scene) {
    const sent = {
      message_id: "id-1",
      subject: "subject",
      correlation_id: "correlation",
      content_type: "text/plain",
      content_encoding: "identity",
      to: "to-somebody",
      reply_to: "reply-to",
      reply_to_group_id: "reply-session",
      ttl: 3_600_000,
    };
    await post(await scene.sender(), { body: "x", ...sent, message_annotations: { "x-opt-partition-key": "key" } });
    const context = await one(await scene.receiver());
    const { message } = context;
    for (const [name, value] of Object.entries(sent)) equal(message[name], value, name);
    equal(annotation(message, "x-opt-partition-key"), "key", "partition key");
    equal(sequenceNumbers([message]), [1], "sequence number");
    const enqueued = annotation(message, "x-opt-enqueued-time");
    truth(Math.abs(enqueued - Date.now()) < 30_000, `enqueued ${enqueued}`);
    truth(annotation(message, "x-opt-locked-until") > new Date(), "lock end");
    equal(message.absolute_expiry_time - enqueued, 3_600_000, "expires");
    await complete(context);
  },

  async "application-properties"(scene) {
    const when = new Date(Date.UTC(2024, 0, 2, 3, 4, 5, 678));
    const uuid = Buffer.from("00112233445566778899aabbccddeeff", "hex");
    const sent = { text: "grüße 🐇", zero: 0, negative: -7, large: 2 ** 40, double: 2.5, yes: true, no: false, none: null, when };
    const typed = { ...sent, uuid: types.wrap_uuid(uuid), ubyte: types.wrap_ubyte(200), binary: types.wrap_binary(uuid) };
    await post(await scene.sender(), { body: "x", application_properties: typed });
    const context = await one(await scene.receiver());
    const { uuid: gotUuid, binary, ubyte, ...got } = context.message.application_properties;
    equal(got, sent, "application properties");
    equal([...gotUuid], [...uuid], "uuid");
    equal([...binary], [...uuid], "binary");
    equal(ubyte, 200, "ubyte");
    await complete(context);
  },

  async bodies(scene) {
    const sender = await scene.sender();
    const binary = Buffer.from(range(1024).map((i) => i % 256));
    const value = { text: "value", number: 7, list: [1, 2, 3] };
    const { data_section, sequence_section } = outcomes;
    for (const body of [data_section(binary), data_section(Buffer.alloc(0)), value, sequence_section([1, 2, "b"])]) {
      await post(sender, { body, ...scene.keyed });
    }
    const messages = await allOf(await scene.receiver(), 4);
    truth(binary.equals(messages[0].body.content), "binary body");
    equal(messages[1].body.content.length, 0, "length of an empty body");
    equal(messages[2].body, value, "value body");
    equal(messages[3].body.content, [1, 2, "b"], "sequence body");
  },

  async batch(scene) {
    const inner = range(100).map((i) => outcomes.encode({ message_id: String(i), body: `message ${i}` }));
    const envelope = outcomes.encode({ body: outcomes.data_sections(inner) });
    await post(await scene.sender(), envelope, undefined, 0x80013700);
    const messages = await allOf(await scene.receiver(), 100);
    equal(messages.map((m) => m.message_id), range(100).map(String), "ids");
    equal(sequenceNumbers(messages), range(100, 1), "sequence numbers");
    equal(messages[99].body, "message 99", "body");
  },

  async "large-message"(scene) {
    const body = Buffer.alloc(900 * 1024);
    for (let i = 0; i < body.length; i++) body[i] = (i * 31) % 251;
    await post(await scene.sender(), { body: outcomes.data_section(body) });
    const [message] = await allOf(await scene.receiver(), 1);
    truth(body.equals(message.body.content), "the body differs");
  },

  async pipelined(scene) {
    const sender = await scene.sender();
    const sends = [];
    for (const i of range(2000)) {
      while (!sender.sendable()) await sleep(1);
      sends.push(post(sender, { body: "x".repeat(100), message_id: i }));
    }
    await Promise.all(sends);
    const receiver = await scene.receiver();
    const messages = await allOf(receiver, 2000);
    equal(messages.map((m) => m.message_id).sort((a, b) => a - b), range(2000), "ids");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "presettled-send"(scene) {
    const sender = await scene.sender({ snd_settle_mode: 1 });
    for (const i of range(10)) sender.send({ body: String(i), ...scene.keyed });
    equal(bodies(await allOf(await scene.receiver(), 10)), range(10).map(String), "bodies");
  },

  async "receive-and-delete"(scene) {
    await scene.send("a", "b");
    const receiver = await scene.receiver({ snd_settle_mode: 1, rcv_settle_mode: 0 });
    const received = await take(receiver, 2, 60_000);
    equal(received.map(({ message }) => message.body), ["a", "b"], "bodies");
    truth(received.every(({ delivery }) => delivery.remote_settled), "a delivery was not settled");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async abandon(scene) {
    const sender = await scene.sender();
    await post(sender, { body: "first", message_id: "id", ...scene.keyed });
    await post(sender, { body: "second", ...scene.keyed });
    const receiver = await scene.receiver();
    const context = await one(receiver);
    equal([context.message.body, context.message.delivery_count ?? 0], ["first", 0], "first delivery");
    await abandon(context);
    const again = await one(receiver);
    equal([again.message.body, again.message.delivery_count, again.message.message_id], ["first", 1, "id"], "second delivery");
    truth(!again.delivery.tag.equals(context.delivery.tag), "the lock token is the old one");
    await complete(again);
    const last = await one(receiver);
    equal(last.message.body, "second", "next message");
    await complete(last);
  },

  async "abandon-properties"(scene) {
    await post(await scene.sender(), { body: "x", application_properties: { kept: 1, changed: "before" } });
    const receiver = await scene.receiver();
    await abandon(await one(receiver), { changed: "after", added: 5 });
    const context = await one(receiver);
    equal(context.message.application_properties, { kept: 1, changed: "after", added: 5 }, "application properties");
    await complete(context);
  },

  async defer(scene) {
    await scene.send("later");
    const receiver = await scene.receiver();
    const context = await one(receiver);
    const number = annotation(context.message, "x-opt-sequence-number");
    await deferral(context);
    await none(receiver, "deliveries of a deferred message");
    const request = { "sequence-numbers": numbers(number), "receiver-settle-mode": types.wrap_uint(1) };
    const { body } = await scene.manage("receive-by-sequence-number", request);
    equal(body.messages.length, 1, "deferred messages");
    equal(outcomes.decode(body.messages[0].message).body, "later", "body");
    await scene.manage("update-disposition", {
      "disposition-status": "completed",
      "lock-tokens": types.wrap_array([body.messages[0]["lock-token"]], UUID),
    });
    await rejects(() => scene.manage("receive-by-sequence-number", request), NOT_FOUND, "a completed message");
    await scene.nothingIsLeft();
  },

  async "dead-letter"(scene) {
    await post(await scene.sender(), { body: "bad", message_id: "id", application_properties: { kept: "yes" } });
    const receiver = await scene.receiver();
    await deadLetter(await one(receiver), {
      DeadLetterReason: "my reason",
      DeadLetterErrorDescription: "my description",
      added: 7,
    });
    await none(receiver, "messages in the queue itself");
    const letters = await scene.deadLetters();
    const context = await one(letters);
    const { message } = context;
    equal([message.body, message.message_id], ["bad", "id"], "dead-lettered message");
    const expected = { DeadLetterReason: "my reason", DeadLetterErrorDescription: "my description", kept: "yes", added: 7 };
    equal(message.application_properties, expected, "application properties");
    equal(annotation(message, "x-opt-deadletter-source"), scene.queue, "source");
    await complete(context);
    await none(letters, "dead letters left");
  },

  async "dead-letter-queue"(scene) {
    await post(await scene.sender(), { body: "bad", ttl: 3000 });
    await deadLetter(await one(await scene.receiver()), { DeadLetterReason: "because" });
    await sleep(3500);
    const queue = `${scene.queue}/$DeadLetterQueue`;
    equal(bodies(await scene.peek(5, 1, queue)), ["bad"], "browsed");
    const letters = await scene.deadLetters();
    const context = await one(letters);
    await abandon(context);
    const again = await one(letters);
    equal(again.message.delivery_count ?? 0, context.message.delivery_count ?? 0, "delivery count");
    equal(again.message.application_properties.DeadLetterReason, "because", "reason");
    await complete(again);
    equal(await scene.peek(5, 1, queue), [], "left");
  },

  async "max-delivery-count"(scene) {
    await scene.send("poison");
    const receiver = await scene.receiver();
    for (const count of range(2)) {
      const context = await one(receiver);
      equal(context.message.delivery_count ?? 0, count, "delivery count");
      await abandon(context);
    }
    await none(receiver, "messages in the queue itself");
    const context = await one(await scene.deadLetters());
    const { body, application_properties: set } = context.message;
    equal([body, set.DeadLetterReason], ["poison", "MaxDeliveryCountExceeded"], "dead letter");
    await complete(context);
  },

  async "lock-expiry"(scene) {
    await post(await scene.sender(), { body: "slow", message_id: "id" });
    const [first, second] = [await scene.receiver(), await scene.receiver()];
    await one(first);
    const started = Date.now();
    await none(second, "messages while locked");
    const again = await one(second);
    truth(Date.now() - started > 3500, `delivered again after ${Date.now() - started} ms`);
    equal([again.message.message_id, again.message.delivery_count], ["id", 1], "second delivery");
    await complete(again);
  },

  async "renew-lock"(scene) {
    await scene.send("slow");
    const context = await one(await scene.receiver());
    const before = annotation(context.message, "x-opt-locked-until");
    await sleep(3000);
    const { body } = await scene.manage("renew-lock", { "lock-tokens": tokens(context) });
    equal(body.expirations.length, 1, "expirations");
    truth(body.expirations[0] - before > 2000, `renewed from ${before} to ${body.expirations[0]}`);
    await sleep(3500);
    await complete(context);
    await scene.nothingIsLeft();
  },

  async "send-again"(scene) {
    const sender = await scene.sender();
    const receiver = await scene.receiver();
    const given = { message_id: "id", subject: "s", group_id: "ключ" };
    const message_annotations = { "x-opt-partition-key": "ключ" };
    await post(sender, { body: "x", application_properties: { k: "v", n: 1 }, message_annotations, ...given });
    const context = await one(receiver);
    await complete(context);
    await post(sender, context.message);
    const again = await one(receiver);
    await complete(again);
    equal(Object.fromEntries(Object.keys(given).map((name) => [name, again.message[name]])), given, "what it had");
    equal(annotation(again.message, "x-opt-partition-key"), "ключ", "partition key");
    equal([again.message.body, again.message.application_properties], ["x", { k: "v", n: 1 }], "body and properties");
  },

  async "lock-lost"(scene) {
    await scene.send("slow");
    const receiver = await scene.receiver();
    const context = await one(receiver);
    await sleep(6000);
    await rejects(() => scene.manage("renew-lock", { "lock-tokens": tokens(context) }), LOCK_LOST, "renewing a lost lock");
    await rejects(() => complete(context), LOCK_LOST, "completing after the lock");
    const again = await one(receiver);
    equal(again.message.delivery_count, 1, "delivery count");
    await complete(again);
  },

  async peek(scene) {
    await scene.send(..."abcde");
    const browsed = await scene.peek(10);
    equal(bodies(browsed), [..."abcde"], "browsed");
    const some = await scene.peek(2, annotation(browsed[2], "x-opt-sequence-number"));
    equal([bodies(some), sequenceNumbers(some)], [["c", "d"], [3, 4]], "browsed from a number");
    equal(browsed.map(lockedUntil), Array(5).fill(undefined), "browsed as locked");
    const receiver = await scene.receiver();
    const locked = await one(receiver);
    const looked = await scene.peek(2, annotation(locked.message, "x-opt-sequence-number"));
    equal(looked.map(lockedUntil), [lockedUntil(locked.message), undefined], "ends of locks");
    await complete(locked);
    await allOf(receiver, 4);
    equal(await scene.peek(10), [], "browsed when empty");
  },

  async browse(scene) {
    await scene.send(..."abcde");
    for (const snd_settle_mode of [SETTLED, UNSETTLED, SETTLED]) {
      const shown = await browsed(scene, scene.queue, snd_settle_mode);
      equal(bodies(shown), [..."abcde"], "browsed");
      for (const { delivery_count } of shown) equal(delivery_count ?? 0, 0, "delivery count");
    }
    const receiver = await scene.receiver();
    await deadLetter(await one(receiver));
    const dead = `${scene.queue}/$DeadLetterQueue`;
    for (const _ of range(2)) equal(bodies(await browsed(scene, dead, SETTLED)), ["a"], "browsed dead letters");
    equal(bodies(await allOf(receiver, 4)), [..."bcde"], "received");
    equal(await browsed(scene, scene.queue, UNSETTLED), [], "browsed when empty");
    await allOf(await scene.deadLetters(), 1);
  },

  async selector(scene) {
    const sender = await scene.sender();
    for (const number of range(6)) {
      const application_properties = { color: ["red", "blue"][number % 2], n: number };
      const ids = { message_id: `id-${number}`, correlation_id: `corr-${number}` };
      await post(sender, { ...ids, subject: `type-${number}`, priority: number, body: number, application_properties });
    }
    const shown = await browsed(scene, scene.queue, SETTLED, filter.selector("color = 'blue'"));
    equal(bodies(shown).sort(), [1, 3, 5], "browsed");
    const selectors = {
      "color = 'red' AND n BETWEEN 1 AND 3": [2],
      "JMSCorrelationID = 'corr-3' OR JMSType LIKE 'type-_' AND JMSPriority > 4": [3, 5],
      "color = 'green'": [],
    };
    for (const [text, expected] of Object.entries(selectors)) {
      const receiver = await scene.receiver({ source: { address: scene.queue, filter: filter.selector(text) } });
      equal(receiver.source.filter["jms-selector"].value, text, "filter of the answer");
      const contexts = await take(receiver, 10, 2000);
      equal(contexts.map(({ message }) => message.body).sort(), expected, text);
      for (const context of contexts) await complete(context);
      receiver.close();
    }
    const rest = (await allOf(await scene.receiver(), 3)).map(({ body, delivery_count }) => [body, delivery_count ?? 0]);
    equal(rest.sort(), [[0, 0], [1, 0], [4, 0]], "the rest");
    const wrong = { "color =": "amqp:invalid-field", "JMSReplyTo = 'x'": "amqp:not-implemented" };
    for (const [text, expected] of Object.entries(wrong)) {
      const source = { address: scene.queue, filter: filter.selector(text) };
      await rejects(() => scene.receiver({ source }), condition(expected), text);
    }
  },

  async schedule(scene) {
    const due = new Date(Date.now() + 6000);
    const later = (body) => ({ body, message_id: body, message_annotations: { "x-opt-scheduled-enqueue-time": due } });
    const messages = [{ "message-id": "later", message: types.wrap_binary(outcomes.encode(later("later"))) }];
    const { body } = await scene.manage("schedule-message", { messages });
    const [number] = body["sequence-numbers"];
    await post(await scene.sender(), later("later too"));
    const browsed = await scene.peek(5);
    equal(bodies(browsed).sort(), ["later", "later too"], "browsed");
    for (const message of browsed) equal(annotation(message, "x-opt-message-state"), 2, "state");
    const first = browsed.find((m) => m.body === "later");
    equal(annotation(first, "x-opt-sequence-number"), number, "the number returned");
    const receiver = await scene.receiver();
    await none(receiver, "messages before their time");
    const received = await allOf(receiver, 2);
    const late = Date.now() - due;
    truth(late >= 0 && late < 5000, `delivered ${late} ms late`);
    equal(bodies(received).sort(), ["later", "later too"], "bodies");
  },

  async "cancel-scheduled"(scene) {
    const due = new Date(Date.now() + 6000);
    const message = (body) => ({
      "message-id": body,
      message: types.wrap_binary(outcomes.encode({ body, message_annotations: { "x-opt-scheduled-enqueue-time": due } })),
    });
    const { body } = await scene.manage("schedule-message", { messages: [message("kept"), message("cancelled")] });
    const request = { "sequence-numbers": numbers(body["sequence-numbers"][1]) };
    await scene.manage("cancel-scheduled-message", request);
    await rejects(() => scene.manage("cancel-scheduled-message", request), NOT_FOUND, "a second cancel");
    equal(bodies(await allOf(await scene.receiver(), 1)), ["kept"], "messages that arrived");
    await scene.nothingIsLeft();
  },

  async "time-to-live"(scene) {
    const sender = await scene.sender();
    await post(sender, { body: "short", ttl: 1000 });
    await post(sender, { body: "long" });
    await sleep(1500);
    equal(bodies(await allOf(await scene.receiver(), 1)), ["long"], "messages that arrived");
    await scene.nothingIsLeft();
  },

  async "time-to-live-dead-letter"(scene) {
    await post(await scene.sender(), { body: "short", ttl: 1000 });
    await sleep(1500);
    await none(await scene.receiver(), "expired messages delivered");
    const [message] = await allOf(await scene.deadLetters(), 1);
    equal([message.body, message.application_properties.DeadLetterReason], ["short", "TTLExpiredException"], "dead letter");
  },

  async "settle-elsewhere"(scene) {
    await scene.send("x");
    const receiver = await scene.receiver();
    const context = await one(receiver);
    const closed = opened(receiver, "receiver_close", ["receiver_error"]);
    receiver.close();
    await closed;
    const request = { "disposition-status": "completed", "lock-tokens": tokens(context) };
    await scene.manage("update-disposition", request);
    await rejects(() => scene.manage("update-disposition", request), LOCK_LOST, "a second settlement");
    await scene.nothingIsLeft();
  },

  async "prompt-return"(scene) {
    const receiver = await scene.receiver();
    const started = Date.now();
    equal((await take(receiver, 10, 500)).length, 0, "messages of an empty queue");
    truth(Date.now() - started < 3000, `draining took ${Date.now() - started} ms`);
    await scene.send(..."abc");
    const got = await take(receiver, 10, 1000);
    equal(got.map(({ message }) => message.body).sort(), [..."abc"], "a short receive");
    await Promise.all(got.map(complete));
    await scene.send("d", "e");
    equal(bodies(await allOf(receiver, 2)).sort(), ["d", "e"], "the rest");
    await scene.nothingIsLeft();
  },

  async prefetch(scene) {
    await scene.send(...range(100).map(String));
    const receiver = await scene.receiver({ credit_window: 50 });
    const received = [];
    const deadline = Date.now() + 60_000;
    while (received.length < 100 && Date.now() < deadline) {
      const some = receiver.inbox.splice(0);
      await Promise.all(some.map(complete));
      received.push(...some.map(({ message }) => message));
      await sleep(5);
    }
    equal(bodies(received), range(100).map(String), "bodies");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "push-receive"(scene) {
    const receiver = await scene.receiver({ autoaccept: true, credit_window: 10 });
    await scene.send(...range(20).map(String));
    const deadline = Date.now() + 60_000;
    while (receiver.inbox.length < 20 && Date.now() < deadline) await sleep(5);
    equal(receiver.inbox.map(({ message }) => message.body), range(20).map(String), "bodies");
    await sleep(200); // autoaccept waits for no answer
    receiver.close();
    await scene.nothingIsLeft();
  },

  async competing(scene) {
    await scene.send(...range(60).map(String));
    const received = [];
    await Promise.all(
      range(3).map(async () => {
        const receiver = await scene.receiver({}, await scene.connect());
        for (;;) {
          const some = await take(receiver, 5, 1000);
          if (!some.length) return receiver.connection.close();
          await Promise.all(some.map(complete));
          received.push(...some.map(({ message }) => Number(message.body)));
        }
      }),
    );
    equal(received.sort((a, b) => a - b), range(60), "bodies");
  },

  async "connection-reuse"(scene) {
    for (const i of range(4)) {
      await scene.send(`${i} a`, `${i} b`);
      const [first, second] = [await scene.receiver(), await scene.receiver()];
      const contexts = [await one(first), await one(second)];
      equal(contexts.map(({ message }) => text(message)).sort(), [`${i} a`, `${i} b`], "bodies");
      await Promise.all(contexts.map(complete));
      first.close();
      second.close();
    }
    await scene.nothingIsLeft();
  },

  async "close-unsettled"(scene) {
    await scene.send("held");
    const first = await scene.receiver();
    await one(first);
    first.close();
    const second = await scene.receiver();
    await none(second, "messages while locked");
    const context = await one(second);
    equal([context.message.body, context.message.delivery_count], ["held", 1], "second delivery");
    await complete(context);
  },

  async "connection-lost"(scene) {
    await scene.send("held");
    await killedWhileHolding(scene.queue);
    const context = await one(await scene.receiver(), 3000);
    equal([context.message.body, context.message.delivery_count], ["held", 1], "second delivery");
    await complete(context);
  },

  async "batch-delete"(scene) {
    await scene.send(...range(25).map(String));
    const before = { "enqueued-time-utc": types.wrap_timestamp(Date.now() + 60_000) };
    const some = await scene.manage("batch-delete-messages", { "message-count": types.wrap_int(10), ...before });
    equal(some.body["message-count"], 10, "deleted");
    equal(bodies(await scene.peek(50)), range(15, 10).map(String), "left");
    const rest = await scene.manage("batch-delete-messages", { "message-count": types.wrap_int(500), ...before });
    equal(rest.body["message-count"], 15, "deleted with room to spare");
    const empty = await scene.manage("batch-delete-messages", { "message-count": types.wrap_int(500), ...before });
    equal(empty.status, 204, "status when there is nothing");
    await scene.nothingIsLeft();
  },

  async "unknown-queue"(scene) {
    const isNotFound = (error) =>
      error.condition === "amqp:not-found" && /The messaging entity '.*' could not be found/.test(error.description);
    await rejects(() => scene.send("x"), isNotFound, "sending");
    await rejects(() => scene.receiver(), isNotFound, "receiving");
  },

  async "wrong-key"(scene) {
    const other = new Scene(scene.queue, [config.key_name, "wrong"]);
    const isAuthentication = (error) => /auth/i.test(`${error.name} ${error.condition} ${error.message}`);
    await rejects(() => other.send("x"), isAuthentication, "connecting");
    await scene.nothingIsLeft();
  },

  async "missing-right"(scene) {
    const listener = new Scene(scene.queue, config.listener);
    const sender = new Scene(scene.queue, config.sender);
    await rejects(() => listener.send("x"), UNAUTHORIZED, "sending without the right");
    await sender.send("x");
    await rejects(() => sender.receiver(), UNAUTHORIZED, "receiving without the right");
    await complete(await one(await listener.receiver()));
    await Promise.all([listener.close(), sender.close()]);
  },

  async oversized(scene) {
    const sender = await scene.sender();
    equal(Number(sender.max_message_size), 64 * 1024, "max-message-size of the link");
    const isTooLarge = condition("amqp:link:message-size-exceeded");
    await rejects(() => post(sender, { body: "x".repeat(100_000) }), isTooLarge, "sending 100,000 bytes");
    await post(sender, { body: "small" });
    equal(bodies(await allOf(await scene.receiver(), 1)), ["small"], "messages that arrived");
  },

  async disabled(scene) {
    await rejects(() => scene.send("x"), ENTITY_DISABLED, "sending");
    await rejects(() => scene.receiver(), ENTITY_DISABLED, "receiving");
  },

  async "send-disabled"(scene) {
    await rejects(() => scene.send("x"), ENTITY_DISABLED, "sending");
    await scene.nothingIsLeft();
  },

  async "receive-disabled"(scene) {
    await scene.send("x");
    await rejects(() => scene.receiver(), ENTITY_DISABLED, "receiving");
  },
};

await main(
  { ...scenarios, ...topicScenarios, ...sessionScenarios, ...partitionedScenarios, ...cornerScenarios },
  (queue) => new Scene(queue),
  async (scene, sessionId) => (sessionId === undefined ? one(await scene.receiver()) : hold(scene, sessionId)),
);
