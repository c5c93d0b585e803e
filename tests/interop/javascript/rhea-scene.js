// What the scenarios with rhea share: a connection with an entity, its links and its management node.
import rhea from "rhea";
import { config, equal, keyOf, local, sleep, truth } from "./harness.js";

export const { message: outcomes, types } = rhea;
const SECOND = 1; // rcv-settle-mode: wait for the broker's answer to every settlement (2.8.3)
export const UUID = 0x98;
const LONG = 0x81;

export class Scene {
  constructor(queue, [username, password] = [config.key_name, config.key]) {
    this.queue = queue;
    this.keyed = keyOf(queue) && { message_annotations: { "x-opt-partition-key": keyOf(queue) } };
    this.login = { username, password };
  }

  async connection() {
    this.shared ??= await this.connect();
    return this.shared;
  }

  connect() {
    const container = rhea.create_container();
    const { host, port } = config;
    const connection = container.connect({ host, port, ...this.login, reconnect: false });
    return opened(connection, "connection_open", ["connection_error", "disconnected"]).then(() => connection);
  }

  async sender(options = {}) {
    const connection = await this.connection();
    const sender = connection.open_sender({ target: this.queue, autosettle: true, ...options });
    sender.pending = new Map();
    const settle = (accepted) => (context) => {
      const { resolve, reject } = sender.pending.get(context.delivery) ?? {};
      sender.pending.delete(context.delivery);
      if (accepted) resolve?.();
      else reject?.(context.delivery.remote_state.error ?? new Error("released or modified"));
    };
    sender.on("accepted", settle(true));
    for (const event of ["rejected", "released", "modified"]) sender.on(event, settle(false));
    await opened(sender, "sendable", ["sender_error", "sender_close"]);
    return sender;
  }

  async send(...bodies) {
    const sender = await this.sender();
    for (const body of bodies) await post(sender, { body, ...this.keyed });
    sender.close();
  }

  async receiver(options = {}, connection = undefined) {
    const receiver = (connection ?? (await this.connection())).open_receiver({
      source: this.queue,
      rcv_settle_mode: SECOND,
      credit_window: 0,
      autoaccept: false,
      ...options,
    });
    receiver.inbox = [];
    receiver.on("message", (context) => receiver.inbox.push(context));
    receiver.on("settled", ({ delivery }) => delivery.answered?.(delivery.remote_state));
    await opened(receiver, "receiver_open", ["receiver_error", "receiver_close"]);
    // A refused link is attached without a source first; the error follows in a detach (2.6.3).
    if (!receiver.source?.address) {
      if (!receiver.error) await opened(receiver, "receiver_close", ["receiver_error"]);
      throw receiver.error;
    }
    return receiver;
  }

  deadLetters() {
    return this.receiver({ source: `${this.queue}/$DeadLetterQueue` });
  }

  /** One request to the queue's management node: its body, or an error with the condition. */
  async manage(operation, body, queue = this.queue) {
    const address = `${queue}/$management`;
    const connection = await this.connection();
    const replyTo = `reply-${operation}-${Math.random()}`;
    const receiver = connection.open_receiver({ source: address, target: replyTo, credit_window: 1 });
    const sender = connection.open_sender({ target: address });
    await opened(sender, "sendable", ["sender_error", "sender_close"]);
    const answer = opened(receiver, "message", ["receiver_error", "receiver_close"]);
    sender.send({
      message_id: replyTo,
      reply_to: replyTo,
      application_properties: { operation: `com.microsoft:${operation}` },
      body,
    });
    const { message } = await answer;
    sender.close();
    receiver.close();
    equal(message.correlation_id, replyTo, "correlation id");
    const { statusCode, errorCondition, statusDescription } = message.application_properties;
    if (statusCode >= 300) {
      const error = new Error(`status ${statusCode}`);
      throw Object.assign(error, { condition: errorCondition, description: statusDescription });
    }
    return { status: statusCode, body: message.body };
  }

  async peek(count, from = 1, queue = this.queue) {
    const request = { "from-sequence-number": types.wrap_long(from), "message-count": types.wrap_int(count) };
    const { status, body } = await this.manage("peek-message", request, queue);
    return status === 204 ? [] : body.messages.map(({ message }) => outcomes.decode(message));
  }

  async nothingIsLeft() {
    const receiver = await this.receiver();
    equal((await take(receiver, 1, 1000)).length, 0, "messages left");
    receiver.close();
    equal(await this.peek(10), [], "messages left to browse");
  }

  async close() {
    this.shared?.close();
  }
}

