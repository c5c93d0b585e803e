// The scenarios of topic_scenarios.py with Azure.Messaging.ServiceBus.
using Azure.Messaging.ServiceBus;
using Azure.Messaging.ServiceBus.Administration;
using static Peeklock.Interop.Azure.Messages;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

static class TopicScenarios
{
    static readonly Func<Exception, bool> NotFound = Reason(ServiceBusFailureReason.MessagingEntityNotFound);
    static readonly Func<Exception, bool> Disabled = Reason(ServiceBusFailureReason.MessagingEntityDisabled);
    static readonly TimeSpan HalfHour = TimeSpan.FromMinutes(30);

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["topic-publish"] = async scene =>
        {
            var second = scene.Message("second");
            second.Subject = "second";
            await scene.Post(scene.Message("first"), second);
            var messages = await Received(scene.Subscription("a"), 2);
            Equal((messages.Bodies(), messages.LocalNumbers()), (new[] { "first", "second" }, new[] { 1, 2 }), "messages in a subscription");
            Equal(messages[0].DeliveryCount, 1, "delivery count");
            Equal((await Received(scene.Subscription("b"), 2)).Bodies(), new[] { "first", "second" }, "messages in another");
            messages = await Received(scene.Subscription("second"), 1);
            Equal((messages.Bodies(), messages.LocalNumbers()), (new[] { "second" }, new[] { 1 }), "messages where a rule selects");
            Truth(messages[0].EnqueuedSequenceNumber != 0, "the number at which it was published");
        },

        ["topic-batch"] = async scene =>
        {
            await using var sender = scene.Sender();
            using var batch = await sender.CreateMessageBatchAsync();
            foreach (var text in Texts(100))
                Truth(batch.TryAddMessage(new ServiceBusMessage(text)), "batch full");
            await sender.SendMessagesAsync(batch);
            foreach (var name in new[] { "a", "b" })
            {
                var messages = await Received(scene.Subscription(name, new ServiceBusReceiverOptions { PrefetchCount = 100 }), 100);
                Equal(messages.Bodies(), Texts(100), "bodies");
                Equal(messages.LocalNumbers(), Enumerable.Range(1, 100), "sequence numbers");
            }
        },

        ["topic-schedule"] = async scene =>
        {
            var due = DateTimeOffset.UtcNow.AddSeconds(6);
            await using var sender = scene.Sender();
            var numbers = await sender.ScheduleMessagesAsync([new("kept"), new("cancelled")], due);
            await sender.SendMessageAsync(new ServiceBusMessage("kept too") { ScheduledEnqueueTime = due });
            await sender.CancelScheduledMessageAsync(numbers[1]);
            await Rejects(() => sender.CancelScheduledMessageAsync(numbers[1]), Reason(ServiceBusFailureReason.MessageNotFound), "a second cancel");
            var scheduled = await scene.Receiver().PeekMessagesAsync(5);
            Equal(Sorted(scheduled.Select(message => $"{message.Body}: {message.State}")), new[] { "kept too: Scheduled", "kept: Scheduled" }, "scheduled");
            await None(scene.Subscription("a"), "messages before their time");
            Equal(Sorted((await AllOf(scene.Subscription("a"), 2)).Bodies()), new[] { "kept", "kept too" }, "messages in a subscription");
            AzureProgram.InTime(due);
            Equal(Sorted((await Received(scene.Subscription("b"), 2)).Bodies()), new[] { "kept", "kept too" }, "messages in another");
        },

        ["topic-time-to-live"] = async scene =>
        {
            await Publish(scene, new("x"), new("half") { TimeToLive = HalfHour });
            await Sleep(1500);
            await Received(scene.Subscription("brief"), 0);
            var letters = await Received(DeadLetters(scene, "brief"), 2);
            Equal(Sorted(letters.Select(letter => $"{letter.Body} {letter.DeadLetterReason}")), new[] { "half TTLExpiredException", "x TTLExpiredException" }, "dead letters");
            await Received(scene.Subscription("dropped"), 0);
            await Received(DeadLetters(scene, "dropped"), 0);
            var living = await Received(scene.Subscription("long"), 2);
            Equal(living.Select(message => (message.Body(), message.TimeToLive)), new[] { ("x", 2 * HalfHour), ("half", HalfHour) }, "messages that live");
        },

