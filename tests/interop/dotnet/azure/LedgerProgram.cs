// Senders and processors on all kinds of entities that go on over outages, and write what happened to them into a ledger.
using System.Diagnostics;
using System.Diagnostics.Tracing;
using System.Text.Json;
using Azure.Messaging.ServiceBus;

namespace Peeklock.Interop.Azure;

/// <summary>
/// `dotnet interop.dll ledger CONNECTION_STRING SEED`. The ledger is what it prints: one line of JSON for each event, in the order in which
/// they happened; tests/sdk_ledger/judge.py says what the fields are. It reads commands, one on a line:
/// `end sending` answers all sends that are under way; `end` stops the processors, empties the dead-letter queues and ends the program.
/// Clients and processors have the SDK's own settings for retries.
/// </summary>
sealed class LedgerProgram
{
    const int MostWaiting = 300; // messages of an entity above which its senders pause
    const int BatchSize = 10;
    const int SessionsOfSender = 6;
    const string Topic = "topic", Subscription = "all", Sessions = "sessions";
    static readonly string[] Queues = ["plain", "partitioned", Sessions];
    static readonly TimeSpan Idle = TimeSpan.FromSeconds(15); // after it a session processor with messages to come is made anew

    readonly string _connectionString;
    readonly int _seed;
    readonly CancellationTokenSource _ending = new(); // of sending
    readonly CancellationTokenSource _stopped = new(); // all
    readonly object _lock = new();
    readonly Dictionary<string, int> _waiting = [];
    readonly Dictionary<string, long> _lastReceipt = [];
    volatile bool _completesAll;

    LedgerProgram(string connectionString, int seed)
    {
        _connectionString = connectionString;
        _seed = seed;
    }

    public static Task Run(string[] arguments) => new LedgerProgram(arguments[0], int.Parse(arguments[1])).Run();

    async Task Run()
    {
        using var retries = new Retries(this);
        await using var client = new ServiceBusClient(_connectionString);
        var senders = new List<Task>();
        foreach (var entity in Queues.Append(Topic))
            for (var number = 0; number < 3; number++)
                senders.Add(SendAll(client, entity, $"{entity}-{number}", number));
        var processors = new List<Receiving>();
        foreach (var (prefetch, name) in new[] { (0, "no prefetch"), (30, "prefetch") })
        {
            processors.Add(await Receiving.Of(this, client, "plain", name, prefetch));
            processors.Add(await Receiving.Of(this, client, "partitioned", name, prefetch));
            processors.Add(await Receiving.Of(this, client, Topic, name, prefetch));
            processors.Add(await Receiving.Of(this, client, Sessions, name, prefetch));
        }
        var watching = Task.WhenAll(WatchTime(), WatchSessions(client, processors));
        Write(new { what = "started" });
        await Command("end sending");
        _ending.Cancel();
        await Task.WhenAll(senders);
        _completesAll = true;
        Write(new { what = "sending ended" });
        await Command("end");
        _stopped.Cancel();
        await watching;
        foreach (var processor in processors)
            await processor.Close();
        foreach (var entity in Queues.Append(Topic))
            await Drain(client, entity);
        Write(new { what = "ended" });
    }

    static async Task Command(string expected)
    {
        var line = await Console.In.ReadLineAsync();
        if (line != expected)
            throw new ArgumentException($"the command {expected} comes next, not {line}");
    }

    // --- the ledger

    public void Write(object line)
    {
        lock (_lock)
            Put(line);
    }

    static void Put(object line)
    {
        Console.Out.WriteLine(JsonSerializer.Serialize(line));
        Console.Out.Flush();
    }

    public static double Now => (DateTime.UtcNow - DateTime.UnixEpoch).TotalSeconds;

    public static string Text(Exception error) => error switch
    {
        ServiceBusException known => $"{known.Reason}: {known.Message}",
        _ => $"{error.GetType().Name}: {error.Message}",
    };

    // --- sending

    /// <summary>One message at a time, a list, or a batch, in turn; in sessions the messages of one call belong to one.</summary>
    async Task SendAll(ServiceBusClient client, string entity, string name, int style)
    {
        var chance = new Random(_seed + 31 * style + entity.Length);
        await using var sender = client.CreateSender(entity);
        for (long next = 0; !_ending.IsCancellationRequested;)
        {
            if (Waiting(entity) > MostWaiting)
            {
                await Task.Delay(20);
                continue;
            }
            var session = entity == Sessions ? $"{name}-{chance.Next(SessionsOfSender)}" : null;
            var key = entity == "partitioned" && chance.Next(2) == 0 ? $"key-{chance.Next(8)}" : null;
            var messages = Enumerable.Range(0, style == 0 ? 1 : BatchSize).Select(_ => Message($"{name}/{next++}", session, key, chance)).ToArray();
            await Send(sender, entity, session, messages, style);
            await Task.Delay(chance.Next(style == 0 ? 20 : 100));
        }
    }

