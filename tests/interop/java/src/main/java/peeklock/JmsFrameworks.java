package peeklock;

import static peeklock.Harness.CONFIG;
import static peeklock.Harness.equal;
import static peeklock.Harness.fails;
import static peeklock.Harness.now;
import static peeklock.Harness.truth;

import com.azure.servicebus.jms.ServiceBusJmsConnectionFactory;
import com.azure.servicebus.jms.ServiceBusJmsConnectionFactorySettings;
import jakarta.jms.Connection;
import jakarta.jms.ConnectionFactory;
import jakarta.jms.Destination;
import jakarta.jms.InvalidDestinationException;
import jakarta.jms.JMSConsumer;
import jakarta.jms.JMSContext;
import jakarta.jms.JMSException;
import jakarta.jms.JMSSecurityException;
import jakarta.jms.Message;
import jakarta.jms.MessageConsumer;
import jakarta.jms.MessageProducer;
import jakarta.jms.Session;
import jakarta.jms.TemporaryQueue;
import jakarta.jms.TemporaryTopic;
import jakarta.jms.TextMessage;
import jakarta.jms.Topic;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Hashtable;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.BlockingQueue;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.TimeUnit;
import java.util.function.Function;
import javax.naming.Context;
import javax.naming.InitialContext;
import org.apache.camel.builder.RouteBuilder;
import org.apache.camel.component.jms.JmsComponent;
import org.apache.camel.impl.DefaultCamelContext;
import org.apache.qpid.jms.JmsConnectionFactory;
import org.springframework.context.annotation.AnnotationConfigApplicationContext;
import org.springframework.context.annotation.Bean;
import org.springframework.context.annotation.Configuration;
import org.springframework.jms.annotation.EnableJms;
import org.springframework.jms.annotation.JmsListener;
import org.springframework.jms.config.DefaultJmsListenerContainerFactory;
import org.springframework.jms.connection.CachingConnectionFactory;
import org.springframework.jms.core.JmsTemplate;

/**
 * JMS 2.0 as applications use it: by Qpid JMS, by Spring, by Camel, and by Azure's own library. One program, because a JVM
 * with these takes seconds to start. Each check has queues and topics of its own.
 */
public final class JmsFrameworks {
    private static final long PATIENCE_MS = 60_000;
    private static final long NOTHING_MS = 700;

    private JmsFrameworks() {}

    public static void main(String[] names) throws Exception {
        Map<String, Harness.Scenario> checks = new LinkedHashMap<>();
        checks.put("qpid-hello-world", JmsFrameworks::helloWorld);
        checks.put("qpid-durable-subscriber", JmsFrameworks::durableSubscriber);
        checks.put("qpid-declared-subscription", JmsFrameworks::declaredSubscription);
        checks.put("qpid-shared-durable", JmsFrameworks::sharedDurable);
        checks.put("qpid-shared", JmsFrameworks::shared);
        checks.put("qpid-subscriber", JmsFrameworks::subscriber);
        checks.put("qpid-subscriber-rights", JmsFrameworks::subscriberRights);
        checks.put("qpid-unsubscribe", JmsFrameworks::unsubscribe);
        checks.put("qpid-temporary-queue", JmsFrameworks::temporaryQueue);
        checks.put("qpid-temporary-topic", JmsFrameworks::temporaryTopic);
        checks.put("qpid-delivery-delay", JmsFrameworks::deliveryDelay);
        checks.put("spring-listener-queue", JmsFrameworks::springQueue);
        checks.put("spring-listener-subscription", JmsFrameworks::springSubscription);
        checks.put("spring-listener-new-subscription", JmsFrameworks::springNewSubscription);
        checks.put("spring-listener-shared", JmsFrameworks::springShared);
        checks.put("spring-listener-topic", JmsFrameworks::springTopic);
        checks.put("spring-browse", JmsFrameworks::springBrowse);
        checks.put("spring-selector", JmsFrameworks::springSelector);
        checks.put("spring-send-and-receive", JmsFrameworks::springSendAndReceive);
        checks.put("spring-delivery-delay", JmsFrameworks::springDeliveryDelay);
        checks.put("camel-in-out", JmsFrameworks::camelInOut);
        checks.put("camel-topic", JmsFrameworks::camelTopic);
        checks.put("azure-subscriptions", JmsFrameworks::azureSubscriptions);
        checks.put("azure-request-and-reply", JmsFrameworks::azureRequestAndReply);
        checks.put("azure-delivery-delay", JmsFrameworks::azureDeliveryDelay);
        Harness.main(names, checks);
    }

