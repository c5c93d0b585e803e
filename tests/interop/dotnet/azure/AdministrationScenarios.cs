// The scenarios of administration_scenarios.py with Azure.Messaging.ServiceBus.
using Azure.Messaging.ServiceBus;
using Azure.Messaging.ServiceBus.Administration;
using static Peeklock.Interop.Azure.Messages;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

static class AdministrationScenarios
{
    const string Metadata = "a < b & ü";
    static readonly Func<Exception, bool> Missing = Reason(ServiceBusFailureReason.MessagingEntityNotFound);
    static readonly Func<Exception, bool> Exists = Reason(ServiceBusFailureReason.MessagingEntityAlreadyExists);

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["admin-queue"] = async scene =>
        {
            var admin = Administration();
            var given = new CreateQueueOptions(scene.Queue)
            {
                LockDuration = TimeSpan.FromSeconds(30),
                MaxDeliveryCount = 5,
                DefaultMessageTimeToLive = TimeSpan.FromHours(2),
                DeadLetteringOnMessageExpiration = true,
                MaxSizeInMegabytes = 2048,
                AutoDeleteOnIdle = TimeSpan.FromHours(1),
                UserMetadata = Metadata,
            };
            void Check(QueueProperties found, int maxDeliveryCount, int lockSeconds)
            {
                Equal((found.Name, found.MaxDeliveryCount, found.LockDuration), (scene.Queue, maxDeliveryCount, TimeSpan.FromSeconds(lockSeconds)), "settings");
                Equal((found.DefaultMessageTimeToLive, found.DeadLetteringOnMessageExpiration), (TimeSpan.FromHours(2), true), "time to live");
                Equal((found.MaxSizeInMegabytes, found.AutoDeleteOnIdle, found.UserMetadata), (Size(2048, found.EnablePartitioning), TimeSpan.FromHours(1), Metadata), "more settings");
            }
            Check(await admin.CreateQueueAsync(given), 5, 30);
            Equal((await admin.GetQueueRuntimePropertiesAsync(scene.Queue)).Value.AccessedAt.Year, 1, "never accessed");
            var properties = (await admin.GetQueueAsync(scene.Queue)).Value;
            Check(properties, 5, 30);
            Truth((await Names(admin.GetQueuesAsync(), queue => queue.Name)).Contains(scene.Queue), "it is listed");

            properties.MaxDeliveryCount = 7;
            properties.LockDuration = TimeSpan.FromSeconds(45);
            await admin.UpdateQueueAsync(properties);
            Check(await admin.GetQueueAsync(scene.Queue), 7, 45);

            await scene.Send("a", "b", "c");
            await using (var sender = scene.Sender())
                await sender.ScheduleMessageAsync(new ServiceBusMessage("later"), DateTimeOffset.UtcNow.AddHours(1));
            await DeadLetterOne(scene.Receiver());
            var runtime = (await admin.GetQueueRuntimePropertiesAsync(scene.Queue)).Value;
            Equal((runtime.ActiveMessageCount, runtime.ScheduledMessageCount, runtime.DeadLetterMessageCount), (2, 1, 1), "counts");
            Equal(runtime.TotalMessageCount, 4, "messages");
            Truth(runtime.SizeInBytes > 0, "size");
            Times(runtime.CreatedAt, runtime.UpdatedAt, runtime.AccessedAt);

            Truth(await admin.QueueExistsAsync(scene.Queue), "it exists");
            await admin.DeleteQueueAsync(scene.Queue);
            Truth(!await admin.QueueExistsAsync(scene.Queue), "it exists no more");
            await Rejects(() => admin.GetQueueAsync(scene.Queue), Missing, "getting a deleted queue");
        },

