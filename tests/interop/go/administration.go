package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus"
	"github.com/Azure/azure-sdk-for-go/sdk/messaging/azservicebus/admin"
	"github.com/coder/websocket"
)

func init() {
	maps.Copy(scenarios, administrationScenarios)
}

const metadata = "a < b & ü"

func administration(connectionString string) *admin.Client {
	options := &admin.ClientOptions{ClientOptions: azcore.ClientOptions{Retry: policy.RetryOptions{MaxRetries: -1}}}
	return must(admin.NewClientFromConnectionString(connectionString, options))
}

func failsWithStatus(err error, status int, what string) {
	var response *azcore.ResponseError
	truth(errors.As(err, &response) && response.StatusCode == status, "%s: expected status %d, got %v", what, status, err)
}

// hasSettings expects every setting that is given, and no matter what for others.
func hasSettings[T any](found, given T) {
	actual, expected := reflect.ValueOf(found), reflect.ValueOf(given)
	for i := range expected.NumField() {
		if field := expected.Field(i); !field.IsNil() {
			name := expected.Type().Field(i).Name
			truth(!actual.Field(i).IsNil(), "%s is missing", name)
			wanted := field.Elem().Interface()
			if name == "MaxSizeInMegabytes" && actual.FieldByName("EnablePartitioning").Elem().Bool() {
				wanted = 16 * wanted.(int32) // of 16 fragments, as the cloud shows it
			}
			equal(actual.Field(i).Elem().Interface(), wanted, name)
		}
	}
}

func recently(created, updated, accessed time.Time) {
	truth(time.Since(created).Abs() < 5*time.Minute, "created at %v", created)
	truth(!updated.Before(created), "updated at %v, created at %v", updated, created)
	truth(!accessed.Before(created), "accessed at %v, created at %v", accessed, created)
}

func deadLetterOne(r *receiver) {
	ok(r.DeadLetterMessage(r.ctx, r.one(), nil), "dead-lettering")
	r.close()
}

func (s *scene) scheduleOne() {
	must(s.sender().ScheduleMessages(s.ctx, []*azservicebus.Message{text("later")}, time.Now().Add(time.Hour), nil))
}

func subscriptionNames(s *scene, client *admin.Client) []string {
	names := []string{}
	for pager := client.NewListSubscriptionsPager(s.queue, nil); pager.More(); {
		for _, each := range must(pager.NextPage(s.ctx)).Subscriptions {
			names = append(names, each.SubscriptionName)
		}
	}
	return sorted(names)
}

