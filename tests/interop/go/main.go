// The harness of the Go program: `interop SCENARIO...` runs some at a time and prints one line of JSON for each.
// What the scenarios are is in scenarios.py; how this SDK does them is in scenarios.go.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/Azure/go-amqp"
)

const atOnce = 16

var config struct {
	ConnectionString string   `json:"connection_string"`
	WrongKey         string   `json:"wrong_key"`
	Signature        string   `json:"signature"`
	ListenOnly       string   `json:"listen_only"`
	SendOnly         string   `json:"send_only"`
	Secure           string   `json:"secure"`
	SecureListenOnly string   `json:"secure_listen_only"`
	KeyName          string   `json:"key_name"`
	Key              string   `json:"key"`
	EntityPrefix     string   `json:"entity_prefix"`
	Keyed            []string `json:"keyed"`
}

type result struct {
	Scenario string  `json:"scenario"`
	OK       bool    `json:"ok"`
	Detail   string  `json:"detail"`
	Seconds  float64 `json:"seconds"`
}

// A failed expectation ends its scenario by a panic that run recovers.
type failure string

func fail(format string, values ...any) {
	panic(failure(fmt.Sprintf(format, values...)))
}

func equal(actual, expected any, what string) {
	if !reflect.DeepEqual(actual, expected) {
		fail("%s: expected %#v, got %#v", what, expected, actual)
	}
}

func truth(condition bool, format string, values ...any) {
	if !condition {
		fail(format, values...)
	}
}

func ok(err error, what string) {
	if err != nil {
		fail("%s: %v", what, err)
	}
}

func must[T any](value T, err error) T {
	ok(err, "unexpected error")
	return value
}

// failsWithCode expects the SDK's own error with this code.
func failsWithCode(err error, code azservicebus.Code, what string) {
	var typed *azservicebus.Error
	truth(errors.As(err, &typed) && typed.Code == code, "%s: expected code %q, got %v", what, code, err)
}

// failsWithCondition expects an error of the broker that the SDK passes on as it came.
func failsWithCondition(err error, condition, what string) {
	var answer *amqp.Error
	var link *amqp.LinkError
	if errors.As(err, &link) && link.RemoteErr != nil {
		answer = link.RemoteErr
	}
	truth(answer != nil || errors.As(err, &answer), "%s: expected %s, got %v", what, condition, err)
	equal(string(answer.Condition), condition, what)
}

// scene is a client and the queue of one scenario.
type scene struct {
	queue  string
	client *azservicebus.Client
	ctx    context.Context
}

// key is a partition key for messages whose order matters; none where every queue is one fragment.
func (s *scene) key() *string {
	if name := strings.TrimPrefix(s.queue, config.EntityPrefix); slices.Contains(config.Keyed, name) {
		return &name
	}
	return nil
}

// local is the sequence number without the partition, which is in the highest 16 bits on partitioned entities.
func local(message *azservicebus.ReceivedMessage) int64 {
	return value(message.SequenceNumber) & (1<<48 - 1)
}

func newScene(ctx context.Context, queue, connectionString string) *scene {
	options := &azservicebus.ClientOptions{RetryOptions: azservicebus.RetryOptions{MaxRetries: -1}}
	return &scene{queue, must(azservicebus.NewClientFromConnectionString(connectionString, options)), ctx}
}

func (s *scene) sender() *azservicebus.Sender {
	return must(s.client.NewSender(s.queue, nil))
}

func (s *scene) trySend(body string) error {
	sender := s.sender()
	defer sender.Close(s.ctx)
	return sender.SendMessage(s.ctx, &azservicebus.Message{Body: []byte(body), PartitionKey: s.key()}, nil)
}

func (s *scene) send(bodies ...string) {
	for _, body := range bodies {
		ok(s.trySend(body), "sending")
	}
}

func (s *scene) post(messages ...*azservicebus.Message) {
	sender := s.sender()
	defer sender.Close(s.ctx)
	for _, message := range messages {
		ok(sender.SendMessage(s.ctx, message, nil), "sending")
	}
}

func (s *scene) receiver() *receiver {
	return s.receiving(nil)
}

func (s *scene) deadLetters() *receiver {
	return s.receiving(&azservicebus.ReceiverOptions{SubQueue: azservicebus.SubQueueDeadLetter})
}

func (s *scene) receiving(options *azservicebus.ReceiverOptions) *receiver {
	return newReceiver(s.ctx, must(s.client.NewReceiverForQueue(s.queue, options)))
}

func (s *scene) nothingIsLeft() {
	receiver := s.receiver()
	receiver.none("messages left")
	equal(len(receiver.peek(10)), 0, "messages left to browse")
	receiver.close()
}

// source is what receivers and receivers of sessions have in common.
type source interface {
	ReceiveMessages(context.Context, int, *azservicebus.ReceiveMessagesOptions) ([]*azservicebus.ReceivedMessage, error)
	PeekMessages(context.Context, int, *azservicebus.PeekMessagesOptions) ([]*azservicebus.ReceivedMessage, error)
	CompleteMessage(context.Context, *azservicebus.ReceivedMessage, *azservicebus.CompleteMessageOptions) error
	Close(context.Context) error
}