        ["admin-topic"] = async scene =>
        {
            var admin = Administration();
            var given = new CreateTopicOptions(scene.Queue)
            {
                DefaultMessageTimeToLive = new TimeSpan(1, 0, 1, 0),
                RequiresDuplicateDetection = true,
                DuplicateDetectionHistoryTimeWindow = TimeSpan.FromMinutes(3),
                MaxSizeInMegabytes = 3072,
                UserMetadata = Metadata,
            };
            void Check(TopicProperties found, TimeSpan timeToLive, string metadata)
            {
                Equal((found.Name, found.DefaultMessageTimeToLive, found.UserMetadata), (scene.Queue, timeToLive, metadata), "settings");
                Equal((found.RequiresDuplicateDetection, found.DuplicateDetectionHistoryTimeWindow), (true, TimeSpan.FromMinutes(3)), "duplicates");
                Equal(found.MaxSizeInMegabytes, Size(3072, found.EnablePartitioning), "size");
            }
            Check(await admin.CreateTopicAsync(given), new TimeSpan(1, 0, 1, 0), Metadata);
            var properties = (await admin.GetTopicAsync(scene.Queue)).Value;
            Check(properties, new TimeSpan(1, 0, 1, 0), Metadata);
            Truth((await Names(admin.GetTopicsAsync(), topic => topic.Name)).Contains(scene.Queue), "it is listed");

            properties.UserMetadata = "changed";
            properties.DefaultMessageTimeToLive = TimeSpan.FromHours(3);
            await admin.UpdateTopicAsync(properties);
            Check(await admin.GetTopicAsync(scene.Queue), TimeSpan.FromHours(3), "changed");

            foreach (var name in new[] { "a", "b" })
                await admin.CreateSubscriptionAsync(scene.Queue, name);
            await using (var sender = scene.Sender())
                await sender.ScheduleMessageAsync(new ServiceBusMessage("later"), DateTimeOffset.UtcNow.AddHours(1));
            var runtime = (await admin.GetTopicRuntimePropertiesAsync(scene.Queue)).Value;
            Equal((runtime.SubscriptionCount, runtime.ScheduledMessageCount), (2, 1), "subscriptions and scheduled messages");
            Times(runtime.CreatedAt, runtime.UpdatedAt, runtime.AccessedAt);

            await admin.DeleteTopicAsync(scene.Queue);
            Truth(!await admin.TopicExistsAsync(scene.Queue), "it exists no more");
            await Rejects(() => admin.GetTopicAsync(scene.Queue), Missing, "getting a deleted topic");
        },

        ["admin-subscription"] = async scene =>
        {
            var admin = Administration();
            var given = new CreateSubscriptionOptions(scene.Queue, "mine")
            {
                LockDuration = TimeSpan.FromSeconds(30),
                MaxDeliveryCount = 4,
                DefaultMessageTimeToLive = TimeSpan.FromHours(2),
                DeadLetteringOnMessageExpiration = true,
                EnableDeadLetteringOnFilterEvaluationExceptions = false,
                UserMetadata = Metadata,
            };
            void Check(SubscriptionProperties found, int maxDeliveryCount)
            {
                Equal((found.TopicName, found.SubscriptionName, found.MaxDeliveryCount), (scene.Queue, "mine", maxDeliveryCount), "settings");
                Equal((found.LockDuration, found.DefaultMessageTimeToLive), (TimeSpan.FromSeconds(30), TimeSpan.FromHours(2)), "times");
                Equal((found.DeadLetteringOnMessageExpiration, found.EnableDeadLetteringOnFilterEvaluationExceptions), (true, false), "dead letters");
                Equal(found.UserMetadata, Metadata, "metadata");
            }
            await admin.CreateTopicAsync(scene.Queue);
            Check(await admin.CreateSubscriptionAsync(given), 4);
            var properties = (await admin.GetSubscriptionAsync(scene.Queue, "mine")).Value;
            Check(properties, 4);
            Equal(await Names(admin.GetSubscriptionsAsync(scene.Queue), each => each.SubscriptionName), new[] { "mine" }, "subscriptions");

            properties.MaxDeliveryCount = 9;
            await admin.UpdateSubscriptionAsync(properties);
            Check(await admin.GetSubscriptionAsync(scene.Queue, "mine"), 9);

            await scene.Send("a", "b", "c");
            await DeadLetterOne(scene.Subscription("mine"));
            var runtime = (await admin.GetSubscriptionRuntimePropertiesAsync(scene.Queue, "mine")).Value;
            Equal((runtime.ActiveMessageCount, runtime.DeadLetterMessageCount, runtime.TotalMessageCount), (2, 1, 3), "counts");
            Times(runtime.CreatedAt, runtime.UpdatedAt, runtime.AccessedAt);

            await admin.DeleteSubscriptionAsync(scene.Queue, "mine");
            Truth(!await admin.SubscriptionExistsAsync(scene.Queue, "mine"), "it exists no more");
            await Rejects(() => admin.GetSubscriptionAsync(scene.Queue, "mine"), Missing, "getting a deleted subscription");
            await admin.DeleteTopicAsync(scene.Queue);
        },