        ["topic-disabled"] = async scene =>
        {
            await Rejects(() => scene.Send("x"), Disabled, "sending");
            await Received(scene.Subscription("a"), 0);
        },

        ["topic-not-allowed"] = async scene =>
        {
            await AtOnceWithin(15_000, async () =>
            {
                // The link may be there for peeking; the SDK takes its end, when it asks for messages, for an empty answer.
                Equal((await scene.Receiver().ReceiveMessagesAsync(1, TimeSpan.FromSeconds(60))).Bodies(), Array.Empty<string>(), "messages of a topic");
                await using var sender = scene.Client.CreateSender($"{scene.Queue}/Subscriptions/a");
                await Rejects(() => sender.SendMessageAsync(new ServiceBusMessage("x")), NotAllowed, "sending to a subscription");
            });
            await Received(scene.Subscription("a"), 0);
        },

        ["unknown-topic"] = scene => AtOnceWithin(15_000, async () =>
        {
            await using var sender = scene.Client.CreateSender($"{scene.Queue}-not");
            await Rejects(() => sender.SendMessageAsync(new ServiceBusMessage("x")), NotFound, "a topic");
            await Rejects(() => One(scene.Subscription("not")), NotFound, "a subscription");
        }),

        ["subscription-settle"] = async scene =>
        {
            await scene.Send("x");
            foreach (var name in new[] { "a", "strict" })
            {
                await using var receiver = scene.Subscription(name);
                await receiver.AbandonMessageAsync(await One(receiver));
            }
            var again = (await Received(scene.Subscription("a"), 1))[0];
            Equal((again.Body(), again.DeliveryCount), ("x", 2), "second delivery");
            await Received(scene.Subscription("strict"), 0);
            var letter = (await Received(DeadLetters(scene, "strict"), 1))[0];
            Equal((letter.Body(), letter.DeadLetterReason), ("x", "MaxDeliveryCountExceeded"), "dead letter");
        },

        ["subscription-defer"] = async scene =>
        {
            await scene.Send("later");
            await using var receiver = scene.Subscription("a");
            var message = await One(receiver);
            await receiver.DeferMessageAsync(message);
            await None(receiver, "deliveries of a deferred message");
            var deferred = await receiver.ReceiveDeferredMessageAsync(message.SequenceNumber);
            Equal((deferred.Body(), deferred.State), ("later", ServiceBusMessageState.Deferred), "deferred message");
            await receiver.CompleteMessageAsync(deferred);
            await Rejects(() => receiver.ReceiveDeferredMessageAsync(message.SequenceNumber), Reason(ServiceBusFailureReason.MessageNotFound), "a completed message");
            Equal((await Received(scene.Subscription("b"), 1)).Bodies(), new[] { "later" }, "messages in the other subscription");
        },

        ["subscription-dead-letter"] = async scene =>
        {
            await Publish(scene, new ServiceBusMessage("bad") { MessageId = "id" }.With(("kept", "yes")));
            await using var receiver = scene.Subscription("a");
            await receiver.DeadLetterMessageAsync(await One(receiver), "my reason", "my description");
            await None(receiver, "messages in the subscription itself");
            var letter = (await Received(DeadLetters(scene, "a"), 1))[0];
            Equal((letter.Body(), letter.MessageId, letter.ApplicationProperties["kept"]), ("bad", "id", "yes"), "dead letter");
            Equal((letter.DeadLetterReason, letter.DeadLetterErrorDescription), ("my reason", "my description"), "reason");
            Equal(letter.DeadLetterSource, $"{scene.Queue}/Subscriptions/a", "source");
            var other = (await Received(scene.Subscription("b"), 1))[0];
            Equal((other.Body(), other.ApplicationProperties), ("bad", new Dictionary<string, object> { ["kept"] = "yes" }), "message in the other subscription");
            await Received(DeadLetters(scene, "b"), 0);
        },

