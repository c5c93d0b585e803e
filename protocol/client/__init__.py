"""Connects to an AMQP peer: an asyncio client for the commands, the pairing and the tests."""
