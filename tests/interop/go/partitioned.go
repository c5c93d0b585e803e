package main

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func init() {
	maps.Copy(scenarios, partitionedScenarios)
}

func eightKeys() []string {
	keys := []string{}
	for i := range 8 {
		keys = append(keys, fmt.Sprintf("key-%d", i))
	}
	return keys
}

func withKey(key, body string) *azservicebus.Message {
	message := text(body)
	message.PartitionKey = &key
	return message
}

func texts(bodies []string) []*azservicebus.Message {
	messages := []*azservicebus.Message{}
	for _, body := range bodies {
		messages = append(messages, text(body))
	}
	return messages
}

func numbersOf(messages []*azservicebus.ReceivedMessage) []int64 {
	numbers := []int64{}
	for _, message := range messages {
		numbers = append(numbers, value(message.SequenceNumber))
	}
	return numbers
}

func partitions(numbers []int64) map[int64]bool {
	found := map[int64]bool{}
	for _, number := range numbers {
		found[number>>48] = true
	}
	return found
}

func onSeveralPartitions(numbers []int64) {
	truth(len(partitions(numbers)) > 1, "all messages are on one partition: %v", numbers)
}

// browsed is all messages from this sequence number on, in as many calls as that takes.
func (r *inbox) browsed(from int64) []*azservicebus.ReceivedMessage {
	found := []*azservicebus.ReceivedMessage{}
	for some := r.peek(100, from); len(some) > 0; some = r.peek(100, from) {
		found = append(found, some...)
		from = value(some[len(some)-1].SequenceNumber) + 1
	}
	return found
}

