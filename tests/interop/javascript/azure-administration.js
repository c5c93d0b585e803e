// The scenarios of administration_scenarios.py with @azure/service-bus.
import { ServiceBusAdministrationClient, ServiceBusClient } from "@azure/service-bus";
import WebSocket from "ws";
import { config, equal, range, rejects, truth } from "./harness.js";
import { Scene, allOf, bodies, code, one } from "./azure-scene.js";

const METADATA = "a < b & ü";
const SOON = 5 * 60_000;
const inAnHour = () => new Date(Date.now() + 3_600_000);

const administration = (connectionString = config.secure) => new ServiceBusAdministrationClient(connectionString, { retryOptions: { maxRetries: 0 } });

const missing = (error) => error.statusCode === 404;

function settings(found, given) {
  // A partitioned entity shows the size of 16 fragments, as the cloud does.
  const expected = found.enablePartitioning ? { ...given, maxSizeInMegabytes: 16 * given.maxSizeInMegabytes } : given;
  equal(Object.fromEntries(Object.keys(expected).map((name) => [name, found[name]])), expected, "settings");
}

function times({ createdAt, modifiedAt, accessedAt }) {
  truth(Math.abs(createdAt - Date.now()) < SOON, `created at ${createdAt}`);
  truth(createdAt <= modifiedAt, `changed at ${modifiedAt}, created at ${createdAt}`);
  truth(createdAt <= accessedAt, `accessed at ${accessedAt}, created at ${createdAt}`);
}

async function names(list) {
  const found = [];
  for await (const each of list) found.push(each.name ?? each.subscriptionName);
  return found;
}

async function deadLetterOne(receiver) {
  await receiver.deadLetterMessage(await one(receiver));
  await receiver.close();
}