var administrationScenarios = map[string]func(*scene){
	"admin-queue": func(s *scene) {
		client := administration(config.Secure)
		given := admin.QueueProperties{
			LockDuration:                     ptr("PT30S"),
			MaxDeliveryCount:                 ptr(int32(5)),
			DefaultMessageTimeToLive:         ptr("PT2H"),
			DeadLetteringOnMessageExpiration: ptr(true),
			MaxSizeInMegabytes:               ptr(int32(2048)),
			AutoDeleteOnIdle:                 ptr("PT1H"),
			UserMetadata:                     ptr(metadata),
		}
		created := must(client.CreateQueue(s.ctx, s.queue, &admin.CreateQueueOptions{Properties: &given}))
		equal(created.QueueName, s.queue, "name")
		hasSettings(created.QueueProperties, given)
		truth(must(client.GetQueueRuntimeProperties(s.ctx, s.queue, nil)).AccessedAt.IsZero(), "never accessed")
		found := must(client.GetQueue(s.ctx, s.queue, nil))
		hasSettings(found.QueueProperties, given)
		listed := false
		for pager := client.NewListQueuesPager(nil); pager.More(); {
			for _, each := range must(pager.NextPage(s.ctx)).Queues {
				listed = listed || each.QueueName == s.queue
			}
		}
		truth(listed, "it is listed")

		changed := found.QueueProperties
		changed.MaxDeliveryCount, changed.LockDuration = ptr(int32(7)), ptr("PT45S")
		must(client.UpdateQueue(s.ctx, s.queue, changed, nil))
		given.MaxDeliveryCount, given.LockDuration = ptr(int32(7)), ptr("PT45S")
		hasSettings(must(client.GetQueue(s.ctx, s.queue, nil)).QueueProperties, given)

		s.send("a", "b", "c")
		s.scheduleOne()
		deadLetterOne(s.receiver())
		runtime := must(client.GetQueueRuntimeProperties(s.ctx, s.queue, nil))
		counts := []int32{runtime.ActiveMessageCount, runtime.ScheduledMessageCount, runtime.DeadLetterMessageCount}
		equal(counts, []int32{2, 1, 1}, "active, scheduled and dead-lettered messages")
		equal(runtime.TotalMessageCount, int64(4), "messages")
		truth(runtime.SizeInBytes > 0, "size")
		recently(runtime.CreatedAt, runtime.UpdatedAt, runtime.AccessedAt)

		must(client.DeleteQueue(s.ctx, s.queue, nil))
		truth(must(client.GetQueue(s.ctx, s.queue, nil)) == nil, "getting a deleted queue gives nothing")
	},

	"admin-topic": func(s *scene) {
		client := administration(config.Secure)
		given := admin.TopicProperties{
			DefaultMessageTimeToLive:            ptr("P1DT1M"),
			RequiresDuplicateDetection:          ptr(true),
			DuplicateDetectionHistoryTimeWindow: ptr("PT3M"),
			MaxSizeInMegabytes:                  ptr(int32(3072)),
			UserMetadata:                        ptr(metadata),
		}
		hasSettings(must(client.CreateTopic(s.ctx, s.queue, &admin.CreateTopicOptions{Properties: &given})).TopicProperties, given)
		found := must(client.GetTopic(s.ctx, s.queue, nil))
		hasSettings(found.TopicProperties, given)
		listed := false
		for pager := client.NewListTopicsPager(nil); pager.More(); {
			for _, each := range must(pager.NextPage(s.ctx)).Topics {
				listed = listed || each.TopicName == s.queue
			}
		}
		truth(listed, "it is listed")

		changed := found.TopicProperties
		changed.UserMetadata, changed.DefaultMessageTimeToLive = ptr("changed"), ptr("PT3H")
		must(client.UpdateTopic(s.ctx, s.queue, changed, nil))
		given.UserMetadata, given.DefaultMessageTimeToLive = ptr("changed"), ptr("PT3H")
		hasSettings(must(client.GetTopic(s.ctx, s.queue, nil)).TopicProperties, given)

		for _, name := range []string{"a", "b"} {
			must(client.CreateSubscription(s.ctx, s.queue, name, nil))
			rule := &admin.CreateRuleOptions{Name: ptr("more"), Filter: &admin.CorrelationFilter{Subject: ptr("x")}}
			must(client.CreateRule(s.ctx, s.queue, name, rule))
		}
		s.scheduleOne()
		runtime := must(client.GetTopicRuntimeProperties(s.ctx, s.queue, nil))
		equal([]int32{runtime.SubscriptionCount, runtime.ScheduledMessageCount}, []int32{2, 1}, "subscriptions and scheduled")
		equal(runtime.CorrelationFilterCount, int32(2), "correlation filters")
		recently(runtime.CreatedAt, runtime.UpdatedAt, runtime.AccessedAt)

		must(client.DeleteTopic(s.ctx, s.queue, nil))
		truth(must(client.GetTopic(s.ctx, s.queue, nil)) == nil, "getting a deleted topic gives nothing")
	},

	"admin-subscription": func(s *scene) {
		client := administration(config.Secure)
		given := admin.SubscriptionProperties{
			LockDuration:                                    ptr("PT30S"),
			MaxDeliveryCount:                                ptr(int32(4)),
			DefaultMessageTimeToLive:                        ptr("PT2H"),
			DeadLetteringOnMessageExpiration:                ptr(true),
			EnableDeadLetteringOnFilterEvaluationExceptions: ptr(false),
			UserMetadata:                                    ptr(metadata),
		}
		must(client.CreateTopic(s.ctx, s.queue, nil))
		options := &admin.CreateSubscriptionOptions{Properties: &given}
		hasSettings(must(client.CreateSubscription(s.ctx, s.queue, "mine", options)).SubscriptionProperties, given)
		found := must(client.GetSubscription(s.ctx, s.queue, "mine", nil))
		hasSettings(found.SubscriptionProperties, given)
		equal(subscriptionNames(s, client), []string{"mine"}, "subscriptions")

		changed := found.SubscriptionProperties
		changed.MaxDeliveryCount, given.MaxDeliveryCount = ptr(int32(9)), ptr(int32(9))
		must(client.UpdateSubscription(s.ctx, s.queue, "mine", changed, nil))
		hasSettings(must(client.GetSubscription(s.ctx, s.queue, "mine", nil)).SubscriptionProperties, given)

		s.send("a", "b", "c")
		deadLetterOne(s.subscription("mine"))
		runtime := must(client.GetSubscriptionRuntimeProperties(s.ctx, s.queue, "mine", nil))
		equal([]int32{runtime.ActiveMessageCount, runtime.DeadLetterMessageCount}, []int32{2, 1}, "active and dead-lettered")
		equal(runtime.TotalMessageCount, int64(3), "messages")
		recently(runtime.CreatedAt, runtime.UpdatedAt, runtime.AccessedAt)

		must(client.DeleteSubscription(s.ctx, s.queue, "mine", nil))
		truth(must(client.GetSubscription(s.ctx, s.queue, "mine", nil)) == nil, "getting a deleted one gives nothing")
		must(client.DeleteTopic(s.ctx, s.queue, nil))
	},

	"admin-rule": func(s *scene) {
		client := administration(config.Secure)
		published := func(body string, amount int64, subject string, more properties) *azservicebus.Message {
			message := with(body, properties{"amount": amount})
			maps.Copy(message.ApplicationProperties, more)
			message.Subject = ptr(subject)
			return message
		}
		red := func() *azservicebus.Message {
			return published("red", 0, "invoice", properties{"colour": "red", "number": int64(3)})
		}
		arrived := func() map[string]any {
			receiver := s.subscription("mine")
			defer receiver.close()
			found := map[string]any{}
			for {
				some := receiver.take(10, time.Second)
				for _, message := range some {
					found[string(message.Body)] = message.ApplicationProperties["checked"]
					receiver.complete(message)
				}
				if len(some) == 0 {
					return found
				}
			}
		}
		get := func(name string) *admin.GetRuleResponse {
			return must(client.GetRule(s.ctx, s.queue, "mine", name, nil))
		}

		must(client.CreateTopic(s.ctx, s.queue, nil))
		must(client.CreateSubscription(s.ctx, s.queue, "mine", nil))
		_, takesAll := get("$Default").Filter.(*admin.TrueFilter)
		truth(takesAll, "the default rule takes all: %#v", get("$Default").Filter)
		must(client.DeleteRule(s.ctx, s.queue, "mine", "$Default", nil))
		sql := &admin.SQLFilter{Expression: "amount > @limit", Parameters: map[string]any{"@limit": int64(10)}}
		action := &admin.SQLAction{Expression: "SET checked = 'yes'"}
		rule := &admin.CreateRuleOptions{Name: ptr("sql"), Filter: sql, Action: action}
		must(client.CreateRule(s.ctx, s.queue, "mine", rule))
		chosen := &admin.CorrelationFilter{
			Subject: ptr("invoice"), ApplicationProperties: map[string]any{"colour": "red", "number": int64(3)},
		}
		must(client.CreateRule(s.ctx, s.queue, "mine", &admin.CreateRuleOptions{Name: ptr("correlation"), Filter: chosen}))

		found := get("sql").RuleProperties
		equal(found.Filter, admin.RuleFilter(sql), "filter")
		equal(found.Action.(*admin.SQLAction).Expression, action.Expression, "action")
		equal(get("correlation").Filter, admin.RuleFilter(chosen), "correlation filter")
		names := []string{}
		for pager := client.NewListRulesPager(s.queue, "mine", nil); pager.More(); {
			for _, each := range must(pager.NextPage(s.ctx)).Rules {
				names = append(names, each.Name)
			}
		}
		equal(sorted(names), []string{"correlation", "sql"}, "rules")

		s.post(published("large", 20, "", nil), red())
		s.post(published("green", 0, "invoice", properties{"colour": "green", "number": int64(3)}))
		equal(arrived(), map[string]any{"large": "yes", "red": nil}, "what arrives")

		found.Filter = &admin.SQLFilter{Expression: "amount > 100"}
		must(client.UpdateRule(s.ctx, s.queue, "mine", found))
		equal(get("sql").Filter.(*admin.SQLFilter).Expression, "amount > 100", "changed filter")
		must(client.DeleteRule(s.ctx, s.queue, "mine", "correlation", nil))
		truth(get("correlation") == nil, "getting a deleted rule gives nothing")
		s.post(published("large", 20, "", nil), published("larger", 200, "", nil), red())
		equal(arrived(), map[string]any{"larger": "yes"}, "what arrives after the change")
		must(client.DeleteTopic(s.ctx, s.queue, nil))
	},

	"admin-authorization": func(s *scene) {
		client := administration(config.Secure)
		key := "a key of the queue's own"
		rule := admin.AuthorizationRule{
			AccessRights: []admin.AccessRight{admin.AccessRightSend},
			KeyName:      ptr("app"), PrimaryKey: &key, SecondaryKey: ptr("another"),
		}
		given := &admin.QueueProperties{AuthorizationRules: []admin.AuthorizationRule{rule}}
		must(client.CreateQueue(s.ctx, s.queue, &admin.CreateQueueOptions{Properties: given}))
		rules := must(client.GetQueue(s.ctx, s.queue, nil)).AuthorizationRules
		equal(len(rules), 1, "rules")
		equal([]string{*rules[0].KeyName, *rules[0].PrimaryKey, *rules[0].SecondaryKey}, []string{"app", key, "another"}, "rule")
		equal(rules[0].AccessRights, rule.AccessRights, "rights")
		general := strings.Replace(config.ConnectionString, config.KeyName, "app", 1)
		limited := newScene(s.ctx, s.queue, strings.Replace(general, config.Key, key, 1))
		defer limited.client.Close(s.ctx)
		limited.send("x")
		err := limited.receiver().tryTake()
		failsWithCode(err, azservicebus.CodeUnauthorizedAccess, "receiving with a right to send")
		s.receiver().all(1)
		must(client.DeleteQueue(s.ctx, s.queue, nil))
	},

	"admin-forwarding": func(s *scene) {
		client := administration(config.Secure)
		target := s.queue + "-target"
		must(client.CreateQueue(s.ctx, target, nil))
		given := &admin.QueueProperties{ForwardTo: &target, ForwardDeadLetteredMessagesTo: &target}
		must(client.CreateQueue(s.ctx, s.queue, &admin.CreateQueueOptions{Properties: given}))
		found := must(client.GetQueue(s.ctx, s.queue, nil))
		for _, destination := range []*string{found.ForwardTo, found.ForwardDeadLetteredMessagesTo} {
			truth(strings.HasSuffix(value(destination), "/"+target), "destination %q", value(destination))
		}
		s.send("x")
		receiver := newReceiver(s.ctx, must(s.client.NewReceiverForQueue(target, nil)))
		equal(bodies(receiver.all(1)), []string{"x"}, "what arrives")
		must(client.DeleteQueue(s.ctx, s.queue, nil))
		must(client.DeleteQueue(s.ctx, target, nil))
	},

	"admin-names": func(s *scene) {
		client := administration(config.Secure)
		mixed, lower := s.queue+"-Mixed.Case", s.queue+"-mixed.case"
		// The SDK gives names back as they were asked for, and those of the service in lists.
		must(client.CreateQueue(s.ctx, mixed, nil))
		truth(must(client.GetQueue(s.ctx, strings.ToUpper(mixed), nil)) != nil, "it is found in upper case")
		names := []string{}
		for pager := client.NewListQueuesPager(nil); pager.More(); {
			for _, each := range must(pager.NextPage(s.ctx)).Queues {
				names = append(names, each.QueueName)
			}
		}
		truth(slices.Contains(names, lower) && !slices.Contains(names, mixed), "the queue is listed in lower case")
		s.queue = mixed
		s.send("x")
		deadLetterOne(s.receiver())
		dead := s.deadLetters()
		equal(*dead.one().DeadLetterSource, lower, "source of the dead letter")
		dead.close()
		must(client.DeleteQueue(s.ctx, strings.ToUpper(mixed), nil))

		must(client.CreateTopic(s.ctx, mixed, nil))
		must(client.CreateSubscription(s.ctx, strings.ToUpper(mixed), "Mine", nil))
		names = names[:0]
		for pager := client.NewListTopicsPager(nil); pager.More(); {
			for _, each := range must(pager.NextPage(s.ctx)).Topics {
				names = append(names, each.TopicName)
			}
		}
		truth(slices.Contains(names, lower) && !slices.Contains(names, mixed), "the topic is listed in lower case")
		equal(subscriptionNames(s, client), []string{"Mine"}, "subscriptions")
		must(client.DeleteTopic(s.ctx, mixed, nil))
	},

	"admin-pages": func(s *scene) {
		client := administration(config.Secure)
		must(client.CreateTopic(s.ctx, s.queue, nil))
		names := []string{}
		for number := range 120 {
			names = append(names, fmt.Sprintf("s%03d", number))
			must(client.CreateSubscription(s.ctx, s.queue, names[number], nil))
		}
		equal(subscriptionNames(s, client), names, "subscriptions")
		equal(must(client.GetTopicRuntimeProperties(s.ctx, s.queue, nil)).SubscriptionCount, int32(120), "their number")
		must(client.DeleteTopic(s.ctx, s.queue, nil))
	},

	"admin-namespace": func(s *scene) {
		found := must(administration(config.Secure).GetNamespaceProperties(s.ctx, nil))
		equal(found.Name, "peeklock", "name")
		truth(strings.Contains("Basic Standard Premium", found.SKU) && found.SKU != "", "tier %q", found.SKU)
		truth(!found.ModifiedTime.Before(found.CreatedTime), "times")
	},

	"admin-errors": func(s *scene) {
		client := administration(config.Secure)
		must(client.CreateQueue(s.ctx, s.queue, nil))
		_, err := client.CreateQueue(s.ctx, s.queue, nil)
		failsWithStatus(err, http.StatusConflict, "creating it again")
		_, err = client.CreateTopic(s.ctx, s.queue, nil)
		failsWithStatus(err, http.StatusConflict, "creating a topic of its name")
		truth(must(client.GetQueue(s.ctx, "nothing", nil)) == nil, "getting nothing gives nothing")
		_, err = client.DeleteQueue(s.ctx, "nothing", nil)
		failsWithStatus(err, http.StatusNotFound, "deleting nothing")
		odd := &admin.CreateQueueOptions{Properties: &admin.QueueProperties{LockDuration: ptr("PT1H")}}
		_, err = client.CreateQueue(s.ctx, s.queue+"-odd", odd)
		failsWithStatus(err, http.StatusBadRequest, "a lock of an hour")
		changed := must(client.GetQueue(s.ctx, s.queue, nil)).QueueProperties
		changed.RequiresSession = ptr(true)
		_, err = client.UpdateQueue(s.ctx, s.queue, changed, nil)
		failsWithStatus(err, http.StatusBadRequest, "changing what cannot change")
		limited := administration(config.SecureListenOnly)
		_, err = limited.GetQueue(s.ctx, s.queue, nil)
		failsWithStatus(err, http.StatusUnauthorized, "a key without Manage")
		_, err = limited.DeleteQueue(s.ctx, s.queue, nil)
		failsWithStatus(err, http.StatusUnauthorized, "a key without Manage")
		must(client.DeleteQueue(s.ctx, s.queue, nil))
	},

	"websockets": func(s *scene) {
		client := administration(config.Secure)
		must(client.CreateQueue(s.ctx, s.queue, nil))
		options := &azservicebus.ClientOptions{
			NewWebSocketConn: func(ctx context.Context, args azservicebus.NewWebSocketConnArgs) (net.Conn, error) {
				connection, _, err := websocket.Dial(ctx, args.Host, &websocket.DialOptions{Subprotocols: []string{"amqp"}})
				if err != nil {
					return nil, err
				}
				return websocket.NetConn(s.ctx, connection, websocket.MessageBinary), nil
			},
			RetryOptions: azservicebus.RetryOptions{MaxRetries: -1},
		}
		over := &scene{s.queue, must(azservicebus.NewClientFromConnectionString(config.Secure, options)), s.ctx}
		defer over.client.Close(s.ctx)
		large := strings.Repeat("x", 300*1024)
		over.send(large)
		sender := over.sender()
		batch := must(sender.NewMessageBatch(s.ctx, nil))
		expected := []string{large}
		for number := range 20 {
			expected = append(expected, fmt.Sprint(number))
			ok(batch.AddMessage(text(fmt.Sprint(number)), nil), "adding to a batch")
		}
		ok(sender.SendMessageBatch(s.ctx, batch, nil), "sending a batch")
		equal(sorted(bodies(over.receiver().allOf(21))), sorted(expected), "what arrives")
		s.nothingIsLeft()
		must(client.DeleteQueue(s.ctx, s.queue, nil))
	},
}
