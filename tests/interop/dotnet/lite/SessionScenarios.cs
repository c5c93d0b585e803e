// The scenarios of session_scenarios.py with AMQP.Net Lite: a session is asked for by a filter of the source, and managed by requests.
using System.Diagnostics;
using Amqp;
using Amqp.Framing;
using Amqp.Types;
using static Peeklock.Interop.Harness;
using static Peeklock.Interop.Lite.Messages;

namespace Peeklock.Interop.Lite;

static class SessionScenarios
{
    const string Filter = "com.microsoft:session-filter";
    const int StateLimit = 64 * 1024;
    static readonly DateTime Ever = DateTime.SpecifyKind(DateTime.MaxValue, DateTimeKind.Utc);
    static readonly Func<Exception, bool> Taken = Condition("com.microsoft:session-cannot-be-locked");
    static readonly Func<Exception, bool> SessionLost = Condition("com.microsoft:session-lock-lost");
    static readonly Func<Exception, bool> TimedOut = Condition("com.microsoft:timeout");

    /// <summary>For the process that is killed while it holds a session.</summary>
    public static async Task<Message> Hold(Scene scene, string sessionId) => await (await Accept(scene, sessionId)).One();

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["session-accept"] = async scene =>
        {
            await Send(scene, "a", "1", "2");
            await Send(scene, "b", "other");
            await Send(scene, "a", "3");
            var receiver = await Accept(scene, "a");
            Equal(SessionOf(receiver), "a", "session id");
            var left = LockEnd(receiver) - DateTime.UtcNow;
            Truth(left.TotalSeconds is > 40 and <= 60, $"locked for {left}");
            var messages = await receiver.AllOf(3);
            Equal(messages.Bodies(), new[] { "1", "2", "3" }, "bodies");
            Equal(messages.Select(message => message.Properties.GroupId), new[] { "a", "a", "a" }, "session ids of the messages");
            await receiver.None("messages left in the session");
            Equal((await (await Accept(scene, "b")).AllOf(1)).Bodies(), new[] { "other" }, "messages of the other session");
        },

        ["session-next"] = async scene =>
        {
            await Send(scene, "b", "first");
            await Send(scene, "a", "second");
            await Send(scene, "b", "third");
            var (first, second) = (await Accept(scene), await Accept(scene));
            Equal((SessionOf(first), SessionOf(second)), ("b", "a"), "sessions");
            Equal((await first.AllOf(2)).Bodies(), new[] { "first", "third" }, "messages of one");
            Equal((await second.AllOf(1)).Bodies(), new[] { "second" }, "messages of the other");
            var waiting = Accept(scene, waitMs: 60_000);
            await Sleep(1500);
            await Send(scene, "c", "fourth");
            var third = await waiting;
            Equal((SessionOf(third), (await third.AllOf(1)).Bodies()), ("c", new[] { "fourth" }), "session waited for, and its messages");
        },

        ["session-timeout"] = async scene =>
        {
            var took = Stopwatch.StartNew();
            await Rejects(() => Accept(scene, waitMs: 2000), TimedOut, "accepting any session");
            Truth(took.ElapsedMilliseconds is >= 2000 and < 5000, $"that took {took.ElapsedMilliseconds} ms");
        },

        ["session-taken"] = async scene =>
        {
            await Accept(scene, "a");
            await using var other = new Scene(scene.Queue);
            await AtOnceWithin(5000, async () =>
            {
                await Rejects(() => Accept(scene, "a"), Taken, "accepting it again");
                await Rejects(() => Accept(other, "a"), Taken, "accepting it on another connection");
            });
            Equal(SessionOf(await Accept(other, "b")), "b", "other session");
        },

        ["session-close"] = async scene =>
        {
            await Send(scene, "a", "held", "next");
            var first = await Accept(scene, "a");
            Equal((await first.One()).Body, "held", "first delivery");
            await first.Close();
            Equal(Counted(await (await Accept(scene, "a")).AllOf(2)), new[] { ("held", 0), ("next", 0) }, "messages and deliveries");
        },

        ["session-connection-lost"] = async scene =>
        {
            await Send(scene, "a", "held");
            await KilledWhileHolding("lite", scene.Queue, "a");
            Equal(Counted(await (await Accept(scene)).AllOf(1)), new[] { ("held", 1) }, "second delivery");
        },

        ["session-renew"] = async scene =>
        {
            await Send(scene, "a", "slow");
            var receiver = await Accept(scene, "a");
            var message = await receiver.One();
            await Sleep(3000);
            var until = await Renew(scene, "a");
            Truth(until - LockEnd(receiver) > TimeSpan.FromSeconds(2), $"renewed from {LockEnd(receiver)} to {until}");
            await Sleep(3000);
            receiver.Complete(message);
            await receiver.Close();
            await (await Accept(scene, "a")).None("messages left");
        },

