"""Locks sessions for receivers, and keeps the states of sessions."""
