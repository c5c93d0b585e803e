package peeklock;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Map;
import java.util.Objects;
import java.util.concurrent.Callable;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.Future;
import java.util.function.Predicate;

/** What both programs share: running scenarios, one line of JSON for each, and assertions that name what differs. */
final class Harness {
    static final ObjectMapper JSON = new ObjectMapper();
    static final JsonNode CONFIG = config();
    private static final int AT_ONCE = 16;

    private Harness() {}

    interface Scenario {
        void run() throws Exception;
    }

    private static JsonNode config() {
        try {
            return JSON.readTree(System.getenv("PEEKLOCK_INTEROP"));
        } catch (Exception error) {
            throw new IllegalStateException("PEEKLOCK_INTEROP holds no JSON", error);
        }
    }

    static String queue(String scenario) {
        return CONFIG.get("entity_prefix").asText() + scenario;
    }

    /** A partition key, for messages whose order matters; null where every queue is one fragment. */
    static String keyOf(String queue) {
        for (JsonNode scenario : CONFIG.get("keyed")) {
            if (queue(scenario.asText()).equals(queue)) {
                return scenario.asText();
            }
        }
        return null;
    }

    /** A sequence number without the partition, which is in the highest 16 bits on partitioned entities. */
    static long local(long sequenceNumber) {
        return sequenceNumber & (1L << 48) - 1;
    }

    static void equal(Object actual, Object expected, String what) {
        if (!Objects.deepEquals(actual, expected)) {
            throw new AssertionError(what + ": expected " + expected + ", got " + actual);
        }
    }

    static void truth(boolean condition, String what) {
        if (!condition) {
            throw new AssertionError(what);
        }
    }

    static void fails(Scenario action, Predicate<Throwable> expected, String what) {
        try {
            action.run();
        } catch (Throwable error) {
            if (!expected.test(error)) {
                throw new AssertionError(what + ": " + error, error);
            }
            return;
        }
        throw new AssertionError(what + ": nothing was thrown");
    }

    static long now() {
        return System.currentTimeMillis();
    }

    /** Let another process of this program receive the queue's message, or one of that session, and kill it. */
    static void killedWhileHolding(Class<?> program, String queue, String... session) throws Exception {
        String java = System.getProperty("java.home") + "/bin/java";
        String path = System.getProperty("java.class.path");
        List<String> command = new ArrayList<>(List.of(java, "-cp", path, program.getName(), "--hold", queue));
        command.addAll(List.of(session));
        Process holder = new ProcessBuilder(command).redirectError(ProcessBuilder.Redirect.DISCARD).start();
        String said = new String(holder.getInputStream().readNBytes(5), StandardCharsets.UTF_8);
        holder.destroyForcibly().waitFor();
        equal(said, "held\n", "what the other process says");
    }

    /** For that other process, once it holds a message. */
    static void held() throws InterruptedException {
        System.out.print("held\n");
        System.out.flush();
        Thread.sleep(60_000);
    }

    static void main(String[] names, Map<String, Scenario> scenarios) throws Exception {
        PrintStream results = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        ExecutorService pool = Executors.newFixedThreadPool(AT_ONCE);
        List<Future<?>> running = new ArrayList<>();
        for (String name : names) {
            Callable<Void> task = () -> {
                String line = JSON.writeValueAsString(run(name, scenarios.get(name)));
                results.println(line);
                return null;
            };
            running.add(pool.submit(task));
        }
        for (Future<?> task : running) {
            task.get();
        }
        System.exit(0); // the SDKs leave threads behind
    }

    private static Map<String, Object> run(String name, Scenario scenario) {
        long started = now();
        String detail = "";
        boolean ok = true;
        try {
            truth(scenario != null, "this program does not know the scenario");
            scenario.run();
        } catch (Throwable error) {
            StringWriter trace = new StringWriter();
            error.printStackTrace(new PrintWriter(trace));
            detail = trace.toString().lines().limit(25).reduce((a, b) -> a + "\n" + b).orElse("");
            ok = false;
        }
        return Map.of("scenario", name, "ok", ok, "detail", detail, "seconds", (now() - started) / 1000.0);
    }

    static List<String> counting(int from, int count) {
        String[] texts = new String[count];
        Arrays.setAll(texts, i -> String.valueOf(from + i));
        return List.of(texts);
    }
}
