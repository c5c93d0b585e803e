// The scenarios of scenarios.py with Azure.Messaging.ServiceBus.
using System.Collections.Concurrent;
using System.Diagnostics;
using System.Transactions;
using Azure.Core.Amqp;
using Azure.Messaging.ServiceBus;
using static Peeklock.Interop.Azure.Messages;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

static class AzureProgram
{
    static readonly Func<Exception, bool> LockLost = Reason(ServiceBusFailureReason.MessageLockLost);
    static readonly Func<Exception, bool> NotFound = Reason(ServiceBusFailureReason.MessagingEntityNotFound);
    static readonly Func<Exception, bool> Disabled = Reason(ServiceBusFailureReason.MessagingEntityDisabled);
    static readonly Func<Exception, bool> NoMessage = Reason(ServiceBusFailureReason.MessageNotFound);
    static readonly Func<Exception, bool> TooLarge = Reason(ServiceBusFailureReason.MessageSizeExceeded);

    public static Task Run(string[] arguments) => RunAll(
        arguments,
        Merged(Scenarios, TopicScenarios.All, SessionScenarios.All, AdministrationScenarios.All, PartitionedScenarios.All, CornerScenarios.All),
        queue => new Scene(queue),
        async (scene, sessionId) => await (sessionId == null ? One(scene.Receiver()) : SessionScenarios.Hold(scene, sessionId)));

    static readonly Dictionary<string, Func<Scene, Task>> Scenarios = new()
    {
        ["send-complete"] = async scene =>
        {
            await scene.Send("hello");
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            Equal((message.Body(), message.DeliveryCount), ("hello", 1), "body and delivery count");
            await receiver.CompleteMessageAsync(message);
            await scene.NothingIsLeft();
        },

        ["duplicates"] = async scene =>
        {
            foreach (var (body, id) in new[] { ("a", "1"), ("b", "1"), ("c", "2") })
                await scene.Post(new ServiceBusMessage(body) { MessageId = id });
            Equal(Sorted((await AllOf(scene.Receiver(), 2)).Bodies()), new[] { "a", "c" }, "bodies");
            await scene.NothingIsLeft();
        },

        ["properties"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage("x")
            {
                MessageId = "id-1",
                Subject = "subject",
                CorrelationId = "correlation",
                ContentType = "text/plain",
                To = "to-somebody",
                ReplyTo = "reply-to",
                ReplyToSessionId = "reply-session",
                PartitionKey = "key",
                TimeToLive = TimeSpan.FromHours(1),
            });
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            Equal(message.MessageId, "id-1", "message id");
            Equal(message.Subject, "subject", "subject");
            Equal(message.CorrelationId, "correlation", "correlation id");
            Equal(message.ContentType, "text/plain", "content type");
            Equal(message.To, "to-somebody", "to");
            Equal((message.ReplyTo, message.ReplyToSessionId), ("reply-to", "reply-session"), "reply to");
            Equal(message.PartitionKey, "key", "partition key");
            Equal(message.TimeToLive, TimeSpan.FromHours(1), "time to live");
            Equal(Local(message.SequenceNumber), 1, "sequence number");
            Truth((message.EnqueuedTime - DateTimeOffset.UtcNow).Duration() < TimeSpan.FromSeconds(30), $"enqueued {message.EnqueuedTime}");
            Truth(message.LockedUntil > DateTimeOffset.UtcNow, $"locked until {message.LockedUntil}");
            Equal(message.ExpiresAt - message.EnqueuedTime, TimeSpan.FromHours(1), "expires");
            Truth(Guid.TryParse(message.LockToken, out _), $"lock token {message.LockToken}");
            Equal(message.State, ServiceBusMessageState.Active, "state");
            await receiver.CompleteMessageAsync(message);
        },

