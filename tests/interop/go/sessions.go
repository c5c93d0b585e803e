package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func init() {
	maps.Copy(scenarios, sessionScenarios)
}

const (
	stateLimit = 64 * 1024
	taken      = "com.microsoft:session-cannot-be-locked"
)

type session struct {
	*azservicebus.SessionReceiver
	inbox
}

func (s *scene) session(of *azservicebus.SessionReceiver, err error) *session {
	ok(err, "accepting")
	return &session{of, inbox{of, s.ctx}}
}

func (s *scene) tryAccept(id string) (*azservicebus.SessionReceiver, error) {
	return s.client.AcceptSessionForQueue(s.ctx, s.queue, id, nil)
}

func (s *scene) accept(id string) *session {
	return s.session(s.tryAccept(id))
}

// tryAcceptNext waits as long as the context allows.
func (s *scene) tryAcceptNext(wait time.Duration) (*azservicebus.SessionReceiver, error) {
	ctx, cancel := context.WithTimeout(s.ctx, wait)
	defer cancel()
	return s.client.AcceptNextSessionForQueue(ctx, s.queue, nil)
}

func (s *scene) acceptNext() *session {
	return s.session(s.tryAcceptNext(20 * time.Second))
}

// timedOut expects that no session came in time, as the broker said or, as it is asked to wait nearly as long as the
// context, that did.
func timedOut(err error, what string) {
	if !errors.Is(err, context.DeadlineExceeded) {
		failsWithCode(err, azservicebus.CodeTimeout, what)
	}
}

func (s *scene) noneIsAvailable(what string) {
	_, err := s.tryAcceptNext(time.Second)
	timedOut(err, what)
}

func (r *session) state() []byte {
	return must(r.GetSessionState(r.ctx, nil))
}

func (r *session) setState(state []byte) {
	ok(r.SetSessionState(r.ctx, state, nil), "setting the state")
}

func in(session, body string) *azservicebus.Message {
	message := text(body)
	message.SessionID = &session
	return message
}

func (s *scene) sendTo(session string, bodies ...string) {
	for _, body := range bodies {
		s.post(in(session, body))
	}
}

func sessionsOf(messages []*azservicebus.ReceivedMessage) []string {
	ids := []string{}
	for _, message := range messages {
		ids = append(ids, value(message.SessionID))
	}
	return ids
}

// failsWithText expects an error of which this SDK shows no more than the text.
func failsWithText(err error, part, what string) {
	truth(err != nil && bytes.Contains([]byte(err.Error()), []byte(part)), "%s: expected %q, got %v", what, part, err)
}

func (s *scene) listed(options *azservicebus.ListSessionsOptions) []string {
	ids := []string{}
	for pager := s.client.NewListSessionsForQueuePager(s.queue, options); pager.More(); {
		ids = append(ids, must(pager.NextPage(s.ctx)).Sessions...)
	}
	return sorted(ids)
}

