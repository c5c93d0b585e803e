// What the scenarios with AMQP.Net Lite share: a connection with an entity, its links and its management node.
using Amqp;
using Amqp.Framing;
using Amqp.Types;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Lite;

sealed class Scene : IAsyncDisposable
{
    const uint Batch = 0x80013700;
    const int PatienceMs = 60_000;
    public string Queue { get; }
    readonly string? _key;
    readonly (string Name, string Key) _login;
    readonly List<Connection> _connections = [];
    Task<Session>? _session;
    static int _names;

    public Scene(string queue, (string Name, string Key)? login = null)
    {
        Queue = queue;
        _key = KeyOf(queue);
        _login = login ?? (Setting("key_name"), Setting("key"));
    }

    /// <summary>A session on a connection of its own.</summary>
    public async Task<Session> Connect()
    {
        var connection = await Connection.Factory.CreateAsync(new Address(Setting("host"), Port, _login.Name, _login.Key, "/", "amqp"));
        _connections.Add(connection);
        return new Session(connection);
    }

    public Task<Session> Shared => _session ??= Connect();

    static string Name(string what) => $"{what}-{Interlocked.Increment(ref _names)}";

    /// <summary>The link when it is open; throws the error of one that the broker refuses.</summary>
    static async Task<TLink> Opened<TLink>(Func<OnAttached, TLink> open, Func<Attach, bool> isRefused)
        where TLink : Link
    {
        var answer = new TaskCompletionSource<Attach>(TaskCreationOptions.RunContinuationsAsynchronously);
        var closed = new TaskCompletionSource<Error?>(TaskCreationOptions.RunContinuationsAsynchronously);
        var link = open((_, attach) => answer.TrySetResult(attach));
        link.AddClosedCallback((_, error) => closed.TrySetResult(error));
        await Task.WhenAny(answer.Task, closed.Task).WaitAsync(TimeSpan.FromMilliseconds(PatienceMs));
        // A refused link is attached without a source or target first; the error follows in a detach (2.6.3).
        if (closed.Task.IsCompleted || isRefused(answer.Task.Result))
            throw new AmqpException(await closed.Task.WaitAsync(TimeSpan.FromMilliseconds(PatienceMs)) ?? new Error(new Symbol("closed")));
        return link;
    }

    public async Task<SenderLink> Sender(string? address = null, SenderSettleMode mode = SenderSettleMode.Unsettled, Fields? properties = null)
    {
        var session = await Shared;
        var attach = new Attach
        {
            Source = new Source(),
            Target = new Target { Address = address ?? Queue },
            SndSettleMode = mode,
            Properties = properties,
        };
        return await Opened(opened => new SenderLink(session, Name("sender"), attach, opened), answer => answer.Target is not Target { Address: not null });
    }

    public async Task<Receiver> Receiver(Source? source = null, bool delete = false, Session? session = null, Fields? properties = null)
    {
        session ??= await Shared;
        Attach? answer = null;
        var attach = new Attach
        {
            Source = source ?? new Source { Address = Queue },
            Target = new Target(),
            SndSettleMode = delete ? SenderSettleMode.Settled : SenderSettleMode.Unsettled,
            RcvSettleMode = ReceiverSettleMode.First,
            Properties = properties,
        };
        var link = await Opened(
            opened => new ReceiverLink(session, Name("receiver"), attach, (each, got) =>
            {
                answer = got;
                opened(each, got);
            }),
            got => got.Source is not Source { Address: not null });
        return new Receiver(link, answer!);
    }

    public Task<Receiver> From(string address) => Receiver(new Source { Address = address });

    public Task<Receiver> DeadLetters() => From($"{Queue}/$DeadLetterQueue");

    public string Subscription(string name) => $"{Queue}/Subscriptions/{name}";

    public Task<Receiver> Subscribed(string name) => From(Subscription(name));

    /// <summary>With the key that keeps the order, where the scenario needs one.</summary>
    public Message Message(object body) => Keyed(new Message(body));

    public Message Keyed(Message message) => _key == null ? message : message.Annotated("x-opt-partition-key", _key);

    /// <summary>One after the other, each when the one before is accepted.</summary>
    public async Task Post(params IEnumerable<Message> messages)
    {
        var sender = await Sender();
        foreach (var message in messages)
            await sender.SendAsync(message);
        await sender.CloseAsync();
    }

    public Task Send(params string[] bodies) => Post(bodies.Select(Message));

    public static Message Batched(IEnumerable<Message> messages)
    {
        var data = new DataList();
        foreach (var message in messages)
            data.Add(new Data { Binary = message.Encoded() });
        return new Message { BodySection = data, Format = Batch };
    }

