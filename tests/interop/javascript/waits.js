// What users of @azure/service-bus wait: the program of `waits.py`, with what the SDK does by default. Runs until killed.
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";

const config = JSON.parse(process.env.PEEKLOCK_INTEROP);
const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

/** The result of the call, which is reported, in an array; null if it failed. */
async function timed(operation, user, call) {
  const began = Date.now() / 1000;
  let result = null;
  let error = "";
  try {
    result = [await call()];
  } catch (failure) {
    error = `${failure.code ?? failure.statusCode ?? failure.name}`;
  }
  console.log(JSON.stringify({ operation, user, began, seconds: Date.now() / 1000 - began, error }));
  return result;
}

// Each is a generator that does the operation once before each `yield`.
const OPERATIONS = {
  async *send(client, timed, queue) {
    const sender = client.createSender(queue);
    for (;;) {
      await timed(() => sender.sendMessages({ body: "m" }));
      yield;
    }
  },

  async *receive(client, timed, queue) {
    const receiver = client.createReceiver(queue, { receiveMode: "receiveAndDelete" });
    for (;;) {
      await timed(async () => {
        const [message] = await receiver.receiveMessages(1, { maxWaitTimeInMs: 60_000 });
        if (!message) throw new Error("none");
      });
      yield;
    }
  },

  async *complete(client, timed, queue) {
    const receiver = client.createReceiver(queue);
    for (;;) {
      const [message] = await receiver.receiveMessages(1, { maxWaitTimeInMs: 60_000 });
      await sleep(500 * config.period_s);
      await timed(() => receiver.completeMessage(message));
      yield;
    }
  },

  async *renew(client, timed, queue) {
    const receiver = client.createReceiver(queue, { maxAutoLockRenewalDurationInMs: 0 });
    let message = null;
    for (;;) {
      message ??= (await receiver.receiveMessages(1, { maxWaitTimeInMs: 60_000 }))[0];
      if (!(await timed(() => receiver.renewMessageLock(message)))) message = null; // its lock may be lost
      yield;
    }
  },

  async *accept(client, timed, queue, user) {
    for (;;) {
      const accepted = await timed(() => client.acceptSession(queue, `session-${user}`, { maxAutoLockRenewalDurationInMs: 0 }));
      await accepted?.[0].close();
      yield;
    }
  },

  async *administer(client, timed, queue, user) {
    const admin = new ServiceBusAdministrationClient(config.secure);
    for (let count = 0; ; count++) {
      const name = `made-${user}-${process.pid}-${count}`;
      await timed(() => admin.createQueue(name));
      yield;
      await timed(() => admin.deleteQueue(name));
      yield;
    }
  },
};

async function run(operation, user, client) {
  const begin = () => OPERATIONS[operation](client, (call) => timed(operation, user, call), `waits-${operation}`, user);
  const period = 1000 * config.period_s;
  let once = begin();
  for (;;) {
    await sleep(period - ((Date.now() - (user * period) / config.users) % period)); // each user has its own point in it
    try {
      await once.next();
    } catch (error) {
      console.error(`${operation}: ${error}`); // of what is not reported
      once = begin();
    }
  }
}

for (const operation of config.operations) {
  const client = new ServiceBusClient(config.connection_string);
  for (let user = 0; user < config.users; user++) run(operation, user, client);
}
