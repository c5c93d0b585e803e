// The scenarios of session_scenarios.py with rhea: a session is asked for by a filter of the source, and managed by requests.
import { equal, killedWhileHolding, range, rejects, sleep, truth } from "./harness.js";
import {
  abandon,
  allOf,
  annotation,
  bodies,
  complete,
  condition,
  deadLetter,
  deferral,
  none,
  NOT_FOUND,
  numbers,
  one,
  opened,
  outcomes,
  post,
  Scene,
  take,
  tokens,
  types,
  UUID,
} from "./rhea-scene.js";

const FILTER = "com.microsoft:session-filter";
const LOCKED_UNTIL = "com.microsoft:locked-until-utc";
const TICKS_OF_1970 = 621_355_968_000_000_000n;
const EVER = types.wrap_timestamp(253_402_300_800_000);
const STATE_LIMIT = 64 * 1024;
const NOT_ALLOWED = condition("amqp:not-allowed");
const TAKEN = condition("com.microsoft:session-cannot-be-locked");
const LOCK_LOST = condition("com.microsoft:session-lock-lost");
const TIMED_OUT = condition("com.microsoft:timeout");

/** A receiver of a session, or of any for which the broker waits so many milliseconds. */
export const accept = (scene, sessionId = null, wait = 5000, address = scene.queue, options = {}) =>
  scene.receiver({
    source: { address, filter: { [FILTER]: sessionId } },
    properties: { "com.microsoft:timeout": types.wrap_uint(wait) },
    ...options,
  });
export const sessionOf = (receiver) => receiver.source.filter[FILTER];
const lockEnd = (receiver) => Number((receiver.properties[LOCKED_UNTIL].readBigInt64BE() - TICKS_OF_1970) / 10_000n);
const noneIsAvailable = (scene, what) => rejects(() => accept(scene, null, 1000), TIMED_OUT, what);

async function send(scene, sessionId, ...texts) {
  const sender = await scene.sender();
  for (const body of texts) await post(sender, { body, group_id: sessionId });
  sender.close();
}

export async function close(receiver) {
  const closed = opened(receiver, "receiver_close", ["receiver_error"]);
  receiver.close();
  await closed;
}

const counted = (messages) => messages.map((m) => [m.body, m.delivery_count ?? 0]);
export const getState = async (scene, sessionId) =>
  (await scene.manage("get-session-state", { "session-id": sessionId })).body["session-state"];
export const setState = (scene, sessionId, state) =>
  scene.manage("set-session-state", { "session-id": sessionId, "session-state": state && types.wrap_binary(state) });
const renew = async (scene, sessionId) => (await scene.manage("renew-session-lock", { "session-id": sessionId })).body.expiration;

async function browse(scene, sessionId, from) {
  const request = { "from-sequence-number": types.wrap_long(from), "message-count": types.wrap_int(10), "session-id": sessionId };
  const { status, body } = await scene.manage("peek-message", request);
  return status === 204 ? [] : body.messages.map(({ message }) => outcomes.decode(message));
}

async function listed(scene, after, page = 100) {
  const ids = [];
  for (;;) {
    const request = { "last-updated-time": after, skip: types.wrap_int(ids.length), top: types.wrap_int(page) };
    const { status, body } = await scene.manage("get-message-sessions", request);
    if (status === 204) return ids;
    ids.push(...body["sessions-ids"]);
  }
}

