package main

import (
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func init() {
	maps.Copy(scenarios, cornerScenarios)
}

const reasonLimit = 4096 // characters of a reason that are kept

// deferred is the deferred message with this number, locked.
func (s *scene) deferred(receiver *receiver, number int64) *azservicebus.ReceivedMessage {
	found := must(receiver.ReceiveDeferredMessages(s.ctx, []int64{number}, nil))
	equal(len(found), 1, "deferred messages")
	return found[0]
}

func isTooLarge(err error) bool {
	return errors.Is(err, azservicebus.ErrMessageTooLarge) || strings.Contains(fmt.Sprint(err), "size")
}

// The scenarios of corner_scenarios.py.
var cornerScenarios = map[string]func(*scene){
	"deferral-count": func(s *scene) {
		s.send("m")
		receiver := s.receiver()
		message := receiver.one()
		equal(message.DeliveryCount, uint32(firstDelivery), "delivery count at first")
		number := value(message.SequenceNumber)
		ok(receiver.DeferMessage(s.ctx, message, nil), "deferring")
		message = s.deferred(receiver, number)
		equal(message.DeliveryCount, uint32(firstDelivery+1), "delivery count after a deferral")
		ok(receiver.AbandonMessage(s.ctx, message, nil), "abandoning")
		message = s.deferred(receiver, number)
		equal(message.DeliveryCount, uint32(firstDelivery+2), "delivery count after an abandon")
		ok(receiver.DeferMessage(s.ctx, message, nil), "deferring again")
		letters := s.deadLetters()
		letter := letters.one()
		equal(string(letter.Body)+" "+value(letter.DeadLetterReason), "m MaxDeliveryCountExceeded", "dead letter")
		letters.complete(letter)
		receiver.close()
		s.nothingIsLeft()
	},

	"message-states": func(s *scene) {
		sender := s.sender()
		due := time.Now().Add(4 * time.Second)
		must(sender.ScheduleMessages(s.ctx, []*azservicebus.Message{text("scheduled")}, due, nil))
		for _, firstAcquirer := range []bool{true, false} {
			body := azservicebus.AMQPAnnotatedMessageBody{Data: [][]byte{[]byte(fmt.Sprint(firstAcquirer))}}
			header := &azservicebus.AMQPAnnotatedMessageHeader{FirstAcquirer: firstAcquirer}
			message := &azservicebus.AMQPAnnotatedMessage{Body: body, Header: header}
			ok(sender.SendAMQPAnnotatedMessage(s.ctx, message, nil), "sending")
		}
		receiver := s.receiver()
		states := map[string]azservicebus.MessageState{}
		var numbers []int64
		for range 3 {
			message := receiver.one()
			states[string(message.Body)] = message.State
			if body := string(message.Body); body != "scheduled" {
				equal(fmt.Sprint(message.RawAMQPMessage.Header.FirstAcquirer), body, "first-acquirer")
			}
			numbers = append(numbers, value(message.SequenceNumber))
			ok(receiver.DeferMessage(s.ctx, message, nil), "deferring")
		}
		active := azservicebus.MessageStateActive
		expected := map[string]azservicebus.MessageState{
			"scheduled": azservicebus.MessageStateScheduled, "true": active, "false": active,
		}
		equal(states, expected, "states")
		equal(s.deferred(receiver, numbers[0]).State, azservicebus.MessageStateDeferred, "state of a deferred message")
	},

	"large-requests": func(s *scene) {
		later := time.Now().Add(time.Hour)
		sender := s.sender()
		schedule := func(size int) ([]int64, error) {
			message := &azservicebus.Message{Body: make([]byte, size)}
			return sender.ScheduleMessages(s.ctx, []*azservicebus.Message{message}, later, nil)
		}
		numbers := must(schedule(262_000))
		browsed := s.receiver().peek(1, numbers[0])
		equal(len(browsed[0].Body), 262_000, "bytes browsed")
		began := time.Now()
		_, err := schedule(300_000)
		truth(isTooLarge(err), "scheduling 300,000 bytes: %v", err)
		truth(time.Since(began) < 15*time.Second, "the error took its time")
		ok(sender.CancelScheduledMessages(s.ctx, numbers, nil), "cancelling")
	},

	"long-reason": func(s *scene) {
		s.send("bad")
		receiver := s.receiver()
		ok(receiver.DeadLetterMessage(s.ctx, receiver.one(), &azservicebus.DeadLetterOptions{
			Reason: ptr(strings.Repeat("r", 40_000)), ErrorDescription: ptr("description"),
		}), "dead-lettering")
		letters := s.deadLetters()
		letter := letters.one()
		equal(value(letter.DeadLetterReason), strings.Repeat("r", reasonLimit), "reason")
		equal(value(letter.DeadLetterErrorDescription), "description", "description")
		letters.complete(letter)
	},

	"expiry-forwarded": func(s *scene) {
		s.send("m")
		receiver := newReceiver(s.ctx, must(s.client.NewReceiverForQueue(s.queue+"-1", nil)))
		message := receiver.one(time.Minute)
		equal(string(message.Body)+" "+value(message.DeadLetterReason), "m TTLExpiredException", "message")
		receiver.complete(message)
	},

	"rule-conversions": func(s *scene) {
		for _, subject := range []string{"n-8", "n-7"} {
			message := with(subject, properties{"number": int64(7)})
			message.Subject = &subject
			s.post(message)
		}
		receiver := s.subscription("a")
		message := receiver.one()
		equal(string(message.Body)+" "+value(message.CorrelationID), "n-7 7", "message and correlation id")
		equal(message.ApplicationProperties["joined"], "n-7", "text and number")
		equal(value(message.TimeToLive), 10*time.Minute, "time to live")
		receiver.complete(message)
	},

	"action-delay": func(s *scene) {
		began := time.Now()
		s.send("m")
		now := s.subscription("now")
		first := now.one()
		truth(first.State == azservicebus.MessageStateActive && first.ScheduledEnqueueTime == nil, "copy: %v", first)
		now.complete(first)
		later := s.subscription("later")
		message := later.one(time.Minute)
		truth(time.Since(began) >= 3*time.Second, "the copy came too early")
		equal(message.State, azservicebus.MessageStateScheduled, "state")
		late := message.EnqueuedTime.Sub(value(message.ScheduledEnqueueTime))
		truth(late >= 0 && late < 15*time.Second, "enqueued %v behind the time that is shown", late)
		later.complete(message)
	},
}
