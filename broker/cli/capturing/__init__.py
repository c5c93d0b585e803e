"""Holds the commands that capture a journal and check a capture."""