        ["admin-rule"] = async scene =>
        {
            var admin = Administration();
            var topic = scene.Queue;
            ServiceBusMessage Published(string body, int amount, string? subject = null, string? colour = null) =>
                new ServiceBusMessage(body) { Subject = subject }.With(("amount", amount), ("colour", colour), ("number", 3));
            async Task<string[]> Arrived()
            {
                await using var inbox = scene.Subscription("mine");
                var found = new List<string>();
                while (await inbox.ReceiveMessageAsync(TimeSpan.FromSeconds(1)) is { } message)
                {
                    found.Add($"{message.Body} {message.ApplicationProperties.GetValueOrDefault("checked")}");
                    await inbox.CompleteMessageAsync(message);
                }
                return Sorted(found);
            }

            await admin.CreateTopicAsync(topic);
            await admin.CreateSubscriptionAsync(topic, "mine");
            Truth((await admin.GetRuleAsync(topic, "mine", "$Default")).Value.Filter is TrueRuleFilter, "the default rule takes all");
            await admin.DeleteRuleAsync(topic, "mine", "$Default");
            var sql = new SqlRuleFilter("amount > @limit AND amount < @most AND (due IS NULL OR due < @when)");
            var when = new DateTime(2024, 1, 2, 3, 4, 52, DateTimeKind.Utc).AddTicks(5_478_689);
            (string Name, object Value)[] parameters = [("@limit", 10), ("@most", 1L << 40), ("@when", when)];
            foreach (var (name, value) in parameters)
                sql.Parameters[name] = value;
            await admin.CreateRuleAsync(topic, "mine", new CreateRuleOptions("sql", sql) { Action = new SqlRuleAction("SET checked = 'yes'") });
            var chosen = new CorrelationRuleFilter { Subject = "invoice", ApplicationProperties = { ["colour"] = "red", ["number"] = 3L } };
            await admin.CreateRuleAsync(topic, "mine", new CreateRuleOptions("correlation", chosen));

            var rule = (await admin.GetRuleAsync(topic, "mine", "sql")).Value;
            var found = (SqlRuleFilter)rule.Filter;
            Equal((found.SqlExpression, ((SqlRuleAction)rule.Action).SqlExpression), (sql.SqlExpression, "SET checked = 'yes'"), "filter and action");
            foreach (var (name, value) in parameters)
                Equal((found.Parameters[name], found.Parameters[name].GetType()), (value, value.GetType()), $"parameter {name}");
            Truth((await admin.GetRuleAsync(topic, "mine", "correlation")).Value.Filter.Equals(chosen), "correlation filter");
            Equal(Sorted(await Names(admin.GetRulesAsync(topic, "mine"), each => each.Name)), new[] { "correlation", "sql" }, "rules");

            await scene.Post(Published("large", 20), Published("red", 0, "invoice", "red"), Published("green", 0, "invoice", "green"));
            Equal(await Arrived(), new[] { "large yes", "red " }, "what arrives");

            rule.Filter = new SqlRuleFilter("amount > 100");
            await admin.UpdateRuleAsync(topic, "mine", rule);
            Equal((await admin.GetRuleAsync(topic, "mine", "sql")).Value.Filter, new SqlRuleFilter("amount > 100"), "changed filter");
            await admin.DeleteRuleAsync(topic, "mine", "correlation");
            Truth(!await admin.RuleExistsAsync(topic, "mine", "correlation"), "it exists no more");
            await Rejects(() => admin.GetRuleAsync(topic, "mine", "correlation"), Missing, "getting a deleted rule");
            await scene.Post(Published("large", 20), Published("larger", 200), Published("red", 0, "invoice", "red"));
            Equal(await Arrived(), new[] { "larger yes" }, "what arrives after the change");
            await admin.DeleteTopicAsync(topic);
        },