    /// <summary>One request to the management node: its status and body. Throws an error with the condition.</summary>
    public async Task<(int Status, Map? Body)> Manage(string operation, Map body, string? queue = null)
    {
        var address = $"{queue ?? Queue}/$management";
        var replyTo = Name($"reply-{operation}");
        var session = await Shared;
        var receiver = await Opened(
            opened => new ReceiverLink(session, replyTo, new Attach { Source = new Source { Address = address }, Target = new Target { Address = replyTo } }, opened),
            got => got.Source is not Source { Address: not null });
        var sender = await Sender(address);
        receiver.SetCredit(1, false);
        var request = new Message
        {
            Properties = new Properties { MessageId = replyTo, ReplyTo = replyTo },
            ApplicationProperties = new ApplicationProperties { ["operation"] = $"com.microsoft:{operation}" },
            BodySection = new AmqpValue { Value = body },
        };
        await sender.SendAsync(request);
        var answer = await receiver.ReceiveAsync(TimeSpan.FromMilliseconds(PatienceMs)) ?? throw new Difference($"no answer to {operation}");
        receiver.Accept(answer);
        await sender.CloseAsync();
        await receiver.CloseAsync();
        Equal(answer.Properties.CorrelationId, replyTo, "correlation id");
        var told = answer.ApplicationProperties;
        var status = (int)told["statusCode"];
        if (status >= 300)
            throw new AmqpException(new Error(told["errorCondition"] as Symbol ?? new Symbol($"{status}")) { Description = (string)told["statusDescription"] });
        return (status, answer.Body as Map);
    }

    public async Task<List<Message>> Peek(int count, long from = 1, string? queue = null, string? sessionId = null)
    {
        var request = new Map { ["from-sequence-number"] = from, ["message-count"] = count };
        if (sessionId != null)
            request["session-id"] = sessionId;
        var (status, body) = await Manage("peek-message", request, queue);
        return status == 204 ? [] : [.. ((List)body!["messages"]).Cast<Map>().Select(item => Messages.Decoded(item["message"]))];
    }

    public Task Renewal(Message message) => Manage("renew-lock", new Map { ["lock-tokens"] = new[] { message.LockToken() } });

    /// <summary>The numbers of messages that are scheduled by one request.</summary>
    public async Task<long[]> Schedule(DateTime due, params IEnumerable<Message> messages)
    {
        var items = new List();
        foreach (var message in messages)
        {
            var item = new Map { ["message-id"] = message.Properties?.MessageId ?? Name("id") };
            item["message"] = message.Annotated("x-opt-scheduled-enqueue-time", due).Encoded();
            if (message.Properties?.GroupId is { } session)
                item["session-id"] = session;
            if (message.MessageAnnotations[new Symbol("x-opt-partition-key")] is { } key)
                item["partition-key"] = key;
            items.Add(item);
        }
        var (_, body) = await Manage("schedule-message", new Map { ["messages"] = items });
        return (long[])body!["sequence-numbers"];
    }

    public Task CancelScheduled(params long[] numbers) => Manage("cancel-scheduled-message", new Map { ["sequence-numbers"] = numbers });

    /// <summary>Deferred messages, with their lock tokens.</summary>
    public async Task<List<(Message Message, Guid Token)>> ByNumber(long[] numbers, string? queue = null, string? sessionId = null, uint mode = 1)
    {
        var request = new Map { ["sequence-numbers"] = numbers, ["receiver-settle-mode"] = mode };
        if (sessionId != null)
            request["session-id"] = sessionId;
        var (_, body) = await Manage("receive-by-sequence-number", request, queue);
        return [.. ((List)body!["messages"]).Cast<Map>().Select(item => (Messages.Decoded(item["message"]), item["lock-token"] as Guid? ?? default))];
    }

    public Task Dispose(string status, Guid[] tokens, string? queue = null, string? sessionId = null)
    {
        var request = new Map { ["disposition-status"] = status, ["lock-tokens"] = tokens };
        if (sessionId != null)
            request["session-id"] = sessionId;
        return Manage("update-disposition", request, queue);
    }

    public async Task NothingIsLeft()
    {
        var receiver = await Receiver();
        await receiver.None("messages left");
        await receiver.Close();
        Equal((await Peek(10)).Bodies(), Array.Empty<object>(), "messages left to browse");
    }

    public async ValueTask DisposeAsync()
    {
        foreach (var connection in _connections)
        {
            try
            {
                await connection.CloseAsync(TimeSpan.FromSeconds(5), null);
            }
            catch (Exception)
            {
                // The broker has ended it.
            }
        }
    }
}

/// <summary>A link that gets as many messages as are asked for.</summary>
sealed class Receiver(ReceiverLink link, Attach answer)
{
    public ReceiverLink Link => link;

    public Attach Answer => answer;

    public Source Source => (Source)answer.Source;

    /// <summary>Up to so many messages that arrive within this time; credit left over is drained.</summary>
    public async Task<List<Message>> Take(int count, int waitMs)
    {
        var received = new List<Message>();
        var end = Environment.TickCount64 + waitMs;
        link.SetCredit(count, CreditMode.Manual);
        while (received.Count < count && await link.ReceiveAsync(TimeSpan.FromMilliseconds(Math.Max(1, end - Environment.TickCount64))) is { } message)
            received.Add(message);
        if (received.Count < count)
        {
            link.SetCredit(0, CreditMode.Drain);
            while (await link.ReceiveAsync(TimeSpan.FromMilliseconds(200)) is { } late)
                received.Add(late);
        }
        return received;
    }

