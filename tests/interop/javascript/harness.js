// What both programs share: running scenarios, one line of JSON for each, and assertions that name what differs.
import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";

const AT_ONCE = 16;

export const config = JSON.parse(process.env.PEEKLOCK_INTEROP);

export const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

export const equal = (actual, expected, what) => assert.deepEqual(actual, expected, what && `${what}: expected ${show(expected)}, got ${show(actual)}`);

export const truth = (condition, what) => assert.ok(condition, what);

const show = (value) => JSON.stringify(value, (_, v) => (typeof v === "bigint" ? `${v}n` : v))?.slice(0, 500);

export const range = (count, from = 0) => Array.from({ length: count }, (_, i) => i + from);

/** A partition key, for messages whose order matters; no key where every queue is one fragment. */
export const keyOf = (queue) => config.keyed.find((name) => config.entity_prefix + name === queue);

/** A sequence number without the partition, which is in the highest 16 bits on partitioned entities. */
export const local = (number) => number % 2 ** 48;

export async function rejects(action, isExpected, what) {
  try {
    await action();
  } catch (error) {
    assert.ok(isExpected(error), `${what}: ${error.code ?? error.condition ?? ""} ${error}`);
    return;
  }
  assert.fail(`${what}: nothing was thrown`);
}

/** Let another process of this program receive the queue's message, or one of that session, and kill it. */
export async function killedWhileHolding(queue, ...session) {
  const holder = spawn(process.execPath, [process.argv[1], "--hold", queue, ...session], { stdio: ["ignore", "pipe", "inherit"] });
  const [said] = await once(holder.stdout, "data");
  assert.equal(String(said), "held\n");
  holder.kill("SIGKILL");
  await once(holder, "exit");
}

async function run(name, scenarios, open) {
  const started = Date.now();
  const result = { scenario: name, ok: true, detail: "" };
  let scene;
  try {
    assert.ok(scenarios[name], "this program does not know the scenario");
    scene = open(config.entity_prefix + name);
    await scenarios[name](scene);
  } catch (error) {
    Object.assign(result, { ok: false, detail: String(error?.stack ?? error) });
  }
  result.seconds = (Date.now() - started) / 1000;
  process.stdout.write(JSON.stringify(result) + "\n");
  await scene?.close().catch(() => {});
}

/**
 * Run the scenarios named on the command line, some at a time. `open` makes a scene of a queue; `hold` receives one
 * message, of a session if one is named.
 */
export async function main(scenarios, open, hold) {
  if (process.argv[2] === "--hold") {
    await hold(open(process.argv[3]), process.argv[4]);
    process.stdout.write("held\n");
    await sleep(60_000);
  }
  process.on("unhandledRejection", (error) => process.stderr.write(`unhandled: ${error?.stack ?? error}\n`));
  const names = process.argv.slice(2);
  const worker = async () => {
    for (let name = names.shift(); name !== undefined; name = names.shift()) await run(name, scenarios, open);
  };
  await Promise.all(range(AT_ONCE).map(worker));
  process.exit(0);
}
