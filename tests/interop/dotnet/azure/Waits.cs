// What users of Azure.Messaging.ServiceBus wait: the program of waits.py, with what the SDK does by default. Runs until killed.
using System.Text.Json;
using Azure;
using Azure.Messaging.ServiceBus;
using Azure.Messaging.ServiceBus.Administration;

namespace Peeklock.Interop.Azure;

sealed class Waits(string operation, int number, ServiceBusClient client)
{
    static readonly JsonElement Config = JsonDocument.Parse(Environment.GetEnvironmentVariable("PEEKLOCK_INTEROP")!).RootElement;
    static readonly TimeSpan Period = TimeSpan.FromSeconds(Config.GetProperty("period_s").GetDouble());

    readonly string _queue = $"waits-{operation}";

    public static async Task Run()
    {
        var users = new List<Task>();
        foreach (var operation in Config.GetProperty("operations").EnumerateArray().Select(each => each.GetString()!))
        {
            var client = new ServiceBusClient(Config.GetProperty("connection_string").GetString());
            for (var number = 0; number < Config.GetProperty("users").GetInt32(); number++)
                users.Add(new Waits(operation, number, client).Repeat());
        }
        await Task.WhenAll(users);
    }

    async Task Repeat()
    {
        var once = Begin();
        var point = Period * number / Config.GetProperty("users").GetInt32(); // in the period: each user has its own
        while (true)
        {
            await Task.Delay(new TimeSpan(Period.Ticks - (DateTime.UtcNow - point).Ticks % Period.Ticks));
            try
            {
                await once();
            }
            catch (Exception error) // of what is not reported
            {
                await Console.Error.WriteLineAsync($"{operation}: {error.Message}");
            }
        }
    }

    /// <summary>Reports the call. True if it succeeded.</summary>
    async Task<bool> Timed(Func<Task> call)
    {
        var began = DateTimeOffset.UtcNow;
        var error = "";
        try
        {
            await call();
        }
        catch (Exception failure)
        {
            error = failure switch
            {
                ServiceBusException known => $"{known.Reason}",
                RequestFailedException known => $"{known.Status}",
                _ => failure.GetType().Name,
            };
        }
        Console.WriteLine(JsonSerializer.Serialize(new
        {
            operation,
            user = number,
            began = began.ToUnixTimeMilliseconds() / 1e3,
            seconds = (DateTimeOffset.UtcNow - began).TotalSeconds,
            error,
        }));
        return error == "";
    }

    static async Task<ServiceBusReceivedMessage> One(ServiceBusReceiver receiver) =>
        await receiver.ReceiveMessageAsync(TimeSpan.FromSeconds(60)) ?? throw new InvalidOperationException("none");

    Func<Task> Begin()
    {
        switch (operation)
        {
            case "send":
                var sender = client.CreateSender(_queue);
                return () => Timed(() => sender.SendMessageAsync(new ServiceBusMessage("m")));
            case "receive":
                var deleting = client.CreateReceiver(_queue, new ServiceBusReceiverOptions { ReceiveMode = ServiceBusReceiveMode.ReceiveAndDelete });
                return () => Timed(() => One(deleting));
            case "complete":
                var completing = client.CreateReceiver(_queue);
                return async () =>
                {
                    var message = await One(completing);
                    await Task.Delay(Period / 2);
                    await Timed(() => completing.CompleteMessageAsync(message));
                };
            case "renew":
                var renewing = client.CreateReceiver(_queue);
                ServiceBusReceivedMessage? held = null;
                return async () =>
                {
                    held ??= await One(renewing);
                    if (!await Timed(() => renewing.RenewMessageLockAsync(held)))
                        held = null; // its lock may be lost
                };
            case "accept":
                return async () =>
                {
                    ServiceBusSessionReceiver? accepted = null;
                    await Timed(async () => accepted = await client.AcceptSessionAsync(_queue, $"session-{number}"));
                    if (accepted != null)
                        await accepted.CloseAsync();
                };
            case "administer":
                var admin = new ServiceBusAdministrationClient(Config.GetProperty("secure").GetString());
                var count = 0;
                return () =>
                {
                    var name = $"made-{number}-{Environment.ProcessId}-{count / 2}";
                    return count++ % 2 == 0
                        ? Timed(() => admin.CreateQueueAsync(name))
                        : Timed(() => admin.DeleteQueueAsync(name));
                };
            default:
                throw new ArgumentException(operation);
        }
    }
}
