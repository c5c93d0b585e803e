// The scenarios of scenarios.py with AMQP.Net Lite, a general AMQP 1.0 client.
// What Azure's SDK does over $management is done here request by request.
using System.Diagnostics;
using System.Transactions;
using Amqp;
using Amqp.Framing;
using Amqp.Types;
using static Peeklock.Interop.Harness;
using static Peeklock.Interop.Lite.Messages;

namespace Peeklock.Interop.Lite;

static class LiteProgram
{
    public static Task Run(string[] arguments) => RunAll(
        arguments,
        Merged(Scenarios, TopicScenarios.All, SessionScenarios.All, PartitionedScenarios.All, CornerScenarios.All),
        queue => new Scene(queue),
        async (scene, sessionId) => await (sessionId == null ? (await scene.Receiver()).One() : SessionScenarios.Hold(scene, sessionId)));

    static readonly Dictionary<string, Func<Scene, Task>> Scenarios = new()
    {
        ["send-complete"] = async scene =>
        {
            await scene.Send("hello");
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            Equal((message.Body, message.Count(), message.DeliveryTag.Length), ("hello", 0, 16), "body, delivery count and length of the tag");
            receiver.Complete(message);
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["duplicates"] = async scene =>
        {
            await scene.Post(New("a", "1"), New("b", "1"), New("c", "2"));
            Equal((await (await scene.Receiver()).AllOf(2)).SortedBodies(), new[] { "a", "c" }, "bodies");
            await scene.NothingIsLeft();
        },

        ["properties"] = async scene =>
        {
            var sent = New("x", "id-1", "subject", correlation: "correlation", ttl: 3_600_000);
            sent.Properties.ContentType = new Symbol("text/plain");
            sent.Properties.ContentEncoding = new Symbol("identity");
            sent.Properties.To = "to-somebody";
            sent.Properties.ReplyTo = "reply-to";
            sent.Properties.ReplyToGroupId = "reply-session";
            sent.Header.Priority = 7;
            sent.Header.Durable = true;
            await scene.Post(sent.Annotated("x-opt-partition-key", "key").Annotated("x-opt-of-somebody", ulong.MaxValue));
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            var got = message.Properties;
            Equal((got.MessageId, got.Subject, got.CorrelationId, got.To), ("id-1", "subject", "correlation", "to-somebody"), "properties");
            Equal(($"{got.ContentType}", $"{got.ContentEncoding}", got.ReplyTo, got.ReplyToGroupId), ("text/plain", "identity", "reply-to", "reply-session"), "more properties");
            Equal((message.Header.Ttl, message.Header.Priority, message.Header.Durable), (3_600_000, 7, true), "header");
            Equal((message.Annotation("x-opt-partition-key"), message.Annotation("x-opt-of-somebody")), ("key", ulong.MaxValue), "annotations");
            Equal(Local(message.Number()), 1, "sequence number");
            var enqueued = message.Time("x-opt-enqueued-time");
            Truth((enqueued - DateTime.UtcNow).Duration() < TimeSpan.FromSeconds(30), $"enqueued {enqueued}");
            Truth(message.Time("x-opt-locked-until") > DateTime.UtcNow, "lock end");
            Equal(got.AbsoluteExpiryTime - enqueued, TimeSpan.FromHours(1), "expires");
            receiver.Complete(message);
        },

        ["application-properties"] = async scene =>
        {
            (string Name, object? Value)[] sent =
            [
                ("text", "grüße 🐇"), ("symbol", new Symbol("symbol")), ("yes", true), ("no", false), ("ubyte", (byte)200), ("byte", (sbyte)-7),
                ("short", (short)-300), ("ushort", (ushort)60_000), ("int", -70_000), ("uint", 4_294_967_295), ("long", 1L << 40), ("ulong", ulong.MaxValue),
                ("float", 1.5f), ("double", 2.5), ("char", 'ü'), ("guid", Guid.Parse("00112233-4455-6677-8899-aabbccddeeff")),
                ("time", new DateTime(2024, 1, 2, 3, 4, 5, 678, DateTimeKind.Utc)), ("binary", new byte[] { 0, 255 }), ("none", null),
            ];
            await scene.Post(New("x").With(sent));
            var message = (await (await scene.Receiver()).AllOf(1))[0];
            Equal(message.ApplicationProperties.Map.Count, sent.Length, "application properties");
            foreach (var (name, value) in sent)
            {
                var got = message.Property(name);
                Equal((got, got?.GetType()), (value, value?.GetType()), name);
            }
        },

        ["bodies"] = async scene =>
        {
            var value = new Map { ["text"] = "value", ["number"] = 7, ["list"] = new List { 1, 2, 3 } };
            await scene.Post(
                scene.Keyed(new Message { BodySection = new Data { Binary = Bytes(1024) } }),
                scene.Keyed(new Message { BodySection = new Data { Binary = [] } }),
                scene.Keyed(new Message { BodySection = new AmqpValue { Value = value } }),
                scene.Keyed(new Message { BodySection = new AmqpValue { Value = new DescribedValue(new Symbol("test:described"), "inside") } }),
                scene.Keyed(new Message { BodySection = new AmqpSequence { List = new List { 1, null, "b" } } }));
            var messages = await (await scene.Receiver()).AllOf(5);
            Equal(((Data)messages[0].BodySection).Binary, Bytes(1024), "binary body");
            Equal(((Data)messages[1].BodySection).Binary, Array.Empty<byte>(), "empty body");
            Equal(((AmqpValue)messages[2].BodySection).Value, value, "value body");
            var described = (DescribedValue)((AmqpValue)messages[3].BodySection).Value;
            Equal(($"{described.Descriptor}", described.Value), ("test:described", "inside"), "described body");
            Equal(((AmqpSequence)messages[4].BodySection).List, new List { 1, null, "b" }, "sequence body");
        },

        ["batch"] = async scene =>
        {
            await scene.Post(Scene.Batched(Texts(100).Select(id => New($"message {id}", id))));
            var messages = await (await scene.Receiver()).AllOf(100);
            Equal(messages.Select(message => message.Properties.MessageId), Texts(100), "ids");
            Equal(messages.LocalNumbers(), Enumerable.Range(1, 100), "sequence numbers");
            Equal(messages[99].Body, "message 99", "body");
        },

        ["large-message"] = async scene =>
        {
            await scene.Post(new Message { BodySection = new Data { Binary = Bytes(900 * 1024) } });
            var message = (await (await scene.Receiver()).AllOf(1))[0];
            Truth(((Data)message.BodySection).Binary.AsSpan().SequenceEqual(Bytes(900 * 1024)), "the body differs");
        },

        ["pipelined"] = async scene =>
        {
            var sender = await scene.Sender();
            await Task.WhenAll(Texts(2000).Select(id => sender.SendAsync(New(new string('x', 100), id))));
            var receiver = await scene.Receiver();
            var messages = await receiver.AllOf(2000);
            Equal(messages.Select(message => int.Parse(message.Properties.MessageId)).Order(), Enumerable.Range(0, 2000), "ids");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["presettled-send"] = async scene =>
        {
            var sender = await scene.Sender(mode: SenderSettleMode.Settled);
            foreach (var text in Texts(10))
                sender.Send(scene.Message(text), null, null);
            Equal((await (await scene.Receiver()).AllOf(10)).Bodies(), Texts(10), "bodies");
        },

        ["receive-and-delete"] = async scene =>
        {
            await scene.Send("a", "b");
            var receiver = await scene.Receiver(delete: true);
            Equal((await receiver.Take(2, 60_000)).Bodies(), new[] { "a", "b" }, "bodies");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["abandon"] = async scene =>
        {
            await scene.Post(scene.Keyed(New("first", "id")), scene.Message("second"));
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            Equal((message.Body, message.Count()), ("first", 0), "first delivery");
            receiver.Abandon(message);
            var again = await receiver.One();
            Equal((again.Body, again.Count(), again.Properties.MessageId), ("first", 1, "id"), "second delivery");
            Truth(again.LockToken() != message.LockToken(), "the lock token is the old one");
            receiver.Complete(again);
            Equal((await receiver.AllOf(1)).Bodies(), new[] { "second" }, "next message");
        },

        ["abandon-properties"] = async scene =>
        {
            await scene.Post(New("x").With(("kept", 1), ("changed", "before")));
            var receiver = await scene.Receiver();
            receiver.Abandon(await receiver.One(), new Fields { [new Symbol("changed")] = "after", [new Symbol("added")] = 5 });
            var message = (await receiver.AllOf(1))[0];
            Equal(message.ApplicationProperties.Map, new Map { ["kept"] = 1, ["changed"] = "after", ["added"] = 5 }, "application properties");
        },

        ["defer"] = async scene =>
        {
            await scene.Send("later");
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            receiver.Defer(message);
            await receiver.None("deliveries of a deferred message");
            var (deferred, token) = (await scene.ByNumber([message.Number()])).Single();
            Equal(deferred.Body, "later", "deferred message");
            await scene.Dispose("completed", [token]);
            await Rejects(() => scene.ByNumber([message.Number()]), NoMessage, "a completed message");
            await scene.NothingIsLeft();
        },

        ["dead-letter"] = async scene =>
        {
            await scene.Post(New("bad", "id").With(("kept", "yes")));
            var receiver = await scene.Receiver();
            receiver.DeadLetter(await receiver.One(), ("DeadLetterReason", "my reason"), ("DeadLetterErrorDescription", "my description"), ("added", 7));
            await receiver.None("messages in the queue itself");
            var letters = await scene.DeadLetters();
            var letter = (await letters.AllOf(1))[0];
            Equal((letter.Body, letter.Properties.MessageId), ("bad", "id"), "dead letter");
            var expected = new Map { ["DeadLetterReason"] = "my reason", ["DeadLetterErrorDescription"] = "my description", ["kept"] = "yes", ["added"] = 7 };
            Equal(letter.ApplicationProperties.Map, expected, "application properties");
            Equal(letter.Annotation("x-opt-deadletter-source"), scene.Queue, "source");
            await letters.None("dead letters left");
        },

        ["dead-letter-queue"] = async scene =>
        {
            await scene.Post(New("bad", ttl: 3000));
            var receiver = await scene.Receiver();
            receiver.DeadLetter(await receiver.One(), ("DeadLetterReason", "because"));
            await Sleep(3500);
            var queue = $"{scene.Queue}/$DeadLetterQueue";
            Equal((await scene.Peek(5, queue: queue)).Bodies(), new[] { "bad" }, "browsed");
            var letters = await scene.DeadLetters();
            var letter = await letters.One();
            letters.Abandon(letter);
            var again = await letters.One();
            Equal((again.Count(), again.Reason()), (letter.Count(), "because"), "delivery count and reason");
            letters.Complete(again);
            Equal((await scene.Peek(5, queue: queue)).Bodies(), Array.Empty<object>(), "left");
        },

        ["max-delivery-count"] = async scene =>
        {
            await scene.Send("poison");
            var receiver = await scene.Receiver();
            for (var count = 0; count < 2; count++)
            {
                var message = await receiver.One();
                Equal(message.Count(), count, "delivery count");
                receiver.Abandon(message);
            }
            await receiver.None("messages in the queue itself");
            var letter = (await (await scene.DeadLetters()).AllOf(1))[0];
            Equal((letter.Body, letter.Reason()), ("poison", "MaxDeliveryCountExceeded"), "dead letter");
        },

        ["lock-expiry"] = async scene =>
        {
            await scene.Post(New("slow", "id"));
            var (first, second) = (await scene.Receiver(), await scene.Receiver());
            await first.One();
            var took = Stopwatch.StartNew();
            await second.None("messages while locked");
            var again = (await second.AllOf(1))[0];
            Truth(took.ElapsedMilliseconds > 3500, $"delivered again after {took.ElapsedMilliseconds} ms");
            Equal((again.Properties.MessageId, again.Count()), ("id", 1), "second delivery");
        },

        ["renew-lock"] = async scene =>
        {
            await scene.Send("slow");
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            var before = message.Time("x-opt-locked-until");
            await Sleep(3000);
            var (_, body) = await scene.Manage("renew-lock", new Map { ["lock-tokens"] = new[] { message.LockToken() } });
            var until = ((DateTime[])body!["expirations"]).Single();
            Truth(until - before > TimeSpan.FromSeconds(2), $"renewed from {before} to {until}");
            await Sleep(3500);
            receiver.Complete(message);
            await scene.NothingIsLeft();
        },

        ["send-again"] = async scene =>
        {
            var receiver = await scene.Receiver();
            await scene.Post(New("x", "id", "s", "ключ").With(("k", "v"), ("n", 1)).Annotated("x-opt-partition-key", "ключ"));
            var message = (await receiver.AllOf(1))[0];
            await scene.Post(Decoded(message.Encoded()));
            var again = (await receiver.AllOf(1))[0];
            Equal((again.Properties.MessageId, again.Properties.Subject, again.Properties.GroupId), ("id", "s", "ключ"), "what it had");
            Equal(again.Annotation("x-opt-partition-key"), "ключ", "partition key");
            Equal((again.Body, again.ApplicationProperties.Map), ("x", new Map { ["k"] = "v", ["n"] = 1 }), "body and properties");
        },

        ["lock-lost"] = async scene =>
        {
            await scene.Send("slow");
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            await Sleep(6000);
            await Rejects(() => scene.Renewal(message), LockLost, "renewing a lost lock");
            await Rejects(() => scene.Dispose("completed", [message.LockToken()]), LockLost, "completing after the lock");
            Equal((await receiver.AllOf(1))[0].Count(), 1, "delivery count");
        },

        ["peek"] = async scene =>
        {
            await scene.Send("a", "b", "c", "d", "e");
            var browsed = await scene.Peek(10);
            Equal(browsed.Bodies(), new[] { "a", "b", "c", "d", "e" }, "browsed");
            var some = await scene.Peek(2, browsed[2].Number());
            Equal((some.Bodies(), some.LocalNumbers()), (new[] { "c", "d" }, new[] { 3, 4 }), "browsed from a number");
            Equal(browsed.Select(message => message.Annotation("x-opt-locked-until")), new object?[5], "browsed as locked");
            var receiver = await scene.Receiver();
            var locked = await receiver.One();
            var ends = (await scene.Peek(2, locked.Number())).Select(message => message.Annotation("x-opt-locked-until"));
            Equal(ends, new object?[] { locked.Time("x-opt-locked-until"), null }, "ends of locks");
            receiver.Complete(locked);
            await receiver.AllOf(4);
            Equal((await scene.Peek(10)).Bodies(), Array.Empty<object>(), "browsed when empty");
        },

        ["browse"] = async scene =>
        {
            string[] all = ["a", "b", "c", "d", "e"];
            await scene.Send(all);
            foreach (var settled in new[] { true, false, true })
            {
                var shown = await Browsed(scene, scene.Queue, settled);
                Equal(shown.Bodies(), all, "browsed");
                Equal(shown.Select(message => message.Count()), new[] { 0, 0, 0, 0, 0 }, "delivery counts");
            }
            var receiver = await scene.Receiver();
            receiver.DeadLetter(await receiver.One());
            var dead = $"{scene.Queue}/$DeadLetterQueue";
            await Eventually(async () => Equal((await Browsed(scene, dead, true)).Bodies(), new[] { "a" }, "browsed dead letters"));
            Equal((await receiver.AllOf(4)).Bodies(), all[1..], "received");
            Equal((await Browsed(scene, scene.Queue, false)).Bodies(), Array.Empty<object>(), "browsed when empty");
            await (await scene.DeadLetters()).AllOf(1);
        },

        ["selector"] = async scene =>
        {
            await scene.Post(Enumerable.Range(0, 6).Select(number =>
            {
                var message = New(number, $"id-{number}", $"type-{number}", correlation: $"corr-{number}");
                message.Header = new Header { Priority = (byte)number };
                return message.With(("color", number % 2 == 0 ? "red" : "blue"), ("n", number));
            }));
            Equal((await Browsed(scene, scene.Queue, true, "color = 'blue'")).SortedBodies(), new[] { "1", "3", "5" }, "browsed");
            (string Text, string[] Expected)[] selectors =
            [
                ("color = 'red' AND n BETWEEN 1 AND 3", ["2"]),
                ("JMSCorrelationID = 'corr-3' OR JMSType LIKE 'type-_' AND JMSPriority > 4", ["3", "5"]),
                ("color = 'green'", []),
            ];
            foreach (var (text, expected) in selectors)
            {
                var receiver = await scene.Receiver(Selecting(scene.Queue, text));
                var filter = (DescribedValue)receiver.Source.FilterSet[new Symbol("jms-selector")];
                Equal(filter.Value, text, "filter of the answer");
                var messages = await receiver.Take(10, 2000);
                Equal(messages.SortedBodies(), expected, text);
                messages.ForEach(receiver.Complete);
                await receiver.Close();
            }
            var rest = await (await scene.Receiver()).AllOf(3);
            Equal(Sorted(rest.Select(message => $"{message.Body} {message.Count()}")), new[] { "0 0", "1 0", "4 0" }, "the rest");
            await Rejects(() => scene.Receiver(Selecting(scene.Queue, "color =")), Condition("amqp:invalid-field"), "a wrong selector");
            await Rejects(() => scene.Receiver(Selecting(scene.Queue, "JMSReplyTo = 'x'")), Condition("amqp:not-implemented"), "another");
        },

        ["schedule"] = async scene =>
        {
            var due = DateTime.UtcNow.AddSeconds(6);
            var number = (await scene.Schedule(due, New("later"))).Single();
            await scene.Post(New("later too").Annotated("x-opt-scheduled-enqueue-time", due));
            var browsed = await scene.Peek(5);
            Equal(Sorted(browsed.Select(message => $"{message.Body} {message.Annotation("x-opt-message-state")}")), new[] { "later 2", "later too 2" }, "browsed");
            Truth(browsed.Numbers().Contains(number), "the number returned is not there");
            var receiver = await scene.Receiver();
            await receiver.None("messages before their time");
            Equal((await receiver.AllOf(2)).SortedBodies(), new[] { "later", "later too" }, "bodies");
            InTime(due);
        },

        ["cancel-scheduled"] = async scene =>
        {
            var numbers = await scene.Schedule(DateTime.UtcNow.AddSeconds(6), New("kept"), New("cancelled"));
            await scene.CancelScheduled(numbers[1]);
            await Rejects(() => scene.CancelScheduled(numbers[1]), NoMessage, "a second cancel");
            Equal((await (await scene.Receiver()).AllOf(1)).Bodies(), new[] { "kept" }, "messages that arrived");
            await scene.NothingIsLeft();
        },

        ["time-to-live"] = async scene =>
        {
            await scene.Post(New("short", ttl: 1000), New("long"));
            await Sleep(1500);
            Equal((await (await scene.Receiver()).AllOf(1)).Bodies(), new[] { "long" }, "messages that arrived");
            await scene.NothingIsLeft();
        },

        ["time-to-live-dead-letter"] = async scene =>
        {
            await scene.Post(New("short", ttl: 1000));
            await Sleep(1500);
            await (await scene.Receiver()).None("expired messages delivered");
            var letter = (await (await scene.DeadLetters()).AllOf(1))[0];
            Equal((letter.Body, letter.Reason()), ("short", "TTLExpiredException"), "dead letter");
        },

        ["settle-elsewhere"] = async scene =>
        {
            await scene.Send("x");
            var receiver = await scene.Receiver();
            var token = (await receiver.One()).LockToken();
            await receiver.Close();
            await scene.Dispose("completed", [token]);
            await Rejects(() => scene.Dispose("completed", [token]), LockLost, "a second settlement");
            await scene.NothingIsLeft();
        },

        ["prompt-return"] = async scene =>
        {
            var receiver = await scene.Receiver();
            await AtOnceWithin(3000, async () => Equal((await receiver.Take(10, 500)).Count, 0, "messages of an empty queue"));
            await scene.Send("a", "b", "c");
            var got = await receiver.Take(10, 1000);
            Equal(got.SortedBodies(), new[] { "a", "b", "c" }, "a short receive");
            got.ForEach(receiver.Complete);
            await scene.Send("d", "e");
            Equal((await receiver.AllOf(2)).SortedBodies(), new[] { "d", "e" }, "the rest");
            await scene.NothingIsLeft();
        },

        ["prefetch"] = async scene =>
        {
            await scene.Send(Texts(100));
            var receiver = await scene.Receiver();
            receiver.Link.SetCredit(50);
            Equal((await Handled(receiver, 100)).Bodies(), Texts(100), "bodies");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["push-receive"] = async scene =>
        {
            var receiver = await scene.Receiver();
            var (received, done) = (new List<Message>(), new TaskCompletionSource());
            receiver.Link.Start(10, (link, message) =>
            {
                link.Accept(message);
                received.Add(message);
                if (received.Count == 20)
                    done.SetResult();
            });
            await scene.Send(Texts(20));
            await done.Task.WaitAsync(TimeSpan.FromSeconds(60));
            Equal(received.Bodies(), Texts(20), "bodies");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["competing"] = async scene =>
        {
            await scene.Send(Texts(60));
            var received = await Task.WhenAll(Enumerable.Range(0, 3).Select(async _ =>
            {
                var receiver = await scene.Receiver(session: await scene.Connect());
                var mine = new List<Message>();
                while (await receiver.Take(5, 1000) is { Count: > 0 } some)
                {
                    some.ForEach(receiver.Complete);
                    mine.AddRange(some);
                }
                return mine;
            }));
            Equal(received.SelectMany(mine => mine).SortedBodies(), Sorted(Texts(60)), "bodies");
        },

        ["connection-reuse"] = async scene =>
        {
            foreach (var turn in Texts(4))
            {
                await scene.Send($"{turn} a", $"{turn} b");
                var (first, second) = (await scene.Receiver(), await scene.Receiver());
                var (one, other) = (await first.One(), await second.One());
                Equal(new[] { one, other }.SortedBodies(), new[] { $"{turn} a", $"{turn} b" }, "bodies");
                first.Complete(one);
                second.Complete(other);
                await first.Close();
                await second.Close();
            }
            await scene.NothingIsLeft();
        },

        ["close-unsettled"] = async scene =>
        {
            await scene.Send("held");
            var first = await scene.Receiver();
            await first.One();
            await first.Close();
            var message = (await (await scene.Receiver()).AllOf(1))[0];
            Equal((message.Body, message.Count()), ("held", 1), "second delivery");
        },

        ["connection-lost"] = async scene =>
        {
            await scene.Send("held");
            await KilledWhileHolding("lite", scene.Queue);
            var receiver = await scene.Receiver();
            var message = await receiver.One(3000);
            Equal((message.Body, message.Count()), ("held", 1), "second delivery");
            receiver.Complete(message);
        },

        ["batch-delete"] = async scene =>
        {
            await scene.Send(Texts(25));
            Map Request(int count) => new() { ["message-count"] = count, ["enqueued-time-utc"] = DateTime.UtcNow.AddMinutes(1) };
            Equal((await scene.Manage("batch-delete-messages", Request(10))).Body!["message-count"], 10, "deleted");
            Equal((await scene.Peek(50)).Bodies(), Texts(15, 10), "left");
            Equal((await scene.Manage("batch-delete-messages", Request(500))).Body!["message-count"], 15, "deleted with room to spare");
            Equal((await scene.Manage("batch-delete-messages", Request(500))).Status, 204, "status when there is nothing");
            await scene.NothingIsLeft();
        },

        ["unknown-queue"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Missing, "sending");
            await Rejects(() => scene.Receiver(), Missing, "receiving");
        },

        ["wrong-key"] = async scene =>
        {
            await using (var other = new Scene(scene.Queue, (Setting("key_name"), "wrong")))
                await Rejects(() => other.Send("x"), error => error is AmqpException && error.Message.Contains("Sasl negotiation failed"), "connecting");
            await scene.NothingIsLeft();
        },

        ["missing-right"] = async scene =>
        {
            await using var listener = new Scene(scene.Queue, Login("listener"));
            await using var sender = new Scene(scene.Queue, Login("sender"));
            await Rejects(() => listener.Send("x"), Unauthorized, "sending without the right");
            await sender.Send("x");
            await Rejects(() => sender.Receiver(), Unauthorized, "receiving without the right");
            await (await listener.Receiver()).AllOf(1);
        },

        ["oversized"] = async scene =>
        {
            await Rejects(() => scene.Post(new Message { BodySection = new Data { Binary = Bytes(100_000) } }), TooLarge, "sending 100,000 bytes");
            await scene.Send("small");
            Equal((await (await scene.Receiver()).AllOf(1)).Bodies(), new[] { "small" }, "messages that arrived");
        },

        ["disabled"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Disabled, "sending");
            await Rejects(() => scene.Receiver(), Disabled, "receiving");
        },

        ["send-disabled"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Disabled, "sending");
            await scene.NothingIsLeft();
        },

        ["receive-disabled"] = async scene =>
        {
            await scene.Send("x");
            await Rejects(() => scene.Receiver(), Disabled, "receiving");
        },

        ["transactions"] = async scene =>
        {
            await scene.Send("old");
            var (sender, receiver) = (await scene.Sender(), await scene.Receiver());
            var old = await receiver.One();
            using (new TransactionScope(TransactionScopeAsyncFlowOption.Enabled))
            {
                await sender.SendAsync(scene.Message("never"));
            }
            using (var committed = new TransactionScope(TransactionScopeAsyncFlowOption.Enabled))
            {
                await sender.SendAsync(scene.Message("a"));
                await sender.SendAsync(scene.Message("b"));
                receiver.Complete(old);
                using (var suppressed = new TransactionScope(TransactionScopeOption.Suppress, TransactionScopeAsyncFlowOption.Enabled))
                {
                    await receiver.None("messages before the commit");
                    suppressed.Complete();
                }
                committed.Complete();
            }
            Equal((await receiver.AllOf(2)).Bodies(), new[] { "a", "b" }, "bodies");
            await receiver.Close();
            await scene.NothingIsLeft();
        },

        ["transactions-across"] = async scene =>
        {
            string[] others = [.. Texts(3, 1).Select(number => $"{scene.Queue}-{number}")];
            await scene.Send("old");
            var receiver = await scene.Receiver();
            var senders = new List<SenderLink>();
            foreach (var other in others)
                senders.Add(await scene.Sender(properties: new Fields { [new Symbol("com.microsoft:transfer-destination-address")] = other }));
            var old = await receiver.One();
            using (new TransactionScope(TransactionScopeAsyncFlowOption.Enabled))
            {
                foreach (var sender in senders)
                    await sender.SendAsync(scene.Message("never"));
            }
            var targets = new List<Receiver>();
            foreach (var other in others)
                targets.Add(await scene.From(other));
            using (var committed = new TransactionScope(TransactionScopeAsyncFlowOption.Enabled))
            {
                foreach (var sender in senders)
                    await sender.SendAsync(scene.Message("a"));
                receiver.Complete(old);
                using (var suppressed = new TransactionScope(TransactionScopeOption.Suppress, TransactionScopeAsyncFlowOption.Enabled))
                {
                    await targets[0].None("messages before the commit");
                    suppressed.Complete();
                }
                committed.Complete();
            }
            foreach (var sender in senders)
                await sender.SendAsync(scene.Message("b")); // outside of a transaction, by the same way
            foreach (var target in targets)
            {
                Equal((await target.AllOf(2)).Bodies(), new[] { "a", "b" }, "bodies");
                await target.None("left at the destination");
            }
            await receiver.Close();
            await scene.NothingIsLeft();
        },
    };

    public static void InTime(DateTime due)
    {
        var late = (DateTime.UtcNow - due).TotalMilliseconds;
        Truth(late is >= 0 and < 5000, $"delivered {late} ms late");
    }

    /// <summary>Messages of a link that has credit already, completed.</summary>
    static async Task<List<Message>> Handled(Receiver receiver, int count)
    {
        var received = new List<Message>();
        while (received.Count < count && await receiver.Link.ReceiveAsync(TimeSpan.FromSeconds(60)) is { } message)
        {
            receiver.Complete(message);
            received.Add(message);
        }
        return received;
    }

    static Source Selecting(string address, string? text)
    {
        var source = new Source { Address = address };
        if (text != null)
            source.FilterSet = new Map { [new Symbol("jms-selector")] = new DescribedValue(0x0000468C00000004UL, text) };
        return source;
    }

    /// <summary>All messages that a link shows which asks for copies, settled by us unless the broker has settled them.</summary>
    static async Task<List<Message>> Browsed(Scene scene, string queue, bool settled, string? selector = null)
    {
        var source = Selecting(queue, selector);
        source.DistributionMode = new Symbol("copy");
        var receiver = await scene.Receiver(source, delete: settled);
        Equal($"{receiver.Source.DistributionMode}", "copy", "distribution mode of the answer");
        var messages = await receiver.Take(100, 5000);
        if (!settled)
            messages.ForEach(receiver.Complete);
        await receiver.Close();
        return messages;
    }
}