    // -- Qpid JMS

    private static JmsConnectionFactory qpid(String keyName, String key) {
        String address = "amqp://%s:%d?amqp.saslMechanisms=PLAIN".formatted(CONFIG.get("host").asText(), CONFIG.get("port").asInt());
        return new JmsConnectionFactory(keyName, key, address);
    }

    private static JmsConnectionFactory qpid() {
        return qpid(CONFIG.get("key_name").asText(), CONFIG.get("key").asText());
    }

    private static JMSContext context(String clientId) {
        JmsConnectionFactory factory = qpid();
        if (clientId != null) {
            factory.setClientID(clientId);
        }
        return factory.createContext();
    }

    private static String text(JMSConsumer consumer) {
        return consumer.receiveBody(String.class, PATIENCE_MS);
    }

    private static void nothing(JMSConsumer consumer) {
        equal(consumer.receive(NOTHING_MS), null, "a further message");
    }

    private static void publish(String topic, String... bodies) {
        try (JMSContext context = context(null)) {
            for (String body : bodies) {
                context.createProducer().send(context.createTopic(topic), body);
            }
        }
    }

    /** As HelloWorld of Qpid JMS's examples: names by JNDI, and a producer without a destination of its own. */
    private static void helloWorld() throws Exception {
        Hashtable<Object, Object> names = new Hashtable<>();
        names.put(Context.INITIAL_CONTEXT_FACTORY, "org.apache.qpid.jms.jndi.JmsInitialContextFactory");
        names.put("connectionfactory.factory", "amqp://%s:%d?amqp.saslMechanisms=PLAIN".formatted(
            CONFIG.get("host").asText(), CONFIG.get("port").asInt()));
        names.put("queue.lookup", "jms-hello");
        Context found = new InitialContext(names);
        ConnectionFactory factory = (ConnectionFactory) found.lookup("factory");
        Destination queue = (Destination) found.lookup("lookup");
        try (Connection connection = factory.createConnection(CONFIG.get("key_name").asText(), CONFIG.get("key").asText())) {
            connection.start();
            Session session = connection.createSession(false, Session.AUTO_ACKNOWLEDGE);
            MessageProducer producer = session.createProducer(null);
            MessageConsumer consumer = session.createConsumer(queue);
            producer.send(queue, session.createTextMessage("Hello world!"));
            equal(((TextMessage) consumer.receive(PATIENCE_MS)).getText(), "Hello world!", "the message");
        }
    }

    private static void durableSubscriber() {
        String topic = "jms-durable";
        for (String round : List.of("1", "2")) {
            try (JMSContext context = context("durable-client")) {
                JMSConsumer consumer = context.createDurableConsumer(context.createTopic(topic), "sub");
                if (round.equals("2")) {
                    equal(text(consumer), "while away", "what came meanwhile");
                }
                publish(topic, "now " + round);
                equal(text(consumer), "now " + round, "what comes");
                consumer.close();
                consumer = context.createDurableConsumer(context.createTopic(topic), "sub"); // over the same connection
                nothing(consumer);
            }
            publish(topic, "while away");
        }
        try (JMSContext context = context("other-client")) {
            nothing(context.createDurableConsumer(context.createTopic(topic), "sub"));
        }
    }

