// The scenarios of corner_scenarios.py with rhea.
import { equal, range, rejects, truth } from "./harness.js";
import {
  abandon,
  allOf,
  annotation,
  complete,
  condition,
  deadLetter,
  deferral,
  NOT_FOUND,
  numbers,
  one,
  outcomes,
  post,
  take,
  types,
  UUID,
} from "./rhea-scene.js";

const REASON_LIMIT = 4096; // characters of a reason that are kept
const BATCH = 0x80013700;
const SCHEDULED = "x-opt-scheduled-enqueue-time";
const STATE = "x-opt-message-state";
const EVER = types.wrap_timestamp(253_402_300_800_000);

/** The deferred message with this number, and its lock token. */
async function byNumber(scene, number) {
  const request = { "sequence-numbers": numbers(number), "receiver-settle-mode": types.wrap_uint(1) };
  const { body } = await scene.manage("receive-by-sequence-number", request);
  const [{ message, "lock-token": token }] = body.messages;
  return [outcomes.decode(message), token];
}

const dispose = (scene, token, status) =>
  scene.manage("update-disposition", { "disposition-status": status, "lock-tokens": types.wrap_array([token], UUID) });

async function schedule(scene, message, due) {
  const encoded = outcomes.encode({ message_annotations: { [SCHEDULED]: new Date(due) }, ...message });
  const { body } = await scene.manage("schedule-message", {
    messages: [{ "message-id": "id", message: types.wrap_binary(encoded) }],
  });
  return body["sequence-numbers"][0];
}

const subscription = (scene, name) => scene.receiver({ source: `${scene.queue}/Subscriptions/${name}` });

