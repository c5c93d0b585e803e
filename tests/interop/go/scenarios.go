package main

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/Azure/go-amqp"
)

func ptr[T any](value T) *T { return &value }

func text(body string) *azservicebus.Message { return &azservicebus.Message{Body: []byte(body)} }

func value[T any](pointer *T) T {
	truth(pointer != nil, "a property is missing")
	return *pointer
}

func counting(from, count int) []string {
	texts := make([]string, count)
	for i := range texts {
		texts[i] = strconv.Itoa(from + i)
	}
	return texts
}

// This SDK's delivery count is that of the wire and one: this delivery counts.
const firstDelivery, secondDelivery = 1, 2

var scenarios = map[string]func(*scene){
	"send-complete": func(s *scene) {
		s.send("hello")
		receiver := s.receiver()
		message := receiver.one()
		equal(string(message.Body), "hello", "body")
		equal(message.DeliveryCount, uint32(firstDelivery), "delivery count")
		receiver.complete(message)
		receiver.close()
		s.nothingIsLeft()
	},

	"duplicates": func(s *scene) {
		for _, each := range [][2]string{{"a", "1"}, {"b", "1"}, {"c", "2"}} {
			s.post(&azservicebus.Message{Body: []byte(each[0]), MessageID: ptr(each[1])})
		}
		receiver := s.receiver()
		equal(sorted(bodies(receiver.allOf(2))), []string{"a", "c"}, "bodies")
		receiver.close()
		s.nothingIsLeft()
	},

	"properties": func(s *scene) {
		s.post(&azservicebus.Message{
			Body: []byte("x"), MessageID: ptr("id-1"), Subject: ptr("subject"), CorrelationID: ptr("correlation"),
			ContentType: ptr("text/plain"), To: ptr("to-somebody"), ReplyTo: ptr("reply-to"),
			ReplyToSessionID: ptr("reply-session"), PartitionKey: ptr("key"), TimeToLive: ptr(time.Hour),
		})
		receiver := s.receiver()
		message := receiver.one()
		equal(message.MessageID, "id-1", "message id")
		equal(value(message.Subject), "subject", "subject")
		equal(value(message.CorrelationID), "correlation", "correlation id")
		equal(value(message.ContentType), "text/plain", "content type")
		equal(value(message.To), "to-somebody", "to")
		equal(value(message.ReplyTo), "reply-to", "reply to")
		equal(value(message.ReplyToSessionID), "reply-session", "reply to session id")
		equal(value(message.PartitionKey), "key", "partition key")
		equal(value(message.TimeToLive), time.Hour, "time to live")
		equal(local(message), int64(1), "sequence number")
		age := time.Since(value(message.EnqueuedTime))
		truth(age.Abs() < 30*time.Second, "enqueued %v ago", age)
		truth(value(message.LockedUntil).After(time.Now()), "locked until %v", message.LockedUntil)
		equal(value(message.ExpiresAt).Sub(*message.EnqueuedTime), time.Hour, "expires")
		truth(message.LockToken != [16]byte{}, "no lock token")
		receiver.complete(message)
	},

	"application-properties": func(s *scene) {
		when := time.Date(2024, 1, 2, 3, 4, 5, 678_000_000, time.UTC)
		sent := map[string]any{
			"text": "grüße 🐇", "int8": int8(-8), "uint8": uint8(200), "int16": int16(-300), "uint16": uint16(60000),
			"int32": int32(-70000), "uint32": uint32(4294967295), "int64": int64(-1 << 40), "uint64": uint64(1) << 63,
			"float": float32(1.5), "double": 2.5, "yes": true, "no": false, "none": nil,
			"uuid": amqp.UUID{0, 0x11, 0x22}, "binary": []byte{0, 255},
		}
		message := text("x")
		message.ApplicationProperties = maps.Clone(sent)
		message.ApplicationProperties["when"] = when
		s.post(message)
		receiver := s.receiver()
		received := receiver.one()
		truth(when.Equal(received.ApplicationProperties["when"].(time.Time)), "time")
		delete(received.ApplicationProperties, "when")
		equal(received.ApplicationProperties, sent, "application properties")
		receiver.complete(received)
	},

	"bodies": func(s *scene) {
		binary := make([]byte, 1024)
		for i := range binary {
			binary[i] = byte(i)
		}
		sent := []azservicebus.AMQPAnnotatedMessageBody{
			{Data: [][]byte{binary}},
			{Data: [][]byte{{}}},
			{Value: map[string]any{"text": "value", "number": int32(7), "list": []any{int64(1), "b"}}},
			{Sequence: [][]any{{int64(1), "b"}, {true}}},
			{Data: [][]byte{[]byte("part one"), []byte("part two")}},
		}
		sender := s.sender()
		for _, body := range sent {
			message := &azservicebus.AMQPAnnotatedMessage{Body: body}
			if key := s.key(); key != nil {
				message.MessageAnnotations = map[any]any{"x-opt-partition-key": *key}
			}
			ok(sender.SendAMQPAnnotatedMessage(s.ctx, message, nil), "sending")
		}
		for i, message := range s.receiver().allOf(len(sent)) {
			body := message.RawAMQPMessage.Body
			if i == 1 {
				equal(len(body.Data), 1, "data sections of an empty body")
				equal(len(body.Data[0]), 0, "bytes of an empty body")
				continue
			}
			equal(body, sent[i], fmt.Sprintf("body %d", i))
		}
	},

	"batch": func(s *scene) {
		sender := s.sender()
		batch := must(sender.NewMessageBatch(s.ctx, nil))
		for i := range 100 {
			message := text(fmt.Sprintf("message %d", i))
			message.MessageID = ptr(strconv.Itoa(i))
			ok(batch.AddMessage(message, nil), "adding to a batch")
		}
		ok(sender.SendMessageBatch(s.ctx, batch, nil), "sending a batch")
		for i, message := range s.receiver().allOf(100) {
			equal(message.MessageID, strconv.Itoa(i), "id")
			equal(local(message), int64(i+1), "sequence number")
			equal(string(message.Body), fmt.Sprintf("message %d", i), "body")
		}
	},

	"large-message": func(s *scene) {
		body := make([]byte, 900*1024)
		for i := range body {
			body[i] = byte(i * 31 % 251)
		}
		s.post(&azservicebus.Message{Body: body})
		receiver := s.receiver()
		message := receiver.one(20 * time.Second)
		truth(bytes.Equal(message.Body, body), "the body differs")
		receiver.complete(message)
	},

	"pipelined": func(s *scene) {
		sender := s.sender()
		var sending sync.WaitGroup
		failures := make(chan error, 2000)
		for worker := range 50 {
			sending.Add(1)
			go func() {
				defer sending.Done()
				for i := worker; i < 2000; i += 50 {
					message := text(strings.Repeat("x", 100))
					message.MessageID = ptr(strconv.Itoa(i))
					failures <- sender.SendMessage(s.ctx, message, nil)
				}
			}()
		}
		sending.Wait()
		close(failures)
		for err := range failures {
			ok(err, "sending")
		}
		receiver := s.receiver()
		ids := map[string]bool{}
		for _, message := range receiver.allOf(2000) {
			ids[message.MessageID] = true
		}
		equal(len(ids), 2000, "distinct ids")
		receiver.close()
		s.nothingIsLeft()
	},

	"receive-and-delete": func(s *scene) {
		s.send("a", "b")
		options := &azservicebus.ReceiverOptions{ReceiveMode: azservicebus.ReceiveModeReceiveAndDelete}
		receiver := s.receiving(options)
		got := receiver.take(2, 10*time.Second)
		if len(got) == 1 {
			got = append(got, receiver.one())
		}
		equal(bodies(got), []string{"a", "b"}, "bodies")
		receiver.close()
		s.nothingIsLeft()
	},

	"abandon": func(s *scene) {
		first, second := text("first"), text("second")
		first.MessageID, first.PartitionKey, second.PartitionKey = ptr("id"), s.key(), s.key()
		s.post(first, second)
		receiver := s.receiver()
		message := receiver.one()
		equal(string(message.Body), "first", "first delivery")
		ok(receiver.AbandonMessage(s.ctx, message, nil), "abandoning")
		again := receiver.one()
		equal(string(again.Body), "first", "second delivery")
		equal(again.DeliveryCount, uint32(secondDelivery), "delivery count")
		equal(again.MessageID, "id", "id")
		truth(again.LockToken != message.LockToken, "the lock token is the old one")
		receiver.complete(again)
		last := receiver.one()
		equal(string(last.Body), "second", "next message")
		receiver.complete(last)
	},

	"abandon-properties": func(s *scene) {
		message := text("x")
		message.ApplicationProperties = map[string]any{"kept": int64(1), "changed": "before"}
		s.post(message)
		receiver := s.receiver()
		options := &azservicebus.AbandonMessageOptions{PropertiesToModify: map[string]any{"changed": "after", "added": int64(5)}}
		ok(receiver.AbandonMessage(s.ctx, receiver.one(), options), "abandoning")
		again := receiver.one()
		expected := map[string]any{"kept": int64(1), "changed": "after", "added": int64(5)}
		equal(again.ApplicationProperties, expected, "application properties")
		receiver.complete(again)
	},

	"defer": func(s *scene) {
		s.send("later")
		receiver := s.receiver()
		message := receiver.one()
		ok(receiver.DeferMessage(s.ctx, message, nil), "deferring")
		receiver.none("deliveries of a deferred message")
		numbers := []int64{value(message.SequenceNumber)}
		deferred := must(receiver.ReceiveDeferredMessages(s.ctx, numbers, nil))
		equal(bodies(deferred), []string{"later"}, "deferred messages")
		equal(deferred[0].State, azservicebus.MessageStateDeferred, "state")
		receiver.complete(deferred[0])
		_, err := receiver.ReceiveDeferredMessages(s.ctx, numbers, nil)
		failsWithCode(err, azservicebus.CodeNotFound, "a completed message")
		receiver.close()
		s.nothingIsLeft()
	},

	"dead-letter": func(s *scene) {
		sent := text("bad")
		sent.MessageID = ptr("id")
		sent.ApplicationProperties = map[string]any{"kept": "yes"}
		s.post(sent)
		receiver := s.receiver()
		ok(receiver.DeadLetterMessage(s.ctx, receiver.one(), &azservicebus.DeadLetterOptions{
			Reason: ptr("my reason"), ErrorDescription: ptr("my description"),
			PropertiesToModify: map[string]any{"added": int64(7)},
		}), "dead-lettering")
		receiver.none("messages in the queue itself")
		letters := s.deadLetters()
		message := letters.one()
		equal(string(message.Body)+" "+message.MessageID, "bad id", "dead-lettered message")
		equal(value(message.DeadLetterReason), "my reason", "reason")
		equal(value(message.DeadLetterErrorDescription), "my description", "description")
		equal(message.ApplicationProperties["kept"], "yes", "property of the sender")
		equal(message.ApplicationProperties["added"], int64(7), "property of the receiver")
		equal(value(message.DeadLetterSource), s.queue, "source")
		letters.complete(message)
		letters.none("dead letters left")
	},

	"dead-letter-queue": func(s *scene) {
		sent := text("bad")
		sent.TimeToLive = ptr(3 * time.Second)
		s.post(sent)
		receiver := s.receiver()
		options := &azservicebus.DeadLetterOptions{Reason: ptr("because")}
		ok(receiver.DeadLetterMessage(s.ctx, receiver.one(), options), "dead-lettering")
		time.Sleep(3500 * time.Millisecond)
		letters := s.deadLetters()
		equal(bodies(letters.peek(5)), []string{"bad"}, "browsed")
		message := letters.one()
		ok(letters.AbandonMessage(s.ctx, message, nil), "abandoning")
		again := letters.one()
		equal(again.DeliveryCount, message.DeliveryCount, "delivery count")
		equal(value(again.DeadLetterReason), "because", "reason")
		letters.complete(again)
		equal(bodies(letters.peek(5)), []string{}, "left")
	},

	"max-delivery-count": func(s *scene) {
		s.send("poison")
		receiver := s.receiver()
		for count := range 2 {
			message := receiver.one()
			equal(message.DeliveryCount, uint32(firstDelivery+count), "delivery count")
			ok(receiver.AbandonMessage(s.ctx, message, nil), "abandoning")
		}
		receiver.none("messages in the queue itself")
		letters := s.deadLetters()
		message := letters.one()
		equal(string(message.Body), "poison", "dead letter")
		equal(value(message.DeadLetterReason), "MaxDeliveryCountExceeded", "reason")
		letters.complete(message)
	},

	"lock-expiry": func(s *scene) {
		s.send("slow")
		first, second := s.receiver(), s.receiver()
		message := first.one()
		started := time.Now()
		second.none("messages while locked")
		again := second.one(12 * time.Second)
		truth(time.Since(started) > 3500*time.Millisecond, "delivered again after %v", time.Since(started))
		equal(again.MessageID, message.MessageID, "id")
		equal(again.DeliveryCount, uint32(secondDelivery), "delivery count")
		second.complete(again)
	},

	"renew-lock": func(s *scene) {
		s.send("slow")
		receiver := s.receiver()
		message := receiver.one()
		before := value(message.LockedUntil)
		time.Sleep(3 * time.Second)
		ok(receiver.RenewMessageLock(s.ctx, message, nil), "renewing")
		until := value(message.LockedUntil)
		truth(until.Sub(before) > 2*time.Second, "renewed from %v to %v", before, until)
		time.Sleep(3500 * time.Millisecond)
		receiver.complete(message)
		receiver.close()
		s.nothingIsLeft()
	},

	"send-again": func(s *scene) {
		sent := text("x")
		sent.MessageID, sent.Subject, sent.SessionID, sent.PartitionKey = ptr("id"), ptr("s"), ptr("ключ"), ptr("ключ")
		sent.ApplicationProperties = map[string]any{"k": "v"}
		s.post(sent)
		receiver := s.receiver()
		message := receiver.one()
		receiver.complete(message)
		s.post(message.Message())
		again := receiver.one()
		receiver.complete(again)
		equal([]string{again.MessageID, value(again.Subject), value(again.SessionID), value(again.PartitionKey)},
			[]string{"id", "s", "ключ", "ключ"}, "what it had")
		equal(again.ApplicationProperties, map[string]any{"k": "v"}, "properties")
	},

	"lock-lost": func(s *scene) {
		s.send("slow")
		receiver := s.receiver()
		message := receiver.one()
		time.Sleep(6 * time.Second)
		err := receiver.RenewMessageLock(s.ctx, message, nil)
		failsWithCode(err, azservicebus.CodeLockLost, "renewing a lost lock")
		err = receiver.CompleteMessage(s.ctx, message, nil)
		failsWithCode(err, azservicebus.CodeLockLost, "completing after the lock")
		again := receiver.one()
		equal(again.MessageID, message.MessageID, "id")
		equal(again.DeliveryCount, uint32(secondDelivery), "delivery count")
		receiver.complete(again)
	},

	"peek": func(s *scene) {
		s.send("a", "b", "c", "d", "e")
		receiver := s.receiver()
		browsed := receiver.peek(10)
		equal(bodies(browsed), []string{"a", "b", "c", "d", "e"}, "browsed")
		some := receiver.peek(2, value(browsed[2].SequenceNumber))
		equal(bodies(some), []string{"c", "d"}, "browsed from a number")
		equal(local(some[0]), int64(3), "its number")
		for _, message := range browsed {
			truth(message.LockedUntil == nil, "browsed as locked until %v", message.LockedUntil)
		}
		locked := receiver.one()
		looked := receiver.peek(2, value(locked.SequenceNumber))
		equal(value(looked[0].LockedUntil).UnixMilli(), value(locked.LockedUntil).UnixMilli(), "end of the lock")
		truth(looked[1].LockedUntil == nil, "the next is locked until %v", looked[1].LockedUntil)
		ok(receiver.CompleteMessage(s.ctx, locked, nil), "completing")
		equal(len(receiver.allOf(4)), 4, "received after browsing")
		equal(bodies(receiver.peek(10)), []string{}, "browsed when empty")
	},

	"schedule": func(s *scene) {
		due := time.Now().Add(6 * time.Second)
		sender := s.sender()
		numbers := must(sender.ScheduleMessages(s.ctx, []*azservicebus.Message{text("later")}, due, nil))
		too := text("later too")
		too.ScheduledEnqueueTime = &due
		s.post(too)
		receiver := s.receiver()
		browsed := receiver.peek(5)
		equal(sorted(bodies(browsed)), []string{"later", "later too"}, "browsed")
		equal(len(numbers), 1, "numbers returned")
		truth(slices.ContainsFunc(browsed, func(message *azservicebus.ReceivedMessage) bool {
			return value(message.SequenceNumber) == numbers[0] && message.State == azservicebus.MessageStateScheduled
		}), "the number returned is not there as scheduled")
		receiver.none("messages before their time")
		messages := receiver.allOf(2)
		late := time.Since(due)
		truth(late >= 0 && late < 5*time.Second, "delivered %v late", late)
		equal(sorted(bodies(messages)), []string{"later", "later too"}, "bodies")
	},

	"cancel-scheduled": func(s *scene) {
		sender := s.sender()
		messages := []*azservicebus.Message{text("kept"), text("cancelled")}
		numbers := must(sender.ScheduleMessages(s.ctx, messages, time.Now().Add(6*time.Second), nil))
		ok(sender.CancelScheduledMessages(s.ctx, numbers[1:], nil), "cancelling")
		err := sender.CancelScheduledMessages(s.ctx, numbers[1:], nil)
		failsWithCode(err, azservicebus.CodeNotFound, "a second cancel")
		equal(bodies(s.receiver().allOf(1)), []string{"kept"}, "messages that arrived")
		s.nothingIsLeft()
	},

	"time-to-live": func(s *scene) {
		short := text("short")
		short.TimeToLive = ptr(time.Second)
		s.post(short, text("long"))
		time.Sleep(1500 * time.Millisecond)
		equal(bodies(s.receiver().allOf(1)), []string{"long"}, "messages that arrived")
		s.nothingIsLeft()
	},

	"time-to-live-dead-letter": func(s *scene) {
		short := text("short")
		short.TimeToLive = ptr(time.Second)
		s.post(short)
		time.Sleep(1500 * time.Millisecond)
		s.receiver().none("expired messages delivered")
		message := s.deadLetters().allOf(1)[0]
		equal(string(message.Body), "short", "dead letter")
		equal(value(message.DeadLetterReason), "TTLExpiredException", "reason")
	},

	"settle-elsewhere": func(s *scene) {
		s.send("x")
		first := s.receiver()
		message := first.one()
		first.close()
		// A message with nothing but a token is one the SDK settles over the management link.
		second, held := s.receiver(), &azservicebus.ReceivedMessage{LockToken: message.LockToken}
		second.complete(held)
		failsWithCode(second.CompleteMessage(s.ctx, held, nil), azservicebus.CodeLockLost, "a second settlement")
		s.nothingIsLeft()
	},

	"prompt-return": func(s *scene) {
		receiver := s.receiver()
		started := time.Now()
		equal(len(receiver.take(10, time.Second)), 0, "messages of an empty queue")
		truth(time.Since(started) < 6*time.Second, "an empty receive took %v", time.Since(started))
		s.send("a", "b", "c")
		started = time.Now()
		got := receiver.take(10, 20*time.Second)
		truth(time.Since(started) < 10*time.Second, "a short receive took %v", time.Since(started))
		for _, message := range got {
			receiver.complete(message)
		}
		s.send("d", "e")
		rest := receiver.allOf(5 - len(got))
		equal(sorted(append(bodies(got), bodies(rest)...)), []string{"a", "b", "c", "d", "e"}, "bodies")
		receiver.close()
		s.nothingIsLeft()
	},

	"prefetch": func(s *scene) {
		// This SDK has no prefetch; asking for all at once is the most credit it grants.
		s.send(counting(0, 100)...)
		receiver := s.receiver()
		equal(bodies(receiver.allOf(100)), counting(0, 100), "bodies")
		receiver.close()
		s.nothingIsLeft()
	},

	"competing": func(s *scene) {
		s.send(counting(100, 60)...)
		var consuming sync.WaitGroup
		var lock sync.Mutex
		var received []string
		var failures []any
		for range 3 {
			consuming.Add(1)
			go func() {
				defer consuming.Done()
				defer func() {
					if cause := recover(); cause != nil {
						failures = append(failures, cause)
					}
				}()
				receiver := s.receiver()
				for some := receiver.take(5, 3*time.Second); len(some) > 0; some = receiver.take(5, 3*time.Second) {
					for _, message := range some {
						receiver.complete(message)
					}
					lock.Lock()
					received = append(received, bodies(some)...)
					lock.Unlock()
				}
			}()
		}
		consuming.Wait()
		equal(len(failures), 0, fmt.Sprint(failures))
		equal(sorted(received), counting(100, 60), "bodies")
	},

	"connection-reuse": func(s *scene) {
		for i := range 4 {
			expected := []string{fmt.Sprintf("%d a", i), fmt.Sprintf("%d b", i)}
			s.send(expected...)
			first, second := s.receiver(), s.receiver()
			messages := []*azservicebus.ReceivedMessage{first.one(), second.one()}
			equal(sorted(bodies(messages)), expected, "bodies")
			first.complete(messages[0])
			second.complete(messages[1])
			first.close()
			second.close()
		}
		s.nothingIsLeft()
	},

	"close-unsettled": func(s *scene) {
		s.send("held")
		first := s.receiver()
		first.one()
		first.close()
		second := s.receiver()
		message := second.one(12 * time.Second)
		equal(string(message.Body), "held", "second delivery")
		equal(message.DeliveryCount, uint32(secondDelivery), "delivery count")
		second.complete(message)
	},

	"connection-lost": func(s *scene) {
		s.send("held")
		killedWhileHolding(s.queue)
		receiver := s.receiver()
		message := receiver.one(3 * time.Second)
		equal(string(message.Body), "held", "second delivery")
		equal(message.DeliveryCount, uint32(secondDelivery), "delivery count")
		receiver.complete(message)
	},

	"unknown-queue": func(s *scene) {
		started := time.Now()
		failsWithCode(s.trySend("x"), azservicebus.CodeNotFound, "sending")
		failsWithCode(s.receiver().tryTake(), azservicebus.CodeNotFound, "receiving")
		truth(time.Since(started) < 15*time.Second, "the error took its time")
	},

	"wrong-key": func(s *scene) {
		other := newScene(s.ctx, s.queue, config.WrongKey)
		defer other.client.Close(s.ctx)
		failsWithCode(other.trySend("x"), azservicebus.CodeUnauthorizedAccess, "sending")
		s.nothingIsLeft()
	},

	"signature": func(s *scene) {
		signed := newScene(s.ctx, s.queue, config.Signature)
		defer signed.client.Close(s.ctx)
		signed.send("x")
		equal(bodies(signed.receiver().allOf(1)), []string{"x"}, "bodies")
		s.nothingIsLeft()
	},

	"missing-right": func(s *scene) {
		listener, sender := newScene(s.ctx, s.queue, config.ListenOnly), newScene(s.ctx, s.queue, config.SendOnly)
		defer listener.client.Close(s.ctx)
		defer sender.client.Close(s.ctx)
		failsWithCode(listener.trySend("x"), azservicebus.CodeUnauthorizedAccess, "sending without the right")
		sender.send("x")
		failsWithCode(sender.receiver().tryTake(), azservicebus.CodeUnauthorizedAccess, "receiving without the right")
		equal(bodies(listener.receiver().allOf(1)), []string{"x"}, "bodies")
	},

	"oversized": func(s *scene) {
		sender := s.sender()
		err := sender.SendMessage(s.ctx, &azservicebus.Message{Body: make([]byte, 100_000)}, nil)
		truth(errors.Is(err, azservicebus.ErrMessageTooLarge) || strings.Contains(fmt.Sprint(err), "size"), "error: %v", err)
		ok(sender.SendMessage(s.ctx, text("small"), nil), "sending a small message")
		equal(bodies(s.receiver().allOf(1)), []string{"small"}, "messages that arrived")
	},

	"disabled": func(s *scene) {
		failsWithCondition(s.trySend("x"), entityDisabled, "sending")
		failsWithCondition(s.receiver().tryTake(), entityDisabled, "receiving")
	},

	"send-disabled": func(s *scene) {
		failsWithCondition(s.trySend("x"), entityDisabled, "sending")
		s.nothingIsLeft()
	},

	"receive-disabled": func(s *scene) {
		s.send("x")
		failsWithCondition(s.receiver().tryTake(), entityDisabled, "receiving")
	},
}

const entityDisabled = "com.microsoft:entity-disabled"