        ["admin-authorization"] = async scene =>
        {
            var key = Convert.ToBase64String(Bytes(32)); // the SDK takes no other length
            var admin = Administration();
            var options = new CreateQueueOptions(scene.Queue);
            options.AuthorizationRules.Add(new SharedAccessAuthorizationRule("app", key, key, [AccessRights.Send]));
            await admin.CreateQueueAsync(options);
            var found = (SharedAccessAuthorizationRule)(await admin.GetQueueAsync(scene.Queue)).Value.AuthorizationRules.Single();
            Equal((found.KeyName, found.PrimaryKey, found.SecondaryKey), ("app", key, key), "keys");
            Equal(found.Rights, new[] { AccessRights.Send }, "rights");
            await using var limited = new Scene(scene.Queue, Setting("connection_string").Replace(Setting("key_name"), "app").Replace(Setting("key"), key));
            await limited.Send("x");
            await Rejects(() => One(limited.Receiver()), Unauthorized, "receiving with a right to send");
            await AllOf(scene.Receiver(), 1);
            await admin.DeleteQueueAsync(scene.Queue);
        },

        ["admin-forwarding"] = async scene =>
        {
            var admin = Administration();
            var target = $"{scene.Queue}-target";
            await admin.CreateQueueAsync(target);
            await admin.CreateQueueAsync(new CreateQueueOptions(scene.Queue) { ForwardTo = target, ForwardDeadLetteredMessagesTo = target });
            var found = (await admin.GetQueueAsync(scene.Queue)).Value;
            foreach (var destination in new[] { found.ForwardTo, found.ForwardDeadLetteredMessagesTo })
                Truth(destination.EndsWith($"/{target}"), $"destination {destination}");
            await scene.Send("x");
            Equal((await AllOf(scene.Client.CreateReceiver(target), 1)).Bodies(), new[] { "x" }, "what arrives");
            await admin.DeleteQueueAsync(scene.Queue);
            await admin.DeleteQueueAsync(target);
        },

        ["admin-names"] = async scene =>
        {
            var admin = Administration();
            var (mixed, lower) = (scene.Queue + "-Mixed.Case", scene.Queue + "-mixed.case");
            Equal((await admin.CreateQueueAsync(mixed)).Value.Name, lower, "name of the new queue");
            foreach (var name in new[] { mixed, mixed.ToUpperInvariant(), lower })
                Equal((await admin.GetQueueAsync(name)).Value.Name, lower, "name");
            Equal((await admin.GetQueueRuntimePropertiesAsync(mixed)).Value.Name, lower, "name in the runtime properties");
            Truth((await Names(admin.GetQueuesAsync(), queue => queue.Name)).Contains(lower), "it is listed");
            await Rejects(() => admin.CreateQueueAsync(mixed.ToUpperInvariant()), Exists, "creating it again");
            await using (var queue = new Scene(mixed))
            {
                await queue.Send("x");
                await DeadLetterOne(queue.Receiver());
                await using var dead = queue.DeadLetters();
                Equal((await One(dead)).DeadLetterSource, lower, "source of the dead letter");
            }
            await admin.DeleteQueueAsync(mixed.ToUpperInvariant());

            Equal((await admin.CreateTopicAsync(mixed)).Value.Name, lower, "name of the new topic");
            Truth((await Names(admin.GetTopicsAsync(), topic => topic.Name)).Contains(lower), "it is listed");
            var subscription = (await admin.CreateSubscriptionAsync(mixed, "Mine")).Value;
            Equal(subscription.SubscriptionName, "Mine", "name of the subscription");
            Equal(await Names(admin.GetSubscriptionsAsync(lower), each => each.SubscriptionName), new[] { "Mine" }, "subscriptions");
            await admin.DeleteTopicAsync(mixed);
        },

