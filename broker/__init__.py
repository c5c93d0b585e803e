"""Peeklock: an AMQP 1.0 broker with the semantics of Azure Service Bus."""

__version__ = "0.1.0"