var partitionedScenarios = map[string]func(*scene){
	"partitioned-spread": func(s *scene) {
		sent := sorted(counting(0, 20))
		s.post(texts(sent)...)
		receiver := s.receiver()
		browsed := receiver.browsed(1)
		numbers := numbersOf(browsed)
		equal(sorted(bodies(browsed)), sent, "browsed")
		onSeveralPartitions(numbers)
		truth(slices.IsSorted(numbers), "sequence numbers: %v", numbers)
		equal(numbersOf(receiver.browsed(numbers[7])), numbers[7:], "browsed from a number")
		equal(sorted(bodies(receiver.allOf(20))), sent, "messages")
		receiver.close()
		s.nothingIsLeft()
	},

	"partitioned-keys": func(s *scene) {
		keys := eightKeys()
		for turn := range 5 {
			for _, key := range keys {
				s.post(withKey(key, strconv.Itoa(turn)))
			}
		}
		sender := s.sender()
		batch := must(sender.NewMessageBatch(s.ctx, nil))
		for _, key := range keys {
			ok(batch.AddMessage(withKey(key, "never"), nil), "adding to a batch")
		}
		failsWithCondition(sender.SendMessageBatch(s.ctx, batch, nil), notAllowed, "a batch with several keys")
		receiver := s.receiver()
		all := receiver.allOf(5 * len(keys))
		onSeveralPartitions(numbersOf(all))
		for _, key := range keys {
			mine := []*azservicebus.ReceivedMessage{}
			for _, message := range all {
				if value(message.PartitionKey) == key {
					mine = append(mine, message)
				}
			}
			equal(bodies(mine), counting(0, 5), "messages of "+key)
			equal(len(partitions(numbersOf(mine))), 1, "partitions of "+key)
		}
		receiver.close()
		s.nothingIsLeft()
	},

	"partitioned-key-mismatch": func(s *scene) {
		different, same := in("a", "never"), in("a", "x")
		different.PartitionKey, same.PartitionKey = ptr("b"), ptr("a")
		sender := s.sender()
		err := sender.SendMessage(s.ctx, different, nil)
		truth(err != nil && strings.Contains(err.Error(), "session id"), "a different partition key: %v", err)
		ok(sender.SendMessage(s.ctx, same, nil), "sending with the same key")
		receiver := s.receiver()
		equal(bodies(receiver.allOf(1)), []string{"x"}, "messages")
		receiver.close()
		s.nothingIsLeft()
	},

	"partitioned-numbers": func(s *scene) {
		sent := sorted(counting(0, 20))
		s.post(texts(sent)...)
		receiver := s.receiver()
		numbers := []int64{}
		for range sent {
			message := receiver.one()
			ok(receiver.DeferMessage(s.ctx, message, nil), "deferring")
			numbers = append(numbers, value(message.SequenceNumber))
		}
		onSeveralPartitions(numbers)
		deferred := must(receiver.ReceiveDeferredMessages(s.ctx, numbers, nil))
		equal(sorted(bodies(deferred)), sent, "deferred messages")
		for _, message := range deferred {
			receiver.complete(message)
		}
		keys, scheduled, sender := eightKeys(), []int64{}, s.sender()
		due := time.Now().Add(6 * time.Second)
		for _, key := range keys {
			one := []*azservicebus.Message{withKey(key, key)}
			scheduled = append(scheduled, must(sender.ScheduleMessages(s.ctx, one, due, nil))...)
		}
		onSeveralPartitions(scheduled)
		ok(sender.CancelScheduledMessages(s.ctx, scheduled[:4], nil), "cancelling")
		equal(sorted(bodies(receiver.allOf(4))), keys[4:], "messages that arrived")
		receiver.close()
		s.nothingIsLeft()
	},

	"partitioned-duplicates": func(s *scene) {
		for _, key := range []string{"a", "b", "a"} {
			message := withKey(key, key)
			message.MessageID = ptr("1")
			s.post(message)
		}
		sent := sorted(counting(0, 20))
		for range 2 {
			messages := texts(sent)
			for i := range messages {
				messages[i].MessageID = ptr("id-" + sent[i])
			}
			s.post(messages...)
		}
		receiver := s.receiver()
		equal(sorted(bodies(receiver.allOf(22))), append(sent, "a", "b"), "messages")
		receiver.close()
		s.nothingIsLeft()
	},

	"partitioned-sessions": func(s *scene) {
		keys := eightKeys()
		for turn := range 3 {
			for _, key := range keys {
				s.post(in(key, strconv.Itoa(turn)))
			}
		}
		accepted, ids, numbers := []*session{}, []string{}, []int64{}
		for range keys {
			receiver := s.acceptNext()
			accepted, ids = append(accepted, receiver), append(ids, receiver.SessionID())
		}
		equal(sorted(ids), keys, "sessions")
		for _, receiver := range accepted {
			messages := receiver.allOf(3)
			equal(bodies(messages), counting(0, 3), "messages of a session")
			receiver.setState([]byte(receiver.SessionID()))
			numbers = append(numbers, numbersOf(messages)...)
		}
		onSeveralPartitions(numbers)
		sent := make(chan error)
		go func() {
			time.Sleep(1500 * time.Millisecond)
			sent <- s.sender().SendMessage(s.ctx, in("late", "x"), nil)
		}()
		late := s.acceptNext()
		ok(<-sent, "sending to a session that is waited for")
		equal(late.SessionID(), "late", "session waited for")
		equal(bodies(late.allOf(1)), []string{"x"}, "its messages")
		for _, receiver := range accepted {
			receiver.close()
		}
		for _, key := range keys {
			receiver := s.accept(key)
			equal(string(receiver.state()), key, "state when accepted again")
			receiver.close()
		}
	},

	"partitioned-topic": func(s *scene) {
		for i := range 20 {
			s.post(with(strconv.Itoa(i), properties{"number": int64(i)}))
		}
		for name, expected := range map[string][]string{"a": counting(0, 20), "some": counting(10, 10)} {
			messages := s.subscription(name).all(len(expected))
			equal(sorted(bodies(messages)), sorted(expected), "messages in "+name)
			onSeveralPartitions(numbersOf(messages))
		}
	},

	"partitioned-annotations": func(s *scene) {
		messages := texts(counting(0, 20))
		for _, key := range eightKeys() {
			messages = append(messages, withKey(key, key))
		}
		for _, message := range messages {
			message.MessageID = ptr(string(message.Body))
			if message.PartitionKey != nil {
				message.MessageID = ptr("id of " + string(message.Body))
			}
		}
		s.post(messages...)
		for _, message := range s.receiver().allOf(28) {
			equal(value(message.PartitionKey), string(message.Body), "key")
			partition := message.RawAMQPMessage.MessageAnnotations["x-opt-partition-id"]
			equal(partition, int16(value(message.SequenceNumber)>>48), "partition")
		}
	},
}
