// The scenarios of partitioned_scenarios.py with AMQP.Net Lite.
using System.Transactions;
using Amqp;
using static Peeklock.Interop.Harness;
using static Peeklock.Interop.Lite.Messages;

namespace Peeklock.Interop.Lite;

static class PartitionedScenarios
{
    const string Key = "x-opt-partition-key";
    static readonly string[] Numbered = Sorted(Texts(20));
    static readonly string[] Keys = [.. Texts(8).Select(number => $"key-{number}")];

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["partitioned-spread"] = async scene =>
        {
            await scene.Send(Numbered);
            var shown = await Browsed(scene, 1);
            Equal(shown.SortedBodies(), Numbered, "browsed");
            var numbers = shown.Numbers();
            OnSeveralPartitions(numbers);
            Equal(numbers, numbers.Order(), "sequence numbers");
            Equal((await Browsed(scene, numbers[7])).Numbers(), numbers[7..], "browsed from a number");
            await Received(scene, Numbered);
        },

        ["partitioned-keys"] = async scene =>
        {
            await scene.Post(Texts(5).SelectMany(turn => Keys.Select(key => Keyed(key, turn))));
            await Rejects(() => scene.Post(Scene.Batched(Keys.Select(key => Keyed(key, "never")))), NotAllowed, "a batch with several keys");
            var messages = await (await scene.Receiver()).Received(5 * Keys.Length);
            OnSeveralPartitions(messages.Numbers());
            foreach (var key in Keys)
            {
                var mine = messages.Where(message => key.Equals(message.Annotation(Key))).ToList();
                Equal(mine.Bodies(), Texts(5), $"messages of {key}");
                Equal(mine.Numbers().Select(Partition).Distinct().Count(), 1, $"partitions of {key}");
            }
            await scene.NothingIsLeft();
        },

        ["partitioned-key-mismatch"] = async scene =>
        {
            var different = New("never", session: "a").Annotated(Key, "b");
            await Rejects(() => scene.Post(different), error => NotAllowed(error) && error.Message.Contains("session id"), "a different partition key");
            await scene.Post(New("x", session: "a").Annotated(Key, "a"));
            await Received(scene, "x");
        },