    static ServiceBusMessage Message(string id, string? session, string? key, Random chance)
    {
        var message = new ServiceBusMessage(Body(id, chance.Next(2000))) { MessageId = id };
        if (session != null)
            message.SessionId = session;
        if (key != null)
            message.PartitionKey = key;
        return message;
    }

    static string Body(string id, int length) => $"{id} {length} {new string((char)('a' + length % 26), length)}";

    static bool IsSound(ServiceBusReceivedMessage message)
    {
        var parts = message.Body.ToString().Split(' ');
        return parts.Length == 3 && parts[0] == message.MessageId && message.Body.ToString() == Body(parts[0], int.Parse(parts[1]));
    }

    async Task Send(ServiceBusSender sender, string entity, string? session, ServiceBusMessage[] messages, int style)
    {
        var ids = messages.Select(message => message.MessageId).ToArray();
        var began = Now;
        var took = Stopwatch.StartNew();
        Write(new { what = "sending", at = began, entity, session, ids });
        var error = "";
        try
        {
            switch (style)
            {
                case 0:
                    await sender.SendMessageAsync(messages[0]);
                    break;
                case 1:
                    await sender.SendMessagesAsync(messages);
                    break;
                default:
                    using (var batch = await sender.CreateMessageBatchAsync())
                    {
                        foreach (var message in messages)
                            if (!batch.TryAddMessage(message))
                                throw new InvalidOperationException("the batch is full");
                        await sender.SendMessagesAsync(batch);
                    }
                    break;
            }
        }
        catch (Exception failure)
        {
            error = Text(failure);
        }
        lock (_lock)
        {
            Put(new { what = "sent", at = Now, took = took.Elapsed.TotalSeconds, entity, session, ids, error });
            if (error == "")
                _waiting[entity] = _waiting.GetValueOrDefault(entity) + messages.Length;
        }
    }

    int Waiting(string entity)
    {
        lock (_lock)
            return _waiting.GetValueOrDefault(entity);
    }

    // --- receiving

    sealed record Settling(Func<Task> Complete, Func<Task> Abandon, Func<Task> DeadLetter);

    async Task Handle(string entity, string receiver, bool dead, bool abandons, ServiceBusReceivedMessage message, Settling settling)
    {
        lock (_lock)
        {
            Put(new
            {
                what = "received", at = Now, entity, receiver, dead, id = message.MessageId, number = message.SequenceNumber, count = message.DeliveryCount,
                token = message.LockToken, until = Until(message.LockedUntil), session = message.SessionId, sound = IsSound(message),
            });
            _lastReceipt[$"{entity} {receiver}"] = Stopwatch.GetTimestamp();
        }
        var throws = _completesAll || dead ? 100 : Random.Shared.Next(100);
        if (throws is >= 10 and < 25)
            await Task.Delay(Random.Shared.Next(300));
        var (outcome, call) = throws switch
        {
            < 5 when abandons => ("abandon", settling.Abandon),
            < 8 => ("dead-letter", settling.DeadLetter),
            _ => ("complete", settling.Complete),
        };
        Write(new { what = "settling", at = Now, entity, dead, number = message.SequenceNumber, token = message.LockToken, outcome });
        var took = Stopwatch.StartNew();
        var error = "";
        try
        {
            await call();
        }
        catch (Exception failure)
        {
            error = Text(failure);
        }
        lock (_lock)
        {
            Put(new
            {
                what = "settled", at = Now, took = took.Elapsed.TotalSeconds, entity, dead, number = message.SequenceNumber, token = message.LockToken, outcome, error,
            });
            if (error == "" && outcome != "abandon" && !dead)
                _waiting[entity] = _waiting.GetValueOrDefault(entity) - 1;
        }
    }

    static double Until(DateTimeOffset time) => (time.UtcDateTime - DateTime.UnixEpoch).TotalSeconds;

    /// <summary>A processor of either kind. Sessions with prefetch abandon nothing: what is behind an abandoned message is there already.</summary>
    sealed class Receiving(string entity, string name, int prefetch, Func<Task> close)
    {
        public string Entity => entity;
        public string Name => name;
        public int Prefetch => prefetch;
        public Task Close() => close();

