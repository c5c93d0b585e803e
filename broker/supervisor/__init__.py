"""Starts the processes of a broker, replaces those that end or hang, and stops them in order."""