    private static void declaredSubscription() {
        publish("jms-declared", "1", "2");
        try (JMSContext context = context("any-client")) {
            equal(text(context.createDurableConsumer(context.createTopic("jms-declared"), "declared")), "1", "by its name");
        }
        try (JMSContext context = context(null)) {
            equal(text(context.createConsumer(context.createQueue("jms-declared/Subscriptions/declared"))), "2", "by its address");
        }
    }

    private static void sharedDurable() {
        Set<String> found = new TreeSet<>();
        try (JMSContext one = context(null); JMSContext other = context(null)) {
            List<JMSConsumer> consumers = new ArrayList<>();
            for (JMSContext context : List.of(one, one, other)) {
                consumers.add(context.createSharedDurableConsumer(context.createTopic("jms-shared-durable"), "sub"));
            }
            publish("jms-shared-durable", "1", "2", "3", "4");
            long until = now() + PATIENCE_MS;
            while (found.size() < 4 && now() < until) {
                for (JMSConsumer consumer : consumers) {
                    String body = consumer.receiveBody(String.class, 50);
                    truth(body == null || found.add(body), "twice: " + body);
                }
            }
        }
        equal(found, Set.of("1", "2", "3", "4"), "what all got");
        publish("jms-shared-durable", "5");
        try (JMSContext context = context(null)) {
            equal(text(context.createSharedDurableConsumer(context.createTopic("jms-shared-durable"), "sub")), "5", "meanwhile");
        }
    }

    private static void shared() {
        try (JMSContext one = context(null); JMSContext other = context("shares")) {
            JMSConsumer first = one.createSharedConsumer(one.createTopic("jms-shared"), "sub");
            JMSConsumer second = one.createSharedConsumer(one.createTopic("jms-shared"), "sub");
            JMSConsumer another = other.createSharedConsumer(other.createTopic("jms-shared"), "sub");
            publish("jms-shared", "1");
            equal(text(another), "1", "the subscription of another client id");
            String body = first.receiveBody(String.class, 500);
            equal(body == null ? text(second) : body, "1", "one of the two");
        }
        publish("jms-shared", "nobody is there");
    }

    private static void subscriber() {
        try (JMSContext context = context(null)) {
            Topic topic = context.createTopic("jms-plain");
            publish("jms-plain", "before");
            JMSConsumer all = context.createConsumer(topic);
            JMSConsumer red = context.createConsumer(topic, "colour = 'red'", true);
            context.createProducer().setProperty("colour", "blue").send(topic, "blue");
            context.createProducer().setProperty("colour", "red").send(topic, "red");
            equal(List.of(text(all), text(all)), List.of("blue", "red"), "all");
            equal(text(red), "red", "what is selected");
            nothing(red);
        }
    }

    private static void subscriberRights() throws Exception {
        JmsConnectionFactory factory = qpid(CONFIG.get("listener").get(0).asText(), CONFIG.get("listener").get(1).asText());
        factory.setClientID("listener");
        try (Connection connection = factory.createConnection()) {
            connection.start();
            Session session = connection.createSession();
            Topic topic = session.createTopic("jms-rights");
            session.createDurableConsumer(topic, "declared").close();
            fails(() -> session.createDurableConsumer(topic, "missing"), error ->
                error instanceof JMSSecurityException && error.getMessage().contains("the right Manage on the topic"), "missing");
            fails(session::createTemporaryQueue, error ->
                error instanceof JMSSecurityException && error.getMessage().contains("the right Manage"), "temporary");
        }
    }

    private static void unsubscribe() throws Exception {
        try (JMSContext context = context("leaves")) {
            JMSConsumer consumer = context.createDurableConsumer(context.createTopic("jms-unsubscribe"), "sub");
            consumer.close();
            publish("jms-unsubscribe", "old");
            context.unsubscribe("sub");
            nothing(context.createDurableConsumer(context.createTopic("jms-unsubscribe"), "sub"));
        }
        try (JMSContext context = context(null)) {
            context.createSharedDurableConsumer(context.createTopic("jms-unsubscribe"), "shared").close();
            context.unsubscribe("shared");
        }
        try (Connection connection = qpid().createConnection()) {
            Session session = connection.createSession();
            fails(() -> session.unsubscribe("shared"), InvalidDestinationException.class::isInstance, "what is not there");
        }
    }