        ["application-properties"] = async scene =>
        {
            var when = new DateTime(2024, 1, 2, 3, 4, 5, 678, DateTimeKind.Utc);
            (string Name, object? Value)[] sent =
            [
                ("text", "grüße 🐇"), ("yes", true), ("no", false), ("byte", (byte)200), ("sbyte", (sbyte)-7), ("short", (short)-300),
                ("ushort", (ushort)60_000), ("int", -70_000), ("uint", 4_294_967_295), ("long", 1L << 40), ("ulong", ulong.MaxValue),
                ("float", 1.5f), ("double", 2.5), ("decimal", 12.345m), ("char", 'ü'), ("guid", Guid.Parse("00112233-4455-6677-8899-aabbccddeeff")),
                ("time", when), ("offset", new DateTimeOffset(when).AddTicks(1234)), ("span", TimeSpan.FromTicks(1_234_567)),
                ("uri", new Uri("http://example.com/a?b")), ("none", null),
            ];
            await scene.Post(new ServiceBusMessage("x").With(sent));
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            Equal(message.ApplicationProperties.Count, sent.Length, "application properties");
            foreach (var (name, value) in sent)
            {
                var got = message.ApplicationProperties[name];
                Equal((got, got?.GetType()), (value, value?.GetType()), name);
            }
            await receiver.CompleteMessageAsync(message);
        },

        ["bodies"] = async scene =>
        {
            var value = new Dictionary<string, object> { ["text"] = "value", ["number"] = 7, ["list"] = new List<object> { 1, 2, 3 } };
            List<IList<object>> sequences = [[1, 2, 3], ["a", "b"]];
            var (typed, listed) = (scene.Message(""), scene.Message(""));
            typed.GetRawAmqpMessage().Body = AmqpMessageBody.FromValue(value);
            listed.GetRawAmqpMessage().Body = AmqpMessageBody.FromSequence(sequences);
            await scene.Post(scene.Keyed(new ServiceBusMessage(Bytes(1024))), scene.Keyed(new ServiceBusMessage()), typed, listed);
            var messages = await AllOf(scene.Receiver(), 4);
            Equal(messages[0].Body.ToArray(), Bytes(1024), "binary body");
            Equal(messages[1].Body.ToArray(), Array.Empty<byte>(), "empty body");
            Truth(messages[2].GetRawAmqpMessage().Body.TryGetValue(out var gotValue), "type of a value body");
            Equal(gotValue, value, "value body");
            Truth(messages[3].GetRawAmqpMessage().Body.TryGetSequence(out var gotSequences), "type of a sequence body");
            Equal(gotSequences, sequences, "sequence body");
        },

        ["batch"] = async scene =>
        {
            await using var sender = scene.Sender();
            using var batch = await sender.CreateMessageBatchAsync();
            foreach (var id in Texts(100))
                Truth(batch.TryAddMessage(new ServiceBusMessage($"message {id}") { MessageId = id }), "batch full");
            await sender.SendMessagesAsync(batch);
            var messages = await AllOf(scene.Receiver(), 100);
            Equal(messages.Select(message => message.MessageId), Texts(100), "ids");
            Equal(messages.LocalNumbers(), Enumerable.Range(1, 100), "sequence numbers");
            Equal(messages[99].Body(), "message 99", "body");
        },

