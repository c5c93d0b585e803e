"""Answers HTTP: the management API, sending and receiving, the journal, and AMQP over WebSockets."""
