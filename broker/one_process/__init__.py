"""Runs a gateway and its only worker in one process, connected in memory."""