    private static void temporaryQueue() throws Exception {
        try (Connection asks = qpid().createConnection(); Connection answers = qpid().createConnection()) {
            asks.start();
            answers.start();
            answer(answers.createSession(), "jms-requests");
            Session session = asks.createSession();
            for (int round = 0; round < 3; round++) {
                TemporaryQueue replies = session.createTemporaryQueue();
                MessageConsumer consumer = session.createConsumer(replies);
                TextMessage request = session.createTextMessage("request " + round);
                request.setJMSReplyTo(replies);
                session.createProducer(session.createQueue("jms-requests")).send(request);
                Message reply = consumer.receive(PATIENCE_MS);
                equal(((TextMessage) reply).getText(), "reply to request " + round, "the reply");
                equal(reply.getJMSDestination(), replies, "where it came from");
                consumer.close();
                replies.delete();
                fails(() -> session.createConsumer(replies), JMSException.class::isInstance, "a deleted queue");
            }
        }
    }

    /** Replies to each request at its reply-to, by a producer without a destination. */
    private static void answer(Session session, String queue) throws JMSException {
        MessageProducer producer = session.createProducer(null);
        session.createConsumer(session.createQueue(queue)).setMessageListener(request -> {
            try {
                TextMessage reply = session.createTextMessage("reply to " + ((TextMessage) request).getText());
                reply.setJMSCorrelationID(request.getJMSMessageID());
                producer.send(request.getJMSReplyTo(), reply);
            } catch (JMSException error) {
                throw new IllegalStateException(error);
            }
        });
    }

    private static void temporaryTopic() throws Exception {
        try (Connection connection = qpid().createConnection(); Connection other = qpid().createConnection()) {
            connection.start();
            other.start(); // only now does it open, and the broker does not wait for long
            Session session = connection.createSession();
            TemporaryTopic topic = session.createTemporaryTopic();
            List<MessageConsumer> consumers = List.of(session.createConsumer(topic), session.createConsumer(topic));
            Session others = other.createSession();
            others.createProducer(topic).send(others.createTextMessage("news"));
            for (MessageConsumer consumer : consumers) {
                equal(((TextMessage) consumer.receive(PATIENCE_MS)).getText(), "news", "for each");
                consumer.close();
            }
            topic.delete();
        }
    }

    private static void deliveryDelay() {
        try (JMSContext context = context(null)) {
            delayed(context, context.createQueue("jms-delays"));
        }
    }

    private static void delayed(JMSContext context, Destination queue) {
        long sent = now();
        context.createProducer().setDeliveryDelay(1500).send(queue, "later");
        JMSConsumer consumer = context.createConsumer(queue);
        Message later = consumer.receive(PATIENCE_MS);
        truth(later != null && now() - sent >= 1500, "it came after " + (now() - sent) + " ms: " + later);
        try {
            equal(later.getBody(String.class), "later", "the message");
            truth(later.getJMSDeliveryTime() >= sent + 1500, "JMSDeliveryTime " + later.getJMSDeliveryTime());
        } catch (JMSException error) {
            throw new IllegalStateException(error);
        }
    }

    // -- Spring

    /** What listeners have got. */
    static final BlockingQueue<String> HEARD_QUEUE = new LinkedBlockingQueue<>();
    static final BlockingQueue<String> HEARD_SUBSCRIPTION = new LinkedBlockingQueue<>();
    static final BlockingQueue<String> HEARD_NEW = new LinkedBlockingQueue<>();
    static final BlockingQueue<String> HEARD_SHARED = new LinkedBlockingQueue<>();
    static final BlockingQueue<String> HEARD_TOPIC = new LinkedBlockingQueue<>();

