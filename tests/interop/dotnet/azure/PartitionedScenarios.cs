// The scenarios of partitioned_scenarios.py with Azure.Messaging.ServiceBus.
using System.Transactions;
using Azure.Messaging.ServiceBus;
using static Peeklock.Interop.Azure.Messages;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

static class PartitionedScenarios
{
    static readonly string[] Numbered = Sorted(Texts(20));
    static readonly string[] Keys = [.. Texts(8).Select(number => $"key-{number}")];

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["partitioned-spread"] = async scene =>
        {
            await scene.Post(Numbered.Select(text => new ServiceBusMessage(text)));
            await using var receiver = scene.Receiver();
            var shown = await Browsed(receiver, 1);
            Equal(Sorted(shown.Bodies()), Numbered, "browsed");
            var numbers = shown.Numbers();
            OnSeveralPartitions(numbers);
            Equal(numbers, numbers.Order(), "sequence numbers");
            Equal((await Browsed(receiver, numbers[7])).Numbers(), numbers[7..], "browsed from a number");
            Equal(Sorted((await AllOf(receiver, 20)).Bodies()), Numbered, "messages");
            await scene.NothingIsLeft();
        },

        ["partitioned-keys"] = async scene =>
        {
            await scene.Post(Texts(5).SelectMany(turn => Keys.Select(key => Keyed(key, turn))));
            await using (var sender = scene.Sender())
                await Rejects(() => sender.SendMessagesAsync(Keys.Select(key => Keyed(key, "never"))), NotAllowed, "a batch with several keys");
            var messages = await AllOf(scene.Receiver(), 5 * Keys.Length);
            OnSeveralPartitions(messages.Numbers());
            foreach (var key in Keys)
            {
                var mine = messages.Where(message => message.PartitionKey == key).ToList();
                Equal(mine.Bodies(), Texts(5), $"messages of {key}");
                Equal(mine.Numbers().Select(Partition).Distinct().Count(), 1, $"partitions of {key}");
            }
            await scene.NothingIsLeft();
        },

        ["partitioned-key-mismatch"] = async scene =>
        {
            await Rejects(() => scene.Post(new ServiceBusMessage("never") { SessionId = "a", PartitionKey = "b" }), error => error is ArgumentException, "a different partition key");
            await scene.Post(new ServiceBusMessage("x") { SessionId = "a", PartitionKey = "a" });
            Equal((await AllOf(scene.Receiver(), 1)).Bodies(), new[] { "x" }, "messages");
            await scene.NothingIsLeft();
        },

        ["partitioned-numbers"] = async scene =>
        {
            await scene.Post(Numbered.Select(text => new ServiceBusMessage(text)));
            await using var receiver = scene.Receiver();
            var messages = await AllOf(receiver, 20, complete: false);
            OnSeveralPartitions(messages.Numbers());
            await Task.WhenAll(messages.Select(message => receiver.DeferMessageAsync(message)));
            var deferred = await receiver.ReceiveDeferredMessagesAsync(messages.Numbers());
            Equal(Sorted(deferred.Bodies()), Numbered, "deferred messages");
            await Task.WhenAll(deferred.Select(message => receiver.CompleteMessageAsync(message)));
            var due = DateTimeOffset.UtcNow.AddSeconds(6);
            await using var sender = scene.Sender();
            var scheduled = new List<long>();
            foreach (var key in Keys)
                scheduled.Add(await sender.ScheduleMessageAsync(Keyed(key, key), due));
            OnSeveralPartitions(scheduled);
            await sender.CancelScheduledMessagesAsync(scheduled.Take(4));
            Equal(Sorted((await AllOf(receiver, 4)).Bodies()), Keys[4..], "messages that arrived");
            await scene.NothingIsLeft();
        },

        ["partitioned-duplicates"] = async scene =>
        {
            await scene.Post(new[] { "a", "b", "a" }.Select(key => new ServiceBusMessage(key) { MessageId = "1", PartitionKey = key }));
            for (var turn = 0; turn < 2; turn++)
                await scene.Post(Numbered.Select(text => new ServiceBusMessage(text) { MessageId = $"id-{text}" }));
            Equal(Sorted((await AllOf(scene.Receiver(), 22)).Bodies()), Numbered.Concat(["a", "b"]), "messages");
            await scene.NothingIsLeft();
        },

