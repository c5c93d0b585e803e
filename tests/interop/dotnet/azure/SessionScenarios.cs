// The scenarios of session_scenarios.py with Azure.Messaging.ServiceBus.
using System.Collections.Concurrent;
using System.Diagnostics;
using System.Transactions;
using Azure.Messaging.ServiceBus;
using static Peeklock.Interop.Azure.Messages;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

static class SessionScenarios
{
    const int StateLimit = 64 * 1024;
    static readonly Func<Exception, bool> Taken = Reason(ServiceBusFailureReason.SessionCannotBeLocked);
    static readonly Func<Exception, bool> LockLost = Reason(ServiceBusFailureReason.SessionLockLost);
    static readonly Func<Exception, bool> TimedOut = Reason(ServiceBusFailureReason.ServiceTimeout);
    static readonly Func<Exception, bool> NoMessage = Reason(ServiceBusFailureReason.MessageNotFound);
    static readonly ServiceBusSessionReceiverOptions AndDeleted = new() { ReceiveMode = ServiceBusReceiveMode.ReceiveAndDelete };

    /// <summary>For the process that is killed while it holds a session.</summary>
    public static async Task<ServiceBusReceivedMessage> Hold(Scene scene, string sessionId) => await One(await Accept(scene, sessionId));

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["session-accept"] = async scene =>
        {
            await Send(scene, "a", "1", "2");
            await Send(scene, "b", "other");
            await Send(scene, "a", "3");
            await using var receiver = await Accept(scene, "a");
            Equal(receiver.SessionId, "a", "session id");
            var left = receiver.SessionLockedUntil - DateTimeOffset.UtcNow;
            Truth(left.TotalSeconds is > 40 and <= 60, $"locked for {left}");
            var messages = await AllOf(receiver, 3);
            Equal(messages.Bodies(), new[] { "1", "2", "3" }, "bodies");
            Equal(messages.Select(message => message.SessionId), new[] { "a", "a", "a" }, "session ids of the messages");
            await None(receiver, "messages left in the session");
            Equal((await AllOf(await Accept(scene, "b"), 1)).Bodies(), new[] { "other" }, "messages of the other session");
        },

        ["session-next"] = async scene =>
        {
            await Send(scene, "b", "first");
            await Send(scene, "a", "second");
            await Send(scene, "b", "third");
            await using var first = await AcceptNext(scene);
            await using var second = await AcceptNext(scene);
            Equal((first.SessionId, second.SessionId), ("b", "a"), "sessions");
            Equal((await AllOf(first, 2)).Bodies(), new[] { "first", "third" }, "messages of one");
            Equal((await AllOf(second, 1)).Bodies(), new[] { "second" }, "messages of the other");
            var waiting = AcceptNext(scene);
            await Sleep(1500);
            await Send(scene, "c", "fourth");
            await using var third = await waiting;
            Equal(third.SessionId, "c", "session waited for");
            Equal((await AllOf(third, 1)).Bodies(), new[] { "fourth" }, "its messages");
        },

        ["session-timeout"] = async scene =>
        {
            var took = Stopwatch.StartNew();
            await Rejects(() => AcceptNextWithin(scene, 2000), TimedOut, "accepting any session");
            Truth(took.ElapsedMilliseconds is > 1500 and < 8000, $"that took {took.ElapsedMilliseconds} ms");
        },

        ["session-taken"] = async scene =>
        {
            await using var holder = await Accept(scene, "a");
            await AtOnceWithin(5000, () => Rejects(() => Accept(scene, "a"), Taken, "accepting it again"));
            Equal((await Accept(scene, "b")).SessionId, "b", "other session");
        },

        ["session-close"] = async scene =>
        {
            await Send(scene, "a", "held", "next");
            await using (var first = await Accept(scene, "a"))
                Equal((await One(first)).Body(), "held", "first delivery");
            var messages = await AllOf(await Accept(scene, "a"), 2);
            Equal(messages.Select(message => (message.Body(), message.DeliveryCount)), new[] { ("held", 1), ("next", 1) }, "messages and deliveries");
        },

        ["session-connection-lost"] = async scene =>
        {
            await Send(scene, "a", "held");
            await KilledWhileHolding("azure", scene.Queue, "a");
            var message = (await AllOf(await AcceptNext(scene), 1))[0];
            Equal((message.Body(), message.DeliveryCount), ("held", 2), "second delivery");
        },

