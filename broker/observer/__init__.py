"""Runs a process that has only the operations endpoint: of several gateways, or of a worker on its own machine."""