export const administrationScenarios = {
  async "admin-queue"(scene) {
    const admin = administration();
    const given = {
      lockDuration: "PT30S",
      maxDeliveryCount: 5,
      defaultMessageTimeToLive: "PT2H",
      deadLetteringOnMessageExpiration: true,
      maxSizeInMegabytes: 2048,
      autoDeleteOnIdle: "PT1H",
      userMetadata: METADATA,
    };
    const created = await admin.createQueue(scene.queue, given);
    equal(created.name, scene.queue, "name");
    settings(created, given);
    equal((await admin.getQueueRuntimeProperties(scene.queue)).accessedAt.getUTCFullYear(), 1, "never accessed");
    const found = await admin.getQueue(scene.queue);
    settings(found, given);
    truth((await names(admin.listQueues())).includes(scene.queue), "it is listed");

    await admin.updateQueue({ ...found, maxDeliveryCount: 7, lockDuration: "PT45S" });
    settings(await admin.getQueue(scene.queue), { ...given, maxDeliveryCount: 7, lockDuration: "PT45S" });

    await scene.send("a", "b", "c");
    await scene.sender().scheduleMessages({ body: "later" }, inAnHour());
    await deadLetterOne(scene.receiver());
    const runtime = await admin.getQueueRuntimeProperties(scene.queue);
    equal([runtime.activeMessageCount, runtime.scheduledMessageCount, runtime.deadLetterMessageCount], [2, 1, 1], "counts");
    equal(runtime.totalMessageCount, 4, "messages");
    truth(runtime.sizeInBytes > 0, "size");
    times(runtime);

    truth(await admin.queueExists(scene.queue), "it exists");
    await admin.deleteQueue(scene.queue);
    truth(!(await admin.queueExists(scene.queue)), "it exists no more");
    await rejects(() => admin.getQueue(scene.queue), missing, "getting a deleted queue");
  },

  async "admin-topic"(scene) {
    const admin = administration();
    const given = {
      defaultMessageTimeToLive: "P1DT1M",
      requiresDuplicateDetection: true,
      duplicateDetectionHistoryTimeWindow: "PT3M",
      maxSizeInMegabytes: 3072,
      userMetadata: METADATA,
    };
    settings(await admin.createTopic(scene.queue, given), given);
    const found = await admin.getTopic(scene.queue);
    settings(found, given);
    truth((await names(admin.listTopics())).includes(scene.queue), "it is listed");

    await admin.updateTopic({ ...found, userMetadata: "changed", defaultMessageTimeToLive: "PT3H" });
    settings(await admin.getTopic(scene.queue), { ...given, userMetadata: "changed", defaultMessageTimeToLive: "PT3H" });

    for (const name of ["a", "b"]) await admin.createSubscription(scene.queue, name);
    await scene.sender().scheduleMessages({ body: "later" }, inAnHour());
    const runtime = await admin.getTopicRuntimeProperties(scene.queue);
    equal([runtime.subscriptionCount, runtime.scheduledMessageCount], [2, 1], "subscriptions and scheduled messages");
    times(runtime);

    await admin.deleteTopic(scene.queue);
    truth(!(await admin.topicExists(scene.queue)), "it exists no more");
    await rejects(() => admin.getTopic(scene.queue), missing, "getting a deleted topic");
  },

  async "admin-subscription"(scene) {
    const admin = administration();
    const given = {
      lockDuration: "PT30S",
      maxDeliveryCount: 4,
      defaultMessageTimeToLive: "PT2H",
      deadLetteringOnMessageExpiration: true,
      deadLetteringOnFilterEvaluationExceptions: false,
      userMetadata: METADATA,
    };
    await admin.createTopic(scene.queue);
    settings(await admin.createSubscription(scene.queue, "mine", given), given);
    const found = await admin.getSubscription(scene.queue, "mine");
    settings(found, given);
    equal(await names(admin.listSubscriptions(scene.queue)), ["mine"], "subscriptions");

    await admin.updateSubscription({ ...found, maxDeliveryCount: 9 });
    settings(await admin.getSubscription(scene.queue, "mine"), { ...given, maxDeliveryCount: 9 });

    await scene.send("a", "b", "c");
    await deadLetterOne(scene.client.createReceiver(scene.queue, "mine", { maxAutoLockRenewalDurationInMs: 0 }));
    const runtime = await admin.getSubscriptionRuntimeProperties(scene.queue, "mine");
    equal([runtime.activeMessageCount, runtime.deadLetterMessageCount, runtime.totalMessageCount], [2, 1, 3], "counts");
    times(runtime);

    await admin.deleteSubscription(scene.queue, "mine");
    truth(!(await admin.subscriptionExists(scene.queue, "mine")), "it exists no more");
    await rejects(() => admin.getSubscription(scene.queue, "mine"), missing, "getting a deleted subscription");
    await admin.deleteTopic(scene.queue);
  },

  async "admin-rule"(scene) {
    const admin = administration();
    const topic = scene.queue;
    const published = (body, amount, subject, more) => ({ body, subject, applicationProperties: { amount, ...more } });
    const receiver = () => scene.client.createReceiver(topic, "mine");
    const arrived = async () => {
      const inbox = receiver();
      const found = {};
      for (let some; (some = await inbox.receiveMessages(10, { maxWaitTimeInMs: 1000 })).length; ) {
        for (const message of some) {
          found[message.body] = message.applicationProperties.checked;
          await inbox.completeMessage(message);
        }
      }
      await inbox.close();
      return found;
    };

    await admin.createTopic(topic);
    await admin.createSubscription(topic, "mine");
    equal((await admin.getRule(topic, "mine", "$Default")).filter.sqlExpression, "1=1", "the default rule takes all");
    await admin.deleteRule(topic, "mine", "$Default");
    const sql = { sqlExpression: "amount > @limit", sqlParameters: { "@limit": 10 } };
    await admin.createRule(topic, "mine", "sql", sql, { sqlExpression: "SET checked = 'yes'" });
    const chosen = { subject: "invoice", applicationProperties: { colour: "red", number: 3 } };
    await admin.createRule(topic, "mine", "correlation", chosen);

    const found = await admin.getRule(topic, "mine", "sql");
    settings(found.filter, sql);
    equal(found.action.sqlExpression, "SET checked = 'yes'", "action");
    settings((await admin.getRule(topic, "mine", "correlation")).filter, chosen);
    equal((await names(admin.listRules(topic, "mine"))).sort(), ["correlation", "sql"], "rules");

    const sender = scene.sender();
    await sender.sendMessages(published("large", 20));
    await sender.sendMessages(published("red", 0, "invoice", { colour: "red", number: 3 }));
    await sender.sendMessages(published("green", 0, "invoice", { colour: "green", number: 3 }));
    equal(await arrived(), { large: "yes", red: undefined }, "what arrives");

    await admin.updateRule(topic, "mine", { ...found, filter: { sqlExpression: "amount > 100" } });
    equal((await admin.getRule(topic, "mine", "sql")).filter.sqlExpression, "amount > 100", "changed filter");
    await admin.deleteRule(topic, "mine", "correlation");
    truth(!(await admin.ruleExists(topic, "mine", "correlation")), "it exists no more");
    await rejects(() => admin.getRule(topic, "mine", "correlation"), missing, "getting a deleted rule");
    await sender.sendMessages(published("large", 20));
    await sender.sendMessages(published("larger", 200));
    await sender.sendMessages(published("red", 0, "invoice", { colour: "red", number: 3 }));
    equal(await arrived(), { larger: "yes" }, "what arrives after the change");
    await admin.deleteTopic(topic);
  },

  async "admin-authorization"(scene) {
    const admin = administration();
    const primaryKey = "a key of the queue's own";
    const rule = { claimType: "SharedAccessKey", accessRights: ["Send"], keyName: "app", primaryKey, secondaryKey: "another" };
    await admin.createQueue(scene.queue, { authorizationRules: [rule] });
    const [found] = (await admin.getQueue(scene.queue)).authorizationRules;
    settings(found, { keyName: "app", primaryKey, secondaryKey: "another", accessRights: ["Send"] });
    const limited = new Scene(scene.queue, config.connection_string.replace(config.key_name, "app").replace(config.key, primaryKey));
    await limited.send("x");
    await rejects(() => one(limited.receiver()), code("UnauthorizedAccess"), "receiving with a right to send");
    await limited.close();
    const receiver = scene.receiver();
    await receiver.completeMessage(await one(receiver));
    await admin.deleteQueue(scene.queue);
  },

  async "admin-forwarding"(scene) {
    const admin = administration();
    const target = `${scene.queue}-target`;
    await admin.createQueue(target);
    await admin.createQueue(scene.queue, { forwardTo: target, forwardDeadLetteredMessagesTo: target });
    const found = await admin.getQueue(scene.queue);
    for (const destination of [found.forwardTo, found.forwardDeadLetteredMessagesTo]) truth(destination.endsWith(`/${target}`), `destination ${destination}`);
    await scene.send("x");
    const receiver = scene.client.createReceiver(target);
    const message = await one(receiver);
    equal(message.body, "x", "what arrives");
    await receiver.completeMessage(message);
    await admin.deleteQueue(scene.queue);
    await admin.deleteQueue(target);
  },

  async "admin-names"(scene) {
    const admin = administration();
    const [mixed, lower] = [`${scene.queue}-Mixed.Case`, `${scene.queue}-mixed.case`];
    equal((await admin.createQueue(mixed)).name, lower, "name of the new queue");
    for (const each of [mixed, mixed.toUpperCase(), lower]) equal((await admin.getQueue(each)).name, lower, "name");
    truth((await names(admin.listQueues())).includes(lower), "it is listed");
    const queue = new Scene(mixed);
    await queue.send("x");
    await deadLetterOne(queue.receiver());
    equal((await one(queue.deadLetters())).deadLetterSource, lower, "source of the dead letter");
    await queue.close();
    await admin.deleteQueue(mixed.toUpperCase());

    equal((await admin.createTopic(mixed)).name, lower, "name of the new topic");
    truth((await names(admin.listTopics())).includes(lower), "it is listed");
    equal((await admin.createSubscription(mixed, "Mine")).subscriptionName, "Mine", "name of the subscription");
    equal(await names(admin.listSubscriptions(lower)), ["Mine"], "subscriptions");
    await admin.deleteTopic(mixed);
  },

  async "admin-pages"(scene) {
    const admin = administration();
    const expected = range(120).map((number) => `s${String(number).padStart(3, "0")}`);
    await admin.createTopic(scene.queue);
    for (const name of expected) await admin.createSubscription(scene.queue, name);
    equal((await names(admin.listSubscriptions(scene.queue))).sort(), expected, "subscriptions");
    equal((await admin.getTopicRuntimeProperties(scene.queue)).subscriptionCount, 120, "their number");
    await admin.deleteTopic(scene.queue);
  },

  async "admin-namespace"() {
    const found = await administration().getNamespaceProperties();
    equal(found.name, "peeklock", "name");
    truth(["Basic", "Standard", "Premium"].includes(found.messagingSku), `tier ${found.messagingSku}`);
    truth(found.createdAt <= found.modifiedAt, "times");
  },

  async "admin-errors"(scene) {
    const admin = administration();
    await admin.createQueue(scene.queue);
    await rejects(() => admin.createQueue(scene.queue), code("MessageEntityAlreadyExistsError"), "creating it again");
    await rejects(() => admin.createTopic(scene.queue), code("MessageEntityAlreadyExistsError"), "creating a topic of its name");
    await rejects(() => admin.getQueue("nothing"), missing, "getting nothing");
    await rejects(() => admin.deleteQueue("nothing"), missing, "deleting nothing");
    await rejects(() => admin.createQueue(`${scene.queue}-odd`, { lockDuration: "PT1H" }), (error) => error.statusCode === 400, "a lock of an hour");
    const changed = { ...(await admin.getQueue(scene.queue)), requiresSession: true };
    await rejects(() => admin.updateQueue(changed), (error) => error.statusCode === 400, "changing what cannot change");
    const limited = administration(config.secure_listen_only);
    await rejects(() => limited.getQueue(scene.queue), code("UnauthorizedRequestError"), "a key without Manage");
    await rejects(() => limited.deleteQueue(scene.queue), code("UnauthorizedRequestError"), "a key without Manage");
    await admin.deleteQueue(scene.queue);
  },

  async websockets(scene) {
    const admin = administration();
    await admin.createQueue(scene.queue);
    const client = new ServiceBusClient(config.secure, { webSocketOptions: { webSocket: WebSocket }, retryOptions: { maxRetries: 0 } });
    const large = "x".repeat(300 * 1024);
    const texts = range(20).map(String);
    const sender = client.createSender(scene.queue);
    await sender.sendMessages({ body: large });
    await sender.sendMessages(texts.map((body) => ({ body })));
    equal(bodies(await allOf(client.createReceiver(scene.queue), 21)).sort(), [large, ...texts].sort(), "what arrives");
    await client.close();
    await scene.nothingIsLeft();
    await admin.deleteQueue(scene.queue);
  },
};
