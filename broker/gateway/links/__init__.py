"""Holds the links on which clients send, receive and browse."""
