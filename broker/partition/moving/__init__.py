"""Moves a plain entity to another partition while clients use it."""
