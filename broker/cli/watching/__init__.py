"""Shows the counts and rates of entities while they change (`peeklock top`)."""