        ["session-lock-lost"] = async scene =>
        {
            await Send(scene, "a", "held");
            var receiver = await Accept(scene, "a");
            var lost = new TaskCompletionSource<Error>();
            receiver.Link.AddClosedCallback((_, error) => lost.TrySetResult(error));
            var token = (await receiver.One()).LockToken();
            Equal($"{(await lost.Task.WaitAsync(TimeSpan.FromSeconds(60))).Condition}", "com.microsoft:session-lock-lost", "error of the link");
            await Rejects(() => scene.Dispose("completed", [token], sessionId: "a"), SessionLost, "settling");
            await Rejects(() => Renew(scene, "a"), SessionLost, "renewing");
            await Rejects(() => GetState(scene, "a"), SessionLost, "reading the state");
            await Rejects(() => SetState(scene, "a", Bytes(1)), SessionLost, "setting the state");
            Equal(Counted(await (await Accept(scene)).AllOf(1)), new[] { ("held", 1) }, "second delivery");
            Equal(await GetState(scene, "a"), null, "state");
        },

        ["session-state"] = async scene =>
        {
            await Send(scene, "a", "x");
            var receiver = await Accept(scene, "a");
            Equal(await GetState(scene, "a"), null, "state before it is set");
            foreach (var state in new[] { "one"u8.ToArray(), [], Bytes(10_240) })
            {
                await SetState(scene, "a", state);
                Equal(await GetState(scene, "a"), state.Length > 0 ? state : null, "state");
            }
            await receiver.AllOf(1);
            await receiver.Close();
            await Rejects(() => Accept(scene, waitMs: 1000), TimedOut, "accepting a session that has only a state");
            await Accept(scene, "a");
            Equal(await GetState(scene, "a"), Bytes(10_240), "state when accepted again");
            await SetState(scene, "a", null);
            Equal(await GetState(scene, "a"), null, "state when cleared");
            await Accept(scene, "b");
            Equal(await GetState(scene, "b"), null, "state of another session");
        },

        ["session-state-limit"] = async scene =>
        {
            await Accept(scene, "a");
            await SetState(scene, "a", Bytes(StateLimit));
            await Rejects(() => SetState(scene, "a", Bytes(StateLimit + 1)), TooLarge, "a byte more");
            Equal(await GetState(scene, "a"), Bytes(StateLimit), "state");
        },

        ["session-abandon"] = async scene =>
        {
            await Send(scene, "a", "first", "second");
            var receiver = await Accept(scene, "a");
            var message = await receiver.One();
            Equal((message.Body, message.Count()), ("first", 0), "first delivery");
            receiver.Abandon(message);
            Equal(Counted(await receiver.AllOf(1)), new[] { ("first", 1) }, "second delivery");
            Equal((await receiver.AllOf(1)).Bodies(), new[] { "second" }, "next message");
        },

        ["session-defer"] = async scene =>
        {
            await Send(scene, "a", "later", "now");
            var receiver = await Accept(scene, "a");
            var message = await receiver.One();
            receiver.Defer(message);
            Equal((await receiver.AllOf(1)).Bodies(), new[] { "now" }, "message after the deferred one");
            await receiver.None("deliveries of a deferred message");
            await Accept(scene, "b");
            await Rejects(() => scene.ByNumber([message.Number()], sessionId: "b"), NoMessage, "in another session");
            var (deferred, token) = (await scene.ByNumber([message.Number()], sessionId: "a")).Single();
            Equal((deferred.Body, deferred.Properties.GroupId), ("later", "a"), "deferred message");
            await scene.Dispose("completed", [token], sessionId: "a");
            await Rejects(() => scene.ByNumber([message.Number()], sessionId: "a"), NoMessage, "a completed message");
        },

        ["session-dead-letter"] = async scene =>
        {
            await Send(scene, "a", "bad", "good");
            var receiver = await Accept(scene, "a");
            receiver.DeadLetter(await receiver.One(), ("DeadLetterReason", "my reason"), ("DeadLetterErrorDescription", "my description"));
            Equal((await receiver.AllOf(1)).Bodies(), new[] { "good" }, "message after it");
            var letters = await scene.DeadLetters();
            var letter = (await letters.AllOf(1))[0];
            Equal((letter.Body, letter.Properties.GroupId), ("bad", "a"), "dead letter");
            Equal((letter.Reason(), letter.Property("DeadLetterErrorDescription")), ("my reason", "my description"), "reason");
            await letters.None("dead letters left");
        },