        public static async Task<Receiving> Of(LedgerProgram program, ServiceBusClient client, string entity, string name, int prefetch)
        {
            Task Failed(ProcessErrorEventArgs args)
            {
                program.Write(new { what = "error", at = Now, entity, receiver = name, source = args.ErrorSource.ToString(), error = Text(args.Exception) });
                return Task.CompletedTask;
            }
            if (entity == Sessions)
            {
                var options = new ServiceBusSessionProcessorOptions { AutoCompleteMessages = false, PrefetchCount = prefetch, MaxConcurrentSessions = 4 };
                options.SessionIdleTimeout = TimeSpan.FromSeconds(2);
                var sessions = client.CreateSessionProcessor(entity, options);
                sessions.ProcessErrorAsync += Failed;
                sessions.SessionInitializingAsync += args =>
                {
                    program.Write(new { what = "session", at = Now, entity, receiver = name, session = args.SessionId, until = Until(args.SessionLockedUntil) });
                    return Task.CompletedTask;
                };
                sessions.ProcessMessageAsync += args => program.Handle(entity, name, false, prefetch == 0, args.Message, new Settling(
                    () => args.CompleteMessageAsync(args.Message), () => args.AbandonMessageAsync(args.Message), () => args.DeadLetterMessageAsync(args.Message, "ledger")));
                await sessions.StartProcessingAsync();
                return new Receiving(entity, name, prefetch, async () => await sessions.DisposeAsync());
            }
            var usual = new ServiceBusProcessorOptions { AutoCompleteMessages = false, PrefetchCount = prefetch, MaxConcurrentCalls = 4 };
            var processor = entity == Topic ? client.CreateProcessor(entity, Subscription, usual) : client.CreateProcessor(entity, usual);
            processor.ProcessErrorAsync += Failed;
            processor.ProcessMessageAsync += args => program.Handle(entity, name, false, true, args.Message, new Settling(
                () => args.CompleteMessageAsync(args.Message), () => args.AbandonMessageAsync(args.Message), () => args.DeadLetterMessageAsync(args.Message, "ledger")));
            await processor.StartProcessingAsync();
            return new Receiving(entity, name, prefetch, async () => await processor.DisposeAsync());
        }
    }

    /// <summary>
    /// The SDK's session processor stays idle after its sessions' locks were lost, whatever the broker does (docs/dotnet.md): make another one.
    /// </summary>
    async Task WatchSessions(ServiceBusClient client, List<Receiving> processors)
    {
        while (await Pause(TimeSpan.FromSeconds(1)))
            for (var number = 0; number < processors.Count; number++)
            {
                var old = processors[number];
                if (old.Entity != Sessions || Waiting(Sessions) <= 0 || !IsIdle(old))
                    continue;
                Write(new { what = "idle", at = Now, entity = old.Entity, receiver = old.Name });
                await old.Close();
                processors[number] = await Receiving.Of(this, client, old.Entity, old.Name, old.Prefetch);
                lock (_lock)
                    _lastReceipt[$"{old.Entity} {old.Name}"] = Stopwatch.GetTimestamp();
            }
    }

    bool IsIdle(Receiving processor)
    {
        lock (_lock)
        {
            var key = $"{processor.Entity} {processor.Name}";
            _lastReceipt.TryAdd(key, Stopwatch.GetTimestamp());
            return Stopwatch.GetElapsedTime(_lastReceipt[key]) > Idle;
        }
    }

    /// <summary>How long this program itself was held up: calls are no shorter than that.</summary>
    async Task WatchTime()
    {
        var step = TimeSpan.FromMilliseconds(100);
        for (var last = Stopwatch.GetTimestamp(); await Pause(step); last = Stopwatch.GetTimestamp())
        {
            var late = Stopwatch.GetElapsedTime(last) - step;
            if (late.TotalSeconds > 0.5)
                Write(new { what = "held up", at = Now, took = late.TotalSeconds });
        }
    }

    /// <summary>False once the program is to end.</summary>
    async Task<bool> Pause(TimeSpan time)
    {
        try
        {
            await Task.Delay(time, _stopped.Token);
            return true;
        }
        catch (OperationCanceledException)
        {
            return false;
        }
    }

    /// <summary>Completes all of a dead-letter queue.</summary>
    async Task Drain(ServiceBusClient client, string entity)
    {
        var options = new ServiceBusReceiverOptions { SubQueue = SubQueue.DeadLetter };
        await using var receiver = entity == Topic ? client.CreateReceiver(entity, Subscription, options) : client.CreateReceiver(entity, options);
        for (var empty = 0; empty < 2;)
        {
            var messages = await receiver.ReceiveMessagesAsync(100, TimeSpan.FromSeconds(3));
            empty = messages.Count == 0 ? empty + 1 : 0;
            foreach (var message in messages)
                await Handle(entity, "dead letters", true, false, message, new Settling(
                    () => receiver.CompleteMessageAsync(message), () => receiver.AbandonMessageAsync(message), () => receiver.DeadLetterMessageAsync(message)));
        }
    }

    /// <summary>Writes what the SDK tries again by itself, and why: after `server-busy` it waits for 10 seconds.</summary>
    sealed class Retries(LedgerProgram program) : EventListener
    {
        protected override void OnEventSourceCreated(EventSource source)
        {
            if (source.Name == "Azure-Messaging-ServiceBus")
                EnableEvents(source, EventLevel.Warning);
        }

        protected override void OnEventWritten(EventWrittenEventArgs written)
        {
            if (written.EventName?.StartsWith("RunOperation", StringComparison.Ordinal) == true)
                program.Write(new { what = "retry", at = Now, error = string.Join(" ", written.Payload ?? (IReadOnlyList<object?>)[]) });
        }
    }
}
