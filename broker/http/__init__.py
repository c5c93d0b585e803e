"""Answers HTTP on the operations endpoint, of a broker and of processes beside one: metrics and health."""