    public async Task<Message> One(int waitMs = 60_000) => (await Take(1, waitMs)).FirstOrDefault() ?? throw new Difference("no message arrived");

    public async Task None(string what) => Equal((await Take(1, 1000)).Bodies(), Array.Empty<object>(), what);

    public async Task<List<Message>> AllOf(int count)
    {
        var received = count == 0 ? [] : await Take(count, 60_000);
        Equal(received.Count, count, "messages received");
        foreach (var message in received)
            link.Accept(message);
        return received;
    }

    /// <summary>That many messages and no more, which are completed; the link is closed.</summary>
    public async Task<List<Message>> Received(int count)
    {
        var messages = await AllOf(count);
        await None("messages beyond those");
        await Close();
        return messages;
    }

    public void Complete(Message message) => link.Accept(message);

    public void Abandon(Message message, Fields? annotations = null) => link.Modify(message, deliveryFailed: true, undeliverableHere: false, messageAnnotations: annotations);

    public void Defer(Message message) => link.Modify(message, deliveryFailed: false, undeliverableHere: true);

    public void DeadLetter(Message message, params (string Name, object Value)[] info)
    {
        var error = new Error(new Symbol("com.microsoft:dead-letter")) { Info = new Fields() };
        foreach (var (name, value) in info)
            error.Info[new Symbol(name)] = value;
        link.Reject(message, error);
    }

    public Task Close() => link.CloseAsync();
}

static class Messages
{
    public static byte[] Encoded(this Message message)
    {
        var buffer = message.Encode();
        return [.. buffer.Buffer.AsSpan(buffer.Offset, buffer.Length)];
    }

    public static Message Decoded(object encoded)
    {
        var bytes = (byte[])encoded;
        return Message.Decode(new ByteBuffer(bytes, 0, bytes.Length, bytes.Length));
    }

    public static Message Annotated(this Message message, string name, object value)
    {
        message.MessageAnnotations ??= new MessageAnnotations();
        message.MessageAnnotations[new Symbol(name)] = value;
        return message;
    }

    /// <summary>With application properties.</summary>
    public static Message With(this Message message, params (string Name, object? Value)[] properties)
    {
        message.ApplicationProperties ??= new ApplicationProperties();
        foreach (var (name, value) in properties)
            message.ApplicationProperties[name] = value;
        return message;
    }

    public static Message New(object body, string? id = null, string? subject = null, string? session = null, string? correlation = null, uint? ttl = null)
    {
        var message = new Message(body) { Properties = new Properties { Subject = subject, GroupId = session, CorrelationId = correlation } };
        if (id != null)
            message.Properties.MessageId = id;
        if (ttl != null)
            message.Header = new Header { Ttl = ttl.Value };
        return message;
    }

    public static object? Annotation(this Message message, string name) => message.MessageAnnotations?[new Symbol(name)];

    public static DateTime Time(this Message message, string name) => (DateTime)message.Annotation(name)!;

    public static object? Property(this Message message, string name) => message.ApplicationProperties?[name];

    public static long Number(this Message message) => (long)message.Annotation("x-opt-sequence-number")!;

    public static long[] Numbers(this IEnumerable<Message> messages) => [.. messages.Select(Number)];

    public static long[] LocalNumbers(this IEnumerable<Message> messages) => [.. messages.Select(message => Local(message.Number()))];

    public static object[] Bodies(this IEnumerable<Message> messages) => [.. messages.Select(message => message.Body)];

    public static string[] SortedBodies(this IEnumerable<Message> messages) => Sorted(messages.Select(message => $"{message.Body}"));

    /// <summary>Deliveries that have failed.</summary>
    public static uint Count(this Message message) => message.Header?.DeliveryCount ?? 0;

    public static string? Reason(this Message message) => message.Property("DeadLetterReason") as string;

    /// <summary>The bytes of a delivery tag are those of a Guid of .NET.</summary>
    public static Guid LockToken(this Message message) => new(message.DeliveryTag);

    public static Func<Exception, bool> Condition(string expected) => error => error is AmqpException { Error: { } found } && $"{found.Condition}" == expected;

    public static readonly Func<Exception, bool> LockLost = Condition("com.microsoft:message-lock-lost");
    public static readonly Func<Exception, bool> NoMessage = Condition("com.microsoft:message-not-found");
    public static readonly Func<Exception, bool> Unauthorized = Condition("amqp:unauthorized-access");
    public static readonly Func<Exception, bool> Disabled = Condition("com.microsoft:entity-disabled");
    public static readonly Func<Exception, bool> NotAllowed = Condition("amqp:not-allowed");
    public static readonly Func<Exception, bool> TooLarge = Condition("amqp:link:message-size-exceeded");

    public static bool Missing(Exception error) =>
        Condition("amqp:not-found")(error) && error.Message.Contains("The messaging entity '") && error.Message.Contains("could not be found");
}