        ["session-schedule"] = async scene =>
        {
            var due = DateTime.UtcNow.AddSeconds(6);
            var numbers = await scene.Schedule(due, New("kept", session: "a"), New("cancelled", session: "a"));
            await scene.CancelScheduled(numbers[1]);
            await Rejects(() => Accept(scene, waitMs: 1000), TimedOut, "accepting the session before its time");
            var receiver = await Accept(scene, waitMs: 60_000);
            LiteProgram.InTime(due);
            Equal(SessionOf(receiver), "a", "session");
            Equal((await receiver.AllOf(1)).Bodies(), new[] { "kept" }, "messages");
            await receiver.None("other messages");
        },

        ["session-peek"] = async scene =>
        {
            foreach (var (sessionId, body) in new[] { ("a", "1"), ("b", "2"), ("a", "3"), ("a", "4"), ("b", "5") })
                await Send(scene, sessionId, body);
            var receiver = await Accept(scene, "a");
            var browsed = await scene.Peek(10, sessionId: "a");
            Equal(browsed.Bodies(), new[] { "1", "3", "4" }, "browsed");
            Equal(browsed.Select(message => message.Properties.GroupId), new[] { "a", "a", "a" }, "session ids");
            var some = await scene.Peek(10, browsed[0].Number() + 1, sessionId: "a");
            Equal(some.Bodies(), new[] { "3", "4" }, "browsed from a number that is none of the session");
            Equal((await receiver.AllOf(3)).Bodies(), new[] { "1", "3", "4" }, "messages, which browsing does not lock");
            Equal((await scene.Peek(10, sessionId: "a")).Bodies(), Array.Empty<object>(), "browsed when empty");
        },

        ["session-receive-and-delete"] = async scene =>
        {
            await Send(scene, "a", "x", "y");
            await Send(scene, "b", "z");
            var receiver = await Accept(scene, "a", delete: true);
            Equal((await receiver.Take(2, 60_000)).Bodies(), new[] { "x", "y" }, "bodies");
            await receiver.Close();
            var next = await Accept(scene);
            Equal((SessionOf(next), (await next.AllOf(1)).Bodies()), ("b", new[] { "z" }), "session that is left, and its messages");
        },

        ["session-wait"] = async scene =>
        {
            await Send(scene, "a", "x");
            var receiver = await Accept(scene, "a", delete: true);
            Equal((await receiver.Take(1, 60_000)).Bodies(), new[] { "x" }, "bodies");
            receiver.Link.SetCredit(1, CreditMode.Manual);
            Equal(await receiver.Link.ReceiveAsync(TimeSpan.FromMilliseconds(5500)), null, "messages while the lock ends");
        },

        ["session-push"] = async scene =>
        {
            var receiver = await Accept(scene, "a");
            var (received, done) = (new List<Message>(), new TaskCompletionSource());
            receiver.Link.Start(5, (link, message) =>
            {
                link.Accept(message);
                received.Add(message);
                if (received.Count == 10)
                    done.SetResult();
            });
            await Send(scene, "a", Texts(10));
            await done.Task.WaitAsync(TimeSpan.FromSeconds(60));
            Equal(received.Bodies(), Texts(10), "bodies");
            await receiver.Close();
            await (await Accept(scene, "a")).None("messages left");
        },

        ["session-many"] = async scene =>
        {
            string[] ids = [.. Texts(20, 10).Select(number => $"s{number}")];
            await scene.Post(Texts(3).SelectMany(turn => ids.Select(id => New($"{id} {turn}", session: id))));
            var receivers = new List<Receiver>();
            foreach (var _ in ids)
                receivers.Add(await Accept(scene));
            Equal(Sorted(receivers.Select(SessionOf)), ids, "sessions");
            foreach (var turn in Texts(3))
            {
                foreach (var receiver in receivers)
                    Equal((await receiver.AllOf(1)).Bodies(), new[] { $"{SessionOf(receiver)} {turn}" }, "message");
            }
            foreach (var receiver in receivers)
                await receiver.Close();
            await Rejects(() => Accept(scene, waitMs: 1000), TimedOut, "accepting a session when all are empty");
        },

        ["session-list"] = async scene =>
        {
            Equal(await Listed(scene, Ever), Array.Empty<string>(), "sessions at first");
            string[] ids = [.. Texts(150, 100).Select(number => $"s{number}")];
            await scene.Post(ids.Select(id => New("x", session: id)));
            await Accept(scene, "early");
            await SetState(scene, "early", Bytes(5));
            await Sleep(100);
            var between = DateTime.UtcNow;
            await Accept(scene, "late");
            await SetState(scene, "late", Bytes(5));
            Equal(Sorted(await Listed(scene, Ever)), new[] { "early", "late" }.Concat(ids), "sessions");
            Equal(await Listed(scene, between), new[] { "late" }, "sessions whose state was set since");
        },