        ["subscription-lock"] = async scene =>
        {
            await scene.Send("slow");
            await using var receiver = scene.Subscription("a");
            var message = await One(receiver);
            var before = message.LockedUntil;
            var apart = (await One(scene.Subscription("b"))).LockedUntil - before;
            Truth(apart.TotalSeconds is > 50 and < 60, $"the ends of the locks are {apart} apart");
            await Sleep(2000);
            await receiver.RenewMessageLockAsync(message);
            Truth(message.LockedUntil - before > TimeSpan.FromSeconds(1), $"renewed from {before} to {message.LockedUntil}");
            await Sleep(4000);
            await receiver.CompleteMessageAsync(message);
            await None(receiver, "messages left");
        },

        ["subscription-peek"] = async scene =>
        {
            await scene.Send("a", "b", "c", "d", "e");
            await Received(scene.Subscription("b"), 5);
            await using var receiver = scene.Subscription("a");
            var browsed = await receiver.PeekMessagesAsync(10);
            Equal(browsed.Bodies(), new[] { "a", "b", "c", "d", "e" }, "browsed");
            var some = await receiver.PeekMessagesAsync(2, fromSequenceNumber: browsed[2].SequenceNumber);
            Equal((some.Bodies(), some.LocalNumbers()), (new[] { "c", "d" }, new[] { 3, 4 }), "browsed from a number");
            await AllOf(receiver, 5);
            Equal((await receiver.PeekMessagesAsync(10, fromSequenceNumber: 1)).Bodies(), Array.Empty<string>(), "browsed when empty");
        },

        ["subscription-receive-and-delete"] = async scene =>
        {
            await scene.Send("x", "y");
            await using (var receiver = scene.Subscription("a", AndDelete))
                Equal((await AllOf(receiver, 2, complete: false)).Bodies(), new[] { "x", "y" }, "bodies");
            await Received(scene.Subscription("a"), 0);
            Equal((await Received(scene.Subscription("b"), 2)).Bodies(), new[] { "x", "y" }, "messages in the other subscription");
        },

        ["subscription-disabled"] = async scene =>
        {
            await scene.Send("x");
            await Rejects(() => One(scene.Subscription("off")), Disabled, "receiving");
            Equal((await Received(scene.Subscription("a"), 1)).Bodies(), new[] { "x" }, "messages in the other subscription");
        },

        ["sql-filter"] = async scene =>
        {
            await Publish(
                scene,
                new ServiceBusMessage("1").With(("price", 150), ("color", "red")),
                new ServiceBusMessage("2") { Subject = "abc" }.With(("price", 50.5), ("color", "red")),
                new("3") { MessageId = "x" },
                new ServiceBusMessage("4").With(("price", 101f), ("color", "red")));
            Equal((await Received(scene.Subscription("dear"), 2)).Bodies(), new[] { "1", "4" }, "by price and color");
            Equal((await Received(scene.Subscription("named"), 2)).Bodies(), new[] { "2", "3" }, "by label or id");
            Equal((await Received(scene.Subscription("bare"), 1)).Bodies(), new[] { "3" }, "without color and price");
        },

        ["correlation-filter"] = async scene =>
        {
            await Publish(
                scene,
                new("1") { Subject = "a", CorrelationId = "c" },
                new ServiceBusMessage("2") { Subject = "a" }.With(("color", "red")),
                new ServiceBusMessage("3").With(("count", 7L), ("color", "RED")),
                new ServiceBusMessage("4").With(("count", 7.5)),
                new ServiceBusMessage("5").With(("count", "7")));
            Equal((await Received(scene.Subscription("labelled"), 1)).Bodies(), new[] { "1" }, "by label and correlation id");
            Equal((await Received(scene.Subscription("red"), 1)).Bodies(), new[] { "2" }, "by a string");
            Equal((await Received(scene.Subscription("seven"), 1)).Bodies(), new[] { "3" }, "by a number");
        },

