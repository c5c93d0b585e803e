"""Answers requests on the nodes `$cbs` and `$management`, and declares transactions at the coordinator."""
