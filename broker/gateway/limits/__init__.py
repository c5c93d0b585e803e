"""Limits what clients may take of a gateway: memory, descriptors, large answers."""
