// The scenarios of corner_scenarios.py with Azure.Messaging.ServiceBus.
using System.Diagnostics;
using Azure.Core.Amqp;
using Azure.Messaging.ServiceBus;
using static Peeklock.Interop.Azure.Messages;
using static Peeklock.Interop.Harness;

namespace Peeklock.Interop.Azure;

static class CornerScenarios
{
    const int ReasonLimit = 4096; // characters of a reason that are kept

    public static readonly Dictionary<string, Func<Scene, Task>> All = new()
    {
        ["deferral-count"] = async scene =>
        {
            await scene.Send("m");
            await using var receiver = scene.Receiver();
            var message = await One(receiver);
            var number = message.SequenceNumber;
            Equal(message.DeliveryCount, 1, "delivery count at first");
            await receiver.DeferMessageAsync(message);
            message = await receiver.ReceiveDeferredMessageAsync(number);
            Equal(message.DeliveryCount, 2, "delivery count after a deferral");
            await receiver.AbandonMessageAsync(message);
            message = await receiver.ReceiveDeferredMessageAsync(number);
            Equal(message.DeliveryCount, 3, "delivery count after an abandon");
            await receiver.DeferMessageAsync(message);
            var letter = (await AllOf(scene.DeadLetters(), 1))[0];
            Equal((letter.Body(), letter.DeadLetterReason), ("m", "MaxDeliveryCountExceeded"), "dead letter");
            await scene.NothingIsLeft();
        },

        ["message-states"] = async scene =>
        {
            await using var sender = scene.Sender();
            await sender.ScheduleMessageAsync(new ServiceBusMessage("scheduled"), DateTimeOffset.UtcNow.AddSeconds(4));
            foreach (var first in new[] { true, false })
            {
                var sent = new ServiceBusMessage($"{first}");
                sent.GetRawAmqpMessage().Header.FirstAcquirer = first;
                await sender.SendMessageAsync(sent);
            }
            await using var receiver = scene.Receiver();
            var messages = await AllOf(receiver, 3, complete: false);
            Equal(Sorted(messages.Select(message => $"{message.Body} {message.State}")), new[] { "False Active", "True Active", "scheduled Scheduled" }, "states");
            foreach (var message in messages.Where(message => message.Body() != "scheduled"))
                Equal($"{message.GetRawAmqpMessage().Header.FirstAcquirer}", message.Body(), "first-acquirer");
            await receiver.DeferMessageAsync(messages[0]);
            var deferred = await receiver.ReceiveDeferredMessageAsync(messages[0].SequenceNumber);
            Equal(deferred.State, ServiceBusMessageState.Deferred, "state of a deferred message");
        },

        ["large-requests"] = async scene =>
        {
            var later = DateTimeOffset.UtcNow.AddHours(1);
            await using var sender = scene.Sender();
            var number = await sender.ScheduleMessageAsync(new ServiceBusMessage(Bytes(262_000)), later);
            await using var receiver = scene.Receiver();
            Equal((await receiver.PeekMessageAsync(number)).Body.ToMemory().Length, 262_000, "bytes browsed");
            var tooLarge = Reason(ServiceBusFailureReason.MessageSizeExceeded);
            await AtOnceWithin(15_000, () =>
                Rejects(() => sender.ScheduleMessageAsync(new ServiceBusMessage(Bytes(300_000)), later), tooLarge, "scheduling 300,000 bytes"));
            await sender.CancelScheduledMessageAsync(number);
            await sender.SendMessageAsync(new ServiceBusMessage(Bytes(262_067)));
            Equal((await AllOf(receiver, 1))[0].Body.ToMemory().Length, 262_067, "bytes received");
        },

        ["long-reason"] = async scene =>
        {
            await scene.Send("bad");
            await using var receiver = scene.Receiver();
            // The SDK refuses such a reason, but not as a property.
            var told = new Dictionary<string, object> { ["DeadLetterReason"] = new string('r', 40_000), ["DeadLetterErrorDescription"] = "description" };
            await receiver.DeadLetterMessageAsync(await One(receiver), told);
            var letter = (await AllOf(scene.DeadLetters(), 1))[0];
            Equal((letter.DeadLetterReason, letter.DeadLetterErrorDescription), (new string('r', ReasonLimit), "description"), "reason");
        },

        ["expiry-forwarded"] = async scene =>
        {
            await scene.Send("m");
            var message = (await AllOf(scene.Client.CreateReceiver($"{scene.Queue}-1"), 1))[0];
            Equal((message.Body(), message.DeadLetterReason), ("m", "TTLExpiredException"), "message");
        },

        ["rule-conversions"] = async scene =>
        {
            await scene.Post(new[] { "n-8", "n-7" }.Select(subject => new ServiceBusMessage(subject) { Subject = subject }.With(("number", 7))));
            var message = (await AllOf(scene.Subscription("a"), 1))[0];
            Equal((message.Body(), message.CorrelationId), ("n-7", "7"), "message and correlation id");
            Equal(message.ApplicationProperties["joined"], "n-7", "text and number");
            Equal(message.TimeToLive, TimeSpan.FromMinutes(10), "time to live");
        },

        ["action-delay"] = async scene =>
        {
            var took = Stopwatch.StartNew();
            await scene.Send("m");
            var now = (await AllOf(scene.Subscription("now"), 1))[0];
            Equal((now.State, now.ScheduledEnqueueTime), (ServiceBusMessageState.Active, default(DateTimeOffset)), "copy");
            var later = (await AllOf(scene.Subscription("later"), 1))[0];
            Truth(took.ElapsedMilliseconds >= 3000, "the copy came too early");
            Equal(later.State, ServiceBusMessageState.Scheduled, "state");
            var late = later.EnqueuedTime - later.ScheduledEnqueueTime;
            Truth(late.TotalMilliseconds is >= 0 and < 15_000, $"enqueued {late} behind the time that is shown");
        },
    };
}
