package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

const emulator = "Endpoint=sb://localhost;SharedAccessKeyName=RootManageSharedAccessKey;" +
	"SharedAccessKey=SAS_KEY_VALUE;UseDevelopmentEmulator=true;"

func main() {
	connectionString := os.Getenv("SERVICEBUS_CONNECTION_STRING")
	if connectionString == "" {
		connectionString = emulator
	}
	if err := run(connectionString); err != nil {
		log.Fatal(err)
	}
}

func run(connectionString string) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	client, err := azservicebus.NewClientFromConnectionString(connectionString, nil)
	if err != nil {
		return err
	}
	defer client.Close(ctx)

	sender, err := client.NewSender("orders", nil)
	if err != nil {
		return err
	}
	if err := sender.SendMessage(ctx, &azservicebus.Message{Body: []byte("Hello from Go")}, nil); err != nil {
		return err
	}

	receiver, err := client.NewReceiverForQueue("orders", nil)
	if err != nil {
		return err
	}
	messages, err := receiver.ReceiveMessages(ctx, 1, nil)
	if err != nil {
		return err
	}
	for _, message := range messages {
		fmt.Println(string(message.Body))
		if err := receiver.CompleteMessage(ctx, message, nil); err != nil {
			return err
		}
	}
	return nil
}