    private static DefaultJmsListenerContainerFactory listeners(ConnectionFactory connections) {
        DefaultJmsListenerContainerFactory factory = new DefaultJmsListenerContainerFactory();
        factory.setConnectionFactory(connections);
        return factory;
    }

    /** As Microsoft documents it for topics: a client id, durable subscriptions, and a factory for topics. */
    private static DefaultJmsListenerContainerFactory durable(ConnectionFactory connections, String clientId) {
        DefaultJmsListenerContainerFactory factory = listeners(connections);
        factory.setPubSubDomain(true);
        factory.setSubscriptionDurable(true);
        factory.setClientId(clientId);
        return factory;
    }

    @Configuration
    @EnableJms
    static class OfQueues {
        @Bean
        DefaultJmsListenerContainerFactory jmsListenerContainerFactory() {
            return listeners(qpid());
        }

        @JmsListener(destination = "spring-queue", concurrency = "2-4")
        void take(String body) {
            HEARD_QUEUE.add(body);
        }

        @JmsListener(destination = "spring-requests")
        String answer(String body) {
            return "reply to " + body;
        }
    }

    @Configuration
    @EnableJms
    static class OfSubscription {
        @Bean
        DefaultJmsListenerContainerFactory topics() {
            return durable(qpid(), "spring-client");
        }

        @JmsListener(destination = "spring-topic", containerFactory = "topics", subscription = "sub1")
        void take(String body) {
            HEARD_SUBSCRIPTION.add(body);
        }
    }

    @Configuration
    @EnableJms
    static class OfNewSubscription {
        @Bean
        DefaultJmsListenerContainerFactory topics() {
            return durable(qpid(), "spring-new-client");
        }

        @JmsListener(destination = "spring-new-topic", containerFactory = "topics", subscription = "made")
        void take(String body) {
            HEARD_NEW.add(body);
        }
    }

    @Configuration
    @EnableJms
    static class OfShared {
        @Bean
        DefaultJmsListenerContainerFactory topics() {
            DefaultJmsListenerContainerFactory factory = listeners(qpid());
            factory.setPubSubDomain(true);
            factory.setSubscriptionDurable(true);
            factory.setSubscriptionShared(true);
            return factory;
        }

        @JmsListener(destination = "spring-shared-topic", containerFactory = "topics", subscription = "all", concurrency = "3")
        void take(String body) {
            HEARD_SHARED.add(body);
        }
    }

    @Configuration
    @EnableJms
    static class OfTopic {
        @Bean
        DefaultJmsListenerContainerFactory topics() {
            DefaultJmsListenerContainerFactory factory = listeners(qpid());
            factory.setPubSubDomain(true);
            return factory;
        }

        @JmsListener(destination = "spring-plain-topic", containerFactory = "topics")
        void take(String body) {
            HEARD_TOPIC.add(body);
        }
    }

    private static String heard(BlockingQueue<String> heard) throws InterruptedException {
        return heard.poll(PATIENCE_MS, TimeUnit.MILLISECONDS);
    }

    private static void springQueue() throws Exception {
        try (var context = new AnnotationConfigApplicationContext(OfQueues.class)) {
            JmsTemplate template = new JmsTemplate(new CachingConnectionFactory(qpid()));
            template.convertAndSend("spring-queue", "1");
            equal(heard(HEARD_QUEUE), "1", "what the listener heard");
        }
    }

    private static void springSubscription() throws Exception {
        publish("spring-topic", "before");
        for (String body : List.of("1", "2")) {
            try (var context = new AnnotationConfigApplicationContext(OfSubscription.class)) {
                if (body.equals("1")) {
                    equal(heard(HEARD_SUBSCRIPTION), "before", "what the declared subscription had");
                }
                publish("spring-topic", body);
                equal(heard(HEARD_SUBSCRIPTION), body, "what the listener heard");
            }
        }
    }