        ["large-message"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage(Bytes(900 * 1024)));
            var received = (await AllOf(scene.Receiver(), 1))[0].Body;
            Truth(received.ToMemory().Span.SequenceEqual(Bytes(900 * 1024)), "the body differs");
        },

        ["pipelined"] = async scene =>
        {
            await using var sender = scene.Sender();
            var body = new string('x', 100);
            for (var start = 0; start < 2000; start += 400)
                await Task.WhenAll(Texts(400, start).Select(id => sender.SendMessageAsync(new ServiceBusMessage(body) { MessageId = id })));
            var messages = await AllOf(scene.Receiver(), 2000);
            Equal(messages.Select(message => int.Parse(message.MessageId)).Order(), Enumerable.Range(0, 2000), "ids");
            await scene.NothingIsLeft();
        },

        ["receive-and-delete"] = async scene =>
        {
            await scene.Send("a", "b");
            await using (var receiver = scene.Receiver(AndDelete))
                Equal((await AllOf(receiver, 2, complete: false)).Bodies(), new[] { "a", "b" }, "bodies");
            await scene.NothingIsLeft();
        },

        ["abandon"] = async scene =>
        {
            var first = scene.Message("first");
            first.MessageId = "id";
            await scene.Post(first, scene.Message("second"));
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            Equal((message.Body(), message.DeliveryCount), ("first", 1), "first delivery");
            await receiver.AbandonMessageAsync(message);
            var again = await One(receiver);
            Equal((again.Body(), again.DeliveryCount, again.MessageId), ("first", 2, "id"), "second delivery");
            Truth(again.LockToken != message.LockToken, "the lock token is the old one");
            await receiver.CompleteMessageAsync(again);
            Equal((await AllOf(receiver, 1)).Bodies(), new[] { "second" }, "next message");
        },

        ["abandon-properties"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage("x").With(("kept", 1), ("changed", "before")));
            await using var receiver = scene.Receiver();
            await receiver.AbandonMessageAsync(await One(receiver), new Dictionary<string, object> { ["changed"] = "after", ["added"] = 5 });
            var message = (await AllOf(receiver, 1))[0];
            Equal(message.ApplicationProperties, new Dictionary<string, object> { ["kept"] = 1, ["changed"] = "after", ["added"] = 5 }, "properties");
        },

        ["defer"] = async scene =>
        {
            await scene.Send("later");
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            await receiver.DeferMessageAsync(message, new Dictionary<string, object> { ["note"] = "deferred" });
            await None(receiver, "deliveries of a deferred message");
            var deferred = await receiver.ReceiveDeferredMessageAsync(message.SequenceNumber);
            Equal((deferred.Body(), deferred.State), ("later", ServiceBusMessageState.Deferred), "deferred message");
            Equal(deferred.ApplicationProperties["note"], "deferred", "property set while deferring");
            await receiver.CompleteMessageAsync(deferred);
            await Rejects(() => receiver.ReceiveDeferredMessageAsync(message.SequenceNumber), NoMessage, "a completed message");
            await scene.NothingIsLeft();
        },

        ["dead-letter"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage("bad") { MessageId = "id" }.With(("kept", "yes")));
            await using var receiver = scene.Receiver();
            await receiver.DeadLetterMessageAsync(await One(receiver), new Dictionary<string, object> { ["added"] = 7 }, "my reason", "my description");
            await None(receiver, "messages in the queue itself");
            await using var letters = scene.DeadLetters();
            var letter = (await AllOf(letters, 1))[0];
            Equal((letter.Body(), letter.MessageId), ("bad", "id"), "dead letter");
            Equal((letter.DeadLetterReason, letter.DeadLetterErrorDescription), ("my reason", "my description"), "reason");
            Equal((letter.ApplicationProperties["kept"], letter.ApplicationProperties["added"]), ("yes", 7), "properties");
            Equal(letter.DeadLetterSource, scene.Queue, "source");
            await None(letters, "dead letters left");
        },

        ["dead-letter-queue"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage("bad") { TimeToLive = TimeSpan.FromSeconds(3) });
            await using var receiver = scene.Receiver();
            await receiver.DeadLetterMessageAsync(await One(receiver), "because");
            await Sleep(3500);
            await using var letters = scene.DeadLetters();
            Equal((await letters.PeekMessagesAsync(5)).Bodies(), new[] { "bad" }, "browsed");
            var letter = await One(letters);
            await letters.AbandonMessageAsync(letter);
            var again = await One(letters);
            Equal((again.DeliveryCount, again.DeadLetterReason), (letter.DeliveryCount, "because"), "delivery count and reason");
            await letters.CompleteMessageAsync(again);
            Equal((await letters.PeekMessagesAsync(5, fromSequenceNumber: 1)).Bodies(), Array.Empty<string>(), "left");
        },

        ["max-delivery-count"] = async scene =>
        {
            await scene.Send("poison");
            await using var receiver = scene.Receiver();
            for (var count = 1; count <= 2; count++)
            {
                var message = await One(receiver);
                Equal(message.DeliveryCount, count, "delivery count");
                await receiver.AbandonMessageAsync(message);
            }
            await None(receiver, "messages in the queue itself");
            var letter = (await AllOf(scene.DeadLetters(), 1))[0];
            Equal((letter.Body(), letter.DeadLetterReason), ("poison", "MaxDeliveryCountExceeded"), "dead letter");
        },

        ["lock-expiry"] = async scene =>
        {
            await scene.Send("slow");
            await using var first = scene.Receiver();
            await using var second = scene.Receiver();
            var message = await One(first);
            var took = Stopwatch.StartNew();
            await None(second, "messages while locked");
            var again = (await AllOf(second, 1))[0];
            Truth(took.ElapsedMilliseconds > 3500, $"delivered again after {took.ElapsedMilliseconds} ms");
            Equal((again.MessageId, again.DeliveryCount), (message.MessageId, 2), "second delivery");
        },

        ["renew-lock"] = async scene =>
        {
            await scene.Send("slow");
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            var before = message.LockedUntil;
            await Sleep(3000);
            await receiver.RenewMessageLockAsync(message);
            Truth(message.LockedUntil - before > TimeSpan.FromSeconds(2), $"renewed from {before} to {message.LockedUntil}");
            await Sleep(3500);
            await receiver.CompleteMessageAsync(message);
            await scene.NothingIsLeft();
        },

        ["auto-renew"] = async scene =>
        {
            await scene.Send("slow");
            await Process(scene, 1, new ServiceBusProcessorOptions(), async message =>
            {
                Equal(message.DeliveryCount, 1, "delivery count");
                await Sleep(8000);
            });
            await scene.NothingIsLeft();
        },

        ["auto-renew-many"] = async scene =>
        {
            await using (var sender = scene.Sender())
                await sender.SendMessagesAsync(Texts(300).Select(text => new ServiceBusMessage(text)));
            var options = new ServiceBusProcessorOptions { MaxConcurrentCalls = 300, PrefetchCount = 300, MaxAutoLockRenewalDuration = TimeSpan.FromSeconds(90) };
            await Process(scene, 300, options, async message =>
            {
                Equal(message.DeliveryCount, 1, "delivery count");
                await Sleep(47_000);
            });
            await scene.NothingIsLeft();
        },

        ["send-again"] = async scene =>
        {
            await using var receiver = scene.Receiver();
            await using var sender = scene.Sender();
            var sent = new ServiceBusMessage("x") { MessageId = "id", Subject = "s", SessionId = "ключ", PartitionKey = "ключ" };
            await sender.SendMessageAsync(sent.With(("k", "v"), ("n", 1)));
            var message = (await AllOf(receiver, 1))[0];
            await sender.SendMessageAsync(new ServiceBusMessage(message));
            var again = (await AllOf(receiver, 1))[0];
            Equal((again.MessageId, again.Subject, again.SessionId, again.PartitionKey), ("id", "s", "ключ", "ключ"), "what it had");
            Equal((again.Body(), again.ApplicationProperties), ("x", new Dictionary<string, object> { ["k"] = "v", ["n"] = 1 }), "body and properties");
        },

        ["lock-lost"] = async scene =>
        {
            await scene.Send("slow");
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            await Sleep(6000);
            await Rejects(() => receiver.RenewMessageLockAsync(message), LockLost, "renewing a lost lock");
            await Rejects(() => receiver.CompleteMessageAsync(message), LockLost, "completing after the lock");
            var again = (await AllOf(receiver, 1))[0];
            Equal((again.MessageId, again.DeliveryCount), (message.MessageId, 2), "second delivery");
        },

        ["peek"] = async scene =>
        {
            await scene.Send("a", "b", "c", "d", "e");
            await using var receiver = scene.Receiver();
            var browsed = await receiver.PeekMessagesAsync(10);
            Equal(browsed.Bodies(), new[] { "a", "b", "c", "d", "e" }, "browsed");
            var some = await receiver.PeekMessagesAsync(2, fromSequenceNumber: browsed[2].SequenceNumber);
            Equal((some.Bodies(), some.LocalNumbers()), (new[] { "c", "d" }, new[] { 3, 4 }), "browsed from a number");
            Truth(browsed.All(message => message.LockedUntil == default), "browsed as locked");
            var locked = await One(receiver);
            var ends = (await receiver.PeekMessagesAsync(2, fromSequenceNumber: locked.SequenceNumber)).Select(message => message.LockedUntil);
            Equal(ends, new[] { locked.LockedUntil, default }, "ends of locks");
            await receiver.CompleteMessageAsync(locked);
            await AllOf(receiver, 4);
            Equal((await receiver.PeekMessagesAsync(10, fromSequenceNumber: 1)).Bodies(), Array.Empty<string>(), "browsed when empty");
        },

        ["schedule"] = async scene =>
        {
            var due = DateTimeOffset.UtcNow.AddSeconds(6);
            await using var sender = scene.Sender();
            var number = await sender.ScheduleMessageAsync(new ServiceBusMessage("later"), due);
            await sender.SendMessageAsync(new ServiceBusMessage("later too") { ScheduledEnqueueTime = due });
            await using var receiver = scene.Receiver();
            var browsed = await receiver.PeekMessagesAsync(5);
            Equal(Sorted(browsed.Select(message => $"{message.Body}: {message.State}")), new[] { "later too: Scheduled", "later: Scheduled" }, "browsed");
            Truth(browsed.Numbers().Contains(number), "the number returned is not there");
            await None(receiver, "messages before their time");
            Equal(Sorted((await AllOf(receiver, 2)).Bodies()), new[] { "later", "later too" }, "bodies");
            InTime(due);
        },

        ["cancel-scheduled"] = async scene =>
        {
            await using var sender = scene.Sender();
            var numbers = await sender.ScheduleMessagesAsync([new("kept"), new("cancelled")], DateTimeOffset.UtcNow.AddSeconds(6));
            await sender.CancelScheduledMessageAsync(numbers[1]);
            await Rejects(() => sender.CancelScheduledMessageAsync(numbers[1]), NoMessage, "a second cancel");
            Equal((await AllOf(scene.Receiver(), 1)).Bodies(), new[] { "kept" }, "message that arrived");
            await scene.NothingIsLeft();
        },

        ["time-to-live"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage("short") { TimeToLive = TimeSpan.FromSeconds(1) }, new ServiceBusMessage("long"));
            await Sleep(1500);
            Equal((await AllOf(scene.Receiver(), 1)).Bodies(), new[] { "long" }, "message that arrived");
            await scene.NothingIsLeft();
        },

        ["time-to-live-dead-letter"] = async scene =>
        {
            await scene.Post(new ServiceBusMessage("short") { TimeToLive = TimeSpan.FromSeconds(1) });
            await Sleep(1500);
            await None(scene.Receiver(), "expired messages delivered");
            var letter = (await AllOf(scene.DeadLetters(), 1))[0];
            Equal((letter.Body(), letter.DeadLetterReason), ("short", "TTLExpiredException"), "dead letter");
        },

        ["settle-elsewhere"] = async scene =>
        {
            await scene.Send("x");
            var first = scene.Receiver();
            var message = await One(first);
            await first.DisposeAsync();
            await using var second = scene.Receiver();
            await second.CompleteMessageAsync(message);
            await scene.NothingIsLeft();
        },

        ["prompt-return"] = async scene =>
        {
            await using var receiver = scene.Receiver();
            await AtOnceWithin(6000, async () =>
                Equal((await receiver.ReceiveMessagesAsync(10, TimeSpan.FromSeconds(1))).Bodies(), Array.Empty<string>(), "messages of an empty queue"));
            await scene.Send("a", "b", "c");
            var got = new List<ServiceBusReceivedMessage>();
            await AtOnceWithin(10_000, async () => got.AddRange(await receiver.ReceiveMessagesAsync(10, TimeSpan.FromSeconds(20))));
            foreach (var message in got)
                await receiver.CompleteMessageAsync(message);
            await scene.Send("d", "e");
            got.AddRange(await AllOf(receiver, 5 - got.Count));
            Equal(Sorted(got.Bodies()), new[] { "a", "b", "c", "d", "e" }, "bodies");
            await scene.NothingIsLeft();
        },

        ["prefetch"] = async scene =>
        {
            await using (var sender = scene.Sender())
                await sender.SendMessagesAsync(Texts(100).Select(scene.Message));
            await using (var receiver = scene.Receiver(new ServiceBusReceiverOptions { PrefetchCount = 50 }))
                Equal((await AllOf(receiver, 100)).Bodies(), Texts(100), "bodies");
            await scene.NothingIsLeft();
        },

        ["push-receive"] = async scene =>
        {
            var handled = new ConcurrentQueue<string>();
            await Process(scene, 20, new ServiceBusProcessorOptions(), message =>
            {
                handled.Enqueue(message.Body());
                return Task.CompletedTask;
            }, () => scene.Send(Texts(20)));
            Equal(handled, Texts(20), "bodies that the processor handled");
            await scene.Send(Texts(20));
            await using var receiver = scene.Receiver();
            var iterated = new List<string>();
            await foreach (var message in receiver.ReceiveMessagesAsync())
            {
                iterated.Add(message.Body());
                await receiver.CompleteMessageAsync(message);
                if (iterated.Count == 20)
                    break;
            }
            Equal(iterated, Texts(20), "bodies that the iterator received");
            await scene.NothingIsLeft();
        },

        ["competing"] = async scene =>
        {
            await using (var sender = scene.Sender())
                await sender.SendMessagesAsync(Texts(60).Select(text => new ServiceBusMessage(text)));
            var received = new ConcurrentQueue<string>();
            await Task.WhenAll(Enumerable.Range(0, 3).Select(async _ =>
            {
                await using var receiver = scene.Receiver();
                while (await receiver.ReceiveMessagesAsync(5, TimeSpan.FromSeconds(3)) is { Count: > 0 } some)
                {
                    foreach (var message in some)
                    {
                        received.Enqueue(message.Body());
                        await receiver.CompleteMessageAsync(message);
                    }
                }
            }));
            Equal(Sorted(received), Sorted(Texts(60)), "bodies");
        },

        ["connection-reuse"] = async scene =>
        {
            foreach (var turn in Texts(4))
            {
                await scene.Send($"{turn} a", $"{turn} b");
                await using var first = scene.Receiver();
                await using var second = scene.Receiver();
                var (one, other) = (await One(first), await One(second));
                Equal(Sorted([one.Body(), other.Body()]), new[] { $"{turn} a", $"{turn} b" }, "bodies");
                await first.CompleteMessageAsync(one);
                await second.CompleteMessageAsync(other);
            }
            await scene.NothingIsLeft();
        },

        ["close-unsettled"] = async scene =>
        {
            await scene.Send("held");
            await using (var first = scene.Receiver())
                await One(first);
            var message = (await AllOf(scene.Receiver(), 1))[0];
            Equal((message.Body(), message.DeliveryCount), ("held", 2), "second delivery");
        },

        ["connection-lost"] = async scene =>
        {
            await scene.Send("held");
            await KilledWhileHolding("azure", scene.Queue);
            await using var receiver = scene.Receiver();
            var message = await One(receiver, 3000);
            Equal((message.Body(), message.DeliveryCount), ("held", 2), "second delivery");
            await receiver.CompleteMessageAsync(message);
        },

        ["unknown-queue"] = scene => AtOnceWithin(15_000, async () =>
        {
            await Rejects(() => scene.Send("x"), NotFound, "sending");
            await Rejects(() => One(scene.Receiver()), NotFound, "receiving");
        }),

        ["wrong-key"] = async scene =>
        {
            await using (var other = new Scene(scene.Queue, Setting("wrong_key")))
                await Rejects(() => other.Send("x"), Unauthorized, "sending");
            await scene.NothingIsLeft();
        },

        ["signature"] = async scene =>
        {
            await using var signed = new Scene(scene.Queue, Setting("signature"));
            await signed.Send("x");
            await AllOf(signed.Receiver(), 1);
            await scene.NothingIsLeft();
        },

        ["missing-right"] = async scene =>
        {
            await using var listener = new Scene(scene.Queue, Setting("listen_only"));
            await using var sender = new Scene(scene.Queue, Setting("send_only"));
            await Rejects(() => listener.Send("x"), Unauthorized, "sending without the right");
            await sender.Send("x");
            await Rejects(() => One(sender.Receiver()), Unauthorized, "receiving without the right");
            await AllOf(listener.Receiver(), 1);
        },

        ["oversized"] = async scene =>
        {
            await Rejects(() => scene.Post(new ServiceBusMessage(Bytes(100_000))), TooLarge, "sending 100,000 bytes");
            await scene.Send("small");
            Equal((await AllOf(scene.Receiver(), 1)).Bodies(), new[] { "small" }, "message that arrived");
        },

        ["disabled"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Disabled, "sending");
            await Rejects(() => One(scene.Receiver()), Disabled, "receiving");
        },

        ["send-disabled"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Disabled, "sending");
            await scene.NothingIsLeft();
        },

        ["receive-disabled"] = async scene =>
        {
            await scene.Send("x");
            await Rejects(() => One(scene.Receiver()), Disabled, "receiving");
        },

        ["transactions"] = async scene =>
        {
            await scene.Send("old");
            await using var receiver = scene.Receiver();
            await using var sender = scene.Sender();
            var old = await One(receiver);
            using (Transaction())
            {
                await sender.SendMessageAsync(scene.Message("never"));
                await receiver.CompleteMessageAsync(old);
            }
            await Eventually(() => receiver.RenewMessageLockAsync(old));

            using (var committed = Transaction())
            {
                await sender.SendMessageAsync(scene.Message("a"));
                await sender.SendMessagesAsync([scene.Message("b"), scene.Message("c")]);
                await Untransacted(() => None(receiver, "messages before the commit"));
                committed.Complete();
            }
            Equal((await AllOf(receiver, 3)).Bodies(), new[] { "a", "b", "c" }, "bodies");

            await scene.Send("last");
            var last = await One(receiver);
            using (var settling = Transaction())
            {
                await receiver.CompleteMessageAsync(last);
                settling.Complete();
            }
            await Rejects(() => receiver.RenewMessageLockAsync(last), LockLost, "renewing");
        },

        ["transactions-across"] = async scene =>
        {
            string[] others = [.. Texts(3, 1).Select(number => $"{scene.Queue}-{number}")];
            await scene.Send("old", "last");
            await using (var across = new Scene(scene.Queue, acrossEntities: true))
            {
                await using var receiver = across.Receiver();
                var old = await One(receiver);
                var senders = others.Select(other => across.Client.CreateSender(other)).ToList();
                using (Transaction())
                {
                    await receiver.CompleteMessageAsync(old);
                    foreach (var sender in senders)
                        await sender.SendMessageAsync(scene.Message("never"));
                }
                await Eventually(() => receiver.RenewMessageLockAsync(old));

                var last = await One(receiver);
                using (var committed = Transaction())
                {
                    foreach (var sender in senders)
                        await sender.SendMessageAsync(scene.Message("a"));
                    await receiver.CompleteMessageAsync(last);
                    foreach (var sender in senders)
                        await sender.SendMessagesAsync([scene.Message("b")]);
                    await Untransacted(() => None(scene.Client.CreateReceiver(others[0]), "messages before the commit"));
                    committed.Complete();
                }
                Equal((await receiver.PeekMessagesAsync(10, fromSequenceNumber: 1)).Bodies(), new[] { "old" }, "messages left");
            }
            foreach (var other in others)
            {
                await using var receiver = scene.Client.CreateReceiver(other);
                Equal((await AllOf(receiver, 2)).Bodies(), new[] { "a", "b" }, $"bodies in {other}");
                await None(receiver, $"messages left in {other}");
            }
        },
    };

    public static TransactionScope Transaction() => new(TransactionScopeAsyncFlowOption.Enabled);

    /// <summary>Does something within a transaction's scope that is no part of it.</summary>
    static async Task Untransacted(Func<Task> action)
    {
        using var suppressed = new TransactionScope(TransactionScopeOption.Suppress, TransactionScopeAsyncFlowOption.Enabled);
        await action();
        suppressed.Complete();
    }

    public static void InTime(DateTimeOffset due)
    {
        var late = (DateTimeOffset.UtcNow - due).TotalMilliseconds;
        Truth(late is >= 0 and < 5000, $"delivered {late} ms late");
    }

    /// <summary>Runs a processor until it has handled and completed so many messages; throws the first error.</summary>
    static async Task Process(
        Scene scene, int count, ServiceBusProcessorOptions options, Func<ServiceBusReceivedMessage, Task> handle, Func<Task>? meanwhile = null)
    {
        options.AutoCompleteMessages = false;
        await using var processor = scene.Client.CreateProcessor(scene.Queue, options);
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
        await done.Task.WaitAsync(TimeSpan.FromSeconds(120));
        await processor.StopProcessingAsync();
    }
}