        ["session-renew"] = async scene =>
        {
            await Send(scene, "a", "slow");
            await using (var receiver = await Accept(scene, "a"))
            {
                var message = await One(receiver);
                var before = receiver.SessionLockedUntil;
                await Sleep(3000);
                await receiver.RenewSessionLockAsync();
                Truth(receiver.SessionLockedUntil - before > TimeSpan.FromSeconds(2), $"renewed from {before} to {receiver.SessionLockedUntil}");
                await Sleep(3000);
                await receiver.CompleteMessageAsync(message);
            }
            await None(await Accept(scene, "a"), "messages left");
        },

        ["session-auto-renew"] = async scene =>
        {
            await Send(scene, "a", "slow");
            await Process(scene, 1, new ServiceBusSessionProcessorOptions(), async message =>
            {
                Equal(message.DeliveryCount, 1, "delivery count");
                await Sleep(8000);
            });
            await None(await Accept(scene, "a"), "messages left");
        },

        ["session-lock-lost"] = async scene =>
        {
            await Send(scene, "a", "held");
            await using var receiver = await Accept(scene, "a");
            var message = await One(receiver);
            await Sleep(6000);
            await Rejects(() => receiver.CompleteMessageAsync(message), Lost, "settling");
            await Rejects(() => receiver.RenewSessionLockAsync(), Lost, "renewing");
            await Rejects(() => receiver.GetSessionStateAsync(), Lost, "reading the state");
            await Rejects(() => receiver.SetSessionStateAsync(new BinaryData("x")), Lost, "setting the state");
            await Rejects(() => One(receiver), Lost, "receiving");
            await using var next = await AcceptNext(scene);
            var again = (await AllOf(next, 1))[0];
            Equal((again.Body(), again.DeliveryCount), ("held", 2), "second delivery");
            Equal(await State(next), null, "state");
        },

        ["session-state"] = async scene =>
        {
            await Send(scene, "a", "x");
            await using (var receiver = await Accept(scene, "a"))
            {
                Equal(await State(receiver), null, "state before it is set");
                foreach (var state in new[] { "one"u8.ToArray(), Bytes(10_240) })
                {
                    await receiver.SetSessionStateAsync(new BinaryData(state));
                    Equal(await State(receiver), state, "state");
                }
                await receiver.SetSessionStateAsync(new BinaryData(Array.Empty<byte>()));
                Equal(await State(receiver), null, "state when emptied");
                await receiver.SetSessionStateAsync(new BinaryData(Bytes(100)));
                await AllOf(receiver, 1);
            }
            await Rejects(() => AcceptNextWithin(scene, 1000), TimedOut, "accepting a session that has only a state");
            await using var again = await Accept(scene, "a");
            Equal(await State(again), Bytes(100), "state when accepted again");
            await again.SetSessionStateAsync(null);
            Equal(await State(again), null, "state when cleared");
            Equal(await State(await Accept(scene, "b")), null, "state of another session");
        },

        ["session-state-limit"] = async scene =>
        {
            await using var receiver = await Accept(scene, "a");
            await receiver.SetSessionStateAsync(new BinaryData(Bytes(StateLimit)));
            var above = new BinaryData(Bytes(StateLimit + 1));
            await Rejects(() => receiver.SetSessionStateAsync(above), Reason(ServiceBusFailureReason.MessageSizeExceeded), "a byte more");
            Equal(await State(receiver), Bytes(StateLimit), "state");
        },

        ["session-abandon"] = async scene =>
        {
            await Send(scene, "a", "first", "second");
            await using var receiver = await Accept(scene, "a");
            var message = await One(receiver);
            Equal((message.Body(), message.DeliveryCount), ("first", 1), "first delivery");
            await receiver.AbandonMessageAsync(message);
            var again = (await AllOf(receiver, 1))[0];
            Equal((again.Body(), again.DeliveryCount), ("first", 2), "second delivery");
            Equal((await AllOf(receiver, 1)).Bodies(), new[] { "second" }, "next message");
        },

