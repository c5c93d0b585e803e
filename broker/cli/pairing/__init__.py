"""Holds the commands of paired namespaces: the sidecar, the syphon, and what a pairing costs."""