export const [UNSETTLED, SETTLED] = [0, 1]; // snd-settle-mode

/** All messages that a link shows which asks for copies, settled by us unless the broker has settled them. */
export async function browsed(scene, queue, snd_settle_mode, filter = undefined) {
  const source = { address: queue, distribution_mode: "copy", filter };
  const receiver = await scene.receiver({ source, snd_settle_mode });
  equal(receiver.source.distribution_mode, "copy", "distribution mode of the answer");
  const contexts = await take(receiver, 100, 2000);
  if (snd_settle_mode === UNSETTLED) for (const context of contexts) await complete(context);
  receiver.close();
  return contexts.map(({ message }) => message);
}

/** The first `event` of `source`; rejects with the error of the first of `failures`. */
export function opened(source, event, failures) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error(`no ${event} in 60 s`)), 60_000);
    source.once(event, (context) => (clearTimeout(timer), resolve(context)));
    for (const failure of failures) {
      source.once(failure, (context) => (clearTimeout(timer), reject(source.error ?? context.error ?? new Error(failure))));
    }
  });
}

/** Send; resolves when accepted, rejects with the error of `rejected`. */
export function post(sender, message, ...rest) {
  return new Promise((resolve, reject) => {
    sender.pending.set(sender.send(message, ...rest), { resolve, reject });
  });
}

/** Up to `count` messages that arrive in `wait` milliseconds; credit left over is drained. */
export async function take(receiver, count, wait) {
  if (receiver.inbox.length < count) receiver.add_credit(count - receiver.inbox.length - receiver.credit);
  const deadline = Date.now() + wait;
  while (receiver.inbox.length < count && Date.now() < deadline) await sleep(10);
  if (receiver.credit > 0) {
    const drained = opened(receiver, "receiver_drained", ["receiver_error"]);
    receiver.drain_credit();
    await drained;
    receiver.drain = false;
    equal(receiver.credit, 0, "credit after draining");
  }
  return receiver.inbox.splice(0, count);
}

export async function one(receiver, wait = 60_000) {
  const [context] = await take(receiver, 1, wait);
  truth(context, "no message arrived");
  return context;
}

export async function none(receiver, what) {
  equal((await take(receiver, 1, 1000)).map(({ message }) => message.body), [], what);
}

/** Settle and wait for the broker's answer; rejects with its error. */
export function settle(delivery, update) {
  const answer = new Promise((resolve, reject) => {
    const timer = setTimeout(() => reject(new Error("no answer to a settlement in 60 s")), 60_000);
    delivery.answered = (state) => {
      clearTimeout(timer);
      if (state?.error) reject(state.error);
      else resolve(state);
    };
  });
  update(delivery);
  return answer;
}

export const complete = ({ delivery }) => settle(delivery, (d) => d.accept());
export const abandon = ({ delivery }, annotations) =>
  settle(delivery, (d) => d.modified({ delivery_failed: true, message_annotations: annotations }));
export const deferral = ({ delivery }) => settle(delivery, (d) => d.modified({ undeliverable_here: true }));
export const deadLetter = ({ delivery }, info) =>
  settle(delivery, (d) => d.reject({ condition: "com.microsoft:dead-letter", info }));

export async function allOf(receiver, count) {
  const received = await take(receiver, count, 60_000);
  equal(received.length, count, "messages received");
  await Promise.all(received.map(complete));
  return received.map(({ message }) => message);
}

/** The lock token's GUID bytes, from a delivery tag in .NET order. */
function lockToken({ delivery }) {
  const [a, b, c, d, e, f, g, h, ...rest] = delivery.tag;
  return Buffer.from([d, c, b, a, f, e, h, g, ...rest]);
}

export const tokens = (...contexts) => types.wrap_array(contexts.map(lockToken), UUID);
export const numbers = (...sequenceNumbers) => types.wrap_array(sequenceNumbers, LONG);
export const annotation = (message, name) => message.message_annotations[name];
export const sequenceNumbers = (messages) => messages.map((message) => local(annotation(message, "x-opt-sequence-number")));
export const bodies = (messages) => messages.map((message) => message.body);
export const text = (message) => message.body;
export const condition = (expected) => (error) => error.condition === expected;
export const LOCK_LOST = condition("com.microsoft:message-lock-lost");
export const NOT_FOUND = condition("com.microsoft:message-not-found");
export const UNAUTHORIZED = condition("amqp:unauthorized-access");
export const ENTITY_DISABLED = condition("com.microsoft:entity-disabled");
