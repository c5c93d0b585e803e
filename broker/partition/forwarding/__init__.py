"""Moves messages on to other entities, each exactly once."""
