// Sends numbers to a queue for some seconds: `outage CONNECTION_STRING QUEUE SECONDS`. Prints each that is accepted.
package main

import (
	"context"
	"fmt"
	"log"
	"os"
	"strconv"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
)

func main() {
	seconds, err := strconv.ParseFloat(os.Args[3], 64)
	if err != nil {
		log.Fatal(err)
	}
	end := time.Now().Add(time.Duration(seconds * float64(time.Second)))
	ctx := context.Background()
	client, err := azservicebus.NewClientFromConnectionString(os.Args[1], nil)
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close(ctx)
	sender, err := client.NewSender(os.Args[2], nil)
	if err != nil {
		log.Fatal(err)
	}
	for number := 0; time.Now().Before(end); number++ {
		id := strconv.Itoa(number)
		if err := sender.SendMessage(ctx, &azservicebus.Message{Body: []byte(id), MessageID: &id}, nil); err != nil {
			fmt.Fprintln(os.Stderr, err)
		} else {
			fmt.Println(number)
		}
		time.Sleep(50 * time.Millisecond)
	}
}