var sessionScenarios = map[string]func(*scene){
	"session-accept": func(s *scene) {
		s.sendTo("a", "1", "2")
		s.sendTo("b", "other")
		s.sendTo("a", "3")
		receiver := s.accept("a")
		equal(receiver.SessionID(), "a", "session id")
		left := time.Until(receiver.LockedUntil())
		truth(left > 40*time.Second && left <= time.Minute, "locked for %v", left)
		messages := receiver.allOf(3)
		equal(bodies(messages), []string{"1", "2", "3"}, "bodies")
		equal(sessionsOf(messages), []string{"a", "a", "a"}, "session ids of the messages")
		receiver.none("messages left in the session")
		equal(bodies(s.accept("b").allOf(1)), []string{"other"}, "messages of the other session")
	},

	"session-next": func(s *scene) {
		s.sendTo("b", "first")
		s.sendTo("a", "second")
		s.sendTo("b", "third")
		first, second := s.acceptNext(), s.acceptNext()
		equal(first.SessionID()+second.SessionID(), "ba", "sessions")
		equal(bodies(first.allOf(2)), []string{"first", "third"}, "messages of one")
		equal(bodies(second.allOf(1)), []string{"second"}, "messages of the other")
		sender := s.sender()
		sent := make(chan error, 1)
		go func() {
			time.Sleep(1500 * time.Millisecond)
			sent <- sender.SendMessage(s.ctx, in("c", "fourth"), nil)
		}()
		third := s.acceptNext()
		ok(<-sent, "sending")
		equal(third.SessionID(), "c", "session waited for")
		equal(bodies(third.allOf(1)), []string{"fourth"}, "its messages")
	},

	"session-timeout": func(s *scene) {
		for range 30 {
			started := time.Now()
			_, err := s.tryAcceptNext(2 * time.Second)
			timedOut(err, "accepting any session")
			took := time.Since(started)
			truth(took > 1500*time.Millisecond && took < 4*time.Second, "that took %v", took)
			if !errors.Is(err, context.DeadlineExceeded) {
				return
			}
		}
		fail("the broker never said so")
	},

	"session-taken": func(s *scene) {
		s.accept("a")
		started := time.Now()
		_, err := s.tryAccept("a")
		failsWithCondition(err, taken, "accepting it again")
		truth(time.Since(started) < 5*time.Second, "the error took its time")
		equal(s.accept("b").SessionID(), "b", "other session")
	},

	"session-close": func(s *scene) {
		s.sendTo("a", "held", "next")
		first := s.accept("a")
		equal(string(first.one().Body), "held", "first delivery")
		first.close()
		messages := s.accept("a").allOf(2)
		equal(bodies(messages), []string{"held", "next"}, "messages")
		for _, message := range messages {
			equal(message.DeliveryCount, uint32(firstDelivery), "delivery count")
		}
	},

	"session-connection-lost": func(s *scene) {
		s.sendTo("a", "held")
		killedWhileHolding(s.queue, "a")
		message := s.acceptNext().allOf(1)[0]
		equal(string(message.Body), "held", "second delivery")
		equal(message.DeliveryCount, uint32(secondDelivery), "delivery count")
	},

	"session-renew": func(s *scene) {
		s.sendTo("a", "slow")
		receiver := s.accept("a")
		message := receiver.one()
		before := receiver.LockedUntil()
		time.Sleep(3 * time.Second)
		ok(receiver.RenewSessionLock(s.ctx, nil), "renewing")
		until := receiver.LockedUntil()
		truth(until.Sub(before) > 2*time.Second, "renewed from %v to %v", before, until)
		time.Sleep(3 * time.Second)
		receiver.complete(message)
		receiver.close()
		s.accept("a").none("messages left")
	},

	"session-lock-lost": func(s *scene) {
		s.sendTo("a", "held")
		receiver := s.accept("a")
		message := receiver.one()
		time.Sleep(6 * time.Second)
		lost := azservicebus.CodeLockLost
		failsWithCode(receiver.RenewSessionLock(s.ctx, nil), lost, "renewing")
		_, err := receiver.GetSessionState(s.ctx, nil)
		failsWithCode(err, lost, "reading the state")
		failsWithCode(receiver.SetSessionState(s.ctx, []byte("x"), nil), lost, "setting the state")
		// Otherwise this SDK accepts the session again and goes on trying for a minute.
		brief, cancel := context.WithTimeout(s.ctx, 2*time.Second)
		defer cancel()
		truth(receiver.CompleteMessage(brief, message, nil) != nil, "settling: no error")
		failsWithText(receiver.Close(s.ctx), "com.microsoft:session-lock-lost", "closing")
		next := s.acceptNext()
		again := next.allOf(1)[0]
		equal(string(again.Body), "held", "second delivery")
		equal(again.DeliveryCount, uint32(secondDelivery), "delivery count")
		equal(len(next.state()), 0, "bytes of the state")
	},

	"session-state": func(s *scene) {
		s.sendTo("a", "x")
		receiver := s.accept("a")
		equal(receiver.state(), []byte(nil), "state before it is set")
		binary := make([]byte, 10_240)
		for i := range binary {
			binary[i] = byte(i)
		}
		for _, state := range [][]byte{[]byte("one"), nil, binary} {
			receiver.setState(state)
			equal(receiver.state(), state, "state")
		}
		receiver.allOf(1)
		receiver.close()
		s.noneIsAvailable("accepting a session that has only a state")
		again := s.accept("a")
		equal(again.state(), binary, "state when accepted again")
		again.setState(nil)
		equal(again.state(), []byte(nil), "state when cleared")
		equal(s.accept("b").state(), []byte(nil), "state of another session")
	},

	"session-state-limit": func(s *scene) {
		receiver := s.accept("a")
		largest := bytes.Repeat([]byte("x"), stateLimit)
		receiver.setState(largest)
		above := bytes.Repeat([]byte("y"), stateLimit+1)
		failsWithText(receiver.SetSessionState(s.ctx, above, nil), "limit is 65536 bytes", "a byte more")
		equal(receiver.state(), largest, "state")
	},

	"session-abandon": func(s *scene) {
		s.sendTo("a", "first", "second")
		receiver := s.accept("a")
		message := receiver.one()
		equal(string(message.Body), "first", "first delivery")
		ok(receiver.AbandonMessage(s.ctx, message, nil), "abandoning")
		again := receiver.one()
		equal(string(again.Body), "first", "second delivery")
		equal(again.DeliveryCount, uint32(secondDelivery), "delivery count")
		receiver.complete(again)
		equal(bodies(receiver.allOf(1)), []string{"second"}, "next message")
	},

	"session-defer": func(s *scene) {
		s.sendTo("a", "later", "now")
		receiver := s.accept("a")
		message := receiver.one()
		ok(receiver.DeferMessage(s.ctx, message, nil), "deferring")
		equal(bodies(receiver.allOf(1)), []string{"now"}, "message after the deferred one")
		receiver.none("deliveries of a deferred message")
		receiver.close()
		number := []int64{value(message.SequenceNumber)}
		_, err := s.accept("b").ReceiveDeferredMessages(s.ctx, number, nil)
		failsWithCode(err, azservicebus.CodeNotFound, "in another session")
		receiver = s.accept("a")
		deferred := must(receiver.ReceiveDeferredMessages(s.ctx, number, nil))
		equal(bodies(deferred), []string{"later"}, "deferred messages")
		equal(sessionsOf(deferred), []string{"a"}, "session ids")
		receiver.complete(deferred[0])
		_, err = receiver.ReceiveDeferredMessages(s.ctx, number, nil)
		failsWithCode(err, azservicebus.CodeNotFound, "a completed message")
	},

	"session-dead-letter": func(s *scene) {
		s.sendTo("a", "bad", "good")
		receiver := s.accept("a")
		ok(receiver.DeadLetterMessage(s.ctx, receiver.one(), &azservicebus.DeadLetterOptions{
			Reason: ptr("my reason"), ErrorDescription: ptr("my description"),
		}), "dead-lettering")
		equal(bodies(receiver.allOf(1)), []string{"good"}, "message after it")
		letter := s.deadLetters().all(1)[0]
		equal(string(letter.Body)+" "+value(letter.SessionID), "bad a", "dead letter")
		equal(value(letter.DeadLetterReason), "my reason", "reason")
		equal(value(letter.DeadLetterErrorDescription), "my description", "description")
	},

	"session-schedule": func(s *scene) {
		due := time.Now().Add(6 * time.Second)
		sender := s.sender()
		messages := []*azservicebus.Message{in("a", "kept"), in("a", "cancelled")}
		numbers := must(sender.ScheduleMessages(s.ctx, messages, due, nil))
		ok(sender.CancelScheduledMessages(s.ctx, numbers[1:], nil), "cancelling")
		s.noneIsAvailable("accepting the session before its time")
		receiver := s.acceptNext()
		late := time.Since(due)
		truth(late >= 0 && late < 5*time.Second, "available %v late", late)
		equal(receiver.SessionID(), "a", "session")
		equal(bodies(receiver.allOf(1)), []string{"kept"}, "messages")
		receiver.none("other messages")
	},

	"session-peek": func(s *scene) {
		s.post(in("a", "1"), in("b", "2"), in("a", "3"), in("a", "4"), in("b", "5"))
		receiver := s.accept("a")
		browsed := receiver.peek(10)
		equal(bodies(browsed), []string{"1", "3", "4"}, "browsed")
		equal(sessionsOf(browsed), []string{"a", "a", "a"}, "session ids")
		next := value(browsed[0].SequenceNumber) + 1
		equal(bodies(receiver.peek(10, next)), []string{"3", "4"}, "browsed from a number that is none of the session")
		equal(bodies(receiver.allOf(3)), []string{"1", "3", "4"}, "messages, which browsing does not lock")
		equal(len(receiver.peek(10)), 0, "browsed when empty")
	},

	"session-receive-and-delete": func(s *scene) {
		s.sendTo("a", "x", "y")
		s.sendTo("b", "z")
		options := &azservicebus.SessionReceiverOptions{ReceiveMode: azservicebus.ReceiveModeReceiveAndDelete}
		receiver := s.session(s.client.AcceptSessionForQueue(s.ctx, s.queue, "a", options))
		equal(bodies(receiver.take(2, 10*time.Second)), []string{"x", "y"}, "bodies")
		receiver.close()
		next := s.acceptNext()
		equal(next.SessionID(), "b", "session that is left")
		equal(bodies(next.allOf(1)), []string{"z"}, "its messages")
	},

	"session-wait": func(s *scene) {
		s.sendTo("a", "x")
		options := &azservicebus.SessionReceiverOptions{ReceiveMode: azservicebus.ReceiveModeReceiveAndDelete}
		receiver := s.session(s.client.AcceptSessionForQueue(s.ctx, s.queue, "a", options))
		equal(bodies(receiver.take(1, 10*time.Second)), []string{"x"}, "bodies")
		equal(bodies(receiver.take(1, 5500*time.Millisecond)), []string{}, "messages while the lock ends")
		receiver.close()
	},

	"session-many": func(s *scene) {
		ids := []string{}
		for i := range 20 {
			ids = append(ids, fmt.Sprintf("s%02d", i))
		}
		sender := s.sender()
		for turn := range 3 {
			for _, id := range ids {
				ok(sender.SendMessage(s.ctx, in(id, fmt.Sprint(id, " ", turn)), nil), "sending")
			}
		}
		receivers, accepted := []*session{}, []string{}
		for range ids {
			receiver := s.acceptNext()
			receivers, accepted = append(receivers, receiver), append(accepted, receiver.SessionID())
		}
		equal(sorted(accepted), ids, "sessions")
		for turn := range 3 {
			for _, receiver := range receivers {
				message := receiver.one()
				equal(string(message.Body), fmt.Sprint(receiver.SessionID(), " ", turn), "message")
				receiver.complete(message)
			}
		}
		for _, receiver := range receivers {
			receiver.close()
		}
		s.noneIsAvailable("accepting a session when all are empty")
	},

	"session-list": func(s *scene) {
		equal(s.listed(nil), []string{}, "sessions at first")
		expected := []string{"early", "late"}
		sender := s.sender()
		for i := range 150 {
			id := fmt.Sprintf("s%03d", i)
			expected = append(expected, id)
			ok(sender.SendMessage(s.ctx, in(id, "x"), nil), "sending")
		}
		s.accept("early").setState([]byte("early"))
		time.Sleep(100 * time.Millisecond)
		between := time.Now()
		s.accept("late").setState([]byte("late"))
		equal(s.listed(nil), expected, "sessions")
		since := s.listed(&azservicebus.ListSessionsOptions{SessionStateUpdatedAfter: &between})
		equal(since, []string{"late"}, "sessions whose state was set since")
	},

	"session-receiver-required": func(s *scene) {
		s.sendTo("a", "x")
		failsWithCondition(s.receiver().tryTake(), notAllowed, "receiving")
		equal(bodies(s.accept("a").allOf(1)), []string{"x"}, "messages")
	},

	"session-id-required": func(s *scene) {
		sender := s.sender()
		failsWithCondition(sender.SendMessage(s.ctx, text("bare"), nil), notAllowed, "sending")
		batch := must(sender.NewMessageBatch(s.ctx, nil))
		ok(errors.Join(batch.AddMessage(in("a", "one"), nil), batch.AddMessage(text("bare"), nil)), "adding to a batch")
		failsWithCondition(sender.SendMessageBatch(s.ctx, batch, nil), notAllowed, "sending a batch")
		bare := []*azservicebus.Message{text("bare")}
		_, err := sender.ScheduleMessages(s.ctx, bare, time.Now().Add(time.Hour), nil)
		failsWithText(err, "requires sessions", "scheduling")
		ok(sender.SendMessage(s.ctx, in("a", "good"), nil), "sending one with a session id")
		equal(bodies(s.accept("a").peek(10)), []string{"good"}, "messages")
	},

	"session-not-required": func(s *scene) {
		s.sendTo("a", "x")
		_, err := s.tryAccept("a")
		failsWithCondition(err, notAllowed, "accepting a session")
		_, err = s.tryAcceptNext(5 * time.Second)
		failsWithCondition(err, notAllowed, "accepting any session")
		message := s.receiver().allOf(1)[0]
		equal(string(message.Body)+" "+value(message.SessionID), "x a", "message")
	},

	"session-subscription": func(s *scene) {
		next := func(wait time.Duration) (*azservicebus.SessionReceiver, error) {
			ctx, cancel := context.WithTimeout(s.ctx, wait)
			defer cancel()
			return s.client.AcceptNextSessionForSubscription(ctx, s.queue, "a", nil)
		}
		s.post(in("a", "1"), in("b", "2"), in("a", "3"))
		second := s.session(s.client.AcceptSessionForSubscription(s.ctx, s.queue, "a", "b", nil))
		sameName := s.session(s.client.AcceptSessionForSubscription(s.ctx, s.queue, "b", "b", nil))
		first := s.session(next(20 * time.Second))
		equal(first.SessionID()+second.SessionID(), "ab", "sessions")
		equal(bodies(first.allOf(2)), []string{"1", "3"}, "messages of one")
		equal(bodies(second.allOf(1)), []string{"2"}, "messages of the other")
		equal(bodies(sameName.allOf(1)), []string{"2"}, "messages of the session of the same name")
		first.setState([]byte("state"))
		equal(first.state(), []byte("state"), "state")
		_, err := s.client.AcceptSessionForSubscription(s.ctx, s.queue, "a", "a", nil)
		failsWithCondition(err, taken, "accepting it again")
		_, err = next(time.Second)
		timedOut(err, "accepting any session when all are empty")
		plain := sorted(bodies(s.subscription("plain").all(3)))
		equal(plain, []string{"1", "2", "3"}, "messages of a subscription without sessions")
	},
}
