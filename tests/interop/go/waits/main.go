// What users of azservicebus wait: the program of waits.py, with what the SDK does by default. Runs until killed.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus/admin"
)

var config struct {
	ConnectionString string   `json:"connection_string"`
	Secure           string   `json:"secure"`
	Users            int      `json:"users"`
	PeriodS          float64  `json:"period_s"`
	Operations       []string `json:"operations"`
}

var ctx = context.Background()

func must[T any](value T, err error) T {
	if err != nil {
		panic(err)
	}
	return value
}

func nameOf(err error) string {
	var service *azservicebus.Error
	var response *azcore.ResponseError
	switch {
	case err == nil:
		return ""
	case errors.As(err, &service):
		return string(service.Code)
	case errors.As(err, &response):
		return fmt.Sprint(response.StatusCode)
	}
	return fmt.Sprintf("%T", err)
}

// user does one kind of operation, once in each period.
type user struct {
	operation string
	number    int
	client    *azservicebus.Client
}

// timed reports the call.
func (u *user) timed(call func() error) error {
	began := time.Now()
	err := call()
	said := map[string]any{
		"operation": u.operation, "user": u.number, "began": float64(began.UnixNano()) / 1e9,
		"seconds": time.Since(began).Seconds(), "error": nameOf(err),
	}
	os.Stdout.Write(append(must(json.Marshal(said)), '\n'))
	return err
}

func (u *user) one(receiver *azservicebus.Receiver) (*azservicebus.ReceivedMessage, error) {
	found, err := receiver.ReceiveMessages(ctx, 1, nil)
	if err != nil {
		return nil, err
	}
	if len(found) == 0 {
		return nil, errors.New("none") // after the loss of the connection
	}
	return found[0], nil
}

// begin returns what does the operation once; an error is of what is not reported.
func (u *user) begin() func() error {
	queue := "waits-" + u.operation
	switch u.operation {
	case "send":
		sender := must(u.client.NewSender(queue, nil))
		return func() error {
			u.timed(func() error { return sender.SendMessage(ctx, &azservicebus.Message{Body: []byte("m")}, nil) })
			return nil
		}
	case "receive":
		options := &azservicebus.ReceiverOptions{ReceiveMode: azservicebus.ReceiveModeReceiveAndDelete}
		receiver := must(u.client.NewReceiverForQueue(queue, options))
		return func() error {
			u.timed(func() error {
				_, err := u.one(receiver)
				return err
			})
			return nil
		}
	case "complete":
		receiver := must(u.client.NewReceiverForQueue(queue, nil))
		return func() error {
			message, err := u.one(receiver)
			if err != nil {
				return err
			}
			time.Sleep(time.Duration(config.PeriodS / 2 * float64(time.Second)))
			u.timed(func() error { return receiver.CompleteMessage(ctx, message, nil) })
			return nil
		}
	case "renew":
		receiver := must(u.client.NewReceiverForQueue(queue, nil))
		var message *azservicebus.ReceivedMessage
		return func() (err error) {
			if message == nil {
				if message, err = u.one(receiver); err != nil {
					return err
				}
			}
			if u.timed(func() error { return receiver.RenewMessageLock(ctx, message, nil) }) != nil {
				message = nil // its lock may be lost
			}
			return nil
		}
	case "accept":
		return func() error {
			var receiver *azservicebus.SessionReceiver
			err := u.timed(func() (err error) {
				receiver, err = u.client.AcceptSessionForQueue(ctx, queue, fmt.Sprint("session-", u.number), nil)
				return err
			})
			if err == nil {
				return receiver.Close(ctx)
			}
			return nil
		}
	case "administer":
		client := must(admin.NewClientFromConnectionString(config.Secure, nil))
		count := 0
		return func() error {
			name := fmt.Sprintf("made-%d-%d-%d", u.number, os.Getpid(), count/2)
			u.timed(func() (err error) {
				if count%2 == 0 {
					_, err = client.CreateQueue(ctx, name, nil)
				} else {
					_, err = client.DeleteQueue(ctx, name, nil)
				}
				return err
			})
			count++
			return nil
		}
	}
	panic(u.operation)
}

func (u *user) run() {
	once := u.begin()
	period := int64(config.PeriodS * float64(time.Second))
	for {
		// Each user has its own point in the period.
		time.Sleep(time.Duration(period - (time.Now().UnixNano()-int64(u.number)*period/int64(config.Users))%period))
		if err := once(); err != nil {
			fmt.Fprintln(os.Stderr, u.operation, err)
		}
	}
}

func main() {
	if err := json.Unmarshal([]byte(os.Getenv("PEEKLOCK_INTEROP")), &config); err != nil {
		panic(err)
	}
	for _, operation := range config.Operations {
		client := must(azservicebus.NewClientFromConnectionString(config.ConnectionString, nil))
		for number := range config.Users {
			go (&user{operation, number, client}).run()
		}
	}
	select {}
}
