"""Decides what happens to the messages of one partition: a state machine that is told the time."""