// inbox is what is done alike with both.
type inbox struct {
	source source
	ctx    context.Context
}

type receiver struct {
	*azservicebus.Receiver
	inbox
}

func newReceiver(ctx context.Context, of *azservicebus.Receiver) *receiver {
	return &receiver{of, inbox{of, ctx}}
}

// take returns up to count messages; none when the first does not come in time.
func (r *inbox) take(count int, wait time.Duration) []*azservicebus.ReceivedMessage {
	return r.takeWith(count, wait, nil)
}

func (r *inbox) takeWith(
	count int, wait time.Duration, options *azservicebus.ReceiveMessagesOptions,
) []*azservicebus.ReceivedMessage {
	ctx, cancel := context.WithTimeout(r.ctx, wait)
	defer cancel()
	messages, err := r.source.ReceiveMessages(ctx, count, options)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		fail("receiving: %v", err)
	}
	return messages
}

func (r *inbox) tryTake() error {
	ctx, cancel := context.WithTimeout(r.ctx, 2*time.Second)
	defer cancel()
	_, err := r.source.ReceiveMessages(ctx, 1, nil)
	return err
}

func (r *inbox) one(wait ...time.Duration) *azservicebus.ReceivedMessage {
	messages := r.take(1, append(wait, 10*time.Second)[0])
	equal(len(messages), 1, "messages received")
	return messages[0]
}

func (r *inbox) none(what string) {
	equal(bodies(r.take(1, time.Second)), []string{}, what)
}

func (r *inbox) complete(message *azservicebus.ReceivedMessage) {
	ok(r.source.CompleteMessage(r.ctx, message, nil), "completing")
}

func (r *inbox) allOf(count int) []*azservicebus.ReceivedMessage {
	// Unless told to wait, the SDK returns 20 ms after the first message, and releases those that come before the next
	// call: on a busy machine they would be received behind later ones.
	patient := &azservicebus.ReceiveMessagesOptions{TimeAfterFirstMessage: 10 * time.Second}
	var all []*azservicebus.ReceivedMessage
	for len(all) < count {
		some := r.takeWith(min(500, count-len(all)), 10*time.Second, patient)
		truth(len(some) > 0, "%d of %d messages arrived", len(all), count)
		for _, message := range some {
			r.complete(message)
		}
		all = append(all, some...)
	}
	return all
}

func (r *inbox) peek(count int, from ...int64) []*azservicebus.ReceivedMessage {
	first := append(from, 1)[0] // without it the SDK goes on where the last call ended
	return must(r.source.PeekMessages(r.ctx, count, &azservicebus.PeekMessagesOptions{FromSequenceNumber: &first}))
}

func (r *inbox) close() {
	ok(r.source.Close(r.ctx), "closing a receiver")
}

func bodies(messages []*azservicebus.ReceivedMessage) []string {
	texts := []string{}
	for _, message := range messages {
		texts = append(texts, string(message.Body))
	}
	return texts
}

func sorted(texts []string) []string {
	slices.Sort(texts)
	return texts
}

// killedWhileHolding lets another process of this program receive the queue's message, or the session's, and kills it.
func killedWhileHolding(queue string, session ...string) {
	holder := exec.Command(must(os.Executable()), append([]string{"--hold", queue}, session...)...)
	output := must(holder.StdoutPipe())
	ok(holder.Start(), "starting another process")
	said := make([]byte, 5)
	must(output.Read(said))
	equal(string(said), "held\n", "what the other process says")
	ok(holder.Process.Kill(), "killing it")
	_ = holder.Wait() // reports the kill
}

func run(name string) (outcome result) {
	started := time.Now()
	outcome.Scenario = name
	defer func() {
		outcome.Seconds = time.Since(started).Seconds()
		if cause := recover(); cause != nil {
			outcome.OK, outcome.Detail = false, fmt.Sprint(cause)
		}
	}()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute) // a busy disk takes long for 2,000 sends
	defer cancel()
	scenario, known := scenarios[name]
	truth(known, "this program does not know the scenario")
	scene := newScene(ctx, config.EntityPrefix+name, config.ConnectionString)
	defer scene.client.Close(ctx)
	scenario(scene)
	outcome.OK = true
	return outcome
}

func main() {
	ok(json.NewDecoder(strings.NewReader(os.Getenv("PEEKLOCK_INTEROP"))).Decode(&config), "reading PEEKLOCK_INTEROP")
	if len(os.Args) > 2 && os.Args[1] == "--hold" {
		scene := newScene(context.Background(), os.Args[2], config.ConnectionString)
		if len(os.Args) > 3 {
			scene.accept(os.Args[3]).one()
		} else {
			scene.receiver().one()
		}
		fmt.Println("held")
		time.Sleep(time.Minute)
		return
	}
	var running sync.WaitGroup
	var printing sync.Mutex
	free := make(chan struct{}, atOnce)
	for _, name := range os.Args[1:] {
		running.Add(1)
		go func() {
			defer running.Done()
			free <- struct{}{}
			defer func() { <-free }()
			line := must(json.Marshal(run(name)))
			printing.Lock()
			defer printing.Unlock()
			fmt.Println(string(line))
		}()
	}
	running.Wait()
}
