"""Reads and writes the XML of the management API: descriptions, rules, entries and feeds. It knows no HTTP."""