export const sessionScenarios = {
  async "session-accept"(scene) {
    await send(scene, "a", "1", "2");
    await send(scene, "b", "other");
    await send(scene, "a", "3");
    const receiver = await accept(scene, "a");
    equal(sessionOf(receiver), "a", "session id");
    const left = lockEnd(receiver) - Date.now();
    truth(left > 40_000 && left <= 60_000, `locked for ${left} ms`);
    const messages = await allOf(receiver, 3);
    equal(bodies(messages), ["1", "2", "3"], "bodies");
    equal(messages.map((m) => m.group_id), ["a", "a", "a"], "session ids of the messages");
    equal(annotation(messages[0], "x-opt-locked-until").getTime(), lockEnd(receiver), "lock of a message");
    await none(receiver, "messages left in the session");
    equal(bodies(await allOf(await accept(scene, "b"), 1)), ["other"], "messages of the other session");
  },

  async "session-next"(scene) {
    await send(scene, "b", "first");
    await send(scene, "a", "second");
    await send(scene, "b", "third");
    const first = await accept(scene);
    const second = await accept(scene);
    equal([sessionOf(first), sessionOf(second)], ["b", "a"], "sessions");
    equal(bodies(await allOf(first, 2)), ["first", "third"], "messages of one");
    equal(bodies(await allOf(second, 1)), ["second"], "messages of the other");
    const waiting = accept(scene, null, 60_000);
    await sleep(1500);
    await send(scene, "c", "fourth");
    const third = await waiting;
    equal(sessionOf(third), "c", "session waited for");
    equal(bodies(await allOf(third, 1)), ["fourth"], "its messages");
  },

  async "session-timeout"(scene) {
    const started = Date.now();
    await rejects(() => accept(scene, null, 2000), TIMED_OUT, "accepting any session");
    const took = Date.now() - started;
    truth(took >= 2000 && took < 4000, `that took ${took} ms`);
  },

  async "session-taken"(scene) {
    await accept(scene, "a");
    const started = Date.now();
    await rejects(() => accept(scene, "a"), TAKEN, "accepting it again");
    const other = new Scene(scene.queue);
    await rejects(() => accept(other, "a"), TAKEN, "accepting it on another connection");
    truth(Date.now() - started < 5000, "the error took its time");
    equal(sessionOf(await accept(other, "b")), "b", "other session");
    await other.close();
  },

  async "session-close"(scene) {
    await send(scene, "a", "held", "next");
    const first = await accept(scene, "a");
    equal((await one(first)).message.body, "held", "first delivery");
    await close(first);
    const messages = await allOf(await accept(scene, "a"), 2);
    equal(counted(messages), [["held", 0], ["next", 0]], "messages and deliveries");
  },

  async "session-connection-lost"(scene) {
    await send(scene, "a", "held");
    await killedWhileHolding(scene.queue, "a");
    equal(counted(await allOf(await accept(scene), 1)), [["held", 1]], "second delivery");
  },

  async "session-renew"(scene) {
    await send(scene, "a", "slow");
    const receiver = await accept(scene, "a");
    const context = await one(receiver);
    await sleep(3000);
    const until = await renew(scene, "a");
    truth(until - lockEnd(receiver) > 2000, `renewed from ${lockEnd(receiver)} to ${until}`);
    await sleep(3000);
    await complete(context);
    await close(receiver);
    await none(await accept(scene, "a"), "messages left");
  },

  async "session-lock-lost"(scene) {
    await send(scene, "a", "held");
    const receiver = await accept(scene, "a");
    const lost = opened(receiver, "receiver_error", []);
    const context = await one(receiver);
    await lost;
    truth(LOCK_LOST(receiver.error), `error of the link: ${receiver.error}`);
    const settling = { "disposition-status": "completed", "lock-tokens": tokens(context), "session-id": "a" };
    await rejects(() => scene.manage("update-disposition", settling), LOCK_LOST, "settling");
    await rejects(() => renew(scene, "a"), LOCK_LOST, "renewing");
    await rejects(() => getState(scene, "a"), LOCK_LOST, "reading the state");
    await rejects(() => setState(scene, "a", Buffer.from("x")), LOCK_LOST, "setting the state");
    equal(counted(await allOf(await accept(scene), 1)), [["held", 1]], "second delivery");
    equal(await getState(scene, "a"), null, "state");
  },

  async "session-state"(scene) {
    await send(scene, "a", "x");
    const receiver = await accept(scene, "a");
    equal(await getState(scene, "a"), null, "state before it is set");
    const binary = Buffer.from(range(10_240).map((i) => i % 256));
    for (const state of [Buffer.from("one"), Buffer.alloc(0), binary]) {
      await setState(scene, "a", state);
      equal(await getState(scene, "a"), state.length ? state : null, "state");
    }
    await allOf(receiver, 1);
    await close(receiver);
    await noneIsAvailable(scene, "accepting a session that has only a state");
    await accept(scene, "a");
    equal(await getState(scene, "a"), binary, "state when accepted again");
    await setState(scene, "a", null);
    equal(await getState(scene, "a"), null, "state when cleared");
    await accept(scene, "b");
    equal(await getState(scene, "b"), null, "state of another session");
  },

  async "session-state-limit"(scene) {
    await accept(scene, "a");
    const largest = Buffer.alloc(STATE_LIMIT, "x");
    await setState(scene, "a", largest);
    const tooLarge = condition("amqp:link:message-size-exceeded");
    await rejects(() => setState(scene, "a", Buffer.alloc(STATE_LIMIT + 1, "y")), tooLarge, "a byte more");
    equal(await getState(scene, "a"), largest, "state");
  },

  async "session-abandon"(scene) {
    await send(scene, "a", "first", "second");
    const receiver = await accept(scene, "a");
    const context = await one(receiver);
    equal(counted([context.message]), [["first", 0]], "first delivery");
    await abandon(context);
    const again = await one(receiver);
    equal(counted([again.message]), [["first", 1]], "second delivery");
    await complete(again);
    equal(bodies(await allOf(receiver, 1)), ["second"], "next message");
  },

  async "session-defer"(scene) {
    await send(scene, "a", "later", "now");
    const receiver = await accept(scene, "a");
    const context = await one(receiver);
    await deferral(context);
    equal(bodies(await allOf(receiver, 1)), ["now"], "message after the deferred one");
    await none(receiver, "deliveries of a deferred message");
    const wanted = {
      "sequence-numbers": numbers(annotation(context.message, "x-opt-sequence-number")),
      "receiver-settle-mode": types.wrap_uint(1),
    };
    const receiveIn = (sessionId) => scene.manage("receive-by-sequence-number", { ...wanted, "session-id": sessionId });
    await accept(scene, "b");
    await rejects(() => receiveIn("b"), NOT_FOUND, "in another session");
    const { body } = await receiveIn("a");
    equal(body.messages.length, 1, "deferred messages");
    const deferred = outcomes.decode(body.messages[0].message);
    equal([deferred.body, deferred.group_id], ["later", "a"], "deferred message");
    const lock = types.wrap_array([body.messages[0]["lock-token"]], UUID);
    await scene.manage("update-disposition", { "disposition-status": "completed", "lock-tokens": lock, "session-id": "a" });
    await rejects(() => receiveIn("a"), NOT_FOUND, "a completed message");
  },

  async "session-dead-letter"(scene) {
    await send(scene, "a", "bad", "good");
    const receiver = await accept(scene, "a");
    const reasons = { DeadLetterReason: "my reason", DeadLetterErrorDescription: "my description" };
    await deadLetter(await one(receiver), reasons);
    equal(bodies(await allOf(receiver, 1)), ["good"], "message after it");
    const letters = await scene.deadLetters();
    const [letter] = await allOf(letters, 1);
    equal([letter.body, letter.group_id], ["bad", "a"], "dead letter");
    const { DeadLetterReason, DeadLetterErrorDescription } = letter.application_properties;
    equal({ DeadLetterReason, DeadLetterErrorDescription }, reasons, "reason");
    await none(letters, "dead letters left");
  },

  async "session-schedule"(scene) {
    const due = new Date(Date.now() + 6000);
    const messages = ["kept", "cancelled"].map((body) => ({
      "message-id": body,
      "session-id": "a",
      message: types.wrap_binary(
        outcomes.encode({ body, group_id: "a", message_annotations: { "x-opt-scheduled-enqueue-time": due } }),
      ),
    }));
    const { body } = await scene.manage("schedule-message", { messages });
    await scene.manage("cancel-scheduled-message", { "sequence-numbers": numbers(body["sequence-numbers"][1]) });
    await noneIsAvailable(scene, "accepting the session before its time");
    const receiver = await accept(scene, null, 60_000);
    const late = Date.now() - due;
    truth(late >= 0 && late < 5000, `available ${late} ms late`);
    equal(sessionOf(receiver), "a", "session");
    equal(bodies(await allOf(receiver, 1)), ["kept"], "messages");
    await none(receiver, "other messages");
  },

  async "session-peek"(scene) {
    for (const [sessionId, body] of [["a", "1"], ["b", "2"], ["a", "3"], ["a", "4"], ["b", "5"]]) await send(scene, sessionId, body);
    const receiver = await accept(scene, "a");
    const browsed = await browse(scene, "a", 1);
    equal(bodies(browsed), ["1", "3", "4"], "browsed");
    equal(browsed.map((m) => m.group_id), ["a", "a", "a"], "session ids");
    const next = annotation(browsed[0], "x-opt-sequence-number") + 1;
    equal(bodies(await browse(scene, "a", next)), ["3", "4"], "browsed from a number that is none of the session");
    equal(bodies(await allOf(receiver, 3)), ["1", "3", "4"], "messages, which browsing does not lock");
    equal(await browse(scene, "a", 1), [], "browsed when empty");
  },

  async "session-receive-and-delete"(scene) {
    await send(scene, "a", "x", "y");
    await send(scene, "b", "z");
    const receiver = await accept(scene, "a", 0, scene.queue, { snd_settle_mode: 1, rcv_settle_mode: 0 });
    const received = await take(receiver, 2, 60_000);
    equal(bodies(received.map(({ message }) => message)), ["x", "y"], "bodies");
    await close(receiver);
    const next = await accept(scene);
    equal(sessionOf(next), "b", "session that is left");
    equal(bodies(await allOf(next, 1)), ["z"], "its messages");
  },

  async "session-wait"(scene) {
    await send(scene, "a", "x");
    const receiver = await accept(scene, "a", 0, scene.queue, { snd_settle_mode: 1, rcv_settle_mode: 0 });
    equal(bodies((await take(receiver, 1, 60_000)).map(({ message }) => message)), ["x"], "bodies");
    equal((await take(receiver, 1, 5500)).length, 0, "messages while the lock ends");
    await close(receiver);
  },

  async "session-push"(scene) {
    const expected = range(10).map(String);
    const receiver = await accept(scene, "a", 0, scene.queue, { autoaccept: true, credit_window: 5 });
    await send(scene, "a", ...expected);
    const deadline = Date.now() + 60_000;
    while (receiver.inbox.length < expected.length && Date.now() < deadline) await sleep(5);
    equal(bodies(receiver.inbox.map(({ message }) => message)), expected, "bodies");
    await sleep(200); // autoaccept waits for no answer
    await close(receiver);
    await none(await accept(scene, "a"), "messages left");
  },

  async "session-many"(scene) {
    const ids = range(20).map((i) => `s${String(i).padStart(2, "0")}`);
    const sender = await scene.sender();
    for (const turn of range(3)) {
      for (const id of ids) await post(sender, { body: `${id} ${turn}`, group_id: id });
    }
    const receivers = [];
    for (const _ of ids) receivers.push(await accept(scene));
    equal(receivers.map(sessionOf).sort(), ids, "sessions");
    for (const turn of range(3)) {
      for (const receiver of receivers) {
        const context = await one(receiver);
        equal(context.message.body, `${sessionOf(receiver)} ${turn}`, "message");
        await complete(context);
      }
    }
    for (const receiver of receivers) await close(receiver);
    await noneIsAvailable(scene, "accepting a session when all are empty");
  },

  async "session-list"(scene) {
    equal(await listed(scene, EVER), [], "sessions at first");
    const ids = range(150).map((i) => `s${String(i).padStart(3, "0")}`);
    for (const id of ids) await send(scene, id, "x");
    await accept(scene, "early");
    await setState(scene, "early", Buffer.from("early"));
    await sleep(100);
    const between = types.wrap_timestamp(Date.now());
    await accept(scene, "late");
    await setState(scene, "late", Buffer.from("late"));
    equal((await listed(scene, EVER)).sort(), ["early", "late", ...ids], "sessions");
    equal(await listed(scene, between), ["late"], "sessions whose state was set since");
  },

  async "session-receiver-required"(scene) {
    await send(scene, "a", "x");
    await rejects(() => scene.receiver(), NOT_ALLOWED, "receiving");
    equal(bodies(await allOf(await accept(scene, "a"), 1)), ["x"], "messages");
  },

  async "session-id-required"(scene) {
    const sender = await scene.sender();
    await rejects(() => post(sender, { body: "bare" }), NOT_ALLOWED, "sending");
    const inner = [{ body: "one", group_id: "a" }, { body: "bare" }].map((message) => outcomes.encode(message));
    const batch = outcomes.encode({ body: outcomes.data_sections(inner) });
    await rejects(() => post(sender, batch, undefined, 0x80013700), NOT_ALLOWED, "sending a batch");
    const due = new Date(Date.now() + 3_600_000);
    const message = outcomes.encode({ body: "bare", message_annotations: { "x-opt-scheduled-enqueue-time": due } });
    const scheduling = { messages: [{ "message-id": "1", message: types.wrap_binary(message) }] };
    await rejects(() => scene.manage("schedule-message", scheduling), NOT_ALLOWED, "scheduling");
    await post(sender, { body: "good", group_id: "a" });
    equal(bodies(await scene.peek(10)), ["good"], "messages");
  },

  async "session-not-required"(scene) {
    await send(scene, "a", "x");
    await rejects(() => accept(scene, "a"), NOT_ALLOWED, "accepting a session");
    await rejects(() => accept(scene), NOT_ALLOWED, "accepting any session");
    const [message] = await allOf(await scene.receiver(), 1);
    equal([message.body, message.group_id], ["x", "a"], "message");
  },

  async "session-subscription"(scene) {
    const [a, b, plain] = ["a", "b", "plain"].map((name) => `${scene.queue}/Subscriptions/${name}`);
    for (const [sessionId, body] of [["a", "1"], ["b", "2"], ["a", "3"]]) await send(scene, sessionId, body);
    const second = await accept(scene, "b", 0, a);
    const sameName = await accept(scene, "b", 0, b);
    const first = await accept(scene, null, 5000, a);
    equal([sessionOf(first), sessionOf(second)], ["a", "b"], "sessions");
    equal(bodies(await allOf(first, 2)), ["1", "3"], "messages of one");
    equal(bodies(await allOf(second, 1)), ["2"], "messages of the other");
    equal(bodies(await allOf(sameName, 1)), ["2"], "messages of the session of the same name");
    const state = { "session-id": "a", "session-state": types.wrap_binary(Buffer.from("state")) };
    await scene.manage("set-session-state", state, a);
    const { body } = await scene.manage("get-session-state", { "session-id": "a" }, a);
    equal(body["session-state"], Buffer.from("state"), "state");
    await rejects(() => accept(scene, "a", 0, a), TAKEN, "accepting it again");
    await rejects(() => accept(scene, null, 1000, a), TIMED_OUT, "accepting any session when all are empty");
    const received = await allOf(await scene.receiver({ source: plain }), 3);
    equal(bodies(received).sort(), ["1", "2", "3"], "messages of a subscription without sessions");
  },
};

/** For the process that is killed while it holds a session. */
export const hold = async (scene, sessionId) => one(await accept(scene, sessionId));