        ["session-defer"] = async scene =>
        {
            await Send(scene, "a", "later", "now");
            long number;
            await using (var receiver = await Accept(scene, "a"))
            {
                var message = await One(receiver);
                number = message.SequenceNumber;
                await receiver.DeferMessageAsync(message);
                Equal((await AllOf(receiver, 1)).Bodies(), new[] { "now" }, "message after the deferred one");
                await None(receiver, "deliveries of a deferred message");
            }
            await using var other = await Accept(scene, "b");
            await Rejects(() => other.ReceiveDeferredMessageAsync(number), NoMessage, "in another session");
            await using var again = await Accept(scene, "a");
            var deferred = await again.ReceiveDeferredMessageAsync(number);
            Equal((deferred.Body(), deferred.SessionId, deferred.State), ("later", "a", ServiceBusMessageState.Deferred), "deferred message");
            await again.CompleteMessageAsync(deferred);
            await Rejects(() => again.ReceiveDeferredMessageAsync(number), NoMessage, "a completed message");
        },

        ["session-dead-letter"] = async scene =>
        {
            await Send(scene, "a", "bad", "good");
            await using var receiver = await Accept(scene, "a");
            await receiver.DeadLetterMessageAsync(await One(receiver), "my reason", "my description");
            Equal((await AllOf(receiver, 1)).Bodies(), new[] { "good" }, "message after it");
            await using var letters = scene.DeadLetters();
            var letter = (await AllOf(letters, 1))[0];
            Equal((letter.Body(), letter.SessionId), ("bad", "a"), "dead letter");
            Equal((letter.DeadLetterReason, letter.DeadLetterErrorDescription), ("my reason", "my description"), "reason");
            await None(letters, "dead letters left");
        },

        ["session-schedule"] = async scene =>
        {
            var due = DateTimeOffset.UtcNow.AddSeconds(6);
            await using var sender = scene.Sender();
            var numbers = await sender.ScheduleMessagesAsync([new("kept") { SessionId = "a" }, new("cancelled") { SessionId = "a" }], due);
            await sender.CancelScheduledMessageAsync(numbers[1]);
            await Rejects(() => AcceptNextWithin(scene, 1000), TimedOut, "accepting the session before its time");
            await using var receiver = await AcceptNext(scene);
            AzureProgram.InTime(due);
            Equal(receiver.SessionId, "a", "session");
            Equal((await AllOf(receiver, 1)).Bodies(), new[] { "kept" }, "messages");
            await None(receiver, "other messages");
        },

        ["session-peek"] = async scene =>
        {
            foreach (var (sessionId, body) in new[] { ("a", "1"), ("b", "2"), ("a", "3"), ("a", "4"), ("b", "5") })
                await Send(scene, sessionId, body);
            await using var receiver = await Accept(scene, "a");
            var browsed = await receiver.PeekMessagesAsync(10);
            Equal(browsed.Bodies(), new[] { "1", "3", "4" }, "browsed");
            Equal(browsed.Select(message => message.SessionId), new[] { "a", "a", "a" }, "session ids");
            var some = await receiver.PeekMessagesAsync(10, fromSequenceNumber: browsed[0].SequenceNumber + 1);
            Equal(some.Bodies(), new[] { "3", "4" }, "browsed from a number that is none of the session");
            Equal((await AllOf(receiver, 3)).Bodies(), new[] { "1", "3", "4" }, "messages, which browsing does not lock");
            Equal((await receiver.PeekMessagesAsync(10, fromSequenceNumber: 1)).Bodies(), Array.Empty<string>(), "browsed when empty");
        },

        ["session-receive-and-delete"] = async scene =>
        {
            await Send(scene, "a", "x", "y");
            await Send(scene, "b", "z");
            await using (var receiver = await Accept(scene, "a", AndDeleted))
                Equal((await AllOf(receiver, 2, complete: false)).Bodies(), new[] { "x", "y" }, "bodies");
            await using var next = await AcceptNext(scene);
            Equal(next.SessionId, "b", "session that is left");
            Equal((await AllOf(next, 1)).Bodies(), new[] { "z" }, "its messages");
        },

