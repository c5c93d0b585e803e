// The scenarios of topic_scenarios.py with AMQP.Net Lite.
using Amqp;
using Amqp.Types;
using static Peeklock.Interop.Harness;
using static Peeklock.Interop.Lite.Messages;

namespace Peeklock.Interop.Lite;

static class TopicScenarios
{
    const uint HalfHour = 1_800_000;
    const ulong RuleCode = 0x13700000004, EmptyAction = 0x13700000005, SqlAction = 0x13700000006;
    const ulong SqlFilter = 0x1370000006, TrueFilter = 0x1370000007, CorrelationFilter = 0x1370000009;

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["topic-publish"] = async scene =>
        {
            await scene.Post(scene.Message("first"), scene.Keyed(New("second", subject: "second")));
            var messages = await Received(scene, "a", 2);
            Equal((messages.Bodies(), messages.LocalNumbers()), (new[] { "first", "second" }, new[] { 1, 2 }), "messages in a subscription");
            Equal(messages[0].Count(), 0, "delivery count");
            Equal((await Received(scene, "b", 2)).Bodies(), new[] { "first", "second" }, "messages in another");
            messages = await Received(scene, "second", 1);
            Equal((messages.Bodies(), messages.LocalNumbers()), (new[] { "second" }, new[] { 1 }), "messages where a rule selects");
        },

        ["topic-batch"] = async scene =>
        {
            await scene.Post(Scene.Batched(Texts(100).Select(text => New(text))));
            foreach (var name in new[] { "a", "b" })
            {
                var messages = await Received(scene, name, 100);
                Equal((messages.Bodies(), messages.LocalNumbers()), (Texts(100), Enumerable.Range(1, 100)), "bodies and sequence numbers");
            }
        },

        ["topic-schedule"] = async scene =>
        {
            var due = DateTime.UtcNow.AddSeconds(6);
            var numbers = await scene.Schedule(due, New("kept"), New("cancelled"));
            await scene.Post(New("kept too").Annotated("x-opt-scheduled-enqueue-time", due));
            await scene.CancelScheduled(numbers[1]);
            await Rejects(() => scene.CancelScheduled(numbers[1]), NoMessage, "a second cancel");
            Equal((await scene.Peek(5)).SortedBodies(), new[] { "kept", "kept too" }, "scheduled messages");
            var receiver = await scene.Subscribed("a");
            await receiver.None("messages before their time");
            Equal((await receiver.AllOf(2)).SortedBodies(), new[] { "kept", "kept too" }, "messages in a subscription");
            LiteProgram.InTime(due);
            Equal((await Received(scene, "b", 2)).SortedBodies(), new[] { "kept", "kept too" }, "messages in another");
        },

        ["topic-time-to-live"] = async scene =>
        {
            await scene.Post(New("x"), New("half", ttl: HalfHour));
            await Sleep(1500);
            await Received(scene, "brief", 0);
            var letters = await DeadLetters(scene, "brief", 2);
            Equal(Sorted(letters.Select(letter => $"{letter.Body} {letter.Reason()}")), new[] { "half TTLExpiredException", "x TTLExpiredException" }, "dead letters");
            await Received(scene, "dropped", 0);
            await DeadLetters(scene, "dropped", 0);
            var living = await Received(scene, "long", 2);
            Equal(Sorted(living.Select(message => $"{message.Body} {message.Header.Ttl}")), new[] { $"half {HalfHour}", $"x {2 * HalfHour}" }, "messages that live");
        },

