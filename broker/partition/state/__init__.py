"""Holds what a partition has in memory: queues, windows, locks, sessions, timers, open transactions."""