        ["admin-pages"] = async scene =>
        {
            var admin = Administration();
            string[] expected = [.. Texts(120, 100).Select(number => $"s{number}")];
            await admin.CreateTopicAsync(scene.Queue);
            foreach (var name in expected)
                await admin.CreateSubscriptionAsync(scene.Queue, name);
            Equal(Sorted(await Names(admin.GetSubscriptionsAsync(scene.Queue), each => each.SubscriptionName)), expected, "subscriptions");
            Equal((await admin.GetTopicRuntimePropertiesAsync(scene.Queue)).Value.SubscriptionCount, 120, "their number");
            await admin.DeleteTopicAsync(scene.Queue);
        },

        ["admin-namespace"] = async _ =>
        {
            var found = (await Administration().GetNamespacePropertiesAsync()).Value;
            Equal(found.Name, "peeklock", "name");
            Truth($"{found.MessagingSku}" is "Basic" or "Standard" or "Premium", $"tier {found.MessagingSku}");
            Truth(found.CreatedTime <= found.ModifiedTime, "times");
        },

        ["admin-errors"] = async scene =>
        {
            var admin = Administration();
            await admin.CreateQueueAsync(scene.Queue);
            await Rejects(() => admin.CreateQueueAsync(scene.Queue), Exists, "creating it again");
            await Rejects(() => admin.CreateTopicAsync(scene.Queue), Exists, "creating a topic of its name");
            await Rejects(() => admin.GetQueueAsync("nothing"), Missing, "getting nothing");
            await Rejects(() => admin.DeleteQueueAsync("nothing"), Missing, "deleting nothing");
            // The SDK itself knows how long a lock may last; names it leaves to the broker.
            await Rejects(() => admin.CreateQueueAsync($"{scene.Queue} odd"), error => error is ArgumentException, "a name with a space");
            await Rejects(() => admin.CreateQueueAsync(new CreateQueueOptions($"{scene.Queue}-odd") { MaxSizeInMegabytes = -5 }), error => error is ArgumentException, "a negative size");
            var limited = Administration("secure_listen_only");
            await Rejects(() => limited.GetQueueAsync(scene.Queue), Unauthorized, "a key without Manage");
            await Rejects(() => limited.DeleteQueueAsync(scene.Queue), Unauthorized, "a key without Manage");
            await admin.DeleteQueueAsync(scene.Queue);
        },

        ["websockets"] = async scene =>
        {
            var admin = Administration();
            await admin.CreateQueueAsync(scene.Queue);
            await using (var web = new Scene(scene.Queue, Setting("secure"), webSockets: true))
            {
                var large = new string('x', 300 * 1024);
                await web.Send(large);
                await using (var sender = web.Sender())
                    await sender.SendMessagesAsync(Texts(20).Select(text => new ServiceBusMessage(text)));
                Equal(Sorted((await AllOf(web.Receiver(), 21)).Bodies()), Sorted([large, .. Texts(20)]), "what arrives");
            }
            await scene.NothingIsLeft();
            await admin.DeleteQueueAsync(scene.Queue);
        },
    };

    static ServiceBusAdministrationClient Administration(string setting = "secure") =>
        new(Setting(setting), new ServiceBusAdministrationClientOptions { Retry = { MaxRetries = 0 } });

    /// <summary>A partitioned entity shows the size of 16 fragments, as the cloud does.</summary>
    static long Size(long given, bool partitioned) => partitioned ? 16 * given : given;

    static void Times(DateTimeOffset created, DateTimeOffset updated, DateTimeOffset accessed)
    {
        Truth((created - DateTimeOffset.UtcNow).Duration() < TimeSpan.FromMinutes(5), $"created at {created}");
        Truth(created <= updated, $"changed at {updated}, created at {created}");
        Truth(created <= accessed, $"accessed at {accessed}, created at {created}");
    }

    static async Task<List<string>> Names<T>(IAsyncEnumerable<T> items, Func<T, string> name)
    {
        var found = new List<string>();
        await foreach (var item in items)
            found.Add(name(item));
        return found;
    }

    static async Task DeadLetterOne(ServiceBusReceiver receiver)
    {
        await using (receiver)
            await receiver.DeadLetterMessageAsync(await One(receiver));
    }
}
