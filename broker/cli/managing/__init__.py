"""Holds the commands that list and change entities and rules by the management API."""
