"""Holds the commands of `peeklock`."""
