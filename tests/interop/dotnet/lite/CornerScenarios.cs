// The scenarios of corner_scenarios.py with AMQP.Net Lite.
using System.Diagnostics;
using Amqp;
using Amqp.Framing;
using Amqp.Types;
using static Peeklock.Interop.Harness;
using static Peeklock.Interop.Lite.Messages;

namespace Peeklock.Interop.Lite;

static class CornerScenarios
{
    const int ReasonLimit = 4096; // characters of a reason that are kept
    const string State = "x-opt-message-state", Scheduled = "x-opt-scheduled-enqueue-time";
    static readonly DateTime Ever = DateTime.SpecifyKind(DateTime.MaxValue, DateTimeKind.Utc);

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["deferral-count"] = async scene =>
        {
            await scene.Send("m");
            var receiver = await scene.Receiver();
            var message = await receiver.One();
            long[] number = [message.Number()];
            Equal(message.Count(), 0, "delivery count at first");
            receiver.Defer(message);
            List<(Message Message, Guid Token)> deferred = [];
            await Eventually(async () => deferred = await scene.ByNumber(number));
            Equal(deferred[0].Message.Count(), 1, "delivery count after a deferral");
            await scene.Dispose("abandoned", [deferred[0].Token]);
            deferred = await scene.ByNumber(number);
            Equal(deferred[0].Message.Count(), 2, "delivery count after an abandon");
            await scene.Dispose("defered", [deferred[0].Token]);
            var letter = (await (await scene.DeadLetters()).AllOf(1))[0];
            Equal((letter.Body, letter.Reason()), ("m", "MaxDeliveryCountExceeded"), "dead letter");
            await Rejects(() => scene.ByNumber(number), NoMessage, "the deferred message");
            await scene.NothingIsLeft();
        },

        ["message-states"] = async scene =>
        {
            await scene.Schedule(DateTime.UtcNow.AddSeconds(4), New("scheduled"));
            foreach (var first in new[] { true, false })
            {
                var sent = New($"{first}");
                sent.Header = new Header { FirstAcquirer = first };
                await scene.Post(sent);
            }
            var receiver = await scene.Receiver();
            var messages = await receiver.Take(3, 60_000);
            Equal(Sorted(messages.Select(message => $"{message.Body} {message.Annotation(State)}")), new[] { "False ", "True ", "scheduled 2" }, "states");
            foreach (var message in messages.Where(message => message.Body is not "scheduled"))
                Equal($"{message.Header?.FirstAcquirer ?? false}", message.Body, "first-acquirer");
            receiver.Defer(messages[0]);
            await Eventually(async () => Equal((await scene.ByNumber([messages[0].Number()])).Single().Message.Annotation(State), 1, "state of a deferred message"));
        },

        ["large-requests"] = async scene =>
        {
            var due = DateTime.UtcNow.AddHours(1);
            Message Sized(int bytes) => new() { BodySection = new Data { Binary = Bytes(bytes) } };
            var number = (await scene.Schedule(due, Sized(262_000))).Single();
            Equal(((Data)(await scene.Peek(1, number)).Single().BodySection).Binary.Length, 262_000, "bytes browsed");
            await AtOnceWithin(15_000, () => Rejects(() => scene.Schedule(due, Sized(300_000)), TooLarge, "scheduling 300,000 bytes"));
            await scene.CancelScheduled(number);
        },

        ["long-reason"] = async scene =>
        {
            await scene.Send("bad");
            var receiver = await scene.Receiver();
            receiver.DeadLetter(await receiver.One(), ("DeadLetterReason", new string('r', 40_000)), ("DeadLetterErrorDescription", "description"));
            var letter = (await (await scene.DeadLetters()).AllOf(1))[0];
            var expected = new Map { ["DeadLetterReason"] = new string('r', ReasonLimit), ["DeadLetterErrorDescription"] = "description" };
            Equal(letter.ApplicationProperties.Map, expected, "application properties");
        },

        ["expiry-forwarded"] = async scene =>
        {
            await scene.Send("m");
            var message = (await (await scene.From($"{scene.Queue}-1")).AllOf(1))[0];
            Equal((message.Body, message.Reason()), ("m", "TTLExpiredException"), "message");
        },

        ["rule-conversions"] = async scene =>
        {
            await scene.Post(new[] { "n-8", "n-7" }.Select(subject => New(subject, subject: subject).With(("number", 7))));
            var message = (await (await scene.Subscribed("a")).AllOf(1))[0];
            Equal((message.Body, message.Properties.CorrelationId), ("n-7", "7"), "message and correlation id");
            Equal((message.Property("joined"), message.Header.Ttl), ("n-7", 600_000), "what the rule made");
        },

        ["action-delay"] = async scene =>
        {
            var took = Stopwatch.StartNew();
            await scene.Send("m");
            var now = (await (await scene.Subscribed("now")).AllOf(1))[0];
            Equal((now.Annotation(State), now.Annotation(Scheduled)), (null as object, null as object), "copy");
            var later = (await (await scene.Subscribed("later")).AllOf(1))[0];
            Truth(took.ElapsedMilliseconds >= 3000, "the copy came too early");
            Equal(later.Annotation(State), 2, "state");
            var late = later.Time("x-opt-enqueued-time") - later.Time(Scheduled);
            Truth(late.TotalMilliseconds is >= 0 and < 15_000, $"enqueued {late} behind the time that is shown");
        },

        ["session-by-number"] = async scene =>
        {
            await scene.Post(New("later", session: "a"));
            var holder = await SessionScenarios.Accept(scene, "a", session: await scene.Connect());
            var message = await holder.One();
            holder.Defer(message);
            List<(Message Message, Guid Token)> deferred = [];
            // Over the scene's own connection, which holds no session.
            await Eventually(async () => deferred = await scene.ByNumber([message.Number()], sessionId: "a", mode: 0));
            Equal(deferred.Single().Message.Body, "later", "message");
            await Rejects(() => scene.ByNumber([message.Number()], sessionId: "a", mode: 0), NoMessage, "a message that is gone");
        },

        ["session-pages"] = async scene =>
        {
            string[] ids = [.. Texts(12, 10).Select(number => $"s{number}")];
            await scene.Post(ids.Select(id => New("x", session: id)));
            foreach (var bySkip in new[] { true, false })
            {
                var found = new List<string>();
                for (var skip = 0; ;)
                {
                    var request = new Map { ["last-updated-time"] = Ever, ["skip"] = bySkip ? skip : 0, ["top"] = 5 };
                    if (!bySkip && found.Count > 0)
                        request["last-session-id"] = found[^1];
                    var (status, body) = await scene.Manage("get-message-sessions", request);
                    if (status == 204)
                        break;
                    var sessions = (string[])body!["sessions-ids"];
                    skip = (int)body["skip"];
                    if (bySkip)
                        Equal(skip, found.Count + sessions.Length, "where the next page begins");
                    found.AddRange(sessions);
                }
                Equal(Sorted(found), ids, bySkip ? "sessions by skip" : "sessions behind the last one");
            }
        },
    };
}