        ["partitioned-sessions"] = async scene =>
        {
            await scene.Post(Texts(3).SelectMany(turn => Keys.Select(key => new ServiceBusMessage(turn) { SessionId = key })));
            var accepted = new List<ServiceBusSessionReceiver>();
            foreach (var _ in Keys)
                accepted.Add(await scene.Client.AcceptNextSessionAsync(scene.Queue));
            Equal(Sorted(accepted.Select(receiver => receiver.SessionId)), Keys, "sessions");
            var numbers = new List<long>();
            foreach (var receiver in accepted)
            {
                var messages = await AllOf(receiver, 3);
                Equal(messages.Bodies(), Texts(3), "messages of a session");
                await receiver.SetSessionStateAsync(new BinaryData(receiver.SessionId));
                numbers.AddRange(messages.Numbers());
            }
            OnSeveralPartitions(numbers);
            var waiting = scene.Client.AcceptNextSessionAsync(scene.Queue);
            await Sleep(1500);
            await scene.Post(new ServiceBusMessage("x") { SessionId = "late" });
            await using var late = await waiting;
            Equal((late.SessionId, (await AllOf(late, 1))[0].Body()), ("late", "x"), "session waited for, and its message");
            foreach (var receiver in accepted)
                await receiver.DisposeAsync();
            foreach (var key in Keys)
            {
                await using var receiver = await scene.Client.AcceptSessionAsync(scene.Queue, key);
                Equal((await receiver.GetSessionStateAsync()).ToString(), key, "state when accepted again");
            }
        },

        ["partitioned-topic"] = async scene =>
        {
            await scene.Post(Enumerable.Range(0, 20).Select(number => new ServiceBusMessage($"{number}").With(("number", number))));
            foreach (var (name, expected) in new[] { ("a", Texts(20)), ("some", Texts(10, 10)) })
            {
                await using var receiver = scene.Subscription(name);
                var messages = await AllOf(receiver, expected.Length);
                Equal(Sorted(messages.Bodies()), Sorted(expected), $"messages in {name}");
                OnSeveralPartitions(messages.Numbers());
                await None(receiver, "messages beyond those");
            }
        },

        ["partitioned-transactions"] = async scene =>
        {
            await scene.Post(Keyed("a", "old"));
            await using var receiver = scene.Receiver();
            await using var sender = scene.Sender();
            var old = await One(receiver);
            foreach (var wrong in new[] { new ServiceBusMessage("never"), Keyed("b", "never") })
            {
                await Rejects(async () =>
                {
                    using var refused = AzureProgram.Transaction();
                    await sender.SendMessageAsync(Keyed("a", "never"));
                    await Rejects(() => sender.SendMessageAsync(wrong), error => error is InvalidOperationException, "a wrong key");
                    refused.Complete();
                }, error => error is TransactionException or InvalidOperationException or ServiceBusException, "a commit");
            }
            using (var committed = AzureProgram.Transaction())
            {
                await sender.SendMessageAsync(Keyed("a", "1"));
                await sender.SendMessagesAsync([Keyed("a", "2"), Keyed("a", "3")]);
                await receiver.CompleteMessageAsync(old);
                committed.Complete();
            }
            Equal((await AllOf(receiver, 3)).Bodies(), Texts(3, 1), "messages");
            await scene.NothingIsLeft();
        },

        ["partitioned-annotations"] = async scene =>
        {
            await scene.Post(Keys.Select(key => new ServiceBusMessage(key) { MessageId = $"{key} id", PartitionKey = key }));
            await scene.Post(Numbered.Select(text => new ServiceBusMessage(text) { MessageId = text }));
            foreach (var message in await AllOf(scene.Receiver(), Keys.Length + Numbered.Length))
            {
                Equal(message.PartitionKey, message.Body(), "key");
                Equal(message.GetRawAmqpMessage().MessageAnnotations["x-opt-partition-id"], Partition(message.SequenceNumber), "partition");
            }
        },
    };

    static ServiceBusMessage Keyed(string key, string body) => new(body) { PartitionKey = key };

    static void OnSeveralPartitions(IEnumerable<long> numbers) =>
        Truth(numbers.Select(Partition).Distinct().Count() > 1, "all messages are on one partition");

    /// <summary>All messages from this sequence number on, in as many calls as that takes.</summary>
    static async Task<List<ServiceBusReceivedMessage>> Browsed(ServiceBusReceiver receiver, long from)
    {
        var found = new List<ServiceBusReceivedMessage>();
        while (await receiver.PeekMessagesAsync(100, from) is { Count: > 0 } some)
        {
            found.AddRange(some);
            from = some[^1].SequenceNumber + 1;
        }
        return found;
    }
}
