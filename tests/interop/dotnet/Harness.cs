// What both programs share: running scenarios, one line of JSON for each, and assertions that name what differs.
using System.Collections;
using System.Collections.Concurrent;
using System.Diagnostics;
using System.Globalization;
using System.Runtime.CompilerServices;
using System.Text.Json;

namespace Peeklock.Interop;

/// <summary>What is not as the scenario says.</summary>
sealed class Difference(string text) : Exception(text);

static class Harness
{
    const int AtOnce = 16;
    static readonly JsonElement Config = JsonDocument.Parse(Environment.GetEnvironmentVariable("PEEKLOCK_INTEROP")!).RootElement;

    public static string Setting(string name) => Config.GetProperty(name).GetString()!;

    public static int Port => Config.GetProperty("port").GetInt32();

    /// <summary>Name and key of a rule.</summary>
    public static (string Name, string Key) Login(string name) => (Config.GetProperty(name)[0].GetString()!, Config.GetProperty(name)[1].GetString()!);

    /// <summary>A partition key, for messages whose order matters; none where every queue is one fragment.</summary>
    public static string? KeyOf(string queue) =>
        Config.GetProperty("keyed").EnumerateArray().Select(name => name.GetString()!).FirstOrDefault(name => Setting("entity_prefix") + name == queue);

    /// <summary>A sequence number without the partition, which is in the highest 16 bits on partitioned entities.</summary>
    public static long Local(long number) => number & 0xFFFF_FFFF_FFFF;

    public static long Partition(long number) => number >>> 48;

    public static Task Sleep(int milliseconds) => Task.Delay(milliseconds);

    public static string[] Texts(int count, int from = 0) => [.. Enumerable.Range(from, count).Select(number => $"{number}")];

    public static string[] Sorted(IEnumerable<string> texts) => [.. texts.Order(StringComparer.Ordinal)];

    public static byte[] Bytes(int count) => [.. Enumerable.Range(0, count).Select(number => (byte)(number * 31 % 251))];

    public static void Truth(bool condition, string what)
    {
        if (!condition)
            throw new Difference(what);
    }

    /// <summary>Compares values and what they contain, and numbers whatever their type.</summary>
    public static void Equal(object? actual, object? expected, string what)
    {
        var (got, wanted) = (Show(actual), Show(expected));
        Truth(got == wanted, $"{what}: expected {Brief(wanted)}, got {Brief(got)}");
    }

    public static async Task Rejects(Func<Task> action, Func<Exception, bool> isExpected, string what)
    {
        try
        {
            await action();
        }
        catch (Exception error)
        {
            Truth(isExpected(error), $"{what}: {error}");
            return;
        }
        throw new Difference($"{what}: nothing was thrown");
    }

    public static async Task AtOnceWithin(int milliseconds, Func<Task> action)
    {
        var took = Stopwatch.StartNew();
        await action();
        Truth(took.ElapsedMilliseconds < milliseconds, $"that took {took.ElapsedMilliseconds} ms");
    }

    /// <summary>Tries again until it succeeds, for 10 s: for what the library does not wait for.</summary>
    public static async Task Eventually(Func<Task> action)
    {
        for (var tries = 0; ; tries++)
        {
            try
            {
                await action();
                return;
            }
            catch (Exception) when (tries < 100)
            {
                await Sleep(100);
            }
        }
    }

    public static string Show(object? value) => value switch
    {
        null => "null",
        string text => $"\"{text}\"",
        bool yes => yes ? "true" : "false",
        byte[] bytes => Convert.ToHexString(bytes),
        DateTime time => time.ToString("O"),
        DateTimeOffset time => time.ToString("O"),
        ITuple tuple => $"({string.Join(", ", Enumerable.Range(0, tuple.Length).Select(i => Show(tuple[i])))})",
        IDictionary map => $"{{{string.Join(", ", map.Keys.Cast<object>().Select(key => $"{key}: {Show(map[key])}").Order(StringComparer.Ordinal))}}}",
        IEnumerable items => $"[{string.Join(", ", items.Cast<object?>().Select(Show))}]",
        IFormattable other => other.ToString(null, CultureInfo.InvariantCulture),
        _ => value.ToString()!,
    };

    static string Brief(string text) => text.Length > 500 ? text[..500] : text;

    /// <summary>Lets another process of this program receive the queue's message, or one of that session, and kills it.</summary>
    public static async Task KilledWhileHolding(string library, string queue, params string[] session)
    {
        using var holder = Process.Start(new ProcessStartInfo(Environment.ProcessPath!, [typeof(Harness).Assembly.Location, library, "--hold", queue, .. session])
        {
            RedirectStandardOutput = true,
        })!;
        Equal(await holder.StandardOutput.ReadLineAsync(), "held", "said by the other process");
        holder.Kill();
        await holder.WaitForExitAsync();
    }

    static async Task Run<TScene>(string name, IReadOnlyDictionary<string, Func<TScene, Task>> scenarios, Func<string, TScene> open)
        where TScene : IAsyncDisposable
    {
        var took = Stopwatch.StartNew();
        var detail = "";
        try
        {
            Truth(scenarios.TryGetValue(name, out var scenario), "this program does not know the scenario");
            await using var scene = open(Setting("entity_prefix") + name);
            await scenario!(scene);
        }
        catch (Exception error)
        {
            detail = error.ToString();
        }
        var result = new { scenario = name, ok = detail == "", detail, seconds = took.Elapsed.TotalSeconds };
        Console.Out.WriteLine(JsonSerializer.Serialize(result));
    }

    /// <summary>
    /// Runs the scenarios that are named, some at a time. `open` makes a scene of a queue; `hold` receives one message, of
    /// a session if one is named.
    /// </summary>
    public static async Task RunAll<TScene>(
        string[] arguments, IReadOnlyDictionary<string, Func<TScene, Task>> scenarios, Func<string, TScene> open, Func<TScene, string?, Task> hold)
        where TScene : IAsyncDisposable
    {
        if (arguments is ["--hold", var queue, ..])
        {
            await hold(open(queue), arguments.ElementAtOrDefault(2));
            Console.WriteLine("held");
            await Sleep(60_000);
            return;
        }
        ThreadPool.SetMinThreads(2 * AtOnce, 2 * AtOnce); // transactions are committed by blocking calls
        var names = new ConcurrentQueue<string>(arguments);
        await Task.WhenAll(Enumerable.Range(0, AtOnce).Select(async _ =>
        {
            while (names.TryDequeue(out var name))
                await Run(name, scenarios, open);
        }));
    }

    public static Dictionary<string, Func<TScene, Task>> Merged<TScene>(params Dictionary<string, Func<TScene, Task>>[] parts) =>
        parts.SelectMany(part => part).ToDictionary();
}