        ["session-wait"] = async scene =>
        {
            await Send(scene, "a", "x");
            await using var receiver = await Accept(scene, "a", AndDeleted);
            Equal((await AllOf(receiver, 1, complete: false)).Bodies(), new[] { "x" }, "bodies");
            Equal((await receiver.ReceiveMessagesAsync(1, TimeSpan.FromMilliseconds(5500))).Bodies(), Array.Empty<string>(), "messages while the lock ends");
        },

        ["session-push"] = async scene =>
        {
            var handled = new ConcurrentQueue<string>();
            var options = new ServiceBusSessionProcessorOptions { SessionIds = { "a" } };
            await Process(scene, 10, options, message =>
            {
                handled.Enqueue(message.Body());
                return Task.CompletedTask;
            }, () => Send(scene, "a", Texts(10)));
            Equal(handled, Texts(10), "bodies that the processor handled");
            await None(await Accept(scene, "a"), "messages left");
            await Send(scene, "b", Texts(10));
            await using var receiver = await Accept(scene, "b");
            var iterated = new List<string>();
            await foreach (var message in receiver.ReceiveMessagesAsync())
            {
                iterated.Add(message.Body());
                await receiver.CompleteMessageAsync(message);
                if (iterated.Count == 10)
                    break;
            }
            Equal(iterated, Texts(10), "bodies that the iterator received");
        },

        ["session-processor"] = async scene =>
        {
            string[] ids = [.. Texts(10, 10).Select(number => $"s{number}")];
            await scene.Post(Texts(5).SelectMany(body => ids.Select(id => new ServiceBusMessage(body) { SessionId = id })));
            var received = new ConcurrentDictionary<string, ConcurrentQueue<string>>();
            var (running, most) = (0, 0);
            var options = new ServiceBusSessionProcessorOptions { MaxConcurrentSessions = 4, SessionIdleTimeout = TimeSpan.FromSeconds(1) };
            await Process(scene, 50, options, async message =>
            {
                most = Math.Max(most, Interlocked.Increment(ref running));
                await Sleep(50);
                received.GetOrAdd(message.SessionId, _ => new()).Enqueue(message.Body());
                Interlocked.Decrement(ref running);
            });
            Truth(most is > 1 and <= 4, $"{most} sessions at a time");
            foreach (var id in ids)
            {
                Equal(received[id], Texts(5), $"bodies of {id}");
                await using var receiver = await Accept(scene, id);
                Equal((await receiver.PeekMessagesAsync(10)).Bodies(), Array.Empty<string>(), $"left of {id}");
            }
        },

        ["session-many"] = async scene =>
        {
            string[] ids = [.. Texts(20, 10).Select(number => $"s{number}")];
            await scene.Post(Texts(3).SelectMany(turn => ids.Select(id => new ServiceBusMessage($"{id} {turn}") { SessionId = id })));
            var receivers = new List<ServiceBusSessionReceiver>();
            foreach (var _ in ids)
                receivers.Add(await AcceptNext(scene));
            Equal(Sorted(receivers.Select(receiver => receiver.SessionId)), ids, "sessions");
            foreach (var turn in Texts(3))
            {
                foreach (var receiver in receivers)
                    Equal((await AllOf(receiver, 1)).Bodies(), new[] { $"{receiver.SessionId} {turn}" }, "message");
            }
            foreach (var receiver in receivers)
                await receiver.DisposeAsync();
            await Rejects(() => AcceptNextWithin(scene, 1000), TimedOut, "accepting a session when all are empty");
        },

        ["session-receiver-required"] = async scene =>
        {
            await Send(scene, "a", "x");
            await Rejects(() => One(scene.Receiver()), NotAllowed, "receiving");
            Equal((await AllOf(await Accept(scene, "a"), 1)).Bodies(), new[] { "x" }, "messages");
        },

        ["session-id-required"] = async scene =>
        {
            await using var sender = scene.Sender();
            await Rejects(() => sender.SendMessageAsync(new ServiceBusMessage("bare")), NotAllowed, "sending");
            await Rejects(() => sender.SendMessagesAsync([new("one") { SessionId = "a" }, new("bare")]), NotAllowed, "sending a batch");
            await Rejects(() => sender.ScheduleMessageAsync(new ServiceBusMessage("bare"), DateTimeOffset.UtcNow.AddHours(1)), NotAllowed, "scheduling");
            await sender.SendMessageAsync(new ServiceBusMessage("good") { SessionId = "a" });
            Equal((await (await Accept(scene, "a")).PeekMessagesAsync(10)).Bodies(), new[] { "good" }, "messages");
        },

