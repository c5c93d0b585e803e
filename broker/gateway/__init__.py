"""Serves the connections of clients, and passes what they ask for to the workers."""
