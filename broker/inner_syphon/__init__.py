"""Runs a syphon as a process of the broker whose namespace has the backlog."""