export const cornerScenarios = {
  async "deferral-count"(scene) {
    await scene.send("m");
    const context = await one(await scene.receiver());
    equal(context.message.delivery_count ?? 0, 0, "delivery count at first");
    const number = annotation(context.message, "x-opt-sequence-number");
    await deferral(context);
    let [message, token] = await byNumber(scene, number);
    equal(message.delivery_count, 1, "delivery count after a deferral");
    await dispose(scene, token, "abandoned");
    [message, token] = await byNumber(scene, number);
    equal(message.delivery_count, 2, "delivery count after an abandon");
    await dispose(scene, token, "defered");
    const letter = await one(await scene.deadLetters());
    const { body, application_properties: set } = letter.message;
    equal([body, set.DeadLetterReason], ["m", "MaxDeliveryCountExceeded"], "dead letter");
    await complete(letter);
    await rejects(() => byNumber(scene, number), NOT_FOUND, "the deferred message");
    await scene.nothingIsLeft();
  },

  async "message-states"(scene) {
    await schedule(scene, { body: "scheduled" }, Date.now() + 4000);
    const sender = await scene.sender();
    for (const first_acquirer of [true, false]) await post(sender, { body: first_acquirer, first_acquirer });
    const contexts = await take(await scene.receiver(), 3, 60_000);
    const shown = contexts.map(({ message }) => [message.body, message.first_acquirer, annotation(message, STATE)]);
    const expected = [[false, false, undefined], ["scheduled", undefined, 2], [true, true, undefined]];
    const inOrder = (all) => all.map(([body, first, state]) => [String(body), first ?? undefined, state]).sort();
    equal(inOrder(shown), inOrder(expected), "body, first-acquirer and state");
    await deferral(contexts[0]);
    const [message] = await byNumber(scene, annotation(contexts[0].message, "x-opt-sequence-number"));
    equal(annotation(message, STATE), 1, "state of a deferred message");
  },

  async "large-requests"(scene) {
    const due = Date.now() + 3_600_000;
    const number = await schedule(scene, { body: outcomes.data_section(Buffer.alloc(262_000)) }, due);
    const [browsed] = await scene.peek(1, number);
    equal(browsed.body.content.length, 262_000, "bytes browsed");
    const began = Date.now();
    const large = { body: outcomes.data_section(Buffer.alloc(300_000)) };
    const refused = condition("amqp:link:message-size-exceeded");
    await rejects(() => schedule(scene, large, due), refused, "scheduling 300,000 bytes");
    truth(Date.now() - began < 15_000, "the error took its time");
    await scene.manage("cancel-scheduled-message", { "sequence-numbers": numbers(number) });
  },

  async "long-reason"(scene) {
    await scene.send("bad");
    await deadLetter(await one(await scene.receiver()), {
      DeadLetterReason: "r".repeat(40_000),
      DeadLetterErrorDescription: "description",
    });
    const letter = await one(await scene.deadLetters());
    const set = letter.message.application_properties;
    const expected = { DeadLetterReason: "r".repeat(REASON_LIMIT), DeadLetterErrorDescription: "description" };
    equal(set, expected, "application properties");
    await complete(letter);
  },

  async "null-data"(scene) {
    await post(await scene.sender(), { body: outcomes.data_section(null) });
    const context = await one(await scene.receiver());
    equal([context.message.body.typecode, context.message.body.content], [0x75, null], "data");
    await complete(context);
  },

  async "empty-batch"(scene) {
    const began = Date.now();
    const sender = await scene.sender();
    const refused = new Promise((resolve) => sender.once("sender_error", () => resolve(sender.error)));
    sender.send(outcomes.encode({ body: outcomes.data_sections([]) }), undefined, BATCH);
    equal((await refused).condition, "amqp:not-allowed", "the end of the link");
    truth(Date.now() - began < 15_000, "the error took its time");
    await scene.send("next");
    equal((await allOf(await scene.receiver(), 1))[0].body, "next", "the next message");
  },

  async "expiry-forwarded"(scene) {
    await scene.send("m");
    const context = await one(await scene.receiver({ source: `${scene.queue}-1` }));
    const { body, application_properties: set } = context.message;
    equal([body, set.DeadLetterReason], ["m", "TTLExpiredException"], "message");
    await complete(context);
  },

  async "rule-conversions"(scene) {
    const sender = await scene.sender();
    for (const subject of ["n-8", "n-7"]) {
      await post(sender, { body: subject, subject, application_properties: { number: 7 } });
    }
    const context = await one(await subscription(scene, "a"));
    const { body, correlation_id, application_properties: set, ttl } = context.message;
    equal([body, correlation_id, set.joined, ttl], ["n-7", "7", "n-7", 600_000], "what the rule made");
    await complete(context);
  },

  async "action-delay"(scene) {
    const began = Date.now();
    await scene.send("m");
    const now = await one(await subscription(scene, "now"));
    equal([annotation(now.message, STATE), annotation(now.message, SCHEDULED)], [undefined, undefined], "copy");
    await complete(now);
    const later = await one(await subscription(scene, "later"));
    truth(Date.now() - began >= 3000, "the copy came too early");
    equal(annotation(later.message, STATE), 2, "state");
    const late = annotation(later.message, "x-opt-enqueued-time") - annotation(later.message, SCHEDULED);
    truth(late >= 0 && late < 15_000, `enqueued ${late} ms behind the time that is shown`);
    await complete(later);
  },

  async "session-by-number"(scene) {
    await post(await scene.sender(), { body: "later", group_id: "a" });
    const connection = await scene.connect();
    const source = { address: scene.queue, filter: { "com.microsoft:session-filter": "a" } };
    const holder = await scene.receiver({ source }, connection);
    const context = await one(holder);
    await deferral(context);
    const request = {
      "sequence-numbers": numbers(annotation(context.message, "x-opt-sequence-number")),
      "receiver-settle-mode": types.wrap_uint(0),
      "session-id": "a",
    };
    // Over the scene's own connection, which holds no session.
    const { body } = await scene.manage("receive-by-sequence-number", request);
    equal(body.messages.map(({ message }) => outcomes.decode(message).body), ["later"], "messages");
    await rejects(() => scene.manage("receive-by-sequence-number", request), NOT_FOUND, "a message that is gone");
    connection.close();
  },

  async "session-pages"(scene) {
    const sender = await scene.sender();
    const ids = range(12).map((i) => `s${String(i).padStart(2, "0")}`);
    for (const id of ids) await post(sender, { body: "x", group_id: id });
    const page = async (skip, last) => {
      const from = { skip: types.wrap_int(skip), top: types.wrap_int(5), ...(last && { "last-session-id": last }) };
      const { status, body } = await scene.manage("get-message-sessions", { "last-updated-time": EVER, ...from });
      return status === 204 ? undefined : [body.skip, body["sessions-ids"]];
    };
    for (const bySkip of [true, false]) {
      const found = [];
      let sessions = [];
      for (let skip = 0, answer; (answer = await page(bySkip ? skip : 0, bySkip ? undefined : found.at(-1))); ) {
        [skip, sessions] = answer;
        if (bySkip) equal(skip, found.length + sessions.length, "where the next page begins");
        found.push(...sessions);
      }
      equal(found.sort(), ids, bySkip ? "sessions by skip" : "sessions behind the last one");
    }
  },
};