        ["topic-disabled"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Disabled, "sending");
            await Received(scene, "a", 0);
        },

        ["topic-not-allowed"] = async scene =>
        {
            // The link is taken for one that means to peek, until it asks for messages.
            await Rejects(async () => await (await scene.Receiver()).One(), NotAllowed, "receiving from a topic");
            await Rejects(() => scene.Sender(scene.Subscription("a")), NotAllowed, "sending to a subscription");
            await Received(scene, "a", 0);
        },

        ["unknown-topic"] = async scene =>
        {
            await Rejects(() => scene.Sender($"{scene.Queue}-not"), Missing, "a topic");
            await Rejects(() => scene.Subscribed("not"), Missing, "a subscription");
        },

        ["subscription-settle"] = async scene =>
        {
            await scene.Send("x");
            foreach (var name in new[] { "a", "strict" })
            {
                var receiver = await scene.Subscribed(name);
                receiver.Abandon(await receiver.One());
                await receiver.Close();
            }
            var again = (await Received(scene, "a", 1))[0];
            Equal((again.Body, again.Count()), ("x", 1), "second delivery");
            await Received(scene, "strict", 0);
            var letter = (await DeadLetters(scene, "strict", 1))[0];
            Equal((letter.Body, letter.Reason()), ("x", "MaxDeliveryCountExceeded"), "dead letter");
        },

        ["subscription-defer"] = async scene =>
        {
            await scene.Send("later");
            var (address, receiver) = (scene.Subscription("a"), await scene.Subscribed("a"));
            var message = await receiver.One();
            receiver.Defer(message);
            await receiver.None("deliveries of a deferred message");
            var (deferred, token) = (await scene.ByNumber([message.Number()], address)).Single();
            Equal(deferred.Body, "later", "deferred message");
            await scene.Dispose("completed", [token], address);
            await Rejects(() => scene.ByNumber([message.Number()], address), NoMessage, "a completed message");
            Equal((await Received(scene, "b", 1)).Bodies(), new[] { "later" }, "messages in the other subscription");
        },

        ["subscription-dead-letter"] = async scene =>
        {
            await scene.Post(New("bad", "id").With(("kept", "yes")));
            var receiver = await scene.Subscribed("a");
            receiver.DeadLetter(await receiver.One(), ("DeadLetterReason", "my reason"), ("DeadLetterErrorDescription", "my description"));
            await receiver.None("messages in the subscription itself");
            var letter = (await DeadLetters(scene, "a", 1))[0];
            Equal((letter.Body, letter.Properties.MessageId), ("bad", "id"), "dead letter");
            var expected = new Map { ["DeadLetterReason"] = "my reason", ["DeadLetterErrorDescription"] = "my description", ["kept"] = "yes" };
            Equal(letter.ApplicationProperties.Map, expected, "its properties");
            Equal(letter.Annotation("x-opt-deadletter-source"), scene.Subscription("a"), "source");
            Equal((await Received(scene, "b", 1))[0].ApplicationProperties.Map, new Map { ["kept"] = "yes" }, "properties in the other subscription");
            await DeadLetters(scene, "b", 0);
        },

        ["subscription-lock"] = async scene =>
        {
            await scene.Send("slow");
            var receiver = await scene.Subscribed("a");
            var message = await receiver.One();
            var before = message.Time("x-opt-locked-until");
            var apart = (await (await scene.Subscribed("b")).One()).Time("x-opt-locked-until") - before;
            Truth(apart.TotalSeconds is > 50 and < 60, $"the ends of the locks are {apart} apart");
            await Sleep(2000);
            var (_, body) = await scene.Manage("renew-lock", new Map { ["lock-tokens"] = new[] { message.LockToken() } }, scene.Subscription("a"));
            var until = ((DateTime[])body!["expirations"]).Single();
            Truth(until - before > TimeSpan.FromSeconds(1), $"renewed from {before} to {until}");
            await Sleep(4000);
            receiver.Complete(message);
            await receiver.None("messages left");
        },

        ["subscription-peek"] = async scene =>
        {
            await scene.Send("a", "b", "c", "d", "e");
            await Received(scene, "b", 5);
            var address = scene.Subscription("a");
            var browsed = await scene.Peek(10, queue: address);
            Equal(browsed.Bodies(), new[] { "a", "b", "c", "d", "e" }, "browsed");
            var some = await scene.Peek(2, browsed[2].Number(), address);
            Equal((some.Bodies(), some.LocalNumbers()), (new[] { "c", "d" }, new[] { 3, 4 }), "browsed from a number");
            await Received(scene, "a", 5);
            Equal((await scene.Peek(10, queue: address)).Bodies(), Array.Empty<object>(), "browsed when empty");
        },

        ["subscription-receive-and-delete"] = async scene =>
        {
            await scene.Send("x", "y");
            var receiver = await scene.Receiver(new Amqp.Framing.Source { Address = scene.Subscription("a") }, delete: true);
            Equal((await receiver.Take(2, 60_000)).Bodies(), new[] { "x", "y" }, "bodies");
            await receiver.Close();
            await Received(scene, "a", 0);
            Equal((await Received(scene, "b", 2)).Bodies(), new[] { "x", "y" }, "messages in the other subscription");
        },

        ["subscription-disabled"] = async scene =>
        {
            await scene.Send("x");
            await Rejects(() => scene.Subscribed("off"), Disabled, "receiving");
            Equal((await Received(scene, "a", 1)).Bodies(), new[] { "x" }, "messages in the other subscription");
        },

        ["sql-filter"] = async scene =>
        {
            await scene.Post(
                New("1").With(("price", 150), ("color", "red")),
                New("2", subject: "abc").With(("price", 50.5), ("color", "red")),
                New("3", "x"),
                New("4").With(("price", 101f), ("color", "red")));
            Equal((await Received(scene, "dear", 2)).SortedBodies(), new[] { "1", "4" }, "by price and color");
            Equal((await Received(scene, "named", 2)).SortedBodies(), new[] { "2", "3" }, "by label or id");
            Equal((await Received(scene, "bare", 1)).SortedBodies(), new[] { "3" }, "without color and price");
        },

        ["correlation-filter"] = async scene =>
        {
            object[] sevens = [(sbyte)7, (byte)7, (short)7, (ushort)7, 7, 7u, 7L, 7UL, 7f, 7.0];
            await scene.Post([
                New("1", subject: "a", correlation: "c"),
                New("2", subject: "a").With(("color", "red")),
                .. sevens.Select(seven => New(seven.GetType().Name).With(("count", seven))),
                New("other").With(("count", 7.5), ("color", "RED")),
                New("text").With(("count", "7")),
            ]);
            Equal((await Received(scene, "labelled", 1)).Bodies(), new[] { "1" }, "by label and correlation id");
            Equal((await Received(scene, "red", 1)).Bodies(), new[] { "2" }, "by a string");
            Equal((await Received(scene, "seven", sevens.Length)).SortedBodies(), Sorted(sevens.Select(seven => seven.GetType().Name)), "by a number");
        },

        ["filter-error"] = async scene =>
        {
            await scene.Post(New("good").With(("amount", 10), ("parts", 5)), New("bad").With(("amount", 10), ("parts", 0)));
            foreach (var name in new[] { "kept", "dropped" })
                Equal((await Received(scene, name, 1)).Bodies(), new[] { "good" }, "messages selected");
            var letter = (await DeadLetters(scene, "kept", 1))[0];
            Equal((letter.Body, letter.Reason()), ("bad", "FilterException"), "dead letter");
            Truth($"{letter.Property("DeadLetterErrorDescription")}".Contains("kept"), $"description: {letter.Property("DeadLetterErrorDescription")}");
            await DeadLetters(scene, "dropped", 0);
            Equal((await Received(scene, "a", 2)).SortedBodies(), new[] { "bad", "good" }, "messages in another subscription");
        },

        ["rule-action"] = async scene =>
        {
            await scene.Post(New("x", subject: "dear").With(("price", 150), ("color", "red"), ("kept", true)));
            var changed = (await Received(scene, "half", 1))[0];
            Equal((changed.Body, changed.Properties.Subject), ("x", "cheap"), "changed copy");
            Equal(changed.ApplicationProperties.Map, new Map { ["price"] = 75, ["kept"] = true, ["RuleName"] = "half" }, "its properties");
            var plain = (await Received(scene, "a", 1))[0];
            Equal((plain.Body, plain.Properties.Subject), ("x", "dear"), "other copy");
            Equal(plain.ApplicationProperties.Map, new Map { ["price"] = 150, ["color"] = "red", ["kept"] = true }, "its properties");
        },

        ["rule-copies"] = async scene =>
        {
            await scene.Post(New("x").With(("color", "red")));
            var messages = await Received(scene, "a", 3);
            Equal((messages.Bodies(), messages.LocalNumbers()), (new[] { "x", "x", "x" }, new[] { 1, 2, 3 }), "bodies and sequence numbers");
            var shown = messages.Select(message => $"{message.Property("RuleName")} {message.Property("number")}");
            Equal(Sorted(shown), new[] { " ", "one 1", "two 2" }, "names of rules, and what they set");
        },

        ["rule-default"] = async scene =>
        {
            var rule = (await Rules(scene)).Single();
            Equal((rule.Filter, rule.Action, rule.Name), ((TrueFilter, new List()), (EmptyAction, new List()), "$Default"), "rule of a new subscription");
            Truth((DateTime.UtcNow - rule.Created).Duration() < TimeSpan.FromMinutes(10), $"created {rule.Created}");
            await scene.Send("before");
            await RemoveRule(scene, "$Default");
            Equal((await Rules(scene)).Count, 0, "rules left");
            await scene.Send("nowhere");
            await AddRule(scene, "$Default", Sql("1=1"));
            await scene.Send("after");
            Equal((await Received(scene, "a", 2)).SortedBodies(), new[] { "after", "before" }, "messages that arrived");
        },

        ["rule-manager"] = async scene =>
        {
            (string Name, object? Value)[] properties = [("color", "red"), ("count", 7), ("ratio", 2.5), ("good", true)];
            var map = new Map();
            foreach (var (name, value) in properties)
                map[name] = value;
            var sql = Sql("price > 100");
            sql["sql-rule-action"] = new Map { ["expression"] = "SET price = price / 2" };
            await AddRule(scene, "sql", sql);
            await AddRule(scene, "correlation", new Map { ["correlation-filter"] = new Map { ["label"] = "s", ["reply-to"] = null, ["properties"] = map } });
            await RemoveRule(scene, "$Default");
            var rules = await Rules(scene);
            Equal(rules.Select(rule => rule.Name), new[] { "correlation", "sql" }, "names, in order");
            Equal((rules[1].Filter, rules[1].Action), ((SqlFilter, new List { "price > 100", 20 }), (SqlAction, new List { "SET price = price / 2", 20 })), "a rule");
            Equal((rules[0].Filter.Code, rules[0].Action), (CorrelationFilter, (EmptyAction, new List())), "another rule");
            var fields = rules[0].Filter.Fields;
            Equal(fields.Cast<object?>().Take(8), new object?[] { null, null, null, null, "s", null, null, null }, "fields of its filter");
            Equal(fields[8], map, "properties of its filter");
            Equal((await Rules(scene, 1, 1)).Select(rule => rule.Name), new[] { "sql" }, "rules of the second page");
            Message Matching(string body, bool good = true) => New(body, subject: "s").With(properties).With(("count", 7.0), ("good", good));
            await scene.Post(New("1").With(("price", 150)), Matching("2"), Matching("3", good: false));
            await RemoveRule(scene, "sql");
            await scene.Post(New("4").With(("price", 150)), Matching("5"));
            var messages = (await Received(scene, "a", 3)).OrderBy(message => $"{message.Body}", StringComparer.Ordinal).ToList();
            Equal(messages.Bodies(), new[] { "1", "2", "5" }, "messages that arrived");
            Equal(messages[0].ApplicationProperties.Map, new Map { ["price"] = 75, ["RuleName"] = "sql" }, "properties after the action");
        },

        ["rule-errors"] = async scene =>
        {
            Func<Exception, bool> wrong(int column) => error =>
                Condition("com.microsoft:argument-error")(error) && error.Message.Contains($"[Token line=1, column={column},");
            await Rejects(() => AddRule(scene, "$Default", Sql("1=1")), Condition("com.microsoft:entity-already-exists"), "a name that is there");
            await Rejects(() => RemoveRule(scene, "not"), Missing, "a missing rule");
            await Rejects(() => AddRule(scene, "wrong", Sql("price > > 1")), wrong(9), "a wrong filter");
            var action = Sql("1=1");
            action["sql-rule-action"] = new Map { ["expression"] = "SET a = 1 +" };
            await Rejects(() => AddRule(scene, "wrong", action), wrong(12), "a wrong action");
            Equal((await Rules(scene)).Select(rule => rule.Name), new[] { "$Default" }, "names");
        },
    };

    static async Task<List<Message>> Received(Scene scene, string name, int count) => await (await scene.Subscribed(name)).Received(count);

    static async Task<List<Message>> DeadLetters(Scene scene, string name, int count) =>
        await (await scene.From($"{scene.Subscription(name)}/$DeadLetterQueue")).Received(count);

    static Map Sql(string expression) => new() { ["sql-filter"] = new Map { ["expression"] = expression } };

    static Task AddRule(Scene scene, string name, Map description) =>
        scene.Manage("add-rule", new Map { ["rule-name"] = name, ["rule-description"] = description }, scene.Subscription("a"));

    static Task RemoveRule(Scene scene, string name) => scene.Manage("remove-rule", new Map { ["rule-name"] = name }, scene.Subscription("a"));

    sealed record Rule((ulong Code, List Fields) Filter, (ulong Code, List Fields) Action, string Name, DateTime Created);

    static async Task<List<Rule>> Rules(Scene scene, int skip = 0, int top = 100)
    {
        var (status, body) = await scene.Manage("enumerate-rules", new Map { ["skip"] = skip, ["top"] = top }, scene.Subscription("a"));
        return status == 204 ? [] : [.. ((List)body!["rules"]).Cast<Map>().Select(item =>
        {
            var (code, fields) = Described(item["rule-description"]);
            Equal(code, RuleCode, "descriptor of a rule");
            return new Rule(Described(fields[0]!), Described(fields[1]!), (string)fields[2]!, (DateTime)fields[3]!);
        })];
    }

    static (ulong Code, List Fields) Described(object value) => ((ulong)((DescribedValue)value).Descriptor, (List)((DescribedValue)value).Value);
}
