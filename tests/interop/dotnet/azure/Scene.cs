// What the scenarios with Azure.Messaging.ServiceBus share: a client with an entity, and what is done with its messages.
using Azure.Core.Amqp;
using Azure.Messaging.ServiceBus;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

sealed class Scene : IAsyncDisposable
{
    public string Queue { get; }
    public ServiceBusClient Client { get; }
    readonly string? _key;

    public Scene(string queue, string? connectionString = null, int tryTimeoutMs = 60_000, bool acrossEntities = false, bool webSockets = false)
    {
        Queue = queue;
        _key = KeyOf(queue);
        Client = new ServiceBusClient(connectionString ?? Setting("connection_string"), new ServiceBusClientOptions
        {
            RetryOptions = new ServiceBusRetryOptions { MaxRetries = 0, TryTimeout = TimeSpan.FromMilliseconds(tryTimeoutMs) },
            EnableCrossEntityTransactions = acrossEntities,
            TransportType = webSockets ? ServiceBusTransportType.AmqpWebSockets : ServiceBusTransportType.AmqpTcp,
        });
    }

    public ServiceBusSender Sender() => Client.CreateSender(Queue);

    public ServiceBusReceiver Receiver(ServiceBusReceiverOptions? options = null) => Client.CreateReceiver(Queue, options);

    public ServiceBusReceiver DeadLetters() => Receiver(new ServiceBusReceiverOptions { SubQueue = SubQueue.DeadLetter });

    public ServiceBusReceiver Subscription(string name, ServiceBusReceiverOptions? options = null) => Client.CreateReceiver(Queue, name, options);

    /// <summary>With the key that keeps the order, where the scenario needs one.</summary>
    public ServiceBusMessage Message(string body) => Keyed(new ServiceBusMessage(body));

    public ServiceBusMessage Keyed(ServiceBusMessage message)
    {
        if (_key != null)
            message.PartitionKey = _key;
        return message;
    }

    /// <summary>One after the other, each a message of its own.</summary>
    public async Task Post(params IEnumerable<ServiceBusMessage> messages)
    {
        await using var sender = Sender();
        foreach (var message in messages)
            await sender.SendMessageAsync(message);
    }

    public Task Send(params string[] bodies) => Post(bodies.Select(Message));

    public async Task NothingIsLeft()
    {
        await using var receiver = Receiver();
        await Messages.None(receiver, "messages left");
        Equal((await receiver.PeekMessagesAsync(10)).Bodies(), Array.Empty<string>(), "messages left to browse");
    }

    public ValueTask DisposeAsync() => Client.DisposeAsync();
}

static class Messages
{
    public static readonly ServiceBusReceiverOptions AndDelete = new() { ReceiveMode = ServiceBusReceiveMode.ReceiveAndDelete };

    public static async Task<ServiceBusReceivedMessage> One(ServiceBusReceiver receiver, int waitMs = 60_000) =>
        await receiver.ReceiveMessageAsync(TimeSpan.FromMilliseconds(waitMs)) ?? throw new Difference("no message arrived");

    public static async Task None(ServiceBusReceiver receiver, string what) =>
        Equal((await receiver.ReceiveMessagesAsync(1, TimeSpan.FromSeconds(1))).Bodies(), Array.Empty<string>(), what);

    public static async Task<List<ServiceBusReceivedMessage>> AllOf(ServiceBusReceiver receiver, int count, bool complete = true)
    {
        var received = new List<ServiceBusReceivedMessage>();
        while (received.Count < count)
        {
            var some = await receiver.ReceiveMessagesAsync(Math.Min(500, count - received.Count), TimeSpan.FromSeconds(60));
            Truth(some.Count > 0, $"{received.Count} of {count} messages arrived");
            if (complete)
                await Task.WhenAll(some.Select(message => receiver.CompleteMessageAsync(message)));
            received.AddRange(some);
        }
        return received;
    }

    public static string[] Bodies(this IEnumerable<ServiceBusReceivedMessage> messages) => [.. messages.Select(Body)];

    public static string Body(this ServiceBusReceivedMessage message) => message.Body.ToString();

    public static long[] LocalNumbers(this IEnumerable<ServiceBusReceivedMessage> messages) => [.. messages.Select(message => Local(message.SequenceNumber))];

    public static long[] Numbers(this IEnumerable<ServiceBusReceivedMessage> messages) => [.. messages.Select(message => message.SequenceNumber)];

    /// <summary>With application properties.</summary>
    public static ServiceBusMessage With(this ServiceBusMessage message, params (string Name, object? Value)[] properties)
    {
        foreach (var (name, value) in properties)
            message.ApplicationProperties[name] = value;
        return message;
    }

    public static Func<Exception, bool> Reason(ServiceBusFailureReason expected) => error => error is ServiceBusException found && found.Reason == expected;

    public static bool NotAllowed(Exception error) => error.GetType() == typeof(InvalidOperationException);

    public static bool Unauthorized(Exception error) => error is UnauthorizedAccessException;
}