    private static void springNewSubscription() throws Exception {
        try (var context = new AnnotationConfigApplicationContext(OfNewSubscription.class)) {
            publishUntilHeard("spring-new-topic", HEARD_NEW);
        }
        publish("spring-new-topic", "while away");
        try (var context = new AnnotationConfigApplicationContext(OfNewSubscription.class)) {
            String body = heard(HEARD_NEW);
            while (body != null && body.startsWith("try")) {
                body = heard(HEARD_NEW);
            }
            equal(body, "while away", "what came meanwhile");
        }
    }

    private static void springShared() throws Exception {
        try (var context = new AnnotationConfigApplicationContext(OfShared.class)) {
            publishUntilHeard("spring-shared-topic", HEARD_SHARED);
            publish("spring-shared-topic", "1", "2", "3", "4", "5", "6");
            List<String> found = new ArrayList<>();
            while (found.size() < 6) {
                String body = heard(HEARD_SHARED);
                if (body == null || !body.startsWith("try")) {
                    found.add(body);
                }
            }
            Collections.sort(found);
            equal(found, List.of("1", "2", "3", "4", "5", "6"), "each once");
        }
    }

    private static void springTopic() throws Exception {
        try (var context = new AnnotationConfigApplicationContext(OfTopic.class)) {
            publishUntilHeard("spring-plain-topic", HEARD_TOPIC);
        }
    }

    /** A listener subscribes in the background, some time after its context has started. */
    private static void publishUntilHeard(String topic, BlockingQueue<String> heard) throws InterruptedException {
        long until = now() + PATIENCE_MS;
        for (int number = 0; now() < until; number++) {
            publish(topic, "try " + number);
            if (heard.poll(300, TimeUnit.MILLISECONDS) != null) {
                return;
            }
        }
        throw new AssertionError("the listener heard nothing");
    }

    private static JmsTemplate template(String queue) {
        JmsTemplate template = new JmsTemplate(new CachingConnectionFactory(qpid()));
        template.setDefaultDestinationName(queue);
        template.setReceiveTimeout(PATIENCE_MS);
        return template;
    }

    private static void springBrowse() {
        JmsTemplate template = template("spring-browsed");
        for (String body : List.of("1", "2", "3")) {
            template.convertAndSend(body);
        }
        for (int round = 0; round < 2; round++) {
            List<String> seen = template.browse((session, browser) -> {
                List<String> bodies = new ArrayList<>();
                for (Object each : Collections.list(browser.getEnumeration())) {
                    bodies.add(((TextMessage) each).getText());
                }
                return bodies;
            });
            equal(seen, List.of("1", "2", "3"), "what is there");
        }
        equal(template.receiveAndConvert(), "1", "it stays to be received");
    }

    private static void springSelector() {
        JmsTemplate template = template("spring-selected");
        for (String colour : List.of("blue", "red")) {
            template.convertAndSend((Object) colour, message -> {
                message.setStringProperty("colour", colour);
                return message;
            });
        }
        equal(template.receiveSelectedAndConvert("colour = 'red'"), "red", "what is selected");
        int count = template.browseSelected("colour = 'blue'", (session, browser) -> Collections.list(browser.getEnumeration()).size());
        equal(count, 1, "browsed with a selector");
    }

    private static void springSendAndReceive() throws Exception {
        try (var context = new AnnotationConfigApplicationContext(OfQueues.class)) {
            JmsTemplate template = template("spring-requests");
            for (String body : List.of("1", "2", "3")) {
                Message reply = template.sendAndReceive(session -> session.createTextMessage(body));
                truth(reply != null, "no reply");
                equal(reply.getBody(String.class), "reply to " + body, "the reply");
            }
        }
    }

