"""Speaks AMQP 1.0 and the conventions of Service Bus on it."""
