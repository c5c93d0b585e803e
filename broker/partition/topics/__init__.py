"""Publishes the messages of a topic to its subscriptions, and changes their rules."""