        ["session-receiver-required"] = async scene =>
        {
            await Send(scene, "a", "x");
            await Rejects(() => scene.Receiver(), NotAllowed, "receiving");
            Equal((await (await Accept(scene, "a")).AllOf(1)).Bodies(), new[] { "x" }, "messages");
        },

        ["session-id-required"] = async scene =>
        {
            await Rejects(() => scene.Post(New("bare")), NotAllowed, "sending");
            await Rejects(() => scene.Post(Scene.Batched([New("one", session: "a"), New("bare")])), NotAllowed, "sending a batch");
            await Rejects(() => scene.Schedule(DateTime.UtcNow.AddHours(1), New("bare")), NotAllowed, "scheduling");
            await Send(scene, "a", "good");
            Equal((await scene.Peek(10)).Bodies(), new[] { "good" }, "messages");
        },

        ["session-not-required"] = async scene =>
        {
            await Send(scene, "a", "x");
            await Rejects(() => Accept(scene, "a"), NotAllowed, "accepting a session");
            await Rejects(() => Accept(scene), NotAllowed, "accepting any session");
            var message = (await (await scene.Receiver()).AllOf(1))[0];
            Equal((message.Body, message.Properties.GroupId), ("x", "a"), "message");
        },

        ["session-subscription"] = async scene =>
        {
            var (a, b) = (scene.Subscription("a"), scene.Subscription("b"));
            foreach (var (sessionId, body) in new[] { ("a", "1"), ("b", "2"), ("a", "3") })
                await Send(scene, sessionId, body);
            var second = await Accept(scene, "b", address: a);
            var sameName = await Accept(scene, "b", address: b);
            var first = await Accept(scene, address: a);
            Equal((SessionOf(first), SessionOf(second)), ("a", "b"), "sessions");
            Equal((await first.AllOf(2)).Bodies(), new[] { "1", "3" }, "messages of one");
            Equal((await second.AllOf(1)).Bodies(), new[] { "2" }, "messages of the other");
            Equal((await sameName.AllOf(1)).Bodies(), new[] { "2" }, "messages of the session of the same name");
            await SetState(scene, "a", Bytes(5), a);
            Equal(await GetState(scene, "a", a), Bytes(5), "state");
            await Rejects(() => Accept(scene, "a", address: a), Taken, "accepting it again");
            await Rejects(() => Accept(scene, waitMs: 1000, address: a), TimedOut, "accepting any session when all are empty");
            Equal((await (await scene.Subscribed("plain")).AllOf(3)).SortedBodies(), Texts(3, 1), "messages of a subscription without sessions");
        },
    };

    /// <summary>A receiver of a session, or of any for which the broker waits so long.</summary>
    public static Task<Receiver> Accept(Scene scene, string? sessionId = null, uint waitMs = 5000, string? address = null, bool delete = false, Session? session = null)
    {
        var source = new Source { Address = address ?? scene.Queue, FilterSet = new Map { [new Symbol(Filter)] = sessionId } };
        return scene.Receiver(source, delete, session, new Fields { [new Symbol("com.microsoft:timeout")] = waitMs });
    }

    public static string SessionOf(Receiver receiver) => (string)receiver.Source.FilterSet[new Symbol(Filter)];

    static DateTime LockEnd(Receiver receiver) => new((long)receiver.Answer.Properties[new Symbol("com.microsoft:locked-until-utc")], DateTimeKind.Utc);

    static Task Send(Scene scene, string sessionId, params string[] texts) => scene.Post(texts.Select(text => New(text, session: sessionId)));

    static IEnumerable<(object, uint)> Counted(IEnumerable<Message> messages) => messages.Select(message => (message.Body, message.Count()));

    static async Task<DateTime> Renew(Scene scene, string sessionId) =>
        (DateTime)(await scene.Manage("renew-session-lock", new Map { ["session-id"] = sessionId })).Body!["expiration"];

    public static async Task<byte[]?> GetState(Scene scene, string sessionId, string? address = null) =>
        (byte[]?)(await scene.Manage("get-session-state", new Map { ["session-id"] = sessionId }, address)).Body!["session-state"];

    public static Task SetState(Scene scene, string sessionId, byte[]? state, string? address = null) =>
        scene.Manage("set-session-state", new Map { ["session-id"] = sessionId, ["session-state"] = state }, address);

    static async Task<List<string>> Listed(Scene scene, DateTime after)
    {
        var ids = new List<string>();
        while (true)
        {
            var (status, body) = await scene.Manage("get-message-sessions", new Map { ["last-updated-time"] = after, ["skip"] = ids.Count, ["top"] = 100 });
            if (status == 204)
                return ids;
            ids.AddRange((string[])body!["sessions-ids"]);
        }
    }
}
