// The scenarios of partitioned_scenarios.py with rhea.
import { equal, range, rejects, sleep, truth } from "./harness.js";
import {
  allOf,
  annotation,
  bodies,
  condition,
  deferral,
  none,
  numbers,
  outcomes,
  post,
  take,
  types,
  UUID,
} from "./rhea-scene.js";
import { accept, close, getState, sessionOf, setState } from "./rhea-sessions.js";

const TEXTS = range(20).map(String).sort();
const KEYS = range(8).map((i) => `key-${i}`);
const KEY = "x-opt-partition-key";
const BATCH = 0x80013700;

const sorted = (messages) => bodies(messages).sort();
const keyed = (key, body, fields = {}) => ({ body, message_annotations: { [KEY]: key }, ...fields });
// As numbers they are exact for the first 32 partitions.
const numberOf = (message) => annotation(message, "x-opt-sequence-number");
const partitions = (found) => new Set(found.map((number) => Math.floor(number / 2 ** 48)));

function onSeveralPartitions(found) {
  truth(partitions(found).size > 1, `all messages are on partition ${[...partitions(found)]}`);
}

async function send(scene, ...messages) {
  const sender = await scene.sender();
  for (const message of messages) await post(sender, message);
  sender.close();
}

/** All messages from this sequence number on, in as many requests as that takes. */
async function browsed(scene, from) {
  const found = [];
  for (;;) {
    const some = await scene.peek(100, from);
    if (!some.length) return found;
    found.push(...some);
    from = numberOf(some.at(-1)) + 1;
  }
}

export const partitionedScenarios = {
  async "partitioned-spread"(scene) {
    await send(scene, ...TEXTS.map((body) => ({ body })));
    const shown = await browsed(scene, 1);
    equal(sorted(shown), TEXTS, "browsed");
    const found = shown.map(numberOf);
    onSeveralPartitions(found);
    equal(found, [...found].sort((a, b) => a - b), "sequence numbers");
    equal((await browsed(scene, found[7])).map(numberOf), found.slice(7), "browsed from a number");
    const receiver = await scene.receiver();
    equal(sorted(await allOf(receiver, 20)), TEXTS, "messages");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-keys"(scene) {
    for (const turn of range(5)) await send(scene, ...KEYS.map((key) => keyed(key, turn)));
    const inner = KEYS.map((key) => outcomes.encode(keyed(key, "never")));
    const batch = outcomes.encode({ body: outcomes.data_sections(inner) });
    const sender = await scene.sender();
    await rejects(() => post(sender, batch, undefined, BATCH), condition("amqp:not-allowed"), "a batch with several keys");
    const receiver = await scene.receiver();
    const messages = await allOf(receiver, 5 * KEYS.length);
    onSeveralPartitions(messages.map(numberOf));
    for (const key of KEYS) {
      const mine = messages.filter((message) => annotation(message, KEY) === key);
      equal(bodies(mine), range(5), `messages of ${key}`);
      equal(partitions(mine.map(numberOf)).size, 1, `partitions of ${key}`);
    }
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-key-mismatch"(scene) {
    const isMismatch = (error) => /session id/.test(error.description);
    await rejects(() => send(scene, keyed("b", "never", { group_id: "a" })), isMismatch, "a different partition key");
    await send(scene, keyed("a", "x", { group_id: "a" }));
    const receiver = await scene.receiver();
    equal(bodies(await allOf(receiver, 1)), ["x"], "messages");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-numbers"(scene) {
    await send(scene, ...TEXTS.map((body) => ({ body })));
    const receiver = await scene.receiver();
    const contexts = await take(receiver, 20, 60_000);
    const found = contexts.map(({ message }) => numberOf(message));
    onSeveralPartitions(found);
    await Promise.all(contexts.map(deferral));
    const request = { "sequence-numbers": numbers(...found), "receiver-settle-mode": types.wrap_uint(1) };
    const { messages } = (await scene.manage("receive-by-sequence-number", request)).body;
    equal(sorted(messages.map(({ message }) => outcomes.decode(message))), TEXTS, "deferred messages");
    await scene.manage("update-disposition", {
      "disposition-status": "completed",
      "lock-tokens": types.wrap_array(messages.map((item) => item["lock-token"]), UUID),
    });
    const due = new Date(Date.now() + 6000);
    const scheduled = [];
    for (const key of KEYS) {
      const message = outcomes.encode({ body: key, message_annotations: { [KEY]: key, "x-opt-scheduled-enqueue-time": due } });
      const item = { "message-id": key, "partition-key": key, message: types.wrap_binary(message) };
      const { body } = await scene.manage("schedule-message", { messages: [item] });
      scheduled.push(...body["sequence-numbers"]);
    }
    onSeveralPartitions(scheduled);
    await scene.manage("cancel-scheduled-message", { "sequence-numbers": numbers(...scheduled.slice(0, 4)) });
    equal(sorted(await allOf(receiver, 4)), KEYS.slice(4), "messages that arrived");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-duplicates"(scene) {
    await send(scene, ...["a", "b", "a"].map((key) => keyed(key, key, { message_id: "1" })));
    for (const _ of range(2)) await send(scene, ...TEXTS.map((body) => ({ body, message_id: `id-${body}` })));
    const receiver = await scene.receiver();
    equal(sorted(await allOf(receiver, 22)), [...TEXTS, "a", "b"], "messages");
    receiver.close();
    await scene.nothingIsLeft();
  },

  async "partitioned-sessions"(scene) {
    for (const turn of range(3)) await send(scene, ...KEYS.map((key) => ({ body: turn, group_id: key })));
    const accepted = [];
    for (const _ of KEYS) accepted.push(await accept(scene));
    equal(accepted.map(sessionOf).sort(), KEYS, "sessions");
    const found = [];
    for (const receiver of accepted) {
      const messages = await allOf(receiver, 3);
      equal(bodies(messages), range(3), "messages of a session");
      await setState(scene, sessionOf(receiver), Buffer.from(sessionOf(receiver)));
      found.push(...messages.map(numberOf));
    }
    onSeveralPartitions(found);
    const sending = sleep(1500).then(() => send(scene, { body: "x", group_id: "late" }));
    const late = await accept(scene, null, 60_000);
    await sending;
    equal([sessionOf(late), bodies(await allOf(late, 1))], ["late", ["x"]], "session waited for, and its messages");
    for (const receiver of accepted) await close(receiver);
    for (const key of KEYS) {
      const receiver = await accept(scene, key);
      equal(String(await getState(scene, key)), key, "state when accepted again");
      await close(receiver);
    }
  },

  async "partitioned-topic"(scene) {
    await send(scene, ...range(20).map((number) => ({ body: String(number), application_properties: { number } })));
    for (const [name, expected] of [["a", range(20)], ["some", range(10, 10)]]) {
      const receiver = await scene.receiver({ source: `${scene.queue}/Subscriptions/${name}` });
      const messages = await allOf(receiver, expected.length);
      equal(sorted(messages), expected.map(String).sort(), `messages in ${name}`);
      onSeveralPartitions(messages.map(numberOf));
      await none(receiver, "messages beyond those");
    }
  },

  async "partitioned-annotations"(scene) {
    const withKeys = KEYS.map((key) => keyed(key, key, { message_id: `${key} id` }));
    await send(scene, ...withKeys, ...TEXTS.map((text) => ({ body: text, message_id: text })));
    for (const message of await allOf(await scene.receiver(), KEYS.length + TEXTS.length)) {
      equal(annotation(message, KEY), message.body, "key");
      equal([annotation(message, "x-opt-partition-id")], [...partitions([numberOf(message)])], "partition");
    }
  },
};