        ["filter-error"] = async scene =>
        {
            await Publish(
                scene,
                new ServiceBusMessage("good").With(("amount", 10), ("parts", 5)),
                new ServiceBusMessage("bad").With(("amount", 10), ("parts", 0)));
            foreach (var name in new[] { "kept", "dropped" })
                Equal((await Received(scene.Subscription(name), 1)).Bodies(), new[] { "good" }, "messages selected");
            var letter = (await Received(DeadLetters(scene, "kept"), 1))[0];
            Equal((letter.Body(), letter.DeadLetterReason), ("bad", "FilterException"), "dead letter");
            Truth(letter.DeadLetterErrorDescription.Contains("kept"), $"description: {letter.DeadLetterErrorDescription}");
            await Received(DeadLetters(scene, "dropped"), 0);
            Equal((await Received(scene.Subscription("a"), 2)).Bodies(), new[] { "good", "bad" }, "messages in another subscription");
        },

        ["rule-action"] = async scene =>
        {
            (string, object?)[] sent = [("price", 150), ("color", "red"), ("kept", true)];
            await Publish(scene, new ServiceBusMessage("x") { Subject = "dear" }.With(sent));
            var changed = (await Received(scene.Subscription("half"), 1))[0];
            Equal((changed.Body(), changed.Subject), ("x", "cheap"), "changed copy");
            Equal(changed.ApplicationProperties, new Dictionary<string, object> { ["price"] = 75, ["kept"] = true, ["RuleName"] = "half" }, "its properties");
            var plain = (await Received(scene.Subscription("a"), 1))[0];
            Equal((plain.Body(), plain.Subject), ("x", "dear"), "other copy");
            Equal(plain.ApplicationProperties, new Dictionary<string, object> { ["price"] = 150, ["color"] = "red", ["kept"] = true }, "its properties");
        },

        ["rule-copies"] = async scene =>
        {
            await Publish(scene, new ServiceBusMessage("x").With(("color", "red")));
            var messages = await Received(scene.Subscription("a"), 3);
            Equal((messages.Bodies(), messages.LocalNumbers()), (new[] { "x", "x", "x" }, new[] { 1, 2, 3 }), "bodies and sequence numbers");
            var shown = messages.Select(message => $"{message.ApplicationProperties.GetValueOrDefault("RuleName")} {message.ApplicationProperties.GetValueOrDefault("number")}");
            Equal(Sorted(shown), new[] { " ", "one 1", "two 2" }, "names of rules, and what they set");
        },

        ["rule-default"] = async scene =>
        {
            await using var rules = scene.Client.CreateRuleManager(scene.Queue, "a");
            var rule = (await Rules(rules)).Single();
            Truth(rule.Name == "$Default" && rule.Filter is TrueRuleFilter && rule.Action == null, $"rule of a new subscription: {rule.Name} {rule.Filter}");
            await scene.Send("before");
            await rules.DeleteRuleAsync("$Default");
            Equal((await Rules(rules)).Count, 0, "rules left");
            await scene.Send("nowhere");
            await rules.CreateRuleAsync("$Default", new TrueRuleFilter());
            await scene.Send("after");
            Equal(Sorted((await Received(scene.Subscription("a"), 2)).Bodies()), new[] { "after", "before" }, "messages that arrived");
        },

