package main

import (
	"fmt"
	"maps"
	"strconv"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func init() {
	maps.Copy(scenarios, topicScenarios)
}

// subscription is a receiver of the subscription with this name; of its dead-letter queue with deadLetters.
func (s *scene) subscription(name string, options ...*azservicebus.ReceiverOptions) *receiver {
	return newReceiver(s.ctx, must(s.client.NewReceiverForSubscription(s.queue, name, append(options, nil)[0])))
}

var deadLetters = &azservicebus.ReceiverOptions{SubQueue: azservicebus.SubQueueDeadLetter}

// all completes that many messages, sees that there are no more, and closes.
func (r *inbox) all(count int) []*azservicebus.ReceivedMessage {
	defer r.close()
	messages := r.allOf(count)
	r.none("messages beyond those")
	return messages
}

func localNumbers(messages []*azservicebus.ReceivedMessage) []int64 {
	numbers := []int64{}
	for _, message := range messages {
		numbers = append(numbers, local(message))
	}
	return numbers
}

type properties = map[string]any

func with(body string, set properties) *azservicebus.Message {
	message := text(body)
	message.ApplicationProperties = set
	return message
}

var topicScenarios = map[string]func(*scene){
	"topic-publish": func(s *scene) {
		first, second := text("first"), text("second")
		first.PartitionKey, second.PartitionKey, second.Subject = s.key(), s.key(), ptr("second")
		s.post(first, second)
		got := s.subscription("a").all(2)
		equal(bodies(got), []string{"first", "second"}, "messages in a subscription")
		equal(localNumbers(got), []int64{1, 2}, "their sequence numbers")
		equal(got[0].DeliveryCount, uint32(firstDelivery), "delivery count")
		equal(bodies(s.subscription("b").all(2)), []string{"first", "second"}, "messages in another")
		got = s.subscription("second").all(1)
		equal(bodies(got), []string{"second"}, "messages where a rule selects")
		equal(localNumbers(got), []int64{1}, "their sequence numbers")
	},

	"topic-batch": func(s *scene) {
		sender := s.sender()
		batch := must(sender.NewMessageBatch(s.ctx, nil))
		for i := range 100 {
			ok(batch.AddMessage(text(strconv.Itoa(i)), nil), "adding to a batch")
		}
		ok(sender.SendMessageBatch(s.ctx, batch, nil), "sending a batch")
		for _, name := range []string{"a", "b"} {
			messages := s.subscription(name).all(100)
			equal(bodies(messages), counting(0, 100), "bodies")
			for i, number := range localNumbers(messages) {
				equal(number, int64(i+1), "sequence number")
			}
		}
	},

	"topic-schedule": func(s *scene) {
		due := time.Now().Add(6 * time.Second)
		sender := s.sender()
		messages := []*azservicebus.Message{text("kept"), text("cancelled")}
		numbers := must(sender.ScheduleMessages(s.ctx, messages, due, nil))
		too := text("kept too")
		too.ScheduledEnqueueTime = &due
		s.post(too)
		ok(sender.CancelScheduledMessages(s.ctx, numbers[1:], nil), "cancelling")
		err := sender.CancelScheduledMessages(s.ctx, numbers[1:], nil)
		failsWithCode(err, azservicebus.CodeNotFound, "a second cancel")
		scheduled := s.receiver().peek(5)
		equal(sorted(bodies(scheduled)), []string{"kept", "kept too"}, "scheduled messages")
		truth(scheduled[0].State == azservicebus.MessageStateScheduled, "state")
		receiver := s.subscription("a")
		receiver.none("messages before their time")
		got := receiver.allOf(2)
		late := time.Since(due)
		truth(late >= 0 && late < 5*time.Second, "delivered %v late", late)
		equal(sorted(bodies(got)), []string{"kept", "kept too"}, "messages in a subscription")
		equal(sorted(bodies(s.subscription("b").all(2))), []string{"kept", "kept too"}, "messages in another")
	},

	"topic-time-to-live": func(s *scene) {
		half := text("half")
		half.TimeToLive = ptr(30 * time.Minute)
		s.post(text("x"), half)
		time.Sleep(1500 * time.Millisecond)
		s.subscription("brief").all(0)
		letters := s.subscription("brief", deadLetters).all(2)
		equal(sorted(bodies(letters)), []string{"half", "x"}, "dead letters")
		for _, letter := range letters {
			equal(value(letter.DeadLetterReason), "TTLExpiredException", "reason")
		}
		s.subscription("dropped").all(0)
		s.subscription("dropped", deadLetters).all(0)
		lives := map[string]time.Duration{}
		for _, message := range s.subscription("long").all(2) {
			lives[string(message.Body)] = value(message.TimeToLive)
		}
		equal(lives, map[string]time.Duration{"x": time.Hour, "half": 30 * time.Minute}, "messages that live")
	},

	"topic-disabled": func(s *scene) {
		failsWithCondition(s.trySend("x"), entityDisabled, "sending")
		s.subscription("a").all(0)
	},

	"topic-not-allowed": func(s *scene) {
		started := time.Now()
		failsWithCondition(s.receiver().tryTake(), notAllowed, "receiving from a topic")
		address := newScene(s.ctx, s.queue+"/Subscriptions/a", config.ConnectionString)
		defer address.client.Close(s.ctx)
		failsWithCondition(address.trySend("x"), notAllowed, "sending to a subscription")
		truth(time.Since(started) < 15*time.Second, "the error took its time")
		s.subscription("a").all(0)
	},

	"unknown-topic": func(s *scene) {
		started := time.Now()
		other := newScene(s.ctx, s.queue+"-not", config.ConnectionString)
		defer other.client.Close(s.ctx)
		failsWithCode(other.trySend("x"), azservicebus.CodeNotFound, "a topic")
		failsWithCode(s.subscription("not").tryTake(), azservicebus.CodeNotFound, "a subscription")
		truth(time.Since(started) < 15*time.Second, "the error took its time")
	},

	"subscription-settle": func(s *scene) {
		s.send("x")
		for _, name := range []string{"a", "strict"} {
			receiver := s.subscription(name)
			ok(receiver.AbandonMessage(s.ctx, receiver.one(), nil), "abandoning")
			receiver.close()
		}
		again := s.subscription("a").all(1)[0]
		equal(string(again.Body), "x", "second delivery")
		equal(again.DeliveryCount, uint32(secondDelivery), "delivery count")
		s.subscription("strict").all(0)
		letter := s.subscription("strict", deadLetters).all(1)[0]
		equal(string(letter.Body), "x", "dead letter")
		equal(value(letter.DeadLetterReason), "MaxDeliveryCountExceeded", "reason")
	},

	"subscription-defer": func(s *scene) {
		s.send("later")
		receiver := s.subscription("a")
		message := receiver.one()
		ok(receiver.DeferMessage(s.ctx, message, nil), "deferring")
		receiver.none("deliveries of a deferred message")
		numbers := []int64{value(message.SequenceNumber)}
		deferred := must(receiver.ReceiveDeferredMessages(s.ctx, numbers, nil))
		equal(bodies(deferred), []string{"later"}, "deferred messages")
		receiver.complete(deferred[0])
		_, err := receiver.ReceiveDeferredMessages(s.ctx, numbers, nil)
		failsWithCode(err, azservicebus.CodeNotFound, "a completed message")
		equal(bodies(s.subscription("b").all(1)), []string{"later"}, "messages in the other subscription")
	},

	"subscription-dead-letter": func(s *scene) {
		sent := with("bad", properties{"kept": "yes"})
		sent.MessageID = ptr("id")
		s.post(sent)
		receiver := s.subscription("a")
		ok(receiver.DeadLetterMessage(s.ctx, receiver.one(), &azservicebus.DeadLetterOptions{
			Reason: ptr("my reason"), ErrorDescription: ptr("my description"),
		}), "dead-lettering")
		receiver.none("messages in the subscription itself")
		letter := s.subscription("a", deadLetters).all(1)[0]
		equal(string(letter.Body)+" "+letter.MessageID, "bad id", "dead letter")
		equal(value(letter.DeadLetterReason), "my reason", "reason")
		equal(value(letter.DeadLetterErrorDescription), "my description", "description")
		equal(letter.ApplicationProperties["kept"], "yes", "application property")
		equal(value(letter.DeadLetterSource), s.queue+"/Subscriptions/a", "source")
		other := s.subscription("b").all(1)[0]
		equal(string(other.Body), "bad", "message in the other subscription")
		equal(other.ApplicationProperties, properties{"kept": "yes"}, "its properties")
		s.subscription("b", deadLetters).all(0)
	},

	"subscription-lock": func(s *scene) {
		s.send("slow")
		receiver, other := s.subscription("a"), s.subscription("b")
		message := receiver.one()
		before := value(message.LockedUntil)
		apart := value(other.one().LockedUntil).Sub(before)
		truth(apart > 50*time.Second && apart < time.Minute, "the ends of the locks are %v apart", apart)
		time.Sleep(2 * time.Second)
		ok(receiver.RenewMessageLock(s.ctx, message, nil), "renewing")
		until := value(message.LockedUntil)
		truth(until.Sub(before) > time.Second, "renewed from %v to %v", before, until)
		time.Sleep(4 * time.Second)
		receiver.complete(message)
		receiver.none("messages left")
	},

	"subscription-peek": func(s *scene) {
		s.send("a", "b", "c", "d", "e")
		s.subscription("b").all(5)
		receiver := s.subscription("a")
		browsed := receiver.peek(10)
		equal(bodies(browsed), []string{"a", "b", "c", "d", "e"}, "browsed")
		some := receiver.peek(2, value(browsed[2].SequenceNumber))
		equal(bodies(some), []string{"c", "d"}, "browsed from a number")
		equal(localNumbers(some), []int64{3, 4}, "their numbers")
		receiver.allOf(5)
		equal(bodies(receiver.peek(10)), []string{}, "browsed when empty")
	},

	"subscription-receive-and-delete": func(s *scene) {
		s.send("x", "y")
		options := &azservicebus.ReceiverOptions{ReceiveMode: azservicebus.ReceiveModeReceiveAndDelete}
		receiver := s.subscription("a", options)
		got := receiver.take(2, 10*time.Second)
		if len(got) == 1 {
			got = append(got, receiver.one())
		}
		equal(bodies(got), []string{"x", "y"}, "bodies")
		receiver.close()
		s.subscription("a").all(0)
		equal(bodies(s.subscription("b").all(2)), []string{"x", "y"}, "messages in the other subscription")
	},

	"subscription-disabled": func(s *scene) {
		s.send("x")
		failsWithCondition(s.subscription("off").tryTake(), entityDisabled, "receiving")
		equal(bodies(s.subscription("a").all(1)), []string{"x"}, "messages in the other subscription")
	},

	"sql-filter": func(s *scene) {
		second, third := with("2", properties{"price": 50.5, "color": "red"}), text("3")
		second.Subject, third.MessageID = ptr("abc"), ptr("x")
		s.post(
			with("1", properties{"price": int32(150), "color": "red"}), second, third,
			with("4", properties{"price": 100.5, "color": "red"}), with("5", properties{"price": int64(100), "color": "red"}),
		)
		equal(sorted(bodies(s.subscription("dear").all(2))), []string{"1", "4"}, "by price and color")
		equal(sorted(bodies(s.subscription("named").all(2))), []string{"2", "3"}, "by label or id")
		equal(bodies(s.subscription("bare").all(1)), []string{"3"}, "without color and price")
	},

	"correlation-filter": func(s *scene) {
		first, second := text("1"), with("2", properties{"color": "red"})
		first.Subject, first.CorrelationID, second.Subject = ptr("a"), ptr("c"), ptr("a")
		s.post(first, second)
		sevens := []any{int8(7), uint8(7), int16(7), uint16(7), int32(7), uint32(7), int64(7), uint64(7), float32(7), 7.0}
		for _, seven := range sevens {
			s.post(with(fmt.Sprintf("%T", seven), properties{"count": seven}))
		}
		s.post(with("text", properties{"count": "7", "color": "RED"}), with("other", properties{"count": 7.5}))
		equal(bodies(s.subscription("labelled").all(1)), []string{"1"}, "by label and correlation id")
		equal(bodies(s.subscription("red").all(1)), []string{"2"}, "by a string")
		types := []string{"int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "float32", "float64"}
		equal(sorted(bodies(s.subscription("seven").all(10))), sorted(types), "by a number")
	},

	"filter-error": func(s *scene) {
		s.post(
			with("good", properties{"amount": int64(10), "parts": int64(5)}),
			with("bad", properties{"amount": int64(10), "parts": int64(0)}),
		)
		equal(bodies(s.subscription("kept").all(1)), []string{"good"}, "messages selected")
		equal(bodies(s.subscription("dropped").all(1)), []string{"good"}, "messages selected")
		letter := s.subscription("kept", deadLetters).all(1)[0]
		equal(string(letter.Body), "bad", "dead letter")
		equal(value(letter.DeadLetterReason), "FilterException", "reason")
		description := value(letter.DeadLetterErrorDescription)
		truth(strings.Contains(description, "kept"), "description: %s", description)
		s.subscription("dropped", deadLetters).all(0)
		equal(sorted(bodies(s.subscription("a").all(2))), []string{"bad", "good"}, "messages in another subscription")
	},

	"rule-action": func(s *scene) {
		sent := with("x", properties{"price": int64(150), "color": "red", "kept": true})
		sent.Subject = ptr("dear")
		s.post(sent)
		changed := s.subscription("half").all(1)[0]
		equal(string(changed.Body)+" "+value(changed.Subject), "x cheap", "changed copy")
		expected := properties{"price": int64(75), "kept": true, "RuleName": "half"}
		equal(changed.ApplicationProperties, expected, "its properties")
		plain := s.subscription("a").all(1)[0]
		equal(string(plain.Body)+" "+value(plain.Subject), "x dear", "other copy")
		equal(plain.ApplicationProperties, sent.ApplicationProperties, "its properties")
	},

	"rule-copies": func(s *scene) {
		s.post(with("x", properties{"color": "red"}))
		messages := s.subscription("a").all(3)
		equal(bodies(messages), []string{"x", "x", "x"}, "bodies")
		equal(localNumbers(messages), []int64{1, 2, 3}, "sequence numbers")
		shown := []string{}
		for _, message := range messages {
			set := message.ApplicationProperties
			shown = append(shown, fmt.Sprint(set["RuleName"], " ", set["number"]))
		}
		equal(sorted(shown), []string{"<nil> <nil>", "one 1", "two 2"}, "names of rules, and what they set")
	},
}

const notAllowed = "amqp:not-allowed"