        ["session-not-required"] = async scene =>
        {
            await Send(scene, "a", "x");
            await Rejects(() => Accept(scene, "a"), NotAllowed, "accepting a session");
            await Rejects(() => AcceptNext(scene), NotAllowed, "accepting any session");
            var message = (await AllOf(scene.Receiver(), 1))[0];
            Equal((message.Body(), message.SessionId), ("x", "a"), "message");
        },

        ["session-subscription"] = async scene =>
        {
            foreach (var (sessionId, body) in new[] { ("a", "1"), ("b", "2"), ("a", "3") })
                await Send(scene, sessionId, body);
            await using var second = await scene.Client.AcceptSessionAsync(scene.Queue, "a", "b");
            await using var sameName = await scene.Client.AcceptSessionAsync(scene.Queue, "b", "b");
            await using var first = await scene.Client.AcceptNextSessionAsync(scene.Queue, "a");
            Equal((first.SessionId, second.SessionId), ("a", "b"), "sessions");
            Equal((await AllOf(first, 2)).Bodies(), new[] { "1", "3" }, "messages of one");
            Equal((await AllOf(second, 1)).Bodies(), new[] { "2" }, "messages of the other");
            Equal((await AllOf(sameName, 1)).Bodies(), new[] { "2" }, "messages of the session of the same name");
            await first.SetSessionStateAsync(new BinaryData("state"));
            Equal(await State(first), "state"u8.ToArray(), "state");
            await Rejects(() => scene.Client.AcceptSessionAsync(scene.Queue, "a", "a"), Taken, "accepting it again");
            await using (var hasty = new Scene(scene.Queue, tryTimeoutMs: 1000))
                await Rejects(() => hasty.Client.AcceptNextSessionAsync(scene.Queue, "a"), TimedOut, "accepting any session when all are empty");
            Equal(Sorted((await AllOf(scene.Subscription("plain"), 3)).Bodies()), Texts(3, 1), "messages of a subscription without sessions");
        },

        ["session-take-over"] = async scene =>
        {
            await Send(scene, "a", "completed", "dead", "deferred", "in a transaction", "next");
            await using var first = await scene.Client.AcceptNextSessionAsync(scene.Queue, NonExclusive());
            Equal((first.SessionId, first.IsSessionExclusive), ("a", false), "session, and whether it is exclusive");
            var given = await AllOf(first, 4, complete: false);
            await Rejects(() => Accept(scene, "a"), Taken, "accepting it as an exclusive one");
            await Rejects(() => Accept(scene, "a", NonExclusive()), Taken, "accepting it without the token");
            await Rejects(() => Accept(scene, "a", NonExclusive($"{Guid.NewGuid()}")), Taken, "with another token");

            await using var elsewhere = new Scene(scene.Queue);
            await using var second = await Accept(elsewhere, "a", NonExclusive(first.SessionLockToken));
            Equal((second.SessionId, second.IsSessionExclusive, second.SessionLockToken), ("a", false, first.SessionLockToken), "session taken over");
            await Rejects(() => first.CompleteMessageAsync(given[0]), Lost, "settling by the first");
            await Rejects(() => first.RenewSessionLockAsync(), Lost, "renewing by the first");
            var receiving = Rejects(async () =>
            {
                while (true)  // a wait that its link's end cuts short is an empty answer
                    Equal(await first.ReceiveMessageAsync(), null, "message for the first");
            }, Lost, "receiving by the first");
            await second.CompleteMessageAsync(given[0]);
            await second.DeadLetterMessageAsync(given[1], "reason");
            await second.DeferMessageAsync(given[2]);
            using (var transaction = new TransactionScope(TransactionScopeAsyncFlowOption.Enabled))
            {
                await second.CompleteMessageAsync(given[3]);
                transaction.Complete();
            }
            await second.SetSessionStateAsync(new BinaryData("state"));
            await second.RenewSessionLockAsync();
            Equal((await AllOf(second, 1)).Bodies(), new[] { "next" }, "message after those of the first");

            await using var third = await Accept(elsewhere, "a", NonExclusive(second.SessionLockToken));  // over the same connection
            await Rejects(() => second.GetSessionStateAsync(), Lost, "reading the state by the second");
            Equal((await State(third), third.SessionLockToken), ("state"u8.ToArray(), first.SessionLockToken), "state and token");
            await third.CompleteMessageAsync(await third.ReceiveDeferredMessageAsync(given[2].SequenceNumber));
            await Send(scene, "a", Texts(20));
            Equal((await AllOf(third, 20)).Bodies(), Texts(20), "messages of the third");
            await third.DisposeAsync();
            await using var exclusive = await Accept(scene, "a");
            Equal((exclusive.IsSessionExclusive, exclusive.SessionLockToken ?? "none"), (true, "none"), "an exclusive one");
            await None(exclusive, "messages left");
            await Rejects(() => Accept(scene, "a", NonExclusive(first.SessionLockToken)), Taken, "taking an exclusive one over");
            await receiving;
            Equal((await AllOf(scene.DeadLetters(), 1)).Bodies(), new[] { "dead" }, "dead letters");
        },