        ["rule-manager"] = async scene =>
        {
            await using var rules = scene.Client.CreateRuleManager(scene.Queue, "a");
            var sql = new SqlRuleFilter("price > 100");
            var action = new SqlRuleAction("SET price = price / 2");
            var correlation = new CorrelationRuleFilter { Subject = "s" };
            (string Name, object? Value)[] properties = [("color", "red"), ("count", 7L), ("ratio", 2.5), ("good", true)];
            foreach (var (name, value) in properties)
                correlation.ApplicationProperties[name] = value;
            await rules.CreateRuleAsync(new CreateRuleOptions("sql", sql) { Action = action });
            await rules.CreateRuleAsync("correlation", correlation);
            await rules.CreateRuleAsync("never", new FalseRuleFilter());
            await rules.DeleteRuleAsync("$Default");
            var found = await Rules(rules);
            Equal(found.Select(rule => rule.Name), new[] { "correlation", "never", "sql" }, "names, in order");
            Truth(found[0].Filter.Equals(correlation), "a rule with a correlation filter");
            Truth(found[1].Filter.Equals(new FalseRuleFilter()), "a rule that never holds");
            Truth(found[2].Filter.Equals(sql) && found[2].Action.Equals(action), "a rule with an SQL filter and an action");
            ServiceBusMessage Correlated(string body, object count) => new ServiceBusMessage(body) { Subject = "s" }.With(properties).With(("count", count));
            await Publish(scene, new ServiceBusMessage("1").With(("price", 150)), Correlated("2", 7L), Correlated("3", 8L));
            await rules.DeleteRuleAsync("sql");
            await Publish(scene, new ServiceBusMessage("4").With(("price", 150)), Correlated("5", 7));
            var messages = (await Received(scene.Subscription("a"), 3)).OrderBy(message => message.Body(), StringComparer.Ordinal).ToList();
            Equal(messages.Bodies(), new[] { "1", "2", "5" }, "messages that arrived");
            Equal(messages[0].ApplicationProperties, new Dictionary<string, object> { ["price"] = 75, ["RuleName"] = "sql" }, "properties after the action");
            Equal(messages[1].ApplicationProperties, properties.ToDictionary(each => each.Name, each => each.Value), "properties without an action");
        },

        ["rule-errors"] = async scene =>
        {
            await using var rules = scene.Client.CreateRuleManager(scene.Queue, "a");
            Func<Exception, bool> wrong(int column) => error => error.Message.Contains($"There was an error parsing the SQL expression. [Token line=1, column={column},");
            await Rejects(() => rules.CreateRuleAsync("$Default", new TrueRuleFilter()), Reason(ServiceBusFailureReason.MessagingEntityAlreadyExists), "a name that is there");
            await Rejects(() => rules.DeleteRuleAsync("not"), NotFound, "a missing rule");
            await Rejects(() => rules.CreateRuleAsync("wrong", new SqlRuleFilter("price > > 1")), wrong(9), "a wrong filter");
            var wrongAction = new CreateRuleOptions("wrong", new TrueRuleFilter()) { Action = new SqlRuleAction("SET a = 1 +") };
            await Rejects(() => rules.CreateRuleAsync(wrongAction), wrong(12), "a wrong action");
            Equal((await Rules(rules)).Select(rule => rule.Name), new[] { "$Default" }, "names");
        },
    };

    static ServiceBusReceiver DeadLetters(Scene scene, string name) =>
        scene.Subscription(name, new ServiceBusReceiverOptions { SubQueue = SubQueue.DeadLetter });

    static async Task Publish(Scene scene, params ServiceBusMessage[] messages)
    {
        await using var sender = scene.Sender();
        await sender.SendMessagesAsync(messages);
    }

    /// <summary>That many messages and no more, which are completed; the receiver is closed.</summary>
    static async Task<List<ServiceBusReceivedMessage>> Received(ServiceBusReceiver receiver, int count)
    {
        await using (receiver)
        {
            var messages = await AllOf(receiver, count);
            await None(receiver, "messages beyond those");
            return messages;
        }
    }

    static async Task<List<RuleProperties>> Rules(ServiceBusRuleManager manager)
    {
        var found = new List<RuleProperties>();
        await foreach (var rule in manager.GetRulesAsync())
            found.Add(rule);
        return found;
    }
}
