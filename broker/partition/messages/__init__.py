"""Leads a message through its life: admission, hand-out, settlement, expiry, scheduling, browsing, deletion."""
