"""Runs the loop around partitions: read commands, apply them, commit, answer."""