        // For test_tier_standard.py.
        ["session-take-over-refused"] = async scene =>
        {
            await Rejects(() => scene.Client.AcceptNextSessionAsync(scene.Queue, NonExclusive()), NotOffered, "accepting any session");
            await Rejects(() => Accept(scene, "it's", NonExclusive()), NotOffered, "accepting a session");
            await Rejects(() => Accept(scene, "a", NonExclusive($"{Guid.NewGuid()}")), NotOffered, "taking a session over");
            Truth((await Accept(scene, "a")).IsSessionExclusive, "an exclusive one is accepted");
        },
    };

    static bool NotOffered(Exception error) => error is NotSupportedException;

    static ServiceBusSessionReceiverOptions NonExclusive(string? token = null) =>
        new() { EnableNonExclusiveSession = true, SessionLockToken = token == null ? null : Guid.Parse(token) };

    static Task<ServiceBusSessionReceiver> Accept(Scene scene, string sessionId, ServiceBusSessionReceiverOptions? options = null) =>
        scene.Client.AcceptSessionAsync(scene.Queue, sessionId, options);

    static Task<ServiceBusSessionReceiver> AcceptNext(Scene scene) => scene.Client.AcceptNextSessionAsync(scene.Queue);

    /// <summary>Accepts any session, waiting so long: the SDK waits as long as its client has for everything.</summary>
    static async Task AcceptNextWithin(Scene scene, int milliseconds)
    {
        await using var hasty = new Scene(scene.Queue, tryTimeoutMs: milliseconds);
        await AcceptNext(hasty);
    }

    static Task Send(Scene scene, string sessionId, params string[] texts) =>
        scene.Post(texts.Select(text => new ServiceBusMessage(text) { SessionId = sessionId }));

    /// <summary>Null is no state, or an empty one: the SDK tells them apart no more than the service does.</summary>
    static async Task<byte[]?> State(ServiceBusSessionReceiver receiver) =>
        await receiver.GetSessionStateAsync() is { } state && state.ToMemory().Length > 0 ? state.ToArray() : null;

    static bool Lost(Exception error) => error is ObjectDisposedException || LockLost(error);

    /// <summary>Runs a processor until it has handled and completed so many messages; throws the first error.</summary>
    static async Task Process(
        Scene scene, int count, ServiceBusSessionProcessorOptions options, Func<ServiceBusReceivedMessage, Task> handle, Func<Task>? meanwhile = null)
    {
        options.AutoCompleteMessages = false;
        await using var processor = scene.Client.CreateSessionProcessor(scene.Queue, options);
        var (handled, done) = (0, new TaskCompletionSource());
        processor.ProcessMessageAsync += async arguments =>
        {
            await handle(arguments.Message);
            await arguments.CompleteMessageAsync(arguments.Message);
            if (Interlocked.Increment(ref handled) == count)
                done.TrySetResult();
        };
        processor.ProcessErrorAsync += arguments =>
        {
            done.TrySetException(arguments.Exception);
            return Task.CompletedTask;
        };
        await processor.StartProcessingAsync();
        if (meanwhile != null)
            await meanwhile();
        await done.Task.WaitAsync(TimeSpan.FromSeconds(60));
        await processor.StopProcessingAsync();
    }
}