    private static void springDeliveryDelay() throws Exception {
        JmsTemplate template = template("spring-delays");
        template.setExplicitQosEnabled(true);
        template.setDeliveryDelay(1500);
        long sent = now();
        template.convertAndSend("later");
        equal(template.receiveAndConvert(), "later", "the message");
        truth(now() - sent >= 1500, "it came after " + (now() - sent) + " ms");
    }

    // -- Camel

    private static DefaultCamelContext camel(Function<JmsComponent, RouteBuilder> routes) throws Exception {
        DefaultCamelContext camel = new DefaultCamelContext();
        JmsComponent jms = JmsComponent.jmsComponentAutoAcknowledge(qpid());
        camel.addComponent("jms", jms);
        camel.addRoutes(routes.apply(jms));
        camel.start();
        return camel;
    }

    private static void camelInOut() throws Exception {
        try (DefaultCamelContext camel = camel(jms -> new RouteBuilder() {
            @Override
            public void configure() {
                from("jms:queue:camel-requests").process(exchange ->
                    exchange.getMessage().setBody("reply to " + exchange.getMessage().getBody(String.class)));
                from("direct:ask").to("jms:queue:camel-requests?exchangePattern=InOut&requestTimeout=" + PATIENCE_MS);
            }
        })) {
            var template = camel.createProducerTemplate();
            for (String body : List.of("1", "2", "3")) {
                equal(template.requestBody("direct:ask", body, String.class), "reply to " + body, "the reply");
            }
        }
    }

    private static void camelTopic() throws Exception {
        BlockingQueue<String> heard = new LinkedBlockingQueue<>();
        try (DefaultCamelContext camel = camel(jms -> new RouteBuilder() {
            @Override
            public void configure() {
                from("jms:topic:camel-topic?clientId=camel&subscriptionDurable=true&subscriptionName=camel-sub").process(exchange ->
                    heard.add(exchange.getMessage().getBody(String.class)));
            }
        })) {
            publishUntilHeard("camel-topic", heard);
        }
    }

    // -- azure-servicebus-jms

    private static ServiceBusJmsConnectionFactory azure(String clientId) {
        ServiceBusJmsConnectionFactorySettings settings = new ServiceBusJmsConnectionFactorySettings();
        settings.setSubscriberAutoDeleteOnIdleDurationInSeconds(3600);
        var factory = new ServiceBusJmsConnectionFactory(CONFIG.get("secure").asText(), settings);
        if (clientId != null) {
            factory.setClientId(clientId);
        }
        return factory;
    }

    private static void azureSubscriptions() {
        try (JMSContext context = azure("azure-client").createContext()) {
            Topic topic = context.createTopic("azure-topic");
            JMSConsumer durable = context.createDurableConsumer(topic, "durable");
            JMSConsumer shared = context.createSharedDurableConsumer(topic, "shared");
            JMSConsumer plain = context.createConsumer(topic);
            context.createProducer().send(topic, "news");
            for (JMSConsumer consumer : List.of(durable, shared, plain)) {
                equal(text(consumer), "news", "for each");
            }
            durable.close();
            shared.close();
            context.unsubscribe("durable");
            context.unsubscribe("shared");
        }
    }

    private static void azureRequestAndReply() throws Exception {
        try (Connection asks = azure(null).createConnection(); Connection answers = azure(null).createConnection()) {
            asks.start();
            answers.start();
            answer(answers.createSession(), "azure-requests");
            Session session = asks.createSession();
            TemporaryQueue replies = session.createTemporaryQueue();
            TextMessage request = session.createTextMessage("request");
            request.setJMSReplyTo(replies);
            session.createProducer(session.createQueue("azure-requests")).send(request);
            MessageConsumer consumer = session.createConsumer(replies);
            equal(consumer.receive(PATIENCE_MS).getBody(String.class), "reply to request", "the reply");
        }
    }

    private static void azureDeliveryDelay() {
        try (JMSContext context = azure(null).createContext()) {
            delayed(context, context.createQueue("azure-delays"));
        }
    }
}
