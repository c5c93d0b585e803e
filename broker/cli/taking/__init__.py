"""Finds the messages that a command means, and takes them out of their entity."""
