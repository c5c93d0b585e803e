"""Describes entities and rules: names, settings, limits, tiers, and the fragment of a partition key."""
