"""Translates requests and responses of `$cbs`, `$management` and the coordinator; makes and checks SAS tokens."""