        ["partitioned-numbers"] = async scene =>
        {
            await scene.Send(Numbered);
            var receiver = await scene.Receiver();
            var messages = await receiver.Take(20, 60_000);
            var numbers = messages.Numbers();
            OnSeveralPartitions(numbers);
            messages.ForEach(receiver.Defer);
            List<(Message Message, Guid Token)> deferred = [];
            await Eventually(async () => deferred = await scene.ByNumber(numbers)); // the library does not wait until they are deferred
            Equal(deferred.Select(each => each.Message).SortedBodies(), Numbered, "deferred messages");
            await scene.Dispose("completed", [.. deferred.Select(each => each.Token)]);
            var due = DateTime.UtcNow.AddSeconds(6);
            var scheduled = new List<long>();
            foreach (var key in Keys)
                scheduled.AddRange(await scene.Schedule(due, Keyed(key, key)));
            OnSeveralPartitions(scheduled);
            await scene.CancelScheduled([.. scheduled.Take(4)]);
            Equal((await receiver.AllOf(4)).SortedBodies(), Keys[4..], "messages that arrived");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["partitioned-duplicates"] = async scene =>
        {
            await scene.Post(new[] { "a", "b", "a" }.Select(key => New(key, "1").Annotated(Key, key)));
            for (var turn = 0; turn < 2; turn++)
                await scene.Post(Numbered.Select(text => New(text, $"id-{text}")));
            await Received(scene, [.. Numbered, "a", "b"]);
        },

        ["partitioned-sessions"] = async scene =>
        {
            await scene.Post(Texts(3).SelectMany(turn => Keys.Select(key => New(turn, session: key))));
            var accepted = new List<Receiver>();
            foreach (var _ in Keys)
                accepted.Add(await SessionScenarios.Accept(scene));
            Equal(Sorted(accepted.Select(SessionScenarios.SessionOf)), Keys, "sessions");
            var numbers = new List<long>();
            foreach (var receiver in accepted)
            {
                var messages = await receiver.AllOf(3);
                Equal(messages.Bodies(), Texts(3), "messages of a session");
                var id = SessionScenarios.SessionOf(receiver);
                await SessionScenarios.SetState(scene, id, System.Text.Encoding.UTF8.GetBytes(id));
                numbers.AddRange(messages.Numbers());
            }
            OnSeveralPartitions(numbers);
            var waiting = SessionScenarios.Accept(scene, waitMs: 60_000);
            await Sleep(1500);
            await scene.Post(New("x", session: "late"));
            var late = await waiting;
            Equal((SessionScenarios.SessionOf(late), (await late.AllOf(1)).Bodies()), ("late", new[] { "x" }), "session waited for, and its messages");
            foreach (var receiver in accepted)
                await receiver.Close();
            foreach (var key in Keys)
            {
                var receiver = await SessionScenarios.Accept(scene, key);
                Equal(await SessionScenarios.GetState(scene, key), System.Text.Encoding.UTF8.GetBytes(key), "state when accepted again");
                await receiver.Close();
            }
        },

        ["partitioned-topic"] = async scene =>
        {
            await scene.Post(Enumerable.Range(0, 20).Select(number => New($"{number}").With(("number", number))));
            foreach (var (name, expected) in new[] { ("a", Texts(20)), ("some", Texts(10, 10)) })
            {
                var messages = await (await scene.Subscribed(name)).Received(expected.Length);
                Equal(messages.SortedBodies(), Sorted(expected), $"messages in {name}");
                OnSeveralPartitions(messages.Numbers());
            }
        },

        ["partitioned-transactions"] = async scene =>
        {
            await scene.Post(Keyed("a", "old"));
            var (sender, receiver) = (await scene.Sender(), await scene.Receiver());
            var old = await receiver.One();
            foreach (var wrong in new[] { New("never"), Keyed("b", "never") })
            {
                await Rejects(async () =>
                {
                    using var refused = new TransactionScope(TransactionScopeAsyncFlowOption.Enabled);
                    await sender.SendAsync(Keyed("a", "never"));
                    await Rejects(() => sender.SendAsync(wrong), NotAllowed, "no key, or another");
                    await Task.Yield(); // see below
                    refused.Complete();
                }, error => error is TransactionException or AmqpException, "a commit");
            }
            using (var committed = new TransactionScope(TransactionScopeAsyncFlowOption.Enabled))
            {
                await sender.SendAsync(Keyed("a", "1"));
                await sender.SendAsync(Keyed("a", "2"));
                receiver.Complete(old);
                // After a send the library goes on here within its reading of the connection. The end of the scope waits, and what it
                // waits for is the answer to the commit, which would not be read.
                await Task.Yield();
                committed.Complete();
            }
            Equal((await receiver.AllOf(2)).Bodies(), new[] { "1", "2" }, "messages");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["partitioned-annotations"] = async scene =>
        {
            await scene.Post(Keys.Select(key => New(key, $"{key} id").Annotated(Key, key)));
            await scene.Post(Numbered.Select(text => New(text, text)));
            foreach (var message in await (await scene.Receiver()).AllOf(Keys.Length + Numbered.Length))
            {
                Equal(message.Annotation(Key), message.Body, "key");
                Equal(message.Annotation("x-opt-partition-id"), Partition(message.Number()), "partition");
            }
        },
    };

    static Message Keyed(string key, string body) => New(body).Annotated(Key, key);

    static async Task Received(Scene scene, params string[] expected)
    {
        Equal((await (await scene.Receiver()).Received(expected.Length)).SortedBodies(), Sorted(expected), "messages");
        await scene.NothingIsLeft();
    }

    static void OnSeveralPartitions(IEnumerable<long> numbers) =>
        Truth(numbers.Select(Partition).Distinct().Count() > 1, "all messages are on one partition");

    /// <summary>All messages from this sequence number on, in as many requests as that takes.</summary>
    static async Task<List<Message>> Browsed(Scene scene, long from)
    {
        var found = new List<Message>();
        while (await scene.Peek(100, from) is { Count: > 0 } some)
        {
            found.AddRange(some);
            from = some[^1].Number() + 1;
        }
        return found;
    }
}
